"""Makes catalog changes true at the server, or says why not (spec remote §3).

`digest` is the catalog's identity and wire shape, `rollout` a thread's file, `reload` the guarded change of it, `context` the
text that travels with messages, `store` what is remembered per thread, `backend` chooses and reports.
"""
