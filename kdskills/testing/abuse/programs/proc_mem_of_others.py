"""Read and write the memory of the processes that watch this one."""
import os

from attempt import done, must_fail, write

try:
    names = os.listdir("/proc")
except OSError:
    names = ["1", str(os.getppid())]
for name in names:
    if name.isdigit() and int(name) not in {os.getpid()}:
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read()
        except OSError:
            continue
        if b"container_init" in words and b"docker-init" not in words:
            must_fail(f"memory of {name}", os.open, f"/proc/{name}/mem", os.O_RDWR)
            must_fail(f"descriptors of {name}", os.listdir, f"/proc/{name}/fd")
must_fail("oom_score_adj", write, "/proc/self/oom_score_adj", b"-1000")
done()
