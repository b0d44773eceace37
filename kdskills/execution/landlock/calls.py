"""The system call filter of Landlock runs: the shared table, and what namespaces do elsewhere.

Without namespaces of their own, programs of one machine share the network, System V memory and message queues, which
Landlock does not know about. So no socket can be made, named or connected at all, and none of the others opened.
Connected pairs of stream sockets stay, because event loops are built on them and they lead nowhere.
"""

from __future__ import annotations

import errno
from typing import Final

from kdskills.execution.seccomp import RULES, Arch, Only, SyscallRule, assemble

_STREAM, _NONBLOCK, _CLOEXEC = 1, 0x800, 0x80000
_PAIRS: Final = tuple(_STREAM | nonblock | cloexec for nonblock in (0, _NONBLOCK) for cloexec in (0, _CLOEXEC))

NO_SOCKETS: Final[tuple[SyscallRule, ...]] = (
    SyscallRule("socket", 41, 198, error=errno.EACCES),
    SyscallRule(
        "socketpair", 53, 199, error=errno.EACCES, only=Only(0, "not_in", (1,)), also=Only(1, "not_in", _PAIRS)
    ),
    SyscallRule("connect", 42, 203, error=errno.EACCES),
    SyscallRule("bind", 49, 200, error=errno.EACCES),
    SyscallRule("listen", 50, 201, error=errno.EACCES),
    SyscallRule("accept", 43, 202, error=errno.EACCES),
    SyscallRule("accept4", 288, 242, error=errno.EACCES),
)
SHARED: Final[tuple[SyscallRule, ...]] = (
    SyscallRule("shmget", 29, 194),
    SyscallRule("shmat", 30, 196),
    SyscallRule("shmctl", 31, 195),
    SyscallRule("semget", 64, 190),
    SyscallRule("semop", 65, 193),
    SyscallRule("semctl", 66, 191),
    SyscallRule("semtimedop", 220, 192),
    SyscallRule("msgget", 68, 186),
    SyscallRule("msgsnd", 69, 189),
    SyscallRule("msgrcv", 70, 188),
    SyscallRule("msgctl", 71, 187),
    SyscallRule("mq_open", 240, 180),
    SyscallRule("mq_unlink", 241, 181),
    SyscallRule("inotify_add_watch", 254, 27),  # tells of other people's files without opening them
)
BY_PATH: Final = SyscallRule("truncate", 76, 45)
"""Landlock before version 3 does not hold it back; `ftruncate` needs a file that was opened for writing."""


def landlock_rules(abi: int) -> tuple[SyscallRule, ...]:
    """Return the refused calls of a Landlock run."""
    replaced = {rule.name for rule in NO_SOCKETS}
    shared_table = tuple(rule for rule in RULES if rule.name not in replaced)
    return (*shared_table, *NO_SOCKETS, *SHARED, *((BY_PATH,) if abi < 3 else ()))


def shared_rules() -> tuple[SyscallRule, ...]:
    """Return the refused calls of a program that has a network namespace of its own, and nothing else."""
    return (*RULES, *SHARED)


def program_bytes(arch: Arch, abi: int) -> bytes:
    """Return the filter as `prctl(2)` reads it."""
    return b"".join(step.pack() for step in assemble(arch, landlock_rules(abi)))
