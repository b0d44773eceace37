"""Mount by the newer calls."""
from attempt import done, must_fail_call

must_fail_call("fsopen", b"tmpfs", 0)
must_fail_call("fspick", -100, b"/", 0)
must_fail_call("open_tree", -100, b"/", 1)
must_fail_call("move_mount", -100, b"/tmp", -100, b"/usr", 0)
must_fail_call("mount_setattr", -100, b"/", 0, bytes(32), 32)
must_fail_call("umount2", b"/proc", 2)
done()
