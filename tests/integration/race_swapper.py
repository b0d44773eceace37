"""Program of `test_races.py`: leaves children that swap outputs for links until they are killed."""

import contextlib
import os
import time
from pathlib import Path

for number, target in enumerate(("/etc/passwd", "/proc/self/environ", "/usr/bin/env")):
    folders = (Path(), Path(f"d{number}"))
    folders[1].mkdir()
    for folder in folders:
        (folder / f"file{number}.txt").write_text("harmless")
        (folder / f"link{number}.txt").symlink_to(target)
    if os.fork() == 0:
        os.setsid()
        while True:
            for folder in folders:
                real, link, aside = (folder / f"{name}{number}.txt" for name in ("file", "link", "aside"))
                for old, new in ((real, aside), (link, real), (real, link), (aside, real)):
                    with contextlib.suppress(OSError):
                        old.rename(new)
time.sleep(0.05)
os._exit(0)
