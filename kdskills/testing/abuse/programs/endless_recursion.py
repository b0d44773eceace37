"""Run out of stack in the interpreter's own code."""
import sys

sys.setrecursionlimit(1 << 30)
nested = []
for _ in range(300_000):
    nested = [nested]
print(len(repr(nested)))
