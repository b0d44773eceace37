"""Applies catalog changes at the server, or reports why it could not.

`digest` is the catalog's identity and wire shape, `rollout` a thread's file, `index` the server's pointers into it, `reload` the
guarded change of that file, `strategy` and `changes` choose among all strategies, `context` and `channel` send the catalog's text
with messages, `store` has the record of each thread, `sharing` releases threads for other workers, `backend` applies and reports.
"""
