"""Send an echo request without privileges."""
import socket

from attempt import done, escape

try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as ping:
        ping.settimeout(1)
        ping.sendto(b"\x08\x00\xf7\xff\x00\x00\x00\x00", ("1.1.1.1", 0))
        escape("an echo request went out")
except OSError:
    pass
done()
