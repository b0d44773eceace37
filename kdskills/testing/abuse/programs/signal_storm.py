"""Flood every process with signals."""
import os
import signal
import time

signal.signal(signal.SIGUSR2, signal.SIG_IGN)
end = time.monotonic() + 1
while time.monotonic() < end:
    for pid in (1, os.getppid()):
        try:
            os.kill(pid, signal.SIGUSR2)
        except OSError:
            pass
print("attempts made")
