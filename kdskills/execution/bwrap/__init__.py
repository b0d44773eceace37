"""What the bubblewrap engine is made of: one sandbox, the sandboxes made ahead of time, and a run in one of them.

The engine itself is `kdskills.builtin.executors.bubblewrap`; the reasons for each part are in
`docs/explanation/isolation.md`.
"""
