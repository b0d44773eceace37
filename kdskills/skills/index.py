"""The persisted index: one file per root, trusted only when it is certainly our own and whole.

A file is one line of JSON that says what it is for, then the lines of `scan_lines`. It is written aside and renamed, so other
processes see the old one or the new one. It holds no bodies.

Rows are lists in a fixed order, because ten thousand of them are read at each start. The frontmatter stays JSON text until
somebody asks for it. Texts that many skills share (licences, authors, tags) are kept once for all of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import sys
import unicodedata
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kdskills.errors import Diagnostic, StrPath, path_argument
from kdskills.skills.model import RootKind, Skill, SkillArgument, SkillContent, SkillTool, make_skill
from kdskills.skills.private_files import private_folder, replace_file
from kdskills.skills.roots import PlainFolder, RootScan, SkillRecord, SkillRoot, make_record

Row = list[Any]
ContentMaker = Callable[[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], SkillContent]
"""Makes the source of a skill's long texts from its folder, full id, file names, their digests, and the folders in it."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class JsonMapping(Mapping[str, Any]):
    """A mapping kept as JSON text and decoded when it is looked into; equal to any mapping with the same items.

    It may be given values that nobody else changes and that become text at the first use: most starts never look into a
    frontmatter.
    """

    __slots__ = ("_content",)

    def __init__(self, content: str | dict[str, Any]) -> None:
        self._content = content

    def _decoded(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.text)
        return decoded

    def __getitem__(self, key: str) -> Any:
        return self._decoded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def items(self) -> ItemsView[str, Any]:
        """Return keys and values, decoded once for all of them."""
        return self._decoded().items()

    def __repr__(self) -> str:
        return repr(self._decoded())

    @property
    def text(self) -> str:
        """The JSON text."""
        content = self._content  # one field, so that threads which come together see either form, never none
        if not isinstance(content, str):
            content = self._content = json_text(content)
        return content


def json_text(value: Any) -> str:
    """Return compact JSON; text that is no UTF-8 is escaped, and small values are lists of their fields."""
    return _ENCODER.encode(value)


def _plain(value: Any) -> dict[str, Any] | list[Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Diagnostic | SkillArgument | SkillTool):
        return [getattr(value, name) for name in value.__slots__]
    raise TypeError(f"{type(value).__name__} has no place in an index")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain)


def notes_from(rows: list[Row] | None) -> tuple[Diagnostic, ...]:
    """Return findings from their rows."""
    return tuple([Diagnostic(*row) for row in rows]) if rows else ()


_FIELDS = attrgetter(
    *("name", "namespace", "id", "description", "version", "category", "author", "created", "license", "compatibility"),
    *("argument_hint", "tags", "when_to_use", "imports", "include_for", "disclosure", "metadata", "allowed_tools"),
    *("allowed_tool_names", "disable_model_invocation", "user_invocable", "arguments", "insert", "tools", "size"),
    "tokens",
)


def _skill_from(
    row: Row,
    frontmatter: str,
    diagnostics: tuple[Diagnostic, ...],
    content: SkillContent,
    kind: RootKind,
    file: str,
    digest: str,
) -> Skill:
    name, namespace, skill_id, description, *shared = row[:10]
    (
        hint, tags, when, imports, include_for, disclosure, metadata, allowed, allowed_names, no_model, invocable,
        arguments, insert, tools, size, tokens,
    ) = row[10:]  # fmt: skip
    return make_skill(
        name,
        sys.intern(namespace),
        name if skill_id is None else skill_id,
        description,
        content,
        *[text and sys.intern(text) for text in shared],
        hint,
        tuple(map(sys.intern, tags)) if tags else (),
        tuple(when) if when else (),
        tuple(imports) if imports else (),
        tuple(include_for) if include_for else (),
        disclosure,
        metadata or _NOTHING,
        allowed,
        tuple(allowed_names) if allowed_names else (),
        no_model,
        invocable,
        tuple([SkillArgument(*argument) for argument in arguments]) if arguments else (),
        insert,
        tuple([SkillTool(*tool) for tool in tools]) if tools else (),
        JsonMapping(frontmatter),
        diagnostics,
        digest,
        size,
        tokens,
        kind,
        file,
    )


