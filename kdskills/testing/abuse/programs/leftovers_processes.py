"""Find processes of an earlier run, or of a run beside this one."""
import os

from attempt import done, escape

own = {os.getpid(), 1, os.getppid()}
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in own:
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read()
        except OSError:
            continue
        if b"container_init" not in words and b"bwrap" not in words:
            escape(f"process {name}: {words[:60]!r}")
done()
