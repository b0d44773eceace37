"""Leave kernel objects that outlive processes: segments, queues, named memory, abstract sockets."""
import ctypes
import os
import socket

libc = ctypes.CDLL(None, use_errno=True)
libc.shmget(0x4B4453, ctypes.c_size_t(4096), 0o1666)
libc.msgget(0x4B4453, 0o1666)
libc.semget(0x4B4453, 1, 0o1666)
try:
    os.close(os.open("/dev/shm/left", os.O_CREAT | os.O_RDWR, 0o666))
except OSError:
    pass
holder = socket.socket(socket.AF_UNIX)
holder.bind("\0kdskills-left-behind")
holder.listen()
if os.fork() == 0:
    os.setsid()
    import time

    time.sleep(600)
print("attempts made", flush=True)
os._exit(0)
