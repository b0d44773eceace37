"""Take announced bytes off a descriptor: whole orders, and input files."""

from __future__ import annotations

import os


def exactly(fd: int, size: int) -> bytes:
    """Read *size* bytes from *fd*. Raises EOFError when fewer come."""
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(fd, min(size - len(pieces), 1 << 20))
        if not piece:
            raise EOFError("the order broke off")
        pieces += piece
    return bytes(pieces)


def place_inputs(fd: int, inputs: list[tuple[str, int]], executable: list[str]) -> None:
    """Write input files below /work from the bytes that follow on *fd*; their paths were checked by the host.

    Those in *executable* may be executed.
    """
    programs = frozenset(executable)
    for path, size in inputs:
        place = os.path.join("/work", path)  # noqa: PTH118 - pathlib costs 3 ms to import
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib costs 3 ms to import
        target = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        if path in programs:
            os.fchmod(target, 0o755)
        with open(target, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(exactly(fd, size))
