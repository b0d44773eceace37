"""Give files powers through extended attributes."""
import os

from attempt import done, must_fail

open("f", "w").close()
must_fail("security.capability", os.setxattr, "f", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
must_fail("trusted.x", os.setxattr, "f", "trusted.x", b"x")
must_fail("security.selinux", os.setxattr, "/usr/bin/env", "security.selinux", b"x")
done()
