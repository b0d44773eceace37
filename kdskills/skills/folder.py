"""One skill folder on disk: the skill file, its companions (compact.md, tools.yaml, sources.yaml), and its long texts.

The readers of companions are pure functions over bytes already read. A broken `tools.yaml` is an error, for a lost gate would
open the skill; the other two only cost what they would have added. Long texts are read on first use; those of registered
skills are cached, and compared with what discovery saw.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from kdskills.errors import Diagnostic, FileRefused, RootChanged, RootMissing
from kdskills.skills.fields import FALSE_WORDS, near_required
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import BOM, MAX_SKILL_BYTES, read_body, trim_body
from kdskills.skills.model import Skill, SkillTool, Verdict
from kdskills.skills.safe_open import (
    RACY_NS,
    TreeFile,
    TreeRow,
    bytes_digest,
    is_withheld,
    newest_of,
    printable_path,
    read_file,
    read_tree,
    rows_digest,
    stamp_of,
    tree_digest,
    tree_rows,
)
from kdskills.skills.yaml_core import (
    Document,
    Fields,
    Items,
    Node,
    Scalar,
    YamlLimits,
    YamlRefused,
    load_yaml,
    to_python,
)

T = TypeVar("T")

SKILL_FILES = ("SKILL.md", "skill.md")
SKILL_YAML = ("skill.yaml", "skill.yml")
COMPACT_FILE = "compact.md"
TOOLS_FILES = ("tools.yaml", "tools.yml")
SOURCES_FILES = ("sources.yaml", "sources.yml")
MAX_COMPACT_BYTES = 256 * 1024
MAX_TOOLS_BYTES = 64 * 1024
MAX_SOURCES_BYTES = 1024 * 1024
MAX_SOURCES_ROWS = 2_000
NO_TOOLS: tuple[SkillTool, ...] = ()
NO_ROWS: tuple[Mapping[str, Any], ...] = ()
CACHE_BYTES = 16 * 1024 * 1024

_SOURCES_LIMITS = YamlLimits(nodes=200_000, size=MAX_SOURCES_BYTES)
_FENCES = re.compile(r"---[^\S\n]*\n(?:.*\n)*?---[^\S\n]*(?:\n|$)")
_OPTIONAL = FALSE_WORDS | {"optional", "soft", "preferred", "recommended"}
_TOOL_KEYS = frozenset({"id", "role", "why", "reason", "description", "required", "hard_required", "availability"})


class ContentRead(NamedTuple, Generic[T]):
    """A companion or long text as read just now; `cost` is about how many bytes of memory it takes."""

    value: T
    diagnostics: tuple[Diagnostic, ...] = ()
    cost: int = 0

    @property
    def stale(self) -> bool:
        """Whether the file is unlike what the snapshot saw."""
        return any(finding.code == "stale" for finding in self.diagnostics)


class _Unusable(Exception):
    """A companion cannot be used; the message says why."""

    def __init__(self, message: str, position: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position


LIMITS = {
    COMPACT_FILE: MAX_COMPACT_BYTES,
    **dict.fromkeys(SKILL_FILES, MAX_SKILL_BYTES),
    **dict.fromkeys(TOOLS_FILES, MAX_TOOLS_BYTES),
    **dict.fromkeys(SOURCES_FILES, MAX_SOURCES_BYTES),
}
"""Most bytes of the skill file and of each companion, by name."""


def code_of(name: str) -> str:
    """Return the code that says that the companion *name* cannot be used."""
    return f"{name.partition('.')[0]}_invalid"


def unusable(
    name: str, reason: str, *, path: str | None = None, verdict: Verdict = "lenient"
) -> tuple[Diagnostic, ...]:
    """Return the finding for the companion *name* that cannot even be read; *reason* is a clause, such as "it is a link"."""
    findings = FileFindings(verdict, name if path is None else path)
    findings.add(code_of(name), f"`{name}` cannot be used: {reason}.")
    return tuple(findings.items)


def _companion(
    decode: Callable[[bytes, FileFindings], T],
    default: T,
    usual_name: str,
    data: bytes,
    *,
    name: str | None = None,
    path: str | None = None,
    verdict: Verdict = "lenient",
) -> ContentRead[T]:
    """Return what *decode* makes of a companion's bytes; of one that cannot be used the *default* and why."""
    name = name or usual_name
    notes = FileFindings(verdict, name if path is None else path)
    try:
        value = decode(data, notes)
    except _Unusable as error:
        notes.add(code_of(name), f"`{name}` cannot be used: {error.message}.", position=error.position)
        value = default
    return ContentRead(value, tuple(notes.items))


