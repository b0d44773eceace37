"""The long texts of a skill found in a root: read on first use, compared with what discovery saw."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from kdskills.skills.companions import COMPACT_FILE, SOURCES_FILES, limit_of, read_compact, read_sources
from kdskills.skills.content import ContentRead, ContentReader, Decoded
from kdskills.skills.digest import tree_digest
from kdskills.skills.findings import printable_path
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, read_body

T = TypeVar("T")


class RootTexts(NamedTuple):
    """Where the skills of one root are read from: the registry's reader, and the resolved root."""

    reader: ContentReader
    base: str


class RegistryContent:
    """The long texts of a registered skill, read on first use and compared with what discovery saw."""

    __slots__ = ("_digests", "_files", "_path", "_ref", "_source")

    def __init__(
        self, source: RootTexts, path: str, ref: str, files: tuple[str, ...], digests: tuple[str, ...]
    ) -> None:
        self._source = source
        self._path = path
        self._ref = ref
        self._files = files
        self._digests = digests

    def read_body(self) -> ContentRead[str]:
        """Return the body, with `stale` when the file has changed since.

        Raises:
            RootMissing: The file is gone.
            RootChanged: The registry is verified and the file has changed (`skill_changed`).
        """
        return self._read(0, MAX_SKILL_BYTES, lambda data, _: _decode_body(data))

    def read_compact(self) -> ContentRead[str | None]:
        """Return the text of `compact.md` as discovery saw it there, or None. Raises as `read_body`."""
        number = self._companion((COMPACT_FILE,))
        return ContentRead(None) if number is None else self._read(number, limit_of(COMPACT_FILE), _decode_compact)

    def read_sources(self) -> ContentRead[tuple[Mapping[str, Any], ...]]:
        """Return the rows of `sources.yaml` as discovery saw it there, or (). Raises as `read_body`."""
        number = self._companion(SOURCES_FILES)
        return ContentRead(()) if number is None else self._read(number, limit_of(SOURCES_FILES[0]), _decode_sources)

    def _read(self, number: int, limit: int, decode: Callable[[bytes, str], Decoded[T]]) -> ContentRead[T]:
        file_path = f"{self._path}/{self._files[number]}"
        return self._source.reader.read(
            self._source.base,
            file_path,
            limit=limit,
            expected=self._digests[number],
            ref=self._ref,
            decode=lambda data: decode(data, file_path),
        )

    def _companion(self, names: tuple[str, ...]) -> int | None:
        """Return which file is the companion; one that could not be read then is not read now."""
        files = range(1, len(self._files))
        return next((each for each in files if self._files[each] in names and self._digests[each]), None)

    def body(self) -> str:
        """Return the body. Raises as `read_body`."""
        return self.read_body().value

    def compact(self) -> str | None:
        """Return the text of `compact.md`, or None. Raises as `read_body`."""
        return self.read_compact().value

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of `sources.yaml`, or (). Raises as `read_body`."""
        return self.read_sources().value

    def tree_digest(self) -> str:
        """Return the digest over every file of the skill, as they are now. Raises `FileRefused`."""
        return tree_digest(self._source.base, self._path)


def _decode_body(data: bytes) -> Decoded[str]:
    text = read_body(data)
    return Decoded(text, sys.getsizeof(text))


def _decode_compact(data: bytes, path: str) -> Decoded[str | None]:
    compact = read_compact(data, path=printable_path(path))
    return Decoded(compact.text, sys.getsizeof(compact.text), compact.findings)


def _decode_sources(data: bytes, path: str) -> Decoded[tuple[Mapping[str, Any], ...]]:
    sources = read_sources(data, name=path.rpartition("/")[2], path=printable_path(path))
    # Objects weigh several times the text they were read from.
    return Decoded(sources.rows, 8 * len(data) + 1024, sources.findings)
