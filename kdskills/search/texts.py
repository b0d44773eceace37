"""What of a skill is searched: its fields as text, each bounded, from one that is hostile or broken as much as can be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kdskills.errors import FileRefused, KdskillsError
from kdskills.skills.model import Skill
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import ROOT_FLAGS, open_file_at, open_folder_at

MAX_BODY: Final = 64 * 1024
"""Characters of a body that are searched."""

MAX_FIELD: Final = 8 * 1024
"""Characters of any other field."""

MAX_FILES: Final = 32
"""Scripts and references of a skill that are looked into, first by name."""

_HEAD_BYTES: Final = 2048
_WORD_KEYS: Final = ("aliases", "tags", "keywords", "when_to_use", "triggers")
_DOCSTRING = re.compile(r"^[ \t]*[rR]?(?:\"\"\"|''')\s*(.+)", re.MULTILINE)
_COMMENT = re.compile(r"^[ \t]*(?:#(?!!)|//|--|;|%)+[ \t]*(\w.*)$", re.MULTILINE)
_TITLE = re.compile(r"^(?:#[ \t]+|title:[ \t]*)(.+)$", re.MULTILINE)


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
    if skill.file is not None:
        folder = os.path.dirname(skill.file)  # noqa: PTH120 - a `Path` for each of ten thousand skills costs more than its text
        kinds = (("scripts", (_DOCSTRING, _COMMENT)), ("references", (_TITLE,)))
        lines = [text for name, patterns in kinds for text in _file_lines(folder, name, patterns)]
        texts["files"] = "\n".join(lines)[:MAX_FIELD]
    return texts, True


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


def _file_lines(folder: str, name: str, patterns: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Yield name and first line that a pattern finds of the files of a skill's folder *name*; nothing where it cannot be read."""
    try:
        root = os.open(folder, ROOT_FLAGS)
    except OSError:
        return
    try:
        inner = open_folder_at(root, name, name)
    except FileRefused:
        return
    finally:
        os.close(root)
    try:
        with os.scandir(inner) as entries:
            files = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))[:MAX_FILES]
        for file in files:
            yield file
            head = _head(inner, file)
            yield next((match[1] for pattern in patterns if (match := pattern.search(head))), "")
    finally:
        os.close(inner)


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
