"""Look for variables of the host, here and in every process that can be seen."""
import os

from attempt import done, escape

known = {"PATH", "HOME", "LANG", "TMPDIR", "PWD", "SHLVL", "_", "HOSTNAME", "LC_CTYPE", "OLDPWD"}
names = set(os.environ) - known - set(GIVEN) - set(PACKED)
if names:
    escape(f"variables {sorted(names)}")
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            text = open(f"/proc/{name}/environ", "rb").read() + open(f"/proc/{name}/cmdline", "rb").read()
        except OSError:
            continue
        if HOST_SECRET.encode() in text.replace(b"\0", b" "):
            escape(f"the host's secret in process {name}")
done()
