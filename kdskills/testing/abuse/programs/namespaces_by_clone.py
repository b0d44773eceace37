"""Make namespaces by clone itself."""
import ctypes
import os
import platform
import signal

from attempt import done, escape

libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
for flag in (0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000, 0x02000000):
    pid = libc.syscall(ctypes.c_long(number), ctypes.c_long(flag | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
        escape(f"clone with {flag:#x}")
done()
