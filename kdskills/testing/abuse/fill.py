"""Write into a folder until refused."""

from __future__ import annotations

import sys
from pathlib import Path


def fill(folder: str, mib: int) -> int:
    """Return how many MiB went into *folder*, at most *mib*; say so when nobody stopped it."""
    for number in range(mib):
        try:
            Path(folder, f"f{number}").write_bytes(bytes(1 << 20))
        except OSError:
            return number
    sys.stdout.write(f"ESCAPED: {folder} took {mib} MiB\n")
    return mib
