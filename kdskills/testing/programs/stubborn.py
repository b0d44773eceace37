"""Ignore every polite signal and wait."""

import signal
import time

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("waiting", flush=True)
time.sleep(300)
