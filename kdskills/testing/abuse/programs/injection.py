"""Leave names and text that would be commands if anybody pasted them together."""
import sys

print("$(touch /tmp/owned) `touch /tmp/owned` ; touch /tmp/owned | sh", file=sys.stderr)
open("$(touch owned).txt", "w").close()
sys.exit("'; rm -rf / #")
