"""Trace a child, and the parent."""
import os
import time

from attempt import done, must_fail_call

child = os.fork()
if child == 0:
    time.sleep(5)
    os._exit(0)
must_fail_call("ptrace", 16, child, 0, 0)
must_fail_call("ptrace", 0x4206, child, 0, 0)
must_fail_call("ptrace", 16, os.getppid(), 0, 0)
os.kill(child, 9)
done()
