"""Start threads without end."""
import threading

stop = threading.Event()
count = 0
try:
    while count < 2000:
        threading.Thread(target=stop.wait, daemon=True).start()
        count += 1
    print("ESCAPED: 2000 threads")
except RuntimeError:
    print("stopped after", count)
