"""End at once and leave a child that goes on talking."""
import os
import time

if os.fork() == 0:
    os.setsid()
    while True:
        os.write(1, b"still here\n" * 100)
        time.sleep(0.001)
print("attempts made", flush=True)
os._exit(0)
