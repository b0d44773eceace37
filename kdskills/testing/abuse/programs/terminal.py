"""Push characters into a controlling terminal."""
import fcntl
import os

from attempt import done, must_fail

must_fail("/dev/tty", os.open, "/dev/tty", os.O_RDWR)
for fd in (0, 1, 2):
    must_fail(f"TIOCSTI on {fd}", fcntl.ioctl, fd, 0x5412, b"x")
done()
