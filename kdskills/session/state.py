"""What a session holds and how it changes: pure functions over frozen values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from kdskills.errors import BadRequest

LoadMode = Literal["replace", "add"]


@dataclass(frozen=True, slots=True)
class ImportedSkill:
    """A skill that came along with a loaded one, by full id and the digest of its SKILL.md then."""

    id: str
    digest: str
    tree_digest: str


@dataclass(frozen=True, slots=True)
class LoadedSkill:
    """One entry of a session: full id, digests when it was loaded, when and by whom, and what came along."""

    id: str
    digest: str
    tree_digest: str
    loaded_at: datetime
    loaded_by: str = "model"
    imports: tuple[ImportedSkill, ...] = ()

    @property
    def digests(self) -> frozenset[str]:
        """Digests of every SKILL.md text this entry needs."""
        return frozenset({self.digest, *(item.digest for item in self.imports)})


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as a store keeps it; `version` grows by one with each change."""

    session_id: str
    consumer: str
    version: int
    created_at: datetime
    touched_at: datetime
    max_active: int | None = 8
    active: tuple[LoadedSkill, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Full ids of the loaded skills, in load order."""
        return tuple(entry.id for entry in self.active)

    @property
    def digests(self) -> frozenset[str]:
        """Digests of every SKILL.md text the session needs."""
        return frozenset[str]().union(*(entry.digests for entry in self.active))

    def head(self) -> SessionHead:
        """Return what listings show."""
        return SessionHead(self.session_id, self.consumer, self.created_at, self.touched_at, self.ids)

    def with_active(self, active: Sequence[LoadedSkill], now: datetime) -> SessionRecord:
        """Return the next version with *active*."""
        return replace(self, active=tuple(active), version=self.version + 1, touched_at=now)


@dataclass(frozen=True, slots=True)
class SessionHead:
    """A session in a listing: no bodies."""

    session_id: str
    consumer: str
    created_at: datetime
    touched_at: datetime
    active: tuple[str, ...] = ()


def load_mode(mode: str | None) -> LoadMode | None:
    """Return the mode meant by *mode*; `""` and None mean replace; None for anything else."""
    if mode is None or mode == "":
        return "replace"
    return "add" if mode == "add" else "replace" if mode == "replace" else None


def next_ids(current: Sequence[str], requested: Sequence[str], mode: LoadMode) -> tuple[str, ...]:
    """Return the ids in force after a load: `add` moves what is loaded again to the end."""
    requested_ids = tuple(dict.fromkeys(requested))
    if mode == "replace":
        return requested_ids
    return tuple(name for name in current if name not in requested_ids) + requested_ids


def merge_entries(
    current: Iterable[LoadedSkill], fresh: Iterable[LoadedSkill], order: Sequence[str]
) -> tuple[LoadedSkill, ...]:
    """Return entries in *order*, fresh ones before current ones of the same id."""
    entries = {entry.id: entry for entry in current} | {entry.id: entry for entry in fresh}
    return tuple(entries[name] for name in order)


def without(entries: Iterable[LoadedSkill], ids: Collection[str]) -> tuple[LoadedSkill, ...]:
    """Return *entries* but those of *ids*."""
    return tuple(entry for entry in entries if entry.id not in ids)


def prompt_order(entries: Sequence[LoadedSkill]) -> tuple[tuple[str, str, str | None], ...]:
    """Return `(full id, digest, importer or None)`: imports once each, before their first importer.

    A skill that is loaded itself is shown as loaded: at its own position unless an earlier one imports it, and then there.
    """
    loaded = {entry.id: entry for entry in entries}
    listed_ids: set[str] = set()
    order: list[tuple[str, str, str | None]] = []
    for entry in entries:
        for item in entry.imports:
            if item.id in listed_ids:
                continue
            listed_ids.add(item.id)
            loaded_entry = loaded.get(item.id)
            order.append(
                (loaded_entry.id, loaded_entry.digest, None) if loaded_entry else (item.id, item.digest, entry.id)
            )
        if entry.id not in listed_ids:
            listed_ids.add(entry.id)
            order.append((entry.id, entry.digest, None))
    return tuple(order)


def most_recent(record: SessionRecord) -> str | None:
    """Return the full id of the skill loaded last, or None."""
    return record.active[-1].id if record.active else None


def iso(moment: datetime) -> str:
    """Return UTC ISO-8601 with `Z` and microseconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def from_iso(text: str) -> datetime:
    """Return the moment *text* names; only the form written by `iso` (fraction optional) is taken.

    Raises:
        BadRequest: *text* is no UTC ISO-8601 time.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise BadRequest(f"not a UTC time: {text!r}", code="snapshot_unsupported")
    return moment
