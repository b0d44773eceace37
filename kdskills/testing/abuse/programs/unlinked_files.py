"""Fill the workdir with files that have no name any more."""
import os

kept = []
total = 0
while total < 300 << 20:
    try:
        fd = os.open("gone", os.O_CREAT | os.O_RDWR)
        os.unlink("gone")
        total += os.write(fd, bytes(1 << 20))
    except OSError:
        break
    kept.append(fd)
    if len(kept) > 200:
        break
print("ESCAPED: 200 MiB without a name" if total >= 200 << 20 else "stopped")
