"""Beside every hostile program in its workdir: try something, and say whether it worked."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

ARCH = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
NUMBERS = {  # x86_64, aarch64
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "capset": (126, 91),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "modify_ldt": (154, -1),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_vm_writev": (311, 271),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone3": (435, 435),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "settimeofday": (164, 170),
    "setns": (308, 268),
    "syslog": (103, 116),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}


def say(words: str) -> None:
    """Put a line on standard output at once."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def escape(what: str) -> None:
    """Say that something worked which must not."""
    say(f"ESCAPED: {what}")


def must_fail(what: str, act: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    """Call *act*; anything but an OSError is an escape."""
    try:
        found = act(*args, **keywords)
    except OSError:
        return
    escape(f"{what}: {found!r}")


def must_fail_call(name: str, *args: Any) -> None:
    """Make the system call *name*; anything but an error is an escape."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    if libc.syscall(ctypes.c_long(NUMBERS[name][ARCH]), *passed) >= 0:
        escape(f"system call {name}")


def read(path: str, size: int = 4096) -> bytes:
    """Read a file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def write(path: str, data: bytes = b"x") -> int:
    """Write to a file, making it when it is not there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def done() -> None:
    """Say that every attempt was made."""
    say("attempts made")
