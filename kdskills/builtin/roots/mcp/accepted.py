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

from kdskills.builtin.roots.mcp.entries import Entry
from kdskills.skills.far import SetChange
from kdskills.skills.private_files import open_private, private_folder

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
    def of(cls, entry: Entry) -> FileSet | None:
        """Return the set of an entry; None when the server does not say what files there are."""
        if entry.files is None or entry.set_digest is None:
            return None
        return cls(entry.set_digest, {path: file.digest for path, file in entry.files.items()})

    def change(self, uri: str, full_id: str, accepted: FileSet | None) -> SetChange:
        """Return what is different from the set that was accepted."""
        new, old = self.files or {}, accepted.files if accepted is not None else None
        known = old is not None
        old = old or {}
        return SetChange(
            uri=uri,
            full_id=full_id,
            digest=self.digest,
            known=known,
            added=tuple(sorted(new.keys() - old.keys())) if known else (),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(path for path in new.keys() & old.keys() if new[path] != old[path])),
        )


Sets = dict[str, FileSet]


class AcceptedSets:
    """Accepted sets by uri, in *folder*. What one process notes, no other loses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Sets | None:
        """Return what was accepted; None when the file cannot be read: then no set counts as accepted."""
        try:
            found = json.loads((self._folder / ACCEPTED).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return {str(uri): _set_of(value) for uri, value in found.items()} if isinstance(found, dict) else None

    def note(self, first: Mapping[str, FileSet]) -> Sets | None:
        """Accept what is listed for the first time, and return everything accepted. Raises OSError."""
        with self._alone():
            there = self.read()
            if there is None:
                return None
            self._write({**first, **there})
            return {**first, **there}

    def accept(self, sets: Mapping[str, FileSet], *, listed: Mapping[str, FileSet]) -> None:
        """Accept *sets*, whatever was accepted before; where that is unreadable, nothing else *listed* is. Raises OSError."""
        with self._alone():
            there = self.read()
            if there is None:
                there = {uri: FileSet(NEVER) for uri in listed}
            self._write({**there, **sets})

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
    """Return a kept set; what is out of shape is one that no set of files is equal to."""
    if isinstance(value, str):
        return FileSet(value)
    if not isinstance(value, dict) or not isinstance(value.get("set"), str):
        return FileSet(NEVER)
    files = value.get("files")
    known = isinstance(files, dict) and all(isinstance(one, str) for one in files.values())
    return FileSet(value["set"], files if known else None)
