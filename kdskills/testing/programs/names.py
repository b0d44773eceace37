"""Leave outputs whose names are meant to fool whoever sees them, among names of several scripts."""

import os

os.mkdir(b"d\x1b")
for name in (
    "ü €.txt",
    "שלום.txt",
    "a b.txt",
    "back\\slash.txt",
    "c1\x85.txt",
    "d\x1b/inner.txt",
    "esc\x1b[2J.txt",
    "line\nbreak.txt",
    "no\udcff.txt",
    "turn\u202etxt.exe",
):
    with open(name.encode("utf-8", "surrogateescape"), "wb") as file:
        file.write(b"x")
