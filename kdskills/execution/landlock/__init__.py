"""Landlock sandboxes: access rights per kernel, leased uids, the run itself.

For the inside of ordinary containers, where no namespace can be made. A program gets a uid of its own that owns
nothing, sees the prepared tree and its own folders, and can make no socket. It is started and ended by
`kdskills_runtime.landlock_init`.
"""
