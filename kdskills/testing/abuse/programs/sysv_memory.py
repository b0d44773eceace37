"""Take memory through System V segments, which outlive processes."""
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
total = 0
while total < 600 << 20:
    number = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1600)
    if number < 0:
        break
    place = libc.shmat(number, None, 0)
    if place in {None, ctypes.c_void_p(-1).value}:
        break
    ctypes.memset(place, 1, 32 << 20)
    total += 32 << 20
print("ESCAPED: 600 MiB of segments" if total >= 600 << 20 else "stopped")
