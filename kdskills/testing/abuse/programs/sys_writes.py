"""Write to kernel interfaces below /sys and /proc/sys."""
import os

from attempt import done, must_fail, write

for path in ("/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/ksm/run", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/panic"):
    must_fail(f"write {path}", write, path)
done()
