"""Hold values that would be commands, lines or hooks if anybody pasted them together."""
import os

from attempt import done, escape

for name, value in GIVEN.items():
    if os.environ.get(name) != value:
        escape(f"{name} is {os.environ.get(name)!r}")
for path in ("/tmp/owned", "/work/owned"):
    if os.path.exists(path):
        escape(f"a value was run: {path}")
done()
