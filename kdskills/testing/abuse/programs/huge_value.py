"""Hand back a value far beyond what a report may carry."""
from kdskills_runtime import report

try:
    report("x" * (8 << 20))
    print("ESCAPED: 8 MiB handed back")
except (ValueError, MemoryError):
    pass
print("attempts made")
