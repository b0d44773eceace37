"""Uids that own nothing, one for each run at a time.

Landlock does not stop a program from changing modes and times of files its uid owns, nor, on older kernels, from
signalling processes of its uid. So a run gets a uid nobody else has: no account, no process, no file but its own. That
is also what makes two promises exact: RLIMIT_NPROC counts per uid, and `kill(-1)` under that uid ends the whole tree.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.errors import ExecRefused
from kdskills.execution.dirs import private_dir

OFFSET: Final = 1000
COUNT: Final = 64
LEAST: Final = 1000


@dataclass(frozen=True, slots=True)
class UidLease:
    """A uid that is ours alone until `close`."""

    uid: int
    fd: int

    def close(self) -> None:
        """Give the uid back; the caller has seen that no process has it any more."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Uids:
    """The uids of one machine: `OFFSET` above the operator's `sandbox_uid`, `COUNT` of them.

    `sandbox_uid` itself is what other engines' programs have on the host, so it is not among them.
    """

    base: int
    top: Path

    @property
    def all(self) -> range:
        """Every uid of the range."""
        return range(self.base + OFFSET, self.base + OFFSET + COUNT)

    def lease(self) -> UidLease:
        """Return a uid that no account, no process and no other run has.

        Raises:
            ExecRefused: `running_as_root` when the range could hold a real account's uid; else every uid is taken.
        """
        if self.base <= 0 or self.all.start < LEAST or self.all.stop > 0xFFFF:
            raise ExecRefused(
                f"sandbox_uid = {self.base} leaves no uids for programs; use a number between 1 and {0xFFFF - OFFSET - COUNT}",
                code="running_as_root",
                engine="landlock",
            )
        busy = running_uids()
        for uid in self.all:
            if uid not in busy and not _has_account(uid) and (lease := self.take(uid)) is not None:
                if uid not in running_uids():  # somebody may have started under it before we held the lock
                    return lease
                lease.close()
        raise ExecRefused(f"all of the {COUNT} uids for programs are in use; run fewer at a time", engine="landlock")

    def take(self, uid: int) -> UidLease | None:
        """Return *uid* when no other run holds it."""
        fd = os.open(private_dir(self.top) / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return UidLease(uid, fd)


def running_uids() -> set[int]:
    """Return the real, effective and saved uids of every process."""
    all_uids: set[int] = set()
    for _, uids in _processes():
        all_uids.update(uids)
    return all_uids


def processes_of(uid: int) -> list[int]:
    """Return the processes that have *uid* in any way, zombies aside."""
    return [pid for pid, uids in _processes() if uid in uids]


def _processes() -> Iterator[tuple[int, set[int]]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                status = Path("/proc", name, "status").read_text(encoding="utf-8", errors="replace")
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                if fields.get("State", "").split()[:1] != ["Z"]:
                    yield int(name), {int(word) for word in fields.get("Uid", "").split()[:3]}


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
