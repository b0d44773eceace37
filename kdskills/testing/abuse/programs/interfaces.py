"""Find a network interface that leads anywhere."""
from attempt import done, escape

names = sorted(line.partition(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:])
if names != ["lo"]:
    escape(f"interfaces {names}")
routes = open("/proc/net/route").read().splitlines()[1:]
if routes:
    escape(f"routes {routes}")
done()
