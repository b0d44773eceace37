"""Look for processes of the host, and into those there are."""
import os

from attempt import done, escape, must_fail, read, write

try:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    pids = []
if len(pids) > 8:
    escape(f"{len(pids)} processes are visible")
for path in ("/proc/kcore", "/proc/kmsg", "/proc/1/environ" if os.getpid() != 1 else "/proc/kcore", "/proc/sys/kernel/cap_last_cap_"):
    if not path.startswith("/proc/1/"):
        must_fail(f"read {path}", read, path)
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/hostname"):
    must_fail(f"write {path}", write, path)
done()
