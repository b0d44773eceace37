"""Look for sockets of the host in the kernel's lists."""
from attempt import done, escape

for name in ("tcp", "tcp6", "udp", "udp6", "unix"):
    try:
        lines = open(f"/proc/net/{name}").read().splitlines()[1:]
    except OSError:
        continue
    if lines:
        escape(f"/proc/net/{name} has {lines[:2]}")
done()
