"""Bring interfaces up and give them addresses."""
import fcntl
import socket
import struct

from attempt import done, must_fail

try:
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
except OSError:
    done()
    raise SystemExit(0)
with control:
    for name, request in (("flags", 0x8914), ("address", 0x8916), ("mtu", 0x8922), ("rename", 0x8923)):
        row = struct.pack("16sH22x", b"lo", 0x1)
        must_fail(name, fcntl.ioctl, control.fileno(), request, row)
    must_fail("bridge", fcntl.ioctl, control.fileno(), 0x89A0, b"br9\0" + bytes(12))
    must_fail("bind to device", control.setsockopt, socket.SOL_SOCKET, 25, b"eth0\0")
done()
