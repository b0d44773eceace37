"""Signal every process that can be reached at all, by one call."""
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1):
    try:
        os.kill(-1, number)
    except OSError:
        pass
print("attempts made")
