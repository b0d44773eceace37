"""Reach out: addresses, names, metadata services, the host."""
import socket

from attempt import done, must_fail

for address in (("1.1.1.1", 53), ("8.8.8.8", 443), ("169.254.169.254", 80), ("172.17.0.1", 22), ("10.0.0.1", 80), ("192.168.0.1", 80), ("127.0.0.1", HOST_PORT)):
    must_fail(f"connect {address}", socket.create_connection, address, 1)
for name in ("example.org", "localhost.localdomain.example", "host.docker.internal"):
    must_fail(f"resolve {name}", socket.getaddrinfo, name, 80)


def shout():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        return udp.sendto(b"x", ("1.1.1.1", 53))


must_fail("udp", shout)
done()
