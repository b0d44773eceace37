"""Take memory in many processes, each below any bound of its own."""
import os
import time

for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(b"x") * (60 << 20)
        time.sleep(20)
        os._exit(len(kept) % 2)
ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(8)]
if not any(ended):
    print("ESCAPED: 480 MiB in eight processes")
