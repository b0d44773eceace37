"""Make and enter namespaces."""
import os

from attempt import done, must_fail, must_fail_call, write

for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000, 0x02000000):
    must_fail_call("unshare", flag)
for name in ("user", "pid", "net", "mnt", "ipc", "uts"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    must_fail_call("setns", fd, 0)
must_fail_call("clone3", 0, 0)
must_fail("uid_map", write, "/proc/self/uid_map", b"0 0 1")
done()
