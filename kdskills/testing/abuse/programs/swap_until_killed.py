"""Leave a child that swaps an output for a link to a host file, over and over, until it is killed."""
import os
import time

open("out.txt", "w").write("harmless")
open("file.txt", "w").write("harmless")
if os.fork() == 0:
    os.setsid()
    os.symlink("/etc/passwd", "link.txt")
    while True:
        try:
            os.rename("out.txt", "aside.txt")
            os.rename("link.txt", "out.txt")
            os.rename("out.txt", "link.txt")
            os.rename("aside.txt", "out.txt")
        except OSError:
            pass
time.sleep(0.2)
print("attempts made", flush=True)
os._exit(0)
