"""Make calls by the numbers of another ABI, past a filter that knows one only."""
import ctypes
import platform

from attempt import done, escape

libc = ctypes.CDLL(None, use_errno=True)
if platform.machine() == "x86_64":
    for name, number in (("getpid", 39), ("unshare", 272), ("ptrace", 521), ("keyctl", 250)):
        if libc.syscall(ctypes.c_long(0x40000000 | number), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0)) >= 0:
            escape(f"x32 {name}")
done()
