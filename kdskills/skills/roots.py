"""Where skills come from: roots, their order, those of other agents, and roots whose skills lie elsewhere.

Then what is found there: the record of a skill's folder, the scan of a root, and the snapshot of all roots at one moment.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from kdskills.errors import BadRequest, Diagnostic, StrPath, path_argument
from kdskills.skills.model import RootKind, Skill, maker_of
from kdskills.skills.private_files import make_folder, replace_file
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.safe_open import STAMP, is_folder, rows_digest


@dataclass(frozen=True, slots=True)
class PlainFolder:
    """A folder on the way to skills: which folders below were entered, and what was noted in it."""

    stamp: bytes
    children: tuple[str, ...]
    notes: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class SkillRecord:
    """A skill's folder as last seen, and what was made of it; paths are posix and relative to the root.

    `below` are the folders entered, `nested` those of them with skill files of their own. `files` names the skill file,
    then its companions; a digest is empty for one that was not read (a link, too large, unreadable). `stamps` are those
    of the folder, `below` and `files`, packed one after the other, `newest` their latest modification time. `notes` are
    findings of the walk, `diagnostics` the parser's. `skill` is None when it was refused.
    """

    path: str
    layout_namespace: str
    below: tuple[str, ...]
    files: tuple[str, ...]
    digests: tuple[str, ...]
    stamps: bytes
    newest: int
    nested: tuple[str, ...]
    notes: tuple[Diagnostic, ...]
    full_id: str
    skill: Skill | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def digest(self) -> str:
        """Digest of the skill file."""
        return self.digests[0]

    @property
    def sizes(self) -> list[int]:
        """Sizes of `files`."""
        return [stamp[0] for stamp in STAMP.iter_unpack(self.stamps[-STAMP.size * len(self.files) :])]


make_record = maker_of(SkillRecord)
"""Makes a `SkillRecord` as `SkillRecord(…)` does, for who makes thousands."""


@dataclass(frozen=True, slots=True)
class RootScan:
    """Everything found in one root, folders on the way and skill folders by path, as met: sorted part by part.

    `checked_at` is when the scan began. A stamp whose modification time is later than two seconds before proves
    nothing, for the file may have changed again within the same tick of the clock. `folders` has the root as "".
    """

    checked_at: int
    folders: dict[str, PlainFolder]
    skills: dict[str, SkillRecord]
    notes: tuple[Diagnostic, ...]
    digest: str
    present: bool


class Listing(Protocol):
    """What a root that is no folder lists. Called often and from any thread: it must answer from memory when it can."""

    def scan(self) -> RootScan:
        """Return what is listed now; the same object as before when nothing changed. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class SetChange:
    """A skill whose files are others than those the operator accepted.

    `uri` is where the other side has it, `digest` that of the set that would be accepted. `added`, `removed` and
    `changed` are paths, known only when the accepted files are known one by one (`files_known`).
    """

    uri: str
    full_id: str
    digest: str
    files_known: bool
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@runtime_checkable
class ApprovedListing(Listing, Protocol):
    """A listing whose skills are used only with the sets of files that the operator accepted."""

    @property
    def label(self) -> str:
        """Name the operator gave the other side."""
        ...

    def changes(self) -> tuple[SetChange, ...]:
        """Look now, and return the skills that wait for approval, sorted by full id. Raises OperatorMustAct."""
        ...

    def accept(self, changes: Sequence[SetChange]) -> None:
        """Accept exactly these sets, if they are still what is listed. Raises Conflict."""
        ...


@runtime_checkable
class FarContent(Protocol):
    """The files of a skill that lies elsewhere. Nothing is returned that was not checked on this very read."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every listed file, relative to the skill; empty when the other side does not say."""
        ...

    def check(self, path: str) -> None:
        """Return when *path* is listed, without fetching it. Raises FileRefused."""
        ...

    def fetch(self, path: str, limit: int) -> bytes:
        """Return the bytes of a listed file, checked. Raises FileRefused."""
        ...

    def materialized(self) -> AbstractContextManager[Path]:
        """Return a folder with every listed file, checked, for as long as the context is open. Raises FileRefused."""
        ...


def far_content(skill: Skill) -> FarContent | None:
    """Return where the files of *skill* come from when they are elsewhere, or None for a skill on this host."""
    if skill.file is not None:
        return None
    return skill.content if isinstance(skill.content, FarContent) else None


KIND_ORDER: tuple[RootKind, ...] = ("overlay", "builtin", "plugin", "user", "project", "bundle")
DEEP_KINDS: frozenset[RootKind] = frozenset({"overlay", "user", "project"})