def _compact(data: bytes, _: FileFindings) -> str:
    text = trim_body(_text(data, MAX_COMPACT_BYTES))
    if _FENCES.match(text):
        raise _Unusable("it begins with frontmatter", (1, 1))
    if not text:
        raise _Unusable("it is empty")
    return text


def _tools(data: bytes, _: FileFindings) -> tuple[SkillTool, ...]:
    root = _yaml(
        _text(data, MAX_TOOLS_BYTES), YamlLimits(), duplicates=False
    ).root  # keeping the first could lose a gate
    lists = [root]
    if isinstance(root, Fields):  # both keys together count, lest a gate is lost
        lists = [root.items[key] for key in ("tools", "tool_ids") if key in root.items]
        if not lists:
            raise _Unusable("it has neither `tools` nor `tool_ids`", (1, 1))
    entries: list[Node] = []
    for node in lists:
        if not isinstance(node, Items):
            both = "`tools` and `tool_ids` are not both lists"
            raise _Unusable(both if len(lists) > 1 else "it is neither a list nor a mapping with `tools`", (1, 1))
        entries += node.items
    return tuple(map(_tool, entries))


def _tool(node: Node) -> SkillTool:
    position = (node.mark.line + 1, node.mark.column + 1)
    if isinstance(node, Scalar):
        if node.null or not node.text.strip():
            raise _Unusable("an entry is blank", position)
        return SkillTool(node.text.strip())
    if not isinstance(node, Fields):
        raise _Unusable("an entry is neither an id nor a mapping", position)
    tool_id = _word(node, "id")
    if not tool_id:
        raise _Unusable("an entry has no `id`", position)
    why = next((text for text in (_word(node, key) for key in ("why", "reason", "description")) if text), "")
    return SkillTool(tool_id, _word(node, "role"), why, _required(node))


def _word(node: Fields, key: str) -> str:
    item = node.items.get(key)
    return item.text.strip() if isinstance(item, Scalar) and not item.null else ""


def _required(node: Fields) -> bool:
    """Whether an entry gates its skill; what is not understood does."""
    known = {"required": FALSE_WORDS, "hard_required": FALSE_WORDS, "availability": _OPTIONAL}
    for key, item in node.items.items():
        if key in known or (key not in _TOOL_KEYS and near_required(key)):
            negative = known.get(key) or (_OPTIONAL if "avail" in key.lower() else FALSE_WORDS)
            if not isinstance(item, Scalar) or not (item.null or item.text.strip().lower() in negative):
                return True
    return False


def _rows(data: bytes, notes: FileFindings) -> tuple[Mapping[str, Any], ...]:
    document = _yaml(_text(data, MAX_SOURCES_BYTES), _SOURCES_LIMITS, duplicates=notes.verdict == "lenient")
    for key, mark in document.duplicates:
        message = f"The key `{key}` stands twice; the first one counts."
        notes.add("duplicate_key", message, position=(mark.line + 1, mark.column + 1), ref=key)
    value = to_python(document.root)
    if isinstance(value, dict):
        value = next((value[key] for key in ("sources", "items") if isinstance(value.get(key), list | dict)), value)
    if isinstance(value, dict):
        value = [{**row, "sid": sid} if isinstance(row, dict) else row for sid, row in value.items()]
    if not isinstance(value, list):
        raise _Unusable("it is neither a list of rows nor a mapping of them", (1, 1))
    if len(value) > MAX_SOURCES_ROWS:
        raise _Unusable(f"it has {len(value):,} rows, more than {MAX_SOURCES_ROWS:,}")
    rows = tuple(row for row in value if isinstance(row, dict))
    if value and not rows:
        raise _Unusable("it is neither a list of rows nor a mapping of them", (1, 1))
    if len(rows) < len(value):
        notes.add("sources_invalid", f"{len(value) - len(rows)} entries are no rows and are left out.")
    return rows


