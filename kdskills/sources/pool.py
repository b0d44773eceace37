"""The turn's pool of sources: numbers that never change owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from kdskills.errors import BadRequest, Diagnostic
from kdskills.sources.rows import MAX_SID, SourceRow, normalize_sources

SourceKey = Callable[[Mapping[str, Any]], str | None]
"""Gives the key under which a row is merged, or None for its URL or path (hook `kdskills_source_key`)."""

_LONGER_WINS = frozenset({"text", "content"})


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What came of merging a file's rows into a pool.

    Attributes:
        pool: The new pool.
        sid_map: The file's sids to the pool's; rows without a sid are not in it.
        added: Numbers issued now, in file order.
        merged: Numbers of prior rows that a row of the file fell onto.
        diagnostics: What was wrong with the rows.
    """

    pool: SourcesPool
    sid_map: Mapping[int, int]
    added: tuple[int, ...]
    merged: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class SourcesPool:
    """Sources by number. Frozen: merging gives a new pool."""

    _rows: dict[int, SourceRow] = field(default_factory=dict)
    _aliases: dict[int, int] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = field(default=(), compare=False)

    @classmethod
    def from_rows(cls, rows: object, *, key: SourceKey | None = None) -> SourcesPool:
        """Build a pool from raw prior rows, in any form `normalize_sources` takes.

        Rows keep their sids. Of several rows of one source the lowest sid has it and the others become aliases.
        What was wrong with the rows stands in `diagnostics`.
        """
        normal, findings = normalize_sources(rows)
        numbered = sorted((row for row in normal if row.sid is not None), key=lambda row: row.sid or 0)
        merged = cls().merge(numbered, key=key)
        aliases = {sid: owner for sid, owner in merged.sid_map.items() if sid != owner}
        pool = cls(dict(merged.pool.rows), aliases)
        rest = [row for row in normal if row.sid is None]
        return replace(pool.merge(rest, key=key).pool if rest else pool, diagnostics=findings)

    @property
    def rows(self) -> Mapping[int, SourceRow]:
        """The rows by sid, ascending; aliases are not in it."""
        return MappingProxyType(self._rows)

    @property
    def aliases(self) -> Mapping[int, int]:
        """Issued sids that stand for the row of another."""
        return MappingProxyType(self._aliases)

    def get(self, sid: int) -> SourceRow | None:
        """Return the row a sid, or an alias, stands for, or None."""
        return self._rows.get(self._aliases.get(sid, sid))

    def merge(self, rows: object, *, key: SourceKey | None = None) -> MergeResult:
        """Add rows in file order.

        A row whose source is known gets that source's sid. Else it keeps its own sid if that was never issued, else
        gets the highest issued + 1. Prior rows keep their sids and never vanish.

        Args:
            rows: Rows in any form `normalize_sources` takes.
            key: Overrides what makes two rows one source.
        """
        normal, findings = normalize_sources(rows)
        by_sid = dict(self._rows)
        owners: dict[str, int] = {}
        for sid, row in by_sid.items():
            owners.setdefault(_key(row, key), sid)
        issued = {*by_sid, *self._aliases}
        highest = max(issued, default=0)
        # A file that claims the last number must not make all later sources uncitable: gaps are filled then.
        free = (sid for sid in count(1) if sid not in issued)
        sid_map: dict[int, int] = {}
        added: list[int] = []
        merged: dict[int, None] = {}
        for row in normal:
            identity = _key(row, key)
            owner = owners.get(identity)
            if owner is None:
                owner = row.sid
                if owner is None or owner in issued:
                    owner = highest + 1 if highest < MAX_SID else next(free)
                owners[identity] = owner
                issued.add(owner)
                highest = max(highest, owner)
                by_sid[owner] = row.numbered(owner)
                added.append(owner)
            else:
                by_sid[owner] = _combined(by_sid[owner], row)
                merged[owner] = None
            if row.sid is not None:
                sid_map[row.sid] = owner
        pool = self if by_sid == self._rows else SourcesPool(dict(sorted(by_sid.items())), self._aliases)
        fresh = set(added)
        return MergeResult(pool, sid_map, tuple(added), tuple(s for s in merged if s not in fresh), findings)

    def to_json(self) -> dict[str, Any]:
        """Return the pool as JSON: `{"rows": [...], "aliases": {"5": 2}}`."""
        rows = [row.to_json() for row in self._rows.values()]
        return {"rows": rows, "aliases": {str(alias): sid for alias, sid in self._aliases.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourcesPool:
        """Return the pool `to_json` described.

        Raises:
            BadRequest: *data* was not written by `to_json`.
        """
        try:
            raw = list(data["rows"])
            aliases = {int(alias): int(sid) for alias, sid in data["aliases"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRequest(f"this is no sources pool: {error}") from error
        rows, findings = normalize_sources(raw)
        by_sid = {row.sid: row for row in rows if row.sid is not None}
        sound = len(by_sid) == len(raw) and not any(
            f.severity != "info" for f in findings if f.code != "source_bad_url"
        )
        if not sound or any(sid not in by_sid or alias in by_sid for alias, sid in aliases.items()):
            raise BadRequest("this is no sources pool: its numbers do not fit its rows")
        return cls(dict(sorted(by_sid.items())), aliases)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[SourceRow]:
        return iter(self._rows.values())

    def __contains__(self, sid: object) -> bool:
        return sid in self._rows or sid in self._aliases

    def __repr__(self) -> str:
        return f"SourcesPool({len(self._rows)} rows, {len(self._aliases)} aliases)"


def _key(row: SourceRow, key: SourceKey | None) -> str:
    return (key(row) if key else None) or row.identity


def _combined(prior: SourceRow, new: SourceRow) -> SourceRow:
    """Return the prior row with what the new one knows better: longer texts, a real title, absent fields."""
    fields = prior.to_json()
    changed = False
    for name, value in new.items():
        old = fields.get(name)
        if name == "sid" or value in (None, ""):
            continue
        if name == "title":
            better = not new.title_is_fallback and (prior.title_is_fallback or len(new.title) > len(prior.title))
        elif old in (None, ""):
            better = True
        else:
            better = name in _LONGER_WINS and isinstance(old, str) and isinstance(value, str) and len(value) > len(old)
        if better:
            fields[name] = value
            changed = True
    return SourceRow(fields) if changed else prior
