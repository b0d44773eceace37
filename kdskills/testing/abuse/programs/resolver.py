"""Ask name servers directly, by both protocols."""
import socket

from attempt import done, escape

query = bytes.fromhex("aaaa01000001000000000000076578616d706c65036f72670000010001")
servers = ["127.0.0.53", "127.0.0.11", "8.8.8.8", "1.1.1.1"]
try:
    servers += [line.split()[1] for line in open("/etc/resolv.conf") if line.startswith("nameserver")]
except OSError:
    pass
for server in servers:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        try:
            with socket.socket(socket.AF_INET, kind) as ask:
                ask.settimeout(0.3)
                ask.connect((server, 53))
                ask.send(query)
                escape(f"{server} answered {ask.recv(512)[:8]!r}")
        except OSError:
            pass
done()
