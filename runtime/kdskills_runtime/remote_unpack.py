"""Unpack a delivered archive in a remote machine, if its bytes are the ones that were sent.

::

    python3 -I remote_unpack.py ARCHIVE SHA256 FOLDER [SECONDS]

A file of its own that imports nothing of this package: it is the first thing a new machine gets. The archive is a tar
of folders, plain files and links; it is waited for up to SECONDS. FOLDER appears whole or not at all; one that is there
already is left alone. Says `unpacked`, or why not, and then exits with 1.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HOME = Path("/opt/kdskills")
CLOSED = ("runs", "skills", "env")
"""What the programs of runs must not look into."""


def main(argv: list[str]) -> int:
    """Unpack one archive."""
    if sys.version_info < (3, 11):  # noqa: UP036 - a machine may bring any Python
        sys.stdout.write(f"not unpacked: python3 is {sys.version.split()[0]} here, and 3.11 is needed\n")
        return 1
    archive, digest, folder = Path(argv[0]), argv[1], Path(argv[2])
    for name in CLOSED:
        (HOME / name).mkdir(parents=True, exist_ok=True)
        (HOME / name).chmod(0o700)
    folder.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (float(argv[3]) if argv[3:] else 0.0)
    while not archive.exists() and time.monotonic() < until:
        time.sleep(0.02)
    try:
        if not folder.is_dir():
            unpack(archive, digest, folder)
    except (OSError, ValueError, tarfile.TarError) as error:
        sys.stdout.write(f"not unpacked: {error}\n")
        return 1
    finally:
        archive.unlink(missing_ok=True)
    sys.stdout.write("unpacked\n")
    return 0


def unpack(archive: Path, digest: str, folder: Path) -> None:
    """Unpack *archive*, whose bytes have *digest*, as *folder*."""
    with archive.open("rb") as stream:
        actual_digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual_digest != digest:
            raise ValueError(f"the archive has digest {actual_digest}, not {digest}")
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            stream.seek(0)
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                write_members(tar, work)
            work.chmod(0o755)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def write_members(tar: tarfile.TarFile, work: Path) -> None:
    """Write the members below *work*; links last, so that nothing is ever written through one."""
    links = []
    for member in tar:
        parts = member.name.split("/")
        if any(part in {"", ".", ".."} for part in parts):
            raise ValueError(f"{member.name!r} is no clean path")
        target = work / member.name
        if member.isdir():
            target.mkdir(mode=0o755, parents=True, exist_ok=True)
        elif member.issym():
            links.append((target, member.linkname))
        elif member.isreg():
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as sink:  # noqa: PTH123 - a descriptor, not a path
                shutil.copyfileobj(source, sink)
                os.fchmod(fd, 0o755 if member.mode & 0o111 else 0o644)
        else:
            raise ValueError(f"{member.name!r} is neither folder, file nor link")
    for target, leads_to in links:
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        target.symlink_to(leads_to)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
