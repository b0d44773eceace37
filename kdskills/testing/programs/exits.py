"""Leave by SystemExit with a code of its own."""

import sys

sys.exit(3)