def _text(data: bytes, limit: int) -> str:
    if len(data) > limit:
        raise _Unusable(f"it has {len(data):,} bytes, more than {limit:,}")
    if b"\0" in data:
        raise _Unusable("it holds a NUL byte", (data.count(b"\n", 0, data.index(b"\0")) + 1, 1))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Unusable("it is not UTF-8", (data.count(b"\n", 0, error.start) + 1, 1)) from error
    return text.removeprefix(BOM).replace("\r\n", "\n").replace("\r", "\n")


def _yaml(text: str, limits: YamlLimits, *, duplicates: bool) -> Document:
    try:
        document = load_yaml(text, limits)
    except YamlRefused as refusal:
        position = (refusal.position[0] + 1, refusal.position[1] + 1) if refusal.position else None
        raise _Unusable(refusal.message, position) from refusal
    for key, mark in () if duplicates else document.duplicates:
        raise _Unusable(f"the key `{key}` stands twice", (mark.line + 1, mark.column + 1))
    return document


read_compact = partial(_companion, _compact, None, COMPACT_FILE)
"""Return the text of `compact.md`; unusable ones give None and `compact_invalid`."""

read_tools = partial(_companion, _tools, NO_TOOLS, TOOLS_FILES[0])
"""Return the tools named in `tools.yaml`; anything not understood is `tools_invalid`, an error."""

read_sources = partial(_companion, _rows, NO_ROWS, SOURCES_FILES[0])
"""Return the rows of `sources.yaml` as written, a mapping of sids with `sid` filled in; else `sources_invalid`.

What the rows mean is decided by `kdskills.sources.normalize_sources`.
"""


def tools_schema() -> dict[str, Any]:
    """Return the JSON Schema of `tools.yaml`; what it refuses refuses the skill, or is `environment_invalid`."""
    word = {"type": ["string", "number", "boolean"], "pattern": r"\S"}
    names = {"type": ["string", "array", "null"], "items": {"type": "string"}}
    keys: dict[str, Any] = {key: {} for key in sorted(_TOOL_KEYS)}
    keys["id"] = word | {"description": "The tool, as programs call it."}
    keys["why"] = {"description": "What the skill needs it for."}
    keys["required"] = {"description": "Whether the skill is refused without it; what is not understood means yes."}
    entry = {"anyOf": [word, {"type": "object", "required": ["id"], "properties": keys}]}
    tools = {"type": "array", "items": entry}
    needs = {key: names | {"description": f"What scripts need of {key}."} for key in ("python", "node", "programs")}
    either = [{"required": ["tools"]}, {"required": ["tool_ids"]}]
    mapping = {"type": "object", "anyOf": either, "properties": {"tools": tools, "tool_ids": tools, **needs}}
    return {"title": "Tools that a skill needs", "anyOf": [tools, mapping]}


class FolderParts(NamedTuple):
    """What of a skill folder is read to parse it."""

    folder: Path
    file_name: str
    data: bytes
    tools: tuple[SkillTool, ...]
    findings: tuple[Diagnostic, ...]


def open_skill(path: str | os.PathLike[str], verdict: Verdict) -> FolderParts | tuple[Diagnostic, ...]:
    """Return the parts of the skill at *path*, or the findings that refuse it. No file-system state raises."""
    skill_path = Path(path)
    findings = FileFindings(verdict, skill_path.name or ".")
    printable = ascii(skill_path.name or str(skill_path))
    try:
        status = skill_path.lstat() if skill_path.name in SKILL_FILES else skill_path.stat()
    except (OSError, ValueError) as error:
        denied = isinstance(error, PermissionError)
        findings.add("unreadable" if denied else "path_missing", f"{printable} cannot be looked at.")
        return tuple(findings.items)
    folder: Path
    names: tuple[str, ...]
    if stat.S_ISDIR(status.st_mode):
        folder, names = skill_path.absolute(), SKILL_FILES
    elif skill_path.name in SKILL_FILES:
        folder, names = skill_path.absolute().parent, (skill_path.name,)
    else:
        findings.add("not_a_directory", f"{printable} is neither a folder nor a skill file.")
        if skill_path.name in SKILL_YAML:
            findings.add(
                "skill_yaml", f"{skill_path.name} is not a skill file; a skill is a SKILL.md with frontmatter."
            )
        return tuple(findings.items)
    if ".." in folder.parts:
        folder = Path(os.path.realpath(folder))
    return _open_folder(folder, names, verdict)


