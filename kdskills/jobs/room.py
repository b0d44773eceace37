"""Room on the disk: what the system says of a full one, and whether the service's folder takes files now."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kdskills.errors import OperatorMustAct

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when there is no room: on the disk, in the account's quota, or within a process's own limit."""
PROBE_BYTES: Final = 64 * 1024


class StorageFull(OperatorMustAct):
    """There is no room left where the service keeps its files; nothing of what was asked is kept."""

    code = "storage_full"


class StateUnwritable(OperatorMustAct):
    """The service cannot write where it keeps its files."""

    code = "state_unwritable"


@contextlib.contextmanager
def telling_full_disk() -> Iterator[None]:
    """Turn the system's word for a full disk into `StorageFull` inside the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull(f"there is no room left to keep this: {os.strerror(error.errno or 0)}") from error


def check_writable(folder: Path) -> None:
    """Write and remove a small file in *folder*, if it is there. Blocks.

    Raises:
        StorageFull: There is no room.
        StateUnwritable: The system refuses for another reason.
    """
    if not folder.is_dir():
        return  # nothing was kept yet; whoever keeps the first thing makes it
    probe = folder / f".ready.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with telling_full_disk():
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
    except OSError as error:
        raise StateUnwritable(f"{folder} cannot be written to: {error.strerror}", path=str(folder)) from error
