"""Finding and ending Landlock runs whose owners are dead."""

from __future__ import annotations

import json
from pathlib import Path

from kdskills.execution.dirs import write_note
from kdskills.execution.landlock.run import end_uid
from kdskills.execution.landlock.uids import Uids, processes_of
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.owner import is_leftover
from kdskills.execution.protocol import ReapReport


def note_uid(folder: RunFolder, uid: int) -> None:
    """Write down which uid a run has, beside its owner."""
    write_note(folder.path / "uid", str(uid))


def leftovers(top: Path, uids: Uids) -> ReapReport:
    """End what dead owners left below *top*; a uid that another run holds by now is left alone."""
    ended: list[str] = []
    failed: list[str] = []
    for path in sorted(top.iterdir()):
        try:
            labels = json.loads((path / "owner.json").read_text(encoding="utf-8"))
            note = path / "uid"
            uid = int(note.read_text(encoding="ascii")) if note.is_file() else None
        except FileNotFoundError:
            continue  # being made, or being removed
        except (OSError, ValueError) as error:
            failed.append(f"run {path.name}: {error}")
            continue
        if not is_leftover(labels):
            continue
        survivors = _end(uids, uid, ended) if uid in uids.all else 0
        if survivors:
            failed.append(f"run {path.name}: {survivors} processes of uid {uid} could not be ended")
            continue
        RunFolder(path, path.name).remove()
        ended.append(f"run {path.name}")
    return ReapReport(tuple(ended), tuple(failed))


def _end(uids: Uids, uid: int | None, ended: list[str]) -> int:
    """End the processes of *uid* unless another run holds it; return how many are left."""
    lease = None if uid is None else uids.take(uid)
    if lease is None:
        return 0
    try:
        ended += [f"process {pid}" for pid in processes_of(lease.uid)]
        return end_uid(lease.uid)
    finally:
        lease.close()
