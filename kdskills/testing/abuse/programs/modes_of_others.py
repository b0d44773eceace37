"""Change modes, times and owners of what is not one's own."""
import os

from attempt import done, must_fail

for path in ("/", "/etc", "/usr", "/usr/bin/env", "/proc", "/etc/passwd"):
    must_fail(f"chmod {path}", os.chmod, path, 0o777)
    must_fail(f"chown {path}", os.chown, path, os.getuid(), os.getgid())
    must_fail(f"utime {path}", os.utime, path, (1, 1))
done()