_CLIENT = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class SkillRoot:
    """A folder that holds skills.

    Attributes:
        uri: Name of the root that holds on every host, such as `bundle://skills`.
        path: The folder on this host; may be a link, which is resolved once per discovery.
        label: Short name for people.
        kind: What the root is; it decides its rank and its layout.
        namespace: Namespace of every skill below. None: the layout says it, except that user and project roots
            have `public`.
        nested: Whether a skill file inside another skill's folder is a skill of its own.
        listing: What lists the skills of a root that is no folder; `path` is then not looked at.
        fill: What brings the folder up to date before each look; returns what it found wrong, and never raises.
    """

    uri: str
    path: Path
    label: str
    kind: RootKind
    namespace: str | None = None
    nested: bool = False
    listing: Listing | None = field(default=None, compare=False, repr=False)
    fill: Callable[[], tuple[Diagnostic, ...]] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_entries(
        cls,
        name: str,
        read: ReadEntries,
        *,
        kind: RootKind = "plugin",
        namespace: str | None = None,
        every_s: float = 1.0,
    ) -> SkillRoot:
        """Return a root whose skills are no files of this host, but what *read* returns, such as rows of a database.

        They are written to a folder of this process that goes with the root, and are from then on skills like others:
        searched, read, run and published. An entry that cannot be written is left out with `entry_invalid`; when *read*
        fails, the skills stay as they were, with `entries_unreadable`.

        Args:
            name: Names the root on every host; letters, digits, `-` and `_`.
            read: Returns all entries as they are now, from any thread: `{"id" or "namespace/id": {path: text or bytes}}`,
                with `SKILL.md` among the paths.
            kind: Rank and layout of the root.
            namespace: Namespace of every skill; their keys are then plain ids.
            every_s: Seconds during which *read* is not called again.

        Raises:
            BadRequest: *name* or *kind* is none.
            TypeError: *read* is no function.
        """
        if not _CLIENT.fullmatch(name) or kind not in KIND_ORDER:
            raise BadRequest(f"{name!r} of kind {kind!r} cannot name a root of entries", name=name)
        if not callable(read):
            raise TypeError(f"read must be a function that returns entries, not {type(read).__name__}")
        entries = EntryFolder(name, read, every_s)
        return cls(f"entries://{name}", entries.folder, name, kind, namespace, fill=entries.fill)

    def __post_init__(self) -> None:
        """Take the path in either form. Raises TypeError for what is none."""
        object.__setattr__(self, "path", path_argument(self.path, "path"))

    @property
    def fixed_namespace(self) -> str | None:
        """The namespace no layout and no field can change, or None."""
        return self.namespace or (DEFAULT_NAMESPACE if self.kind in DEEP_KINDS else None)

    @property
    def deep(self) -> bool:
        """Whether skills stand at any depth up to six, instead of `<id>` or `<namespace>/<id>`."""
        return self.kind in DEEP_KINDS


ReadEntries = Callable[[], Mapping[str, Mapping[str, str | bytes]]]
MAX_ENTRIES: Final = 10_000
MAX_ENTRY_FILES: Final = 512
MAX_ENTRY_BYTES: Final = 16 * 1024 * 1024


class EntryFolder:
    """A folder with the files of entries, as they were when they were last read; it is removed with the object."""

    def __init__(self, name: str, read: ReadEntries, every_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"kdskills-{name[:40]}-"))
        self._name, self._read, self._every_s = name, read, every_s
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._files: dict[str, bytes] = {}
        self._notes: tuple[Diagnostic, ...] = ()
        weakref.finalize(self, _remove_own, self.folder, os.getpid())

    def fill(self) -> tuple[Diagnostic, ...]:
        """Write what changed since the last look, and return what is wrong with the entries."""
        with self._lock:
            now = time.monotonic()
            if self._looked is None or now - self._looked >= self._every_s:
                self._looked = now
                try:
                    files, self._notes = _entry_files(self._name, self._read())
                    self._write(files)
                except Exception as error:  # noqa: BLE001 - the entries are another program's, which may fail in any way
                    words = f"The skills of {self._name} cannot be read now: {type(error).__name__}: {error}"
                    self._notes = (Diagnostic("entries_unreadable", "warning", words, ref=self._name),)
            return self._notes

    def _write(self, files: Mapping[str, bytes]) -> None:
        """Remove files that are not among *files*, then write those that are other ones. Raises OSError."""
        for path in self._files.keys() - files.keys():
            (self.folder / path).unlink(missing_ok=True)
            for above in [*(self.folder / path).parents][: path.count("/")]:
                with suppress(OSError):  # there are other files in it
                    above.rmdir()
            del self._files[path]
        for path, data in files.items():
            digest = hashlib.sha256(data).digest()
            # Whoever cleans folders of temporary files may have taken it.
            if self._files.get(path) != digest or not (self.folder / path).is_file():
                make_folder((self.folder / path).parent)
                replace_file(self.folder / path, data)
                self._files[path] = digest


