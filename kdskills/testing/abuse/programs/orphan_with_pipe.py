"""End at once and leave a grandchild with our standard output."""
import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("attempts made", flush=True)
os._exit(0)
