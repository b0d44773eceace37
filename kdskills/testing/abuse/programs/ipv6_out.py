"""Reach out by IPv6: the host's loopback, the link, the world, groups."""
import socket

from attempt import done, must_fail

try:
    socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
except OSError:
    done()
    raise SystemExit(0)
for address in (("::1", HOST_PORT), ("::ffff:127.0.0.1", HOST_PORT), ("2606:4700:4700::1111", 53), ("fe80::1%lo", 80), ("fd00::1", 80)):
    must_fail(f"connect {address}", socket.create_connection, address, 1)
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp:
    must_fail("global", udp.sendto, b"x", ("2001:4860:4860::8888", 53))
done()
