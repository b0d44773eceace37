"""Grow a file through a mapping instead of writing."""
import mmap
import os

fd = os.open("mapped", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 8 << 20)
for place in ("/dev/shm/mapped", "/tmp/mapped"):
    try:
        other = os.open(place, os.O_CREAT | os.O_RDWR)
        os.ftruncate(other, 200 << 20)
        view = mmap.mmap(other, 200 << 20)
    except (OSError, ValueError):
        continue
    for at in range(0, 200 << 20, 4096):
        view[at] = 1
    print("ESCAPED: 200 MiB mapped in", place)
print("attempts made")
