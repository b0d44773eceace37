"""Write where the host would notice."""
from attempt import done, must_fail, write

for path in ("/etc/passwd", "/etc/cron.d/x", "/usr/bin/x", "/usr/local/lib/x", "/var/x", "/root/x", "/skills/x", "/x", "/run/x", "/home/x"):
    must_fail(f"write {path}", write, path)
done()
