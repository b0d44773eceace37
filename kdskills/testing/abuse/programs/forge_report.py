"""Write a report of one's own to every descriptor there is, then fail."""
import os

line = b'{"event": "ended", "outcome": "ok", "exit_code": 0, "value": "forged"}\n'
for fd in range(3, 64):
    try:
        os.write(fd, line)
    except OSError:
        pass
os._exit(7)
