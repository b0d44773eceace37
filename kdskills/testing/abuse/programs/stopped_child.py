"""Leave a stopped child that no polite signal wakes."""
import os
import signal

pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
print("attempts made", flush=True)
