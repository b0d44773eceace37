"""Never come to an end of ending."""
import atexit
import time

atexit.register(time.sleep, 600)
print("attempts made", flush=True)
