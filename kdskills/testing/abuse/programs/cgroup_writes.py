"""Lift one's own limits through the cgroup file systems."""
import os

from attempt import done, must_fail, write

seen = 0
for top, folders, files in os.walk("/sys/fs/cgroup"):
    for name in files:
        if name in {"cgroup.procs", "memory.max", "memory.limit_in_bytes", "pids.max", "release_agent", "notify_on_release", "tasks"}:
            must_fail(f"write {top}/{name}", write, os.path.join(top, name), b"0")
    seen += 1
    if seen > 500:
        break
done()