def _remove_own(folder: Path, process: int) -> None:
    """Remove a folder, but not from a process that was forked off the one it belongs to."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _entry_files(name: str, entries: Any) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """Return the files of all entries that can be written, by path, and why others cannot. Raises TypeError."""
    files: dict[str, bytes] = {}
    notes: list[Diagnostic] = []
    if not isinstance(entries, Mapping):
        raise TypeError(f"read() returned {type(entries).__name__}, not a mapping of entries")
    for number, (key, paths) in enumerate(entries.items()):
        try:
            if number == MAX_ENTRIES:
                raise ValueError(f"there are more than {MAX_ENTRIES:,} entries")  # noqa: TRY301
            if isinstance(key, str) and "/" in key and key.partition("/")[0] in entries:
                raise ValueError("its namespace is the id of another entry")  # noqa: TRY301
            files |= _files_of(key, paths)
        except (TypeError, ValueError) as error:
            words = f"The entry {str(key)[:80]!r} of {name} is left out: {error}."
            notes.append(Diagnostic("entry_invalid", "error", words, ref=name))
        if number == MAX_ENTRIES:
            break
    return files, tuple(notes)


def _files_of(key: object, paths: object) -> dict[str, bytes]:
    """Return the files of one entry, by path from the root. Raises TypeError and ValueError."""
    if not isinstance(key, str) or not isinstance(paths, Mapping):
        raise TypeError("it is no id with a mapping of paths")
    if key.count("/") > 1 or len(paths) > MAX_ENTRY_FILES:
        raise ValueError(f"its key has more than two parts, or it more than {MAX_ENTRY_FILES} files")
    files: dict[str, bytes] = {}
    for path, data in paths.items():
        if not isinstance(path, str) or not isinstance(data, str | bytes):
            raise TypeError("its files are no paths with text or bytes")
        whole = f"{key}/{path}"
        for part in whole.split("/"):
            unsafe = part in {"", ".", ".."} or "\\" in part or any(ord(char) < 32 for char in part)
            if unsafe or len(part.encode()) > 255:
                raise ValueError("a path has empty, dotted, long or unsafe parts")
        files[whole] = data.encode() if isinstance(data, str) else data
    if f"{key}/SKILL.md" not in files:
        raise ValueError("it has no SKILL.md")
    if sum(map(len, files.values())) > MAX_ENTRY_BYTES:
        raise ValueError(f"it has more than {MAX_ENTRY_BYTES >> 20} MiB")
    if any("/".join(path.split("/")[:end]) in files for path in files for end in range(2, path.count("/") + 1)):
        raise ValueError("a name is a file and a folder at once")
    return files


def order_roots(roots: Iterable[SkillRoot]) -> tuple[SkillRoot, ...]:
    """Return *roots* by kind, weakest first; within a kind their order stays. The last one wins a full id."""
    return tuple(sorted(roots, key=lambda root: KIND_ORDER.index(root.kind)))


class AgentRoots(list[SkillRoot]):
    """The roots found beside other agents' files; `diagnostics` names those left out for want of trust."""

    def __init__(self, roots: Iterable[SkillRoot] = (), diagnostics: Iterable[Diagnostic] = ()) -> None:
        super().__init__(roots)
        self.diagnostics = tuple(diagnostics)


