"""Lock memory so that the machine cannot page it."""
import ctypes
import mmap

libc = ctypes.CDLL(None, use_errno=True)
area = mmap.mmap(-1, 32 << 20)
place = ctypes.addressof(ctypes.c_char.from_buffer(area))
if libc.mlock(ctypes.c_void_p(place), ctypes.c_size_t(32 << 20)) == 0:
    print("ESCAPED: 32 MiB locked")
print("attempts made")
