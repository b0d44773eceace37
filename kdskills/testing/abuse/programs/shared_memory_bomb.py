"""Take memory through shared mappings of many processes."""
import mmap
import os
import time

for _ in range(6):
    if os.fork() == 0:
        area = mmap.mmap(-1, 80 << 20)
        for at in range(0, 80 << 20, 4096):
            area[at] = 1
        time.sleep(5)
        os._exit(0)
ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
if not any(ended):
    print("ESCAPED: 480 MiB in shared mappings")
