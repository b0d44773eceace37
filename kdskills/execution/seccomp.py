"""The system calls a sandboxed program is refused, as a table, and the BPF program made from it.

`runtime/images/seccomp.json` is docker's profile of the same table. `clone3`, whose flags a filter cannot see, is ENOSYS, so
that the C library falls back to `clone`. Programs that share the network and System V objects, as under Landlock, get none.
"""

from __future__ import annotations

import errno
import functools
import operator
import platform
import struct
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from kdskills.errors import ExecRefused

Arch = Literal["x86_64", "aarch64"]

ARCHES: Final[dict[str, Arch]] = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""What `platform.machine()` calls the architectures there are filters for."""

AUDIT_ARCH: Final[dict[Arch, int]] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT: Final = 0x40000000

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
ERRNO: Final = 0x00050000

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16

CLONE_NEW: Final = {
    "NEWNS": 0x00020000,
    "NEWCGROUP": 0x02000000,
    "NEWUTS": 0x04000000,
    "NEWIPC": 0x08000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
FAMILIES: Final = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
TERMINAL_INJECTION: Final = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}


class Only(NamedTuple):
    """Refuse a call only for some values of one argument, seen as 32 bits. `test` is `any_bit` (a bit of `values` is
    set), `in` (is one of them) or `not_in` (is none of them).
    """

    arg: int
    test: Literal["any_bit", "in", "not_in"]
    values: tuple[int, ...]


class SyscallRule(NamedTuple):
    """One refused call: its number on each architecture (None where it does not exist), the error, the condition. With
    `only` and `also`, either condition refuses.
    """

    name: str
    x86_64: int | None
    aarch64: int | None
    error: int = errno.EPERM
    only: Only | None = None
    also: Only | None = None

    def number(self, arch: Arch) -> int | None:
        """Return the call's number on *arch*."""
        return self.x86_64 if arch == "x86_64" else self.aarch64


def _plain(error: int = errno.EPERM, /, **numbers: tuple[int | None, int | None]) -> Iterator[SyscallRule]:
    """Give rules that refuse calls whatever their arguments, by their numbers on x86_64 and aarch64."""
    return (SyscallRule(name, x86_64, aarch64, error) for name, (x86_64, aarch64) in numbers.items())


_SOCKETS = Only(0, "not_in", tuple(FAMILIES.values()))

RULES: Final[tuple[SyscallRule, ...]] = (
    # other processes
    *_plain(ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), process_madvise=(440, 440)),
    *_plain(pidfd_getfd=(438, 438), kcmp=(312, 272)),
    # mounts and roots
    *_plain(mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), open_tree=(428, 428)),
    *_plain(move_mount=(429, 429), fsopen=(430, 430), fsconfig=(431, 431), fsmount=(432, 432), fspick=(433, 433)),
    *_plain(mount_setattr=(442, 442), open_tree_attr=(467, 467), name_to_handle_at=(303, 264)),
    *_plain(open_by_handle_at=(304, 265), fanotify_init=(300, 262), quotactl=(179, 60), quotactl_fd=(443, 443)),
    *_plain(swapon=(167, 224), swapoff=(168, 225), acct=(163, 89)),
    # namespaces
    *_plain(unshare=(272, 97), setns=(308, 268)),
    SyscallRule("clone", 56, 220, only=Only(0, "any_bit", tuple(CLONE_NEW.values()))),
    SyscallRule("clone3", 435, 435, error=errno.ENOSYS),
    *_plain(sethostname=(170, 161), setdomainname=(171, 162)),
    # kernel interfaces with a long history of holes
    *_plain(bpf=(321, 280), perf_event_open=(298, 241), io_uring_setup=(425, 425), io_uring_enter=(426, 426)),
    *_plain(io_uring_register=(427, 427), userfaultfd=(323, 282), add_key=(248, 217), request_key=(249, 218)),
    *_plain(keyctl=(250, 219), move_pages=(279, 239), migrate_pages=(256, 238), lookup_dcookie=(212, 18)),
    *_plain(nfsservctl=(180, 42), vhangup=(153, 58), uselib=(134, None), _sysctl=(156, None), sysfs=(139, None)),
    *_plain(modify_ldt=(154, None), iopl=(172, None), ioperm=(173, None)),
    # modules, kexec, clocks, the kernel's log
    *_plain(init_module=(175, 105), finit_module=(313, 273), delete_module=(176, 106), kexec_load=(246, 104)),
    *_plain(kexec_file_load=(320, 294), reboot=(169, 142), settimeofday=(164, 170), adjtimex=(159, 171)),
    *_plain(clock_settime=(227, 112), clock_adjtime=(305, 266), syslog=(103, 116)),
    # arguments
    SyscallRule("personality", 135, 92, only=Only(0, "not_in", (0,))),
    SyscallRule("ioctl", 16, 29, only=Only(1, "in", tuple(TERMINAL_INJECTION.values()))),
    SyscallRule("socket", 41, 198, error=errno.EAFNOSUPPORT, only=_SOCKETS),
    SyscallRule("socketpair", 53, 199, error=errno.EAFNOSUPPORT, only=_SOCKETS),
)


class Instruction(NamedTuple):
    """One BPF instruction, as `struct sock_filter` lays it out."""

    code: int
    jt: int
    jf: int
    k: int


