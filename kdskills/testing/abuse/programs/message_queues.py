"""Keep kernel memory in System V message queues."""
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
total = 0
buffer = (ctypes.c_char * (8 + 8192))()
buffer[0] = 1
for _ in range(40_000):
    queue = libc.msgget(0, 0o1600)
    if queue < 0:
        break
    while libc.msgsnd(queue, buffer, ctypes.c_size_t(8192), 0o4000) == 0:
        total += 8192
    if total >= 600 << 20:
        break
print("ESCAPED: 600 MiB in queues" if total >= 600 << 20 else "stopped")