def _open_folder(folder: Path, names: tuple[str, ...], verdict: Verdict) -> FolderParts | tuple[Diagnostic, ...]:
    refusal: FileRefused | None = None
    for name in names:
        try:
            data = read_file(folder, name, limit=MAX_SKILL_BYTES).data
        except FileRefused as error:
            if error.code != "file_missing":
                refusal = error
                break
            refusal = refusal or error
        else:
            tools, findings, _ = read_companion(folder, TOOLS_FILES, read_tools, NO_TOOLS, verdict)
            return FolderParts(folder, name, data, tools, findings)
    assert refusal is not None  # each name was tried, and none was read
    refused = FileFindings(verdict, str(refusal.details.get("path", names[0])))
    known = refusal.code in {"file_missing", "symlink", "too_large"}
    refused.add(refusal.code if known else "unreadable", f"{refusal.message}.")
    for name in SKILL_YAML if refusal.code == "file_missing" else ():
        if (folder / name).is_file():
            refused.path = name
            refused.add("skill_yaml", f"{name} is not a skill file; a skill is a SKILL.md with frontmatter.")
    return tuple(refused.items)


def read_companion(
    folder: Path, names: tuple[str, ...], read: Callable[..., ContentRead[T]], default: T, verdict: Verdict = "lenient"
) -> ContentRead[T]:
    """Return what *read* makes of the first of *names* that is there; the default when none is, or it cannot be read."""
    for name in names:
        try:
            data = read_file(folder, name, limit=LIMITS[name]).data
        except FileRefused as refusal:
            if refusal.code != "file_missing":
                return ContentRead(default, unusable(name, refusal.message, verdict=verdict))
        else:
            return read(data, name=name, verdict=verdict)
    return ContentRead(default)


class LazyContent:
    """The long texts of a skill that no registry keeps, each read by its function on first use and kept."""

    def __init__(
        self,
        body: Callable[[], str],
        tree_digest: Callable[[], str],
        compact: Callable[[], str | None] = lambda: None,
        sources: Callable[[], tuple[Mapping[str, Any], ...]] = tuple,
    ) -> None:
        self.body, self.compact, self.sources = cache(body), cache(compact), cache(sources)
        self.tree_digest = tree_digest

    @classmethod
    def of_text(cls, body: str, size: int, digest: str) -> LazyContent:
        """Return the content of a folder with nothing but a skill file of this body, size and digest."""
        row: list[str | int] = ["SKILL.md", size, digest.partition(":")[2]]
        return cls(lambda: body, lambda: rows_digest([row]))

    @classmethod
    def of_folder(cls, folder: Path, file_name: str, verdict: Verdict) -> LazyContent:
        """Return the content of a folder on disk; its body raises `FileRefused` when the file is gone since."""
        return cls(
            lambda: read_body(read_file(folder, file_name, limit=MAX_SKILL_BYTES).data, verdict),
            lambda: tree_digest(folder),
            lambda: read_companion(folder, (COMPACT_FILE,), read_compact, None).value,
            lambda: read_companion(folder, SOURCES_FILES, read_sources, NO_ROWS).value,
        )


class _CachedText(NamedTuple):
    stamp: bytes
    read_at: int
    digest: str
    read: ContentRead[Any]


