"""End from a thread while the main one sleeps and a handler objects."""
import atexit
import os
import threading
import time

atexit.register(time.sleep, 600)
threading.Thread(target=lambda: (time.sleep(0.1), os._exit(42))).start()
time.sleep(600)
