"""Read one's own output back through /proc, and make the pipe deaf."""
import fcntl
import os

for fd in (1, 2):
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
        os.read(other, 65536)
        os.close(other)
    except OSError:
        pass
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
os.write(1, b"attempts made\n")
