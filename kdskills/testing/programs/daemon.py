"""Leave a daemon behind that holds the pipes, ignores TERM and would outlive us."""

import os
import signal
import sys
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    os._exit(0)
print("parent done")
sys.stdout.flush()
