"""Mount, move and pivot."""
from attempt import done, must_fail_call

must_fail_call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
must_fail_call("mount", b"/", b"/tmp", 0, 4096, 0)
must_fail_call("mount", 0, b"/", 0, 32, 0)
must_fail_call("pivot_root", b"/tmp", b"/tmp")
done()
