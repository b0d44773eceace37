"""Nest folders deeper than any path may be long."""
import os

for _ in range(3000):
    try:
        os.mkdir("d")
        os.chdir("d")
    except OSError:
        break
print("attempts made")