def agent_skill_roots(
    start: StrPath,
    *,
    home: bool | StrPath = False,
    clients: Sequence[str] = (),
    trusted: Collection[StrPath],
) -> AgentRoots:
    """Find `.agents/skills` and `.<client>/skills` from *start* up to the repository top, and at home.

    The order is the order of precedence, weakest first: home, then from the repository top down to *start*; in one
    folder `.agents`, then the clients as given. Without a repository only *start* itself is looked at.

    A project root counts as trusted when its own canonical path is in *trusted*, or when the folder that holds
    `.agents` is and the root really lies inside that folder. Paths are compared part by part; nothing in the project
    is read to decide it.

    Args:
        start: Folder to begin at.
        home: Whether to look at home too; a path names another home.
        clients: Further agents, such as `claude`.
        trusted: Canonical paths the caller trusts.

    Returns:
        A list of roots, with `.diagnostics` holding `root_untrusted` for each one left out.

    Raises:
        BadRequest: A client is not a plain word.
    """
    for client in clients:
        if not _CLIENT.fullmatch(client):
            raise BadRequest(f"{client!r} is not the name of a client", client=client)
    names = tuple(dict.fromkeys((".agents", *(f".{client}" for client in clients))))
    roots: list[SkillRoot] = []
    findings: list[Diagnostic] = []
    visited: set[Path] = set()
    if home:
        base = Path(os.path.expanduser("~")) if home is True else path_argument(home, "home")  # noqa: PTH111 - without a home there is none
        for name, folder in _present(base, names) if base.is_absolute() or home is not True else ():
            if folder not in visited:
                visited.add(folder)
                roots.append(SkillRoot(f"user://{name}/skills", folder, f"user:{name}", "user"))
    accepted = {Path(os.path.realpath(path_argument(path, "trusted"))) for path in trusted}
    folders = _upwards(Path(os.path.realpath(path_argument(start, "start"))))
    for project in folders:
        relative = project.relative_to(folders[0]).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        for name, folder in _present(project, names):
            if folder in visited:
                continue
            visited.add(folder)
            label = f"{prefix}{name}/skills"
            if folder in accepted or (project in accepted and folder.is_relative_to(project)):
                roots.append(SkillRoot(f"project://{label}", folder, f"project:{prefix}{name}", "project"))
            else:
                message = (
                    f"The skills in {label} are not used, because nobody on this host said that the project is trusted."
                )
                fix = "Add the folder's canonical path to the trusted paths if you trust who wrote it."
                findings.append(Diagnostic("root_untrusted", "warning", message, path=label, fix=fix))
    return AgentRoots(roots, findings)


def _present(base: Path, names: Iterable[str]) -> list[tuple[str, Path]]:
    """Return the names whose `skills` folder is there, each with its canonical path."""
    folders = ((name, base / name / "skills") for name in names)
    return [(name, Path(os.path.realpath(folder))) for name, folder in folders if is_folder(folder)]


def _upwards(start: Path) -> list[Path]:
    """Return the folders from the repository top down to *start*; *start* alone outside a repository."""
    chain = [start, *start.parents]
    for count, folder in enumerate(chain, 1):
        if os.path.lexists(folder / ".git"):
            return chain[:count][::-1]
    return [start]


@dataclass(frozen=True, slots=True)
class InvalidSkill:
    """A skill that is there but was refused at load; it keeps hiding a weaker root's skill of the same id.

    `path` is posix and relative to the root.
    """

    full_id: str
    path: str
    root: SkillRoot
    diagnostics: tuple[Diagnostic, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RootState:
    """A root as it was found: the digest over its skill files and companions, and whether it was there at all."""

    root: SkillRoot
    digest: str
    present: bool


@dataclass(frozen=True)
class Snapshot:
    """All skills of all roots at one moment.

    Attributes:
        skills: Usable skills by full id, sorted; immutable.
        invalid: Refused skills by full id, sorted; never in `skills` too.
        diagnostics: Every finding: roots first, then skills in the order of roots and paths.
        roots: The roots in order, weakest first.
        origins: Root of each full id in `skills`.
        generation: Grows by one with each change.
        built_at: Nanoseconds since the epoch.
    """

    skills: Mapping[str, Skill]
    invalid: Mapping[str, InvalidSkill]
    diagnostics: tuple[Diagnostic, ...]
    roots: tuple[RootState, ...]
    origins: Mapping[str, SkillRoot]
    generation: int
    built_at: int

    @property
    def namespaces(self) -> frozenset[str]:
        """Namespaces of all skills, refused ones too."""
        return frozenset(name.partition(".")[0] for name in (*self.skills, *self.invalid))

    @cached_property
    def digest(self) -> str:
        """Digest over the roots' digests and the winner of each full id: what a fingerprint is made of."""
        rows = [["root", state.root.label, state.root.kind, state.root.uri, state.digest] for state in self.roots]
        rows += [["skill", name, self.origins[name].uri, skill.digest] for name, skill in self.skills.items()]
        rows += [["invalid", name, entry.root.uri, entry.digest] for name, entry in self.invalid.items()]
        return rows_digest(rows)


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What a refresh found, as sorted full ids; `diagnostics` are those of the new snapshot."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]
    generation: int
