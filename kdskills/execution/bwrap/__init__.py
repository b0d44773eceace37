"""What the bubblewrap engine is made of: its argument list, its launcher, one running box, and the end of its tree.

The engine itself is `kdskills.builtin.executors.bubblewrap`; the reasons for each part are in
`docs/explanation/isolation.md`.
"""
