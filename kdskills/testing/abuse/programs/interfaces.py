"""Find a network interface that leads anywhere, and that a socket could use."""
import socket

from attempt import done, escape

try:
    socket.socket().close()
except OSError:
    done()
    raise SystemExit(0)

names = sorted(line.partition(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:])
if names != ["lo"]:
    escape(f"interfaces {names}")
routes = open("/proc/net/route").read().splitlines()[1:]
if routes:
    escape(f"routes {routes}")
done()
