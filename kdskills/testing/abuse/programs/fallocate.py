"""Reserve far more room than there is."""
import os

from attempt import done, must_fail

for folder in ("/work", "/tmp", "/dev/shm"):
    try:
        fd = os.open(f"{folder}/reserved", os.O_CREAT | os.O_RDWR)
    except OSError:
        continue
    must_fail(f"1 GiB in {folder}", os.posix_fallocate, fd, 0, 1 << 30)
    os.close(fd)
    os.unlink(f"{folder}/reserved")
done()