def _stamp_text(stamps: bytes) -> str:
    return base64.b64encode(stamps).decode("ascii")


def _record_row(record: SkillRecord) -> Row:
    """Return a skill's record as a row, with what frontmatter and companions said, but without the frontmatter itself."""
    skill = record.skill
    fields: Row = [] if skill is None else [*_FIELDS(skill)]
    return [
        record.path,
        record.layout_namespace,
        record.below or None,
        "/".join(record.files),
        " ".join(record.digests),
        len(record.stamps),
        record.newest,
        record.nested or None,
        record.notes or None,
        record.full_id,
        None if skill is None else [*fields[:2], None if skill.id == skill.name else skill.id, *fields[3:]],
        record.diagnostics or None,
    ]


@lru_cache(maxsize=256)
def _file_names(names: str) -> tuple[str, ...]:
    """Return names of files that were joined; thousands of skills have the same ones."""
    return tuple(map(sys.intern, names.split("/")))


def _record_from(
    row: Row, frontmatter: str, stamps: bytes, root: SkillRoot, base: str, content: ContentMaker
) -> SkillRecord:
    """Return the record a row describes; *base* is the resolved root."""
    path, namespace, folders, names, hashes, _, newest, nested, notes, full_id, values, findings = row
    below = tuple(folders) if folders else ()
    files = _file_names(names)
    digests = tuple(hashes.split(" "))
    diagnostics = notes_from(findings)
    skill = None
    if values is not None:
        source = content(path, full_id, files, digests, below)
        file = f"{base}/{path}/{files[0]}"
        skill = _skill_from(values, frontmatter, diagnostics, source, root.kind, file, digests[0])
    return make_record(
        path,
        sys.intern(namespace),
        below,
        files,
        digests,
        stamps,
        newest,
        tuple(nested) if nested else (),
        notes_from(notes),
        full_id,
        skill,
        diagnostics,
    )


def scan_lines(scan: RootScan) -> list[str]:
    """Return a scan as lines of ASCII: one JSON document, the stamps of all skills, and a frontmatter for each skill.

    What is not read at a start, the frontmatters, is not decoded at a start: each stays the text of its own line.
    """
    records = list(scan.skills.values())
    document = {
        "checked_at": scan.checked_at,
        "digest": scan.digest,
        "notes": scan.notes,
        "folders": [
            [path, _stamp_text(plain.stamp), plain.children, plain.notes] for path, plain in scan.folders.items()
        ],
        "skills": [_record_row(record) for record in records],
    }
    stamps = _stamp_text(b"".join([record.stamps for record in records]))
    frontmatters = ({} if record.skill is None else record.skill.frontmatter for record in records)
    texts = [each.text if isinstance(each, JsonMapping) else json_text(each) if each else "" for each in frontmatters]
    return [json_text(document), stamps, *texts]


DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)


def scan_from(lines: Sequence[str], root: SkillRoot, base: str, content: ContentMaker) -> RootScan:
    """Return the scan that `scan_lines` wrote; lines of another shape raise one of `DAMAGED`."""
    document: Mapping[str, Any] = json.loads(lines[0])
    packed = base64.b64decode(lines[1], validate=True)
    rows = document["skills"]
    skills: dict[str, SkillRecord] = {}
    position = 0
    for row, frontmatter in zip(rows, lines[2:], strict=True):
        end = position + row[5]
        record = _record_from(row, frontmatter, packed[position:end], root, base, content)
        skills[record.path] = record
        position = end
    if position != len(packed):
        raise ValueError("there are other stamps than skills")
    folders = {
        path: PlainFolder(base64.b64decode(stamp), tuple(children), notes_from(notes))
        for path, stamp, children, notes in document["folders"]
    }
    return RootScan(
        document["checked_at"], folders, skills, notes_from(document["notes"]), document["digest"], present=True
    )


FORMAT = 2
"""Shape of the file."""

PARSER = 1
"""Raised whenever the same skill file means something else than before, so that old indexes are not believed."""

MAX_BYTES = 256 * 1024 * 1024


class IndexIgnored(Exception):
    """Why an index file is not used; it never leaves this room."""


