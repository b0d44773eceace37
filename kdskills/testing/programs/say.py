"""Say the arguments, joined."""

import sys

print("|".join(sys.argv[1:]))
