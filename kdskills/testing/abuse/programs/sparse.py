"""Leave sparse files that claim far more than there is."""
import os

for size in (1 << 50, 1 << 40, 60 << 20):
    try:
        fd = os.open("sparse.bin", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, size)
        break
    except OSError:
        pass
print("attempts made")
