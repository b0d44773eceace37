"""Entries of a server's listing, checked before anything is made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from kdskills.skills.digest import rows_digest

SKILL_FILE: Final = "SKILL.md"
MAX_FILES: Final = 512
MAX_BYTES: Final = 16 * 1024 * 1024
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class EntryRefused(Exception):  # internal to this package: every one becomes a diagnostic
    """Why an entry is not used."""


@dataclass(frozen=True, slots=True)
class FarFile:
    """A file as the listing has it; `path` is relative to the skill."""

    path: str
    uri: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ListedSkill:
    """A skill as the listing has it. `files` is None when the server does not say (`"dynamic"`)."""

    uri: str
    frontmatter: Mapping[str, Any]
    files: Mapping[str, FarFile] | None

    @property
    def base(self) -> str:
        """Uri of the skill's directory, without a trailing slash."""
        return self.uri.removesuffix(f"/{SKILL_FILE}")

    @property
    def parts(self) -> tuple[str, ...]:
        """Path of the skill's directory in the server's names."""
        return tuple(unquote(part) for part in self.base.removeprefix("skill://").split("/"))

    @property
    def set_digest(self) -> str | None:
        """Digest over every (uri, digest): what an approval is bound to. None when the server does not say."""
        if self.files is None:
            return None
        return rows_digest(sorted((file.uri, file.size, file.digest) for file in self.files.values()))

    @property
    def tree(self) -> str | None:
        """Digest of the tree that these files make, as of a folder."""
        if self.files is None:
            return None
        rows = sorted(self.files.values(), key=lambda file: file.path.encode())
        return rows_digest([(file.path, file.size, file.digest.removeprefix("sha256:")) for file in rows])


def read_entry(row: Mapping[str, Any], *, allow_dynamic: bool) -> ListedSkill:
    """Return an entry of `skills/list` or `skills/get`. Raises EntryRefused."""
    uri, frontmatter, resources = row.get("uri"), row.get("frontmatter"), row.get("resources")
    if not isinstance(uri, str) or not uri.startswith("skill://") or not uri.endswith(f"/{SKILL_FILE}"):
        raise EntryRefused("its uri is no skill://…/SKILL.md")
    if not isinstance(frontmatter, dict):
        raise EntryRefused("it has no frontmatter")
    base = uri.removesuffix(SKILL_FILE)
    for part in base.removeprefix("skill://").removesuffix("/").split("/"):
        _plain(unquote(part))
    if resources == "dynamic":
        if not allow_dynamic:
            raise EntryRefused("its server does not say what files it has, and the root has no allow_dynamic")
        return ListedSkill(uri, frontmatter, None)
    if not isinstance(resources, list):
        raise EntryRefused("it lists no resources")
    if len(resources) > MAX_FILES:
        raise EntryRefused(f"it lists more than {MAX_FILES} files")
    files: dict[str, FarFile] = {}
    for resource in resources:
        file = _file(resource, base)
        if file.path in files:
            raise EntryRefused(f"it lists {file.path} twice")
        files[file.path] = file
    if SKILL_FILE not in files:
        raise EntryRefused(f"it does not list its {SKILL_FILE}")
    if sum(file.size for file in files.values()) > MAX_BYTES:
        raise EntryRefused(f"its files have more than {MAX_BYTES >> 20} MiB")
    folders = {path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)}
    if folders & files.keys():
        raise EntryRefused("a name is a file and a folder at once")
    return ListedSkill(uri, frontmatter, files)


def _file(resource: object, base: str) -> FarFile:
    if not isinstance(resource, dict):
        raise EntryRefused("a resource is no object")
    uri, digest, size = resource.get("uri"), resource.get("digest"), resource.get("size")
    if not isinstance(uri, str) or not uri.startswith(base):
        raise EntryRefused("a resource lies outside its folder")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise EntryRefused(f"{uri} has no sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise EntryRefused(f"{uri} has no size")
    try:
        parts = [unquote(part, errors="strict") for part in uri.removeprefix(base).split("/")]
    except UnicodeDecodeError as error:
        raise EntryRefused(f"{uri} is no UTF-8") from error
    for part in parts:  # each by itself: an escaped slash must not make two of one
        _plain(part)
    return FarFile("/".join(parts), uri, digest, size)


def _plain(part: str) -> None:
    """Refuse a part of a path that could mean another place. Raises EntryRefused."""
    if part in {"", ".", ".."} or any(char in "/\\?#" or ord(char) < 32 for char in part) or len(part.encode()) > 255:
        raise EntryRefused("a path has empty, dotted or unsafe parts")


def same_value(first: object, second: object) -> bool:
    """Whether two JSON values are one: numbers by value, everything else by kind too."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return type(first) is type(second) and first == second if not _numbers(first, second) else first == second


def _numbers(first: object, second: object) -> bool:
    return isinstance(first, int | float) and isinstance(second, int | float)
