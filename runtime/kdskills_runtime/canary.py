"""The canary: a program that reports what it can see and do, for an engine's probe.

Run as `python3 -I canary.py FILE...`; prints one JSON object on standard output. FILE are host files that must not be
readable. It judges nothing: the probe on the host does.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any


def observe(files: list[str]) -> dict[str, Any]:
    """Return what this process can see: identity, privileges, interfaces, and which of *files* it can read."""
    pairs = (line.partition(":") for line in _lines("/proc/self/status"))
    status = {name: value.strip() for name, _, value in pairs}
    return {
        "uid": os.getuid(),
        "host_uids": [int(line.split()[1]) for line in _lines("/proc/self/uid_map")],
        "readable": [path for path in files if _opens(path, os.O_RDONLY)],
        "core_pattern_writable": _opens("/proc/sys/kernel/core_pattern", os.O_WRONLY),
        "cap_bounding": int(status.get("CapBnd", "ffffffff"), 16),
        "cap_effective": int(status.get("CapEff", "ffffffff"), 16),
        "seccomp": int(status.get("Seccomp", "0")),
        "no_new_privs": int(status.get("NoNewPrivs", "0")),
        "interfaces": sorted(line.partition(":")[0].strip() for line in _lines("/proc/net/dev")[2:]),
        "sockets": _sockets(),
        "root_writable": os.access("/", os.W_OK),
        "pid": os.getpid(),
        "environment": sorted(os.environ),
    }


def _lines(path: str) -> list[str]:
    """Return the lines of a file in /proc; none of one that is not there."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - pathlib costs 3 ms
            return file.readlines()
    except OSError:
        return []


def _opens(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _sockets() -> list[str]:
    import _socket  # the C module alone: the other costs 4 ms

    families = []
    for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        try:
            kind = _socket.SOCK_STREAM if name != "AF_NETLINK" else _socket.SOCK_RAW
            _socket.socket(getattr(_socket, name), kind).close()
            families.append(name)
        except OSError:
            continue
    return families


if __name__ == "__main__":
    json.dump(observe(sys.argv[1:]), sys.stdout)
