"""Use whatever descriptors were left open by those who started this program."""
import os
import stat

from attempt import done, escape

for name in sorted(os.listdir("/proc/self/fd"), key=int):
    fd = int(name)
    try:
        facts = os.fstat(fd)
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue
    if stat.S_ISDIR(facts.st_mode) and not target.startswith("/proc/"):
        escape(f"descriptor {fd} is the folder {target}")
    if stat.S_ISSOCK(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
        escape(f"descriptor {fd} is {target}")
    if stat.S_ISREG(facts.st_mode) and not target.startswith(("/tmp/", "/work/")) and "memfd" not in target:
        escape(f"descriptor {fd} is the file {target}")
done()
