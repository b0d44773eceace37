"""Applies catalog changes at the server, or reports why it could not.

`rollout` is a thread's file and the server's pointers into it, `changes` chooses among the strategies and carries one out,
`backend` applies and reports, keeps the record of each thread, and sends the catalog's text with messages.
"""
