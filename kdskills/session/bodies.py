"""Texts of skills: read from the current files, validated by stat, shared by callers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kdskills.errors import FileRefused, ToolCallRefused
from kdskills.session.codes import not_found, refuse
from kdskills.session.flights import Abandoned, Flights
from kdskills.session.receipts import bytes_digest
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill_bytes
from kdskills.skills.roots import FarContent, far_content
from kdskills.skills.safe_open import open_file

CACHE_BYTES: Final = 16 * 1024 * 1024
RACY_NS: Final = 2_000_000_000
SKILL_FILE: Final = "SKILL.md"
_CHUNK: Final = 256 * 1024

Stamp = tuple[int, int, int, int]
Reader = Callable[[Path, str, int, threading.Event], bytes]


@dataclass(frozen=True, slots=True)
class Body:
    """A skill's text at one moment.

    Attributes:
        digest: Digest of the SKILL.md.
        text: Its body: what follows the frontmatter.
        raw: The whole SKILL.md as text, or None for a skill that was never a file.
        tree: Digest over the skill's files then.
        properties: The frontmatter.
    """

    digest: str
    text: str
    raw: str | None = field(default=None, repr=False)
    tree: str = ""
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Roughly the bytes it takes in memory."""
        return len(self.text) + len(self.raw or "")


@dataclass(frozen=True, slots=True)
class _CachedBody:
    stamp: Stamp
    read_ns: int
    body: Body

    def serves(self, stamp: Stamp) -> bool:
        # A file changed within one clock tick of the read may have the same stamp and another text.
        return self.stamp == stamp and self.read_ns - stamp[1] > RACY_NS


def read_pieces(folder: Path, name: str, limit: int, abandoned: threading.Event) -> bytes:
    """Read a file below *folder* in pieces, stopping when nobody waits any more.

    Raises:
        FileRefused: It is missing, a link, no regular file, unreadable or larger than *limit*.
        Abandoned: *abandoned* was set.
    """
    pieces: list[bytes] = []
    size = 0
    with open_file(folder, name) as stream:
        while piece := stream.read(_CHUNK):
            size += len(piece)
            if size > limit:
                raise FileRefused(f"{name} has more than {limit} bytes", code="too_large", path=name, limit=limit)
            if abandoned.is_set():
                raise Abandoned
            pieces.append(piece)
    return b"".join(pieces)


class Bodies:
    """Reads SKILL.md files: callers that ask at the same time share one read, and a failed read is never cached.

    Args:
        limit: Largest SKILL.md in bytes.
        reader: Reads the bytes; tests pass their own.
        clock_ns: Nanoseconds since the epoch.
    """

    def __init__(self, limit: int, *, reader: Reader = read_pieces, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._limit = limit
        self._reader = reader
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, _CachedBody] = OrderedDict()
        self._texts: OrderedDict[str, Body] = OrderedDict()
        self._size = 0
        self._flights: Flights[Body] = Flights()

    async def current(self, skill: Skill) -> Body:
        """Return the text of *skill* as its file is now.

        Raises:
            ToolCallRefused: `skill_not_found` when the file is gone, `skill_unreadable` when it does not parse.
        """
        if skill.path is None:
            return await self.fresh(skill)
        stamp = _stamp(skill.path)
        entry = self._lookup(skill.full_id)
        if stamp is not None and entry is not None and entry.serves(stamp):
            return entry.body
        return await self.fresh(skill)

    async def fresh(self, skill: Skill) -> Body:
        """Return the text of *skill*, read again whatever is cached. Raises as `current`."""
        content = far_content(skill)
        if content is not None:
            key = (skill.full_id, f"{skill.digest} {id(content)}")
            return await self._flights.fetch(key, lambda _: self._fetch(skill, content))
        if skill.path is None:
            return Body(skill.digest, skill.body, None, "", skill.frontmatter)
        return await self._flights.fetch(
            (skill.full_id, str(skill.path)), lambda abandoned: self._read(skill, abandoned)
        )

    async def current_digest(self, skill: Skill) -> str | None:
        """Return the digest of the file now, or None when it cannot be loaded as it is."""
        try:
            return (await self.current(skill)).digest
        except ToolCallRefused:
            return None

    def cached_body(self, digest: str) -> Body | None:
        """Return the text with this digest if it is in memory."""
        with self._lock:
            body = self._texts.get(digest)
            if body is not None:
                self._texts.move_to_end(digest)
            return body

    def keep(self, body: Body) -> Body:
        """Keep *body* in memory by its digest, dropping the least used ones beyond 16 MiB."""
        with self._lock:
            old = self._texts.pop(body.digest, None)
            self._size += body.size - (old.size if old else 0)
            self._texts[body.digest] = body
            while self._size > CACHE_BYTES and len(self._texts) > 1:
                _, dropped = self._texts.popitem(last=False)
                self._size -= dropped.size
        return body

    def close(self) -> None:
        """Stop reading."""
        self._flights.close()

    def _lookup(self, full_id: str) -> _CachedBody | None:
        with self._lock:
            return self._cached.get(full_id)

    def _fetch(self, skill: Skill, content: FarContent) -> Body:
        """Fetch the text of a skill whose files are on another host; it must match its listed digest."""
        try:
            data = content.fetch(SKILL_FILE, self._limit)
        except FileRefused as error:
            reason = error.details.get("reason", error.code)
            raise refuse("skill_unreadable", f"{SKILL_FILE} of this skill: {error.message}", reason=reason) from error
        return parsed(data, skill, SKILL_FILE, skill.tree_digest())

    def _read(self, skill: Skill, abandoned: threading.Event) -> Body:
        path = skill.path
        if path is None:  # not reached: skills without a file are answered before a flight starts
            raise not_found([skill.full_id], ())
        stamp, now = _stamp(path), self._clock_ns()
        try:
            data = self._reader(path.parent, path.name, self._limit, abandoned)
        except FileRefused as error:
            if error.code == "file_missing":
                raise not_found([skill.name], ()) from error
            raise refuse(
                "skill_unreadable", f"{path.name} of this skill: {error.message}", reason=error.code
            ) from error
        try:
            tree = skill.tree_digest()
        except FileRefused as error:
            message = f"the files of this skill cannot be read: {error.message}"
            raise refuse("skill_unreadable", message, reason=error.code) from error
        body = parsed(data, skill, path.name, tree)
        if stamp is not None and stamp == _stamp(path):
            with self._lock:
                self._cached[skill.full_id] = _CachedBody(stamp, now, body)
                self._cached.move_to_end(skill.full_id)
                while len(self._cached) > 1024:
                    self._cached.popitem(last=False)
        return body


def parsed(data: bytes, skill: Skill, file_name: str, tree: str) -> Body:
    """Return the body in SKILL.md bytes.

    Raises:
        ToolCallRefused: `skill_unreadable` with the findings' codes.
    """
    folder = skill.folder.name if skill.folder is not None else skill.id
    result = parse_skill_bytes(data, folder=folder, file_name=file_name)
    if result.skill is None:
        errors = [item for item in result.diagnostics if item.severity == "error"]
        problem = errors[0].message if errors else "it cannot be parsed"
        codes = [item.code for item in errors]
        raise refuse("skill_unreadable", f"the SKILL.md of this skill does not parse now: {problem}", codes=codes)
    raw = data.decode("utf-8")
    return Body(bytes_digest(data), result.skill.body, raw, tree, result.skill.frontmatter)


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
