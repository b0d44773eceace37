"""The sets of files an operator accepted, kept in a file that several processes share."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kdskills.builtin.roots.mcp.entries import ListedSkill
from kdskills.skills.private_files import open_private, private_folder
from kdskills.skills.roots import SetChange

ACCEPTED: Final = "accepted.json"
NEVER: Final = ""
"""Stands for a set that was not accepted: no set has this digest."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """What an approval is bound to: the digest over every (uri, digest), and the digests of files by path.

    Files are None where a set was noted without them.
    """

    digest: str
    files: Mapping[str, str] | None = None

    @classmethod
    def from_skill(cls, entry: ListedSkill) -> FileSet | None:
        """Return the set of an entry; None when the server does not say what files there are."""
        if entry.files is None or entry.set_digest is None:
            return None
        return cls(entry.set_digest, {path: file.digest for path, file in entry.files.items()})

    def change(self, uri: str, full_id: str, accepted: FileSet | None) -> SetChange:
        """Return what is different from the set that was accepted."""
        new, old = self.files or {}, accepted.files if accepted is not None else None
        has_files = old is not None
        old = old or {}
        return SetChange(
            uri=uri,
            full_id=full_id,
            digest=self.digest,
            files_known=has_files,
            added=tuple(sorted(new.keys() - old.keys())) if has_files else (),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(path for path in new.keys() & old.keys() if new[path] != old[path])),
        )


Sets = dict[str, FileSet]


class AcceptedSets:
    """Accepted sets by uri, in a file below *folder*; processes write one after the other, so that none is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Sets | None:
        """Return what was accepted; None when the file cannot be read: then no set counts as accepted."""
        try:
            rows = json.loads((self._folder / ACCEPTED).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return {str(uri): _set_of(value) for uri, value in rows.items()} if isinstance(rows, dict) else None

    def note(self, first: Mapping[str, FileSet]) -> Sets | None:
        """Accept what is listed for the first time, and return everything accepted. Raises OSError."""
        with self._alone():
            accepted = self.read()
            if accepted is None:
                return None
            self._write({**first, **accepted})
            return {**first, **accepted}

    def accept(self, sets: Mapping[str, FileSet], *, listed: Mapping[str, FileSet]) -> None:
        """Accept *sets*, whatever was accepted before; where that is unreadable, nothing else *listed* is. Raises OSError."""
        with self._alone():
            accepted = self.read()
            if accepted is None:
                accepted = {uri: FileSet(NEVER) for uri in listed}
            self._write({**accepted, **sets})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from writing meanwhile."""
        private_folder(self._folder)
        with open_private(self._folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, sets: Sets) -> None:
        rows = {uri: {"set": each.digest, "files": each.files} for uri, each in sorted(sets.items())}
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".new-", delete=False) as new:
            json.dump(rows, new, indent=1)
        Path(new.name).replace(self._folder / ACCEPTED)


def _set_of(value: Any) -> FileSet:
    """Return the set in a row of the file; a malformed row gives a set that equals none, and so needs approval."""
    if isinstance(value, str):
        return FileSet(value)
    if not isinstance(value, dict) or not isinstance(value.get("set"), str):
        return FileSet(NEVER)
    files = value.get("files")
    has_digests = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
    return FileSet(value["set"], files if has_digests else None)
