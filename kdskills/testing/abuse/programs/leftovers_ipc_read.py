"""Find kernel objects an earlier run left."""
import ctypes
import os
import socket

from attempt import done, escape

libc = ctypes.CDLL(None, use_errno=True)
for name, found in (("segment", libc.shmget(0x4B4453, ctypes.c_size_t(1), 0)), ("queue", libc.msgget(0x4B4453, 0)), ("semaphore", libc.semget(0x4B4453, 0, 0))):
    if found >= 0:
        escape(f"a {name} of an earlier run")
if os.path.exists("/dev/shm/left"):
    escape("named memory of an earlier run")
with socket.socket(socket.AF_UNIX) as client:
    try:
        client.connect("\0kdskills-left-behind")
        escape("a socket of an earlier run")
    except OSError:
        pass
done()
