"""Speak to everybody at once."""
import socket

from attempt import done, must_fail

try:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
except OSError:
    done()
    raise SystemExit(0)
with udp:
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    for address in ("255.255.255.255", "224.0.0.1", "239.255.255.250", "10.255.255.255"):
        must_fail(address, udp.sendto, b"x", (address, 1900))
done()
