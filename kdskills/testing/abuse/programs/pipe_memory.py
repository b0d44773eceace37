"""Keep kernel memory in pipes."""
import fcntl
import os

total = 0
kept = []
try:
    while total < 600 << 20:
        reading, writing = os.pipe()
        kept.append((reading, writing))
        try:
            fcntl.fcntl(writing, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(writing, False)
        try:
            while True:
                total += os.write(writing, bytes(65536))
        except BlockingIOError:
            pass
except OSError:
    pass
print("ESCAPED: 600 MiB in pipes" if total >= 600 << 20 else f"stopped at {total}")
