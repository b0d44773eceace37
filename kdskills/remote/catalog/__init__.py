"""Makes catalog changes true at the server, or says why not.

`digest` is the catalog's identity and wire shape, `rollout` a thread's file, `index` the server's pointers into it, `reload` the
guarded change of it, `strategy` and `changes` the other ways, `context` and `channel` the text that travels with messages, `store`
what is remembered per thread, `sharing` how workers free threads for each other, `backend` chooses and reports.
"""