def default_index_dir() -> Path | None:
    """Return `$XDG_CACHE_HOME/kdskills/index`, else `~/.cache/kdskills/index`; None for a user without a home."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if cache_home.startswith("/") else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - no raise
    return base / "kdskills" / "index" if base.is_absolute() else None


class IndexStore:
    """Reads and writes the index of each root in *folder*; None keeps none, `"default"` is the user's cache."""

    def __init__(self, folder: StrPath | None) -> None:
        own_folder = folder is not None and folder != "default"
        self.folder = path_argument(folder, "index_dir") if own_folder else default_index_dir() if folder else None

    def file(self, root: SkillRoot, base: str) -> Path | None:
        """Return where the index of a root is kept, or None."""
        if self.folder is None:
            return None
        key = json_text(_identity(root, base)).encode()
        return self.folder / f"{hashlib.sha256(key).hexdigest()[:32]}.json"

    def load(self, root: SkillRoot, base: str, content: ContentMaker) -> tuple[RootScan | None, Diagnostic | None]:
        """Return the scan kept for a root at *base*; None when there is none, with `index_ignored` when there was a file."""
        path = self.file(root, base)
        if path is None:
            return None, None
        try:
            data = _read(path)
            return (None, None) if data is None else (_decode(data, root, base, content), None)
        except IndexIgnored as ignored:
            message = f"The index of the root {root.label} is not used and will be rebuilt: {ignored}."
            return None, Diagnostic("index_ignored", "info", message, ref=root.label)

    def save(self, root: SkillRoot, base: str, scan: RootScan) -> Diagnostic | None:
        """Write the index of a root; an unwritable folder is a finding, not an error."""
        path = self.file(root, base)
        if path is None or not scan.present:
            return None
        try:
            private_folder(path.parent)
            body = "\n".join(scan_lines(scan)).encode("ascii")
            header = {**_identity(root, base), "checksum": hashlib.sha256(body).hexdigest()}
            replace_file(path, json_text(header).encode("ascii") + b"\n" + body)
        except OSError as error:
            reason = error.strerror or "the system refused"
            message = f"The index of the root {root.label} cannot be kept: {reason}; each start reads all skills."
            return Diagnostic("index_not_written", "info", message, ref=root.label)
        return None


def search_file(index_dir: StrPath | None, roots: Sequence[SkillRoot]) -> Path | None:
    """Return where the search index of a set of roots is kept, beside their own indexes, or None."""
    folder = IndexStore(index_dir).folder
    key = json_text([_identity(root, os.path.realpath(root.path)) for root in roots]).encode()
    return None if folder is None else folder / f"{hashlib.sha256(key).hexdigest()[:32]}.search"


def _identity(root: SkillRoot, base: str) -> dict[str, Any]:
    """Return everything that decides how the root's files are read."""
    return {
        "format": FORMAT,
        "parser": PARSER,
        "unicode": unicodedata.unidata_version,
        "root": base,
        "kind": root.kind,
        "namespace": root.namespace,
        "nested": root.nested,
    }


def _decode(data: bytes, root: SkillRoot, base: str, content: ContentMaker) -> RootScan:
    head, _, body = data.partition(b"\n")
    try:
        header: dict[str, Any] = dict(json.loads(head))
        checksum = header.pop("checksum")
    except DAMAGED as error:
        raise IndexIgnored("its first line is damaged") from error
    if header != _identity(root, base):
        raise IndexIgnored("another version wrote it")
    if checksum != hashlib.sha256(body).hexdigest():
        raise IndexIgnored("its checksum does not fit")
    try:
        return scan_from(body.decode("ascii").split("\n"), root, base, content)
    except DAMAGED as error:
        raise IndexIgnored("it has another shape") from error


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IndexIgnored(f"it cannot be opened ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # a folder would not even become a stream
        raise IndexIgnored("it is not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if status.st_uid != os.geteuid():
            raise IndexIgnored("it belongs to another user")
        if status.st_mode & 0o022:
            raise IndexIgnored("others may write to it")
        if status.st_size > MAX_BYTES:
            raise IndexIgnored("it is too large")
        try:
            return stream.read(MAX_BYTES)
        except OSError as error:
            raise IndexIgnored(f"it cannot be read ({error.strerror})") from error
