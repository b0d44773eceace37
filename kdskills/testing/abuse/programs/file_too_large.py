"""Write one file beyond its limit, deaf to the signal that says so."""
import os
import signal

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
fd = os.open("large", os.O_CREAT | os.O_RDWR)
for _ in range(64):
    os.write(fd, bytes(1 << 20))
print("ESCAPED: 64 MiB in one file")
