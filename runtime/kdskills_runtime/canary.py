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
    status = _status()
    return {
        "uid": os.getuid(),
        "host_uids": _host_uids(),
        "readable": [path for path in files if _opens(path, os.O_RDONLY)],
        "core_pattern_writable": _opens("/proc/sys/kernel/core_pattern", os.O_WRONLY),
        "cap_bounding": int(status.get("CapBnd", "ffffffff"), 16),
        "cap_effective": int(status.get("CapEff", "ffffffff"), 16),
        "seccomp": int(status.get("Seccomp", "0")),
        "no_new_privs": int(status.get("NoNewPrivs", "0")),
        "interfaces": _interfaces(),
        "sockets": _sockets(),
        "root_writable": os.access("/", os.W_OK),
        "pid": os.getpid(),
        "environment": sorted(os.environ),
    }


def _status() -> dict[str, str]:
    """Return the fields of /proc/self/status."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - pathlib costs 3 ms
        pairs = (line.partition(":") for line in file)
        return {name: value.strip() for name, _, value in pairs}


def _host_uids() -> list[int]:
    """Return the outer uid of every row of the uid map: the uids of this process one namespace up."""
    with open("/proc/self/uid_map", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs 3 ms
        return [int(line.split()[1]) for line in file]


def _opens(path: str, flags: int) -> bool:
    """Return whether *path* can be opened with *flags*."""
    try:
        os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _interfaces() -> list[str]:
    """Return the network interfaces of this namespace."""
    try:
        with open("/proc/net/dev", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs 3 ms
            return sorted(line.partition(":")[0].strip() for line in file.readlines()[2:])
    except OSError:
        return []


def _sockets() -> list[str]:
    """Return the address families for which a socket can be made."""
    import _socket  # the C module alone: the other costs 4 ms

    families = []
    for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        try:
            _socket.socket(
                getattr(_socket, name), _socket.SOCK_STREAM if name != "AF_NETLINK" else _socket.SOCK_RAW
            ).close()
            families.append(name)
        except OSError:
            continue
    return families


if __name__ == "__main__":
    json.dump(observe(sys.argv[1:]), sys.stdout)
