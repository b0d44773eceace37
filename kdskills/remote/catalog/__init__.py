"""Applies catalog changes at the server, or reports why it could not.

`digest` is the catalog's identity and wire shape, `rollout` a thread's file and the server's pointers into it, `changes` chooses
among the strategies and carries one out, `backend` applies and reports, keeps the record of each thread, releases threads for
other workers, and sends the catalog's text with messages.
"""
