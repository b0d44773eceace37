"""Make outputs nobody can remove: immutable, append-only, without any permission."""
import fcntl
import os
import struct

from attempt import done

for name, flag in (("immutable.txt", 0x10), ("append.txt", 0x20)):
    fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.ioctl(fd, 0x40086602, struct.pack("l", flag))
    except OSError:
        pass
os.makedirs("shut/inner")
open("shut/inner/f.txt", "w").close()
os.chmod("shut/inner", 0)
os.chmod("shut", 0)
done()
