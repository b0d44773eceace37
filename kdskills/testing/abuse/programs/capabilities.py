"""Take on capabilities, and lift the promise not to."""
import ctypes
import struct

from attempt import done, escape, must_fail_call

libc = ctypes.CDLL(None, use_errno=True)
facts = dict(line.split(":\t") for line in open("/proc/self/status").read().splitlines() if line.startswith(("Cap", "NoNew", "Seccomp:")))
for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(facts[name], 16):
        escape(f"{name} is {facts[name]}")
if facts["NoNewPrivs"] != "1" or facts["Seccomp"] != "2":
    escape(f"{facts}")
must_fail_call("capset", struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6))
for call in ((38, 0, 0, 0, 0), (47, 2, 21, 0, 0)):
    if libc.prctl(*[ctypes.c_long(word) for word in call]) == 0:
        escape(f"prctl {call}")
done()
