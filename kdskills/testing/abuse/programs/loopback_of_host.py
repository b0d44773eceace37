"""Reach the host's services through every name its loopback has."""
import socket

from attempt import done, must_fail

for host in ("127.0.0.1", "127.1.2.3", "0.0.0.0", "localhost", "::"):
    must_fail(f"connect {host}", socket.create_connection, (host, HOST_PORT), 1)
done()
