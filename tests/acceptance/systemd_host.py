"""A host under systemd: this machine's own system over a layer that is thrown away, in namespaces of its own.

    with SystemdHost(folder) as host:
        host.shell("deploy/systemd/install")

Systemd is its first process, with no unit begun but what a test begins. The package stands in /opt/kdskills as after an
installation, the repository in /opt/repo. Its network is its own loopback. Needs root, and Debian's systemd; what lies below is
only read. This machine may have fewer open files to give than the units ask for: they get as many as it has.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
"""One that every account may run, of the version that the packages are for."""
ALONE = ("--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child", "--propagation", "private")
BOOT = r"""
set -eu
mount -t tmpfs -o mode=0755,size=256m tmpfs "$1"; cd "$1"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root; cd root
for each in var/lib/kdskills var/cache/kdskills var/log run tmp root; do
  mkdir -p "$each"; mount -t tmpfs -o mode=0755,size=256m tmpfs "$each"
done
chmod 1777 tmp
rm -rf usr/lib/systemd/system/*.wants etc/systemd/system/*.wants etc/systemd/system/kdskills* etc/kdskills opt/kdskills
mkdir -p opt/repo opt/packages opt/kdskills/bin "opt/kdskills/lib/${4##*/}/site-packages" oldroot
mount --bind "$2" opt/repo; mount --bind "$3" opt/packages
printf '%s\n' /opt/repo /opt/repo/runtime /opt/packages > "opt/kdskills/lib/${4##*/}/site-packages/installed.pth"
echo "home = /usr/bin" > opt/kdskills/pyvenv.cfg
ln -s "$4" opt/kdskills/bin/python
printf '#!/opt/kdskills/bin/python\nimport sys\nfrom kdskills.doors.cli import main\nsys.exit(main())\n' > opt/kdskills/bin/kdskills
chmod 0755 opt/kdskills/bin/kdskills
mount -t proc proc proc; mount -t sysfs -o ro sysfs sys; mount --rbind /dev dev
mount -t tmpfs tmpfs sys/fs/cgroup
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mount -t cgroup2 cgroup sys/fs/cgroup
else
  mkdir sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
pivot_root . oldroot; umount -l oldroot
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd --unit=basic.target --log-target=console
"""


class SystemdHost:
    """The host; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder.with_suffix(".log")

    def __enter__(self) -> SystemdHost:
        """Start it."""
        self._folder.mkdir()
        packages = Path(pytest.__file__).parents[1]
        words = ("unshare", *ALONE, "sh", "-c", BOOT, "boot", self._folder, REPOSITORY, packages, PYTHON)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._begun()
        except BaseException:  # an interrupt too: what was begun of it ends, and the error goes on
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it, with everything that runs in it."""
        self._process.kill()
        self._process.wait()

    def _begun(self) -> None:
        own = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        until = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, self._log.read_text(errors="replace")
            assert time.monotonic() < until, self._log.read_text(errors="replace")
            if (child := own.read_text().split()) and "systemd" in Path(f"/proc/{child[0]}/comm").read_text():
                self._first = child[0]
                if self.shell("systemctl is-active -q basic.target", check=False).returncode == 0:
                    break
            time.sleep(0.1)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for unit in ("kdskills-serve.service", "kdskills-worker@.service"):
            name = f"/etc/systemd/system/{unit}.d/files.conf"
            self.shell(
                f"mkdir -p {name.rpartition('/')[0]}; printf '[Service]\\nLimitNOFILE={min(files, 65536)}\\n' > {name}"
            )
        self.shell("systemctl start systemd-journald")

    def shell(
        self, script: str, *, check: bool = True, stdin: str = "", **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run *script* as root in the host, in the repository, and return what it said."""
        words = ("nsenter", "-t", self._first, "--all", "sh", "-euc", f"cd /opt/repo; {script}")
        told = subprocess.run(words, capture_output=True, text=True, input=stdin, timeout=120, check=False, **more)
        assert not check or told.returncode == 0, (
            script,
            told.stdout,
            told.stderr,
            self.journal() if "systemctl" in script else "",
        )
        return told

    def journal(self) -> str:
        """Return what our units said."""
        return self.shell("journalctl --no-pager -q -o cat -u 'kdskills-*'", check=False).stdout


def systemd_absence() -> str | None:
    """Return why there can be no such host here, or None."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("/usr/lib/systemd/systemd", PYTHON) if not Path(name).exists()]
    return f"{', '.join(missing)} not installed: .ci/deploy does it" if missing else None
