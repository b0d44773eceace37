"""Use the wall's own tools against it."""
import subprocess

from attempt import done, escape

for argv in (["unshare", "-Ur", "true"], ["bwrap", "--ro-bind", "/", "/", "true"], ["nsenter", "-t", "1", "-a", "true"], ["mount", "-t", "tmpfs", "x", "/tmp"], ["su", "-c", "true"], ["sudo", "-n", "true"], ["setpriv", "--reuid", "0", "true"], ["chroot", "/", "true"]):
    try:
        if subprocess.run(argv, capture_output=True, timeout=5).returncode == 0:
            escape(" ".join(argv))
    except (OSError, subprocess.TimeoutExpired):
        pass
done()
