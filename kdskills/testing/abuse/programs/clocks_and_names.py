"""Change the machine's clock and names."""
import socket
import time

from attempt import done, must_fail, must_fail_call

must_fail("clock_settime", time.clock_settime, time.CLOCK_REALTIME, 0)
must_fail("sethostname", socket.sethostname, "owned")
must_fail_call("setdomainname", b"owned", 5)
must_fail_call("adjtimex", b"\x01" + bytes(255))
done()
