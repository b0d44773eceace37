"""Say what is on standard input."""

import sys

print(repr(sys.stdin.read()))
