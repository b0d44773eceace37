"""Use the kernel's keyrings, which no namespace divides."""
from attempt import done, must_fail_call

must_fail_call("add_key", b"user", b"x", b"y", 1, -3)
must_fail_call("keyctl", 0, -3, 1, 0, 0)
done()
