"""Leave a daemon in a session of its own, twice forked, deaf to signals."""
import os
import signal
import time

if os.fork() == 0:
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("attempts made", flush=True)
