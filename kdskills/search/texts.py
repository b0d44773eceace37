"""What of a skill is searched: its fields as text, each bounded, from one that is hostile or broken as much as can be read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from kdskills.errors import FileRefused, KdskillsError
from kdskills.skills.folder import RegistryContent
from kdskills.skills.model import Skill
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import RACY_NS, ROOT_FLAGS, newest_of, open_file_at, open_folder_at, stamp_of

MAX_BODY: Final = 64 * 1024
"""Characters of a body that are searched."""

MAX_FIELD: Final = 8 * 1024
"""Characters of any other field."""

MAX_FILES: Final = 32
"""Scripts and references of a skill that are looked into, first by name."""

MAX_ENTRIES: Final = 1024
"""Entries of a folder of scripts or references; one with more is not looked into."""

_HEAD_BYTES: Final = 2048
_WORD_KEYS: Final = ("aliases", "tags", "keywords", "when_to_use", "triggers")
_DOCSTRING = re.compile(r"^[ \t]*[rR]?(?:\"\"\"|''')\s*(.+)", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*(?:#(?!!)|//|--|;|%)+[ \t]*(\w.*)$", re.MULTILINE)
_TITLE = re.compile(r"^(?:#[ \t]+|title:[ \t]*)(.+)$", re.MULTILINE)
_SEARCHED: Final = MappingProxyType({"scripts": (_DOCSTRING, _COMMENT), "references": (_TITLE,)})


def skill_texts(skill: Skill) -> tuple[dict[str, str], bool]:
    """Return `{field: text}` of *skill*, and whether everything there is could be read.

    Fields are `name`, `description`, `keywords` (aliases, tags, keywords, triggers), `body` with its headings, and `files` (names
    of scripts with their first comment or docstring, titles of references). A skill that lies elsewhere is searched by what
    its listing says.
    """
    texts = {
        "name": f"{skill.id} {skill.name}" if skill.id != skill.name else skill.name,
        "description": skill.description[:MAX_FIELD],
        "keywords": " ".join(_words_of(skill))[:MAX_FIELD],
    }
    if far_content(skill) is not None:
        return texts, True
    try:
        body = skill.body[:MAX_BODY]
    except (KdskillsError, OSError):  # gone or unreadable since discovery, which tells of it; found by the rest
        return texts, False
    texts["body"] = body
    lines = [text for folder, patterns in _folders(skill).items() for text in _file_lines(skill, folder, patterns)]
    texts["files"] = "\n".join(lines)[:MAX_FIELD]
    return texts, True


def files_stamp(skill: Skill) -> str:
    """Return what changes with any file of a skill that `skill_texts` looks into beside the skill file; "" where there is none.

    Nothing is read: names, sizes and times tell. What has changed less than two seconds ago may change again within the same
    tick of the clock, and is told as such.
    """
    if isinstance(skill.content, RegistryContent) and skill.content.below == ():  # asked of ten thousand at a start
        return ""
    stamps: list[bytes] = []
    top = os.path.dirname(skill.file or "")  # noqa: PTH120 - as below
    for folder in _folders(skill):
        with suppress(OSError):  # gone since discovery, or since it was listed
            for entry in _listed(f"{top}/{folder}"):
                stamps += (os.fsencode(entry.name), stamp_of(entry.stat(follow_symlinks=False)))
    if not stamps:
        return ""
    fresh = newest_of(b"".join(stamps[1::2])) >= time.time_ns() - RACY_NS
    return f" {blake2b(repr(stamps).encode(), digest_size=16).hexdigest()}{'~' if fresh else ''}"


def _folders(skill: Skill) -> Mapping[str, tuple[re.Pattern[str], ...]]:
    """Return the folders of a skill that are looked into, each with what is looked for in a file."""
    if isinstance(skill.content, RegistryContent):
        names = skill.content.may_have(*_SEARCHED)
        return {name: _SEARCHED[name] for name in names} if names else {}
    return {} if skill.file is None else _SEARCHED


def _words_of(skill: Skill) -> Iterator[str]:
    front: Mapping[str, Any] = dict(skill.frontmatter.items())  # decoded once
    for source in (front, front.get("metadata")):
        if isinstance(source, Mapping):
            for key in _WORD_KEYS:
                yield from _strings(source.get(key))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, str))


def _file_lines(skill: Skill, folder: str, patterns: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Yield name and first line that a pattern finds of the files of a skill's folder."""
    with _entries(skill, folder) as (descriptor, entries):
        for entry in entries:
            yield entry.name
            head = _head(descriptor, entry.name)
            yield next((match[1] for pattern in patterns if (match := pattern.search(head))), "")


@contextmanager
def _entries(skill: Skill, folder: str) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """Open a skill's folder and list its files, first by name; nothing where it cannot be read or has too many entries."""
    assert skill.file is not None  # else it has no folder
    with ExitStack() as opened:
        descriptor = -1
        files: list[os.DirEntry[str]] = []
        with suppress(OSError, FileRefused):
            top = os.open(os.path.dirname(skill.file), ROOT_FLAGS)  # noqa: PTH120 - a `Path` for each of ten thousand skills costs more than its text
            opened.callback(os.close, top)
            descriptor = open_folder_at(top, folder, folder)
            opened.callback(os.close, descriptor)
            files = _listed(descriptor)
        yield descriptor, files


def _listed(folder: int | str) -> list[os.DirEntry[str]]:
    """Return the files of a folder that are looked into, first by name; none of too many. Raises `OSError`."""
    with os.scandir(folder) as listing:
        entries = list(islice(listing, MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:  # which ones the system names first differs between machines
        return []
    files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    return sorted(files, key=attrgetter("name"))[:MAX_FILES]


def _head(folder: int, name: str) -> str:
    try:
        descriptor = open_file_at(folder, name, name, listed=True)
    except FileRefused:
        return ""
    try:
        return os.read(descriptor, _HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
