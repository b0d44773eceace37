"""Take on another root."""
import os

from attempt import done, must_fail

os.makedirs("/tmp/root", exist_ok=True)
must_fail("chroot", os.chroot, "/tmp/root")
must_fail("chroot to /", os.chroot, "/")
done()
