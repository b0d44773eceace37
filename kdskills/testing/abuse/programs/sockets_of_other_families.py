"""Open sockets that a network namespace does not hold back."""
import socket

from attempt import done, must_fail

for name, number in (("vsock", 40), ("netlink", 16), ("packet", 17), ("bluetooth", 31), ("alg", 38), ("can", 29), ("xdp", 44), ("tipc", 30), ("key", 15), ("x25", 9)):
    must_fail(f"socket {name}", socket.socket, number, socket.SOCK_DGRAM if name != "vsock" else socket.SOCK_STREAM)
must_fail("raw socket", socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
done()
