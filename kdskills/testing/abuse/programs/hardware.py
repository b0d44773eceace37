"""Reach hardware and the processor's own tables."""
import platform

from attempt import done, must_fail, must_fail_call, read

if platform.machine() == "x86_64":
    must_fail_call("iopl", 3)
    must_fail_call("ioperm", 0, 1024, 1)
    must_fail_call("modify_ldt", 1, bytes(16), 16)
for path in ("/dev/port", "/dev/cpu/0/msr", "/dev/userfaultfd", "/dev/dri/card0", "/dev/input/event0", "/dev/snd/controlC0", "/dev/hwrng", "/dev/mapper/control", "/dev/autofs", "/dev/btrfs-control", "/dev/vfio/vfio", "/dev/vhost-vsock"):
    must_fail(f"open {path}", read, path)
done()