class ContentReader:
    """Reads skills' files for one registry, through a cache bounded in bytes. Safe from any thread.

    A file unlike its snapshot is served with `stale`, or refused when the registry is *verified*.
    """

    def __init__(self, *, verified: bool, clock: Callable[[], int], cache_bytes: int = CACHE_BYTES) -> None:
        self._verified = verified
        self._clock = clock
        self._most_bytes = cache_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _CachedText] = OrderedDict()
        self._cached_bytes = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes in the cache now."""
        return self._cached_bytes

    def clear(self) -> None:
        """Forget everything read so far."""
        with self._lock:
            self._entries.clear()
            self._cached_bytes = 0

    def read(
        self,
        base: str,
        path: str,
        *,
        limit: int,
        expected: str,
        ref: str,
        decode: Callable[[bytes], ContentRead[T]],
        pinned: bool = False,
    ) -> ContentRead[T]:
        """Read the file *path* of skill *ref* below the resolved root *base*.

        The cache serves when the file is certainly the same. *expected* is the digest the snapshot knows; what *decode*
        makes of the bytes is kept. Raises RootMissing (`skill_missing`) for a file that is gone or may not be read,
        RootChanged (`skill_changed`) for another one in a verified registry, or of a *pinned* skill.
        """
        entry = self._cached(base, path)
        if entry is None:
            read_at = self._clock()
            try:
                file = read_file(base, path, limit=limit)
            except FileRefused as refusal:
                message = f"{path} of skill {ref} can no longer be read ({refusal.code})."
                code = "skill_missing"
                raise RootMissing(message, code=code, ref=ref, path=path, reason=refusal.code) from refusal
            entry = _CachedText(stamp_of(file.stat), read_at, bytes_digest(file.data), decode(file.data))
            self._store(f"{base}/{path}", entry)
        if entry.digest == expected:
            return entry.read
        if self._verified or pinned:
            was = "that was locked or signed" if pinned else "this process was started with"
            message = f"{path} of skill {ref} is not the file {was}."
            raise RootChanged(message, code="skill_changed", ref=ref, path=path, expected=expected, found=entry.digest)
        message = f"{path} has changed since the skills were last looked through; the new text is served."
        changed = Diagnostic("stale", "warning", message, path, ref=ref, fix="Refresh the registry.")
        return ContentRead(entry.read.value, (*entry.read.diagnostics, changed))

    def _cached(self, base: str, path: str) -> _CachedText | None:
        key = f"{base}/{path}"
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        try:
            status = os.lstat(key)
        except OSError:
            return None
        certain = newest_of(entry.stamp) < entry.read_at - RACY_NS and stamp_of(status) == entry.stamp
        return entry if certain else None

    def _store(self, key: str, entry: _CachedText) -> None:
        with self._lock:
            before = self._entries.pop(key, None)
            if before is not None:
                self._cached_bytes -= before.read.cost
            if entry.read.cost > self._most_bytes:
                return
            self._entries[key] = entry
            self._cached_bytes += entry.read.cost
            while self._cached_bytes > self._most_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._cached_bytes -= dropped.read.cost


class RegistryContent:
    """The long texts of a registered skill, read on first use and compared with what discovery saw.

    `files` names the skill file, then its companions, and `digests` has the digest of each; `below` are the folders in the
    skill, relative to the root, or None where nobody looked. The readers raise `RootMissing` when the file is gone, and
    `RootChanged` (`skill_changed`) when it has changed and the registry is verified, or the skill is pinned to files that
    were judged; otherwise a changed file is `stale`.
    """

    __slots__ = ("_base", "_digests", "_files", "_path", "_pinned", "_reader", "_ref", "below")

    def __init__(
        self,
        reader: ContentReader,
        base: str,
        path: str,
        ref: str,
        files: tuple[str, ...],
        digests: tuple[str, ...],
        below: tuple[str, ...] | None = None,
    ) -> None:
        self._reader = reader
        self._base = base
        self._path = path
        self._ref = ref
        self._files = files
        self._digests = digests
        self._pinned: str | None = None
        self.below = below

    @property
    def read_digests(self) -> dict[str, str]:
        """Digests of the skill file and its companions, as discovery read them, by name; of those that it could read."""
        return {name: digest for name, digest in zip(self._files, self._digests, strict=True) if digest}

    @property
    def looked_at(self) -> tuple[str, ...]:
        """Paths in the skill's folder, "." for itself, that discovery has stamps of, in their order; none where nobody looked."""
        if self.below is None:
            return ()
        return (".", *(path[len(self._path) + 1 :] for path in self.below), *self._files)

    def pin(self, files: str | None) -> None:
        """Hold the skill to exactly *files*, the lines of its `TreeFile`s with NULs between; None lets go of it."""
        self._pinned = files

    def confirm(self, path: str, data: bytes) -> None:
        """Raise FileRefused, `skill_changed`, unless *data* is what the skill's file *path* is held to."""
        if self._pinned is None:
            return
        digest, lines = hashlib.sha256(data).hexdigest(), self._pinned.split("\0")
        if not any(TreeFile(path, len(data), digest, executable).line in lines for executable in (False, True)):
            raise FileRefused(f"{path!r} is not what was locked or signed", code="skill_changed", path=path)

    def may_have(self, *names: str) -> list[str]:
        """Return those of *names* that may be folders of the skill: all where nobody looked."""
        if self.below is None:
            return list(names)
        return [name for name in names if f"{self._path}/{name}" in self.below]

    def _read(self, names: tuple[str, ...], default: T, read: Callable[..., ContentRead[T]]) -> ContentRead[T]:
        # A companion that could not be read then is not read now.
        files = zip(self._files, self._digests, strict=True)
        name, expected = next(((name, digest) for name, digest in files if name in names and digest), ("", ""))
        if not name:
            return ContentRead(default)
        path = f"{self._path}/{name}"

        def decode(data: bytes) -> ContentRead[T]:
            text = read(data, name=name, path=printable_path(path))
            # Objects weigh several times the text they were read from.
            weight = 8 * len(data) + 1024 if names is SOURCES_FILES else sys.getsizeof(text.value)
            return text._replace(cost=weight)

        limit = LIMITS[name]
        pinned = self._pinned is not None
        return self._reader.read(
            self._base, path, limit=limit, expected=expected, ref=self._ref, decode=decode, pinned=pinned
        )

    def read_body(self) -> ContentRead[str]:
        """Return the body."""
        return self._read(self._files[:1], "", lambda data, **_: ContentRead(read_body(data)))

    def read_compact(self) -> ContentRead[str | None]:
        """Return the text of `compact.md` as discovery saw it there, or None."""
        return self._read((COMPACT_FILE,), None, read_compact)

    def read_sources(self) -> ContentRead[tuple[Mapping[str, Any], ...]]:
        """Return the rows of `sources.yaml` as discovery saw it there, or ()."""
        return self._read(SOURCES_FILES, (), read_sources)

    def body(self) -> str:
        """Return the body."""
        return self.read_body().value

    def compact(self) -> str | None:
        """Return the text of `compact.md`, or None."""
        return self.read_compact().value

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of `sources.yaml`, or ()."""
        return self.read_sources().value

    def tree_digest(self) -> str:
        """Return the digest over every file of the skill, as they are now.

        Raises `FileRefused`, `skill_changed` when the skill is pinned to other files, or to other ones that may be run: the
        digest says nothing of that.
        """
        return rows_digest(self._rows())

    def shown_digest(self) -> str:
        """Return the digest over the files that models and programs may see, as they are now. Raises as `tree_digest`."""
        return rows_digest(row for row in self._rows() if not is_withheld(row[0]))

    def _rows(self) -> list[TreeRow]:
        if self._pinned is None:
            return tree_rows(self._base, self._path)
        files = read_tree(self._base, self._path)
        if self._pinned != "\0".join([file.line for file in files]):
            raise FileRefused("its files are not what was locked or signed", code="skill_changed", path=self._path)
        return [(file.path, file.size, file.sha256) for file in files]


def shown_digest(skill: Skill) -> str:
    """Return the digest over the files of *skill* that models and programs may see, as they are now: what is mounted is held
    to it. Evaluations count in `skill.tree_digest()` alone. Raises FileRefused as that does.
    """
    if isinstance(skill.content, RegistryContent):
        return skill.content.shown_digest()
    # Content that lies elsewhere has no evaluations at all.
    return skill.tree_digest() if skill.folder is None else tree_digest(skill.folder, shown=True)


def skill_bytes(skill: Skill, path: str, limit: int) -> bytes:
    """Return the bytes of a file of a skill on this host, of at most *limit*.

    Evaluations are not there. Raises FileRefused as `read_file`, and `skill_changed` when it is not what the skill is held to.
    """
    if skill.folder is None or is_withheld(path):
        raise FileRefused(f"{path!r} is not there", code="file_missing", path=path)
    data = read_file(skill.folder, path, limit=limit).data
    confirm_bytes(skill, path, data)
    return data


def confirm_bytes(skill: Skill, path: str, data: bytes) -> None:
    """Raise FileRefused, `skill_changed`, unless *data* is what the skill's file *path* is held to, if it is."""
    if isinstance(skill.content, RegistryContent):
        skill.content.confirm(path, data)
