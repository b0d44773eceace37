"""Climb out of every folder there is, by path and by descriptor."""
import os

from attempt import done, escape

top = os.stat("/")
for start in ("/work", "/tmp", "/proc/self", "/dev", "/usr/lib", "/"):
    try:
        fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        continue
    for _ in range(40):
        above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = above
    if not os.path.samestat(os.fstat(fd), top):
        escape(f"above / from {start}")
    try:
        os.close(os.open("etc/shadow", os.O_RDONLY, dir_fd=fd))
        escape(f"etc/shadow from {start}")
    except OSError:
        pass
    os.close(fd)
done()