def assemble(arch: Arch, rules: Sequence[SyscallRule] = RULES) -> list[Instruction]:
    """Return the filter of *rules* for *arch*; another architecture's calls kill the program."""
    program = [
        Instruction(_LOAD, 0, 0, _ARCH),
        Instruction(_JEQ, 1, 0, AUDIT_ARCH[arch]),
        Instruction(_RET, 0, 0, KILL),
        Instruction(_LOAD, 0, 0, _NR),
    ]
    if arch == "x86_64":
        program += [Instruction(_JGE, 0, 1, X32_BIT), Instruction(_RET, 0, 0, ERRNO | errno.ENOSYS)]
    allow = Instruction(_RET, 0, 0, ALLOW)
    for rule in rules:
        number, deny = rule.number(arch), Instruction(_RET, 0, 0, ERRNO | rule.error)
        tests = [step for only in (rule.only, rule.also) if only is not None for step in _test(only, deny)]
        block = [*tests, allow] if tests else [deny]  # once the number matched, every path ends in a return
        if number is not None:
            program += [Instruction(_JEQ, 0, len(block), number), *block]
    return [*program, allow]


def program_bytes(arch: Arch, rules: Sequence[SyscallRule] = RULES) -> bytes:
    """Return the filter of *rules* as bwrap, `prctl(2)` and `seccomp(2)` read it."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in assemble(arch, rules))


def _test(only: Only, deny: Instruction) -> list[Instruction]:
    """Return what refuses a call whose argument is as *only* says, and goes on past its end otherwise."""
    load = Instruction(_LOAD, 0, 0, _ARGS + 8 * only.arg)  # the low word: both architectures are little endian
    if only.test == "any_bit":
        mask = functools.reduce(operator.or_, only.values)
        return [load, Instruction(_JSET, 0, 1, mask), deny]
    # One comparison per value, the last first: a hit jumps to the refusal, or for `not_in` over it.
    allowed, last = int(only.test == "not_in"), len(only.values) - 1
    jumps = [Instruction(_JEQ, last - at + allowed, 0, value) for at, value in enumerate(only.values)]
    if not allowed:
        jumps[-1] = Instruction(_JEQ, 0, 1, only.values[-1])
    return [load, *jumps, deny]


_STREAM, _NONBLOCK, _CLOEXEC = 1, 0x800, 0x80000
_PAIRS: Final = tuple(_STREAM | nonblock | cloexec for nonblock in (0, _NONBLOCK) for cloexec in (0, _CLOEXEC))

NO_SOCKETS: Final[tuple[SyscallRule, ...]] = (
    *_plain(errno.EACCES, socket=(41, 198)),
    SyscallRule(
        "socketpair", 53, 199, error=errno.EACCES, only=Only(0, "not_in", (1,)), also=Only(1, "not_in", _PAIRS)
    ),
    *_plain(errno.EACCES, connect=(42, 203), bind=(49, 200), listen=(50, 201), accept=(43, 202), accept4=(288, 242)),
)
_LOCAL: Final = Only(0, "not_in", (FAMILIES["AF_UNIX"],))
LOCAL_SOCKETS: Final[tuple[SyscallRule, ...]] = (
    *(rule for rule in RULES if rule.name not in {"socket", "socketpair"}),
    SyscallRule("socket", 41, 198, error=errno.EAFNOSUPPORT, only=_LOCAL),
    SyscallRule("socketpair", 53, 199, error=errno.EAFNOSUPPORT, only=_LOCAL),
)
"""The refused calls of a program whose network namespace may lead somewhere: it has sockets of its own machine alone."""

SHARED: Final[tuple[SyscallRule, ...]] = (
    *_plain(shmget=(29, 194), shmat=(30, 196), shmctl=(31, 195), semget=(64, 190), semop=(65, 193), semctl=(66, 191)),
    *_plain(semtimedop=(220, 192), msgget=(68, 186), msgsnd=(69, 189), msgrcv=(70, 188), msgctl=(71, 187)),
    *_plain(mq_open=(240, 180), mq_unlink=(241, 181)),
    SyscallRule("inotify_add_watch", 254, 27),  # tells of other people's files without opening them
)
BY_PATH: Final = SyscallRule("truncate", 76, 45)
"""Landlock before version 3 does not hold it back; `ftruncate` needs a file that was opened for writing."""


def host_filter(rules: Sequence[SyscallRule], engine: str) -> bytes:
    """Return the filter of *rules* for this machine. Raises ExecRefused when there is none."""
    arch = ARCHES.get(platform.machine())
    if arch is None:
        raise ExecRefused(f"no system call filter for {platform.machine()}", engine=engine)
    return program_bytes(arch, rules)


def landlock_rules(abi: int) -> tuple[SyscallRule, ...]:
    """Return the refused calls of a Landlock run."""
    replaced = {rule.name for rule in NO_SOCKETS}
    shared_table = tuple(rule for rule in RULES if rule.name not in replaced)
    return (*shared_table, *NO_SOCKETS, *SHARED, *((BY_PATH,) if abi < 3 else ()))


SHARED_RULES: Final = (*RULES, *SHARED)
"""The refused calls of a program that has a network namespace of its own, and nothing else."""
