"""Skills as resources other programs read: entries, manifests and bytes of one moment.

A skill is published from a read-only copy of its tree, named by the tree's digest: what an entry lists and what is read
later are the same bytes, whatever happens to the folder meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from urllib.parse import quote

from kdskills.errors import BadRequest, Diagnostic, FileRefused, NotFound, PluginFailed, RootChanged, RootMissing
from kdskills.execution import SkillMount
from kdskills.execution.dirs import cache_dir
from kdskills.execution.stage import stage_skill
from kdskills.session.approval import AccessKind, AccessRequest, Deny, denial_of
from kdskills.skills.archives import EXECUTABLE, ArchiveRefused
from kdskills.skills.fields import name_problem
from kdskills.skills.findings import FileFindings
from kdskills.skills.folder import shown_digest
from kdskills.skills.frontmatter import read_frontmatter
from kdskills.skills.model import render_body
from kdskills.skills.safe_open import TreeFile, read_file, rows_digest, walk_tree
from kdskills.skills.selection import By, Granted, refuse_by
from kdskills.skills.yaml_core import to_python
from kdskills.supply.index import INDEX_FILE, MAX_DESCRIPTION, SiteEntry, artifact_url, write_artifact, write_index

if TYPE_CHECKING:
    from kdskills.skills import Skill
    from kdskills.skills.refs import RuleMatcher
    from kdskills.turn import SkillView

MAX_FILES: Final = 512
MAX_BYTES: Final = 16 * 1024 * 1024
MAX_PROMPT: Final = 1024 * 1024
"""Characters of a prompt: an argument may stand in a text thousands of times."""
MAX_KEPT: Final = 4096
SKILL_FILE: Final = "SKILL.md"
NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
NOT_FOUND: Final = "there is no such skill, file or directory for this caller"
"""One text for everything that is not there or not allowed, so that nobody learns which."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A regular file of a published skill; `path` is relative to the skill."""

    path: str
    uri: str
    size: int
    digest: str

    @property
    def media_type(self) -> str:
        """What the file's name says it is."""
        usual = mimetypes.guess_type(self.path)[0] or "application/octet-stream"
        return "text/markdown" if self.path.endswith(".md") else usual


@dataclass(frozen=True, slots=True)
class PublishedEntry:
    """A published skill: where it is, what its frontmatter says, and every file with digest and size."""

    uri: str
    full_id: str
    name: str
    description: str
    tree: str
    frontmatter: Mapping[str, Any]
    files: tuple[PublishedFile, ...]

    @property
    def base(self) -> str:
        """Uri of the skill's directory, without a trailing slash."""
        return self.uri.removesuffix(f"/{SKILL_FILE}")


class Child(NamedTuple):
    """A direct child of a directory."""

    uri: str
    name: str
    media_type: str
    size: int | None = None


class Unpublishable(Exception):  # internal to this module: every one becomes a diagnostic
    """Why a skill is not published."""


@dataclass(frozen=True, slots=True)
class PublicSkill:
    """A skill that anybody may fetch: its entry in the index, and the folder its artifact is made of, with these files."""

    entry: SiteEntry
    full_id: str
    folder: Path
    paths: tuple[str, ...]


class PublicArtifact(NamedTuple):
    """The artifact of a skill, in a file without a name that stands at its beginning; `entry` has no description yet."""

    stream: BinaryIO
    size: int
    entry: SiteEntry
    files: tuple[TreeFile, ...]

    @classmethod
    def make(cls, name: str, folder: Path) -> PublicArtifact:
        """Make the artifact of the skill *name* in *folder*; the caller closes its stream. Raises as `write_artifact`."""
        with ExitStack() as stack:
            stream: Any = stack.enter_context(SpooledTemporaryFile(MAX_BYTES // 16))
            kind, files = write_artifact(folder, stream)
            size = stream.tell()
            stream.seek(0)
            digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
            stream.seek(0)
            stack.pop_all()
        return cls(stream, size, SiteEntry(name, "", kind, artifact_url(name, kind, digest), digest), files)


class PublicFile(NamedTuple):
    """A file of a site: its bytes from where the stream stands, how many they are, and the digest over them."""

    stream: BinaryIO
    size: int
    digest: str
    media_type: str
    lasting: bool
    """Whether other bytes would have another name."""


def public_file(skills: Sequence[PublicSkill], name: str) -> PublicFile | None:
    """Return the index of *skills* or one of their artifacts; None for any other name, and without skills. Blocks.

    The caller closes its stream. Raises as `write_artifact`.
    """
    if skills and name == INDEX_FILE:
        data = write_index(skill.entry for skill in skills)
        return PublicFile(BytesIO(data), len(data), _digest(data), "application/json", lasting=False)
    skill = next((skill for skill in skills if skill.entry.url == name), None)
    if skill is None:
        return None
    artifact = PublicArtifact.make(skill.entry.name, skill.folder)
    if artifact.entry.url != name:  # its files have changed since
        artifact.stream.close()
        return None
    media_type = "application/zip" if artifact.entry.kind == "archive" else "text/markdown; charset=utf-8"
    return PublicFile(artifact.stream, artifact.size, skill.entry.digest or "", media_type, lasting=True)


@dataclass(frozen=True)
class Publication:
    """What one consumer's view publishes. Cheap to make; entries are kept by the digest of their tree.

    Attributes:
        view: Whose skills; the gate is asked again at each access.
        cached_entries: Of earlier publications, by full id and tree; shared by the doors of one Host.
        cache: Folder of the copies.
        starter: Who starts the skills; what that caller may not start is not published.
        deny: Asks the policy plugins before a file is read.
    """

    view: SkillView
    cached_entries: dict[tuple[str, str], PublishedEntry]
    cache: Path = field(default_factory=cache_dir)
    starter: By = "code"
    deny: Deny | None = None

    def entries(self) -> tuple[tuple[PublishedEntry, ...], tuple[Diagnostic, ...]]:
        """Return every published skill, sorted by uri, and why others are not."""
        entries: list[PublishedEntry] = []
        notes: list[Diagnostic] = []
        for skill in self.view.skills.values():
            try:
                entries.append(self._entry(skill))
            except Unpublishable as reason:
                message = f"{skill.full_id} is not published to MCP clients: {reason}."
                notes.append(Diagnostic("mcp_unpublishable", "info", message, ref=skill.full_id))
        return tuple(sorted(entries, key=lambda entry: entry.uri)), tuple(notes)

    def public(
        self, marks: RuleMatcher, public_skills: dict[tuple[str, ...], PublicSkill]
    ) -> tuple[tuple[PublicSkill, ...], tuple[Diagnostic, ...]]:
        """Return every skill of the view that *marks* name and anybody may fetch, by name, and why others of them are not.

        What a policy plugin would not let be loaded or read is none of them. *public_skills* are those of earlier calls.
        """
        marked = [skill for skill in self.view.skills.values() if marks.match(skill.full_id) is not None]
        counts = Counter(skill.id for skill in marked)
        public: list[PublicSkill] = []
        notes: list[Diagnostic] = []
        for skill in marked:
            try:
                public.append(self._public_skill(skill, public_skills, alone=counts[skill.id] == 1))
            except Unpublishable as reason:
                message = f"{skill.full_id} is marked as public and is not published: {reason}."
                notes.append(Diagnostic("not_published", "warning", message, ref=skill.full_id))
        for rule in marks.unmatched(self.view.skills.keys()):
            message = f"The rule {rule!r:.100} of `public` names no skill that anybody may use."
            notes.append(Diagnostic("rule_matches_nothing", "warning", message, ref=rule))
        return tuple(sorted(public, key=lambda skill: skill.entry.name)), tuple(notes)

    def _public_skill(
        self, skill: Skill, public_skills: dict[tuple[str, ...], PublicSkill], *, alone: bool
    ) -> PublicSkill:
        """Return a skill as it is published to anybody, where it is *alone* with its name. Raises Unpublishable."""
        if not alone:
            raise Unpublishable("another one that is public has its name")
        if name_problem(skill.id) is not None or not 0 < len(skill.description) <= MAX_DESCRIPTION:
            raise Unpublishable(f"its name or its description, of at most {MAX_DESCRIPTION} characters, fits no index")
        tree = self._tree(skill)
        assert skill.folder is not None
        try:
            # Digests of trees say nothing of execute bits, which archives have.
            key = (skill.full_id, tree, *(item.path for item in walk_tree(skill.folder) if item.mode & EXECUTABLE))
            public = public_skills.get(key)
            if public is None:
                _entry_of(skill, tree, skill.folder)
                artifact = PublicArtifact.make(skill.id, skill.folder)
                artifact.stream.close()
                if rows_digest(file[:3] for file in artifact.files) != tree:
                    raise Unpublishable("its files are being changed")
                paths = tuple(file.path for file in artifact.files)
                while len(public_skills) >= MAX_KEPT:
                    public_skills.pop(next(iter(public_skills)), None)
                public_skills[key] = public = PublicSkill(artifact.entry, skill.full_id, skill.folder, paths)
            self._ask("load", skill.full_id, SKILL_FILE)
            for path in public.paths:
                self._ask("read", skill.full_id, path)
        except NotFound:
            raise Unpublishable("a policy plugin denies it") from None
        except (FileRefused, ArchiveRefused) as error:
            raise Unpublishable(error.message) from error
        return replace(public, entry=replace(public.entry, description=skill.description))

    def get(self, uri: str) -> PublishedEntry:
        """Return the skill whose SKILL.md has this uri. Raises NotFound."""
        namespace, _, path = uri.removeprefix("skill://").partition("/")
        name, _, file = path.partition("/")
        skill = self.view.skills.get(f"{namespace}.{name}")
        with suppress(Unpublishable):
            if uri.startswith("skill://") and file == SKILL_FILE and skill is not None:
                return self._entry(skill)
        raise NotFound(NOT_FOUND)

    def owner(self, uri: str) -> PublishedEntry:
        """Return the skill a file or directory belongs to. Raises NotFound."""
        return self.get(f"{'/'.join(uri.split('/')[:4])}/{SKILL_FILE}")

    def read(self, uri: str) -> tuple[PublishedFile, bytes]:
        """Return a file as its entry lists it. Raises NotFound."""
        entry = self.owner(uri)
        file = next((item for item in entry.files if item.uri == uri), None)
        if file is None:
            raise NotFound(NOT_FOUND)
        # In a session only files of a loaded skill can be read: who may not load it may read none of them here, too.
        self._ask("load", entry.full_id, SKILL_FILE)
        if file.path != SKILL_FILE:
            self._ask("read", entry.full_id, file.path)
        data = read_file(self._copy(entry.tree), file.path, limit=MAX_BYTES).data
        if _digest(data) != file.digest:
            raise RootChanged("the copy of a published skill was changed", id=entry.full_id)
        return file, data

    def _ask(self, kind: AccessKind, full_id: str, path: str) -> None:
        """Ask the policy plugins. Raises NotFound when they refuse, or could not say, which is in the log."""
        if self.deny is None:
            return
        request = AccessRequest(kind, self.view.consumer, "", full_id, path, f"skills.{kind}")
        try:
            denial = denial_of(self.deny, request)
        except PluginFailed as error:
            raise NotFound(NOT_FOUND) from error
        if denial is not None:
            raise NotFound(NOT_FOUND)

    def children(self, uri: str) -> tuple[Child, ...]:
        """Return the direct children of a directory, sorted; of an empty one there are none. Raises NotFound."""
        entry = self.owner(uri)
        if uri != entry.base and not uri.startswith(f"{entry.base}/"):
            raise NotFound(NOT_FOUND)
        inside = f"{uri}/"
        children: dict[str, Child] = {}
        for file in entry.files:
            if file.uri.startswith(inside):
                first, deeper, _ = file.uri.removeprefix(inside).partition("/")
                name = file.path.split("/")[uri.count("/") - entry.base.count("/")]
                uri_and_kind = (inside + first, name, "inode/directory", None)
                children[first] = Child(*uri_and_kind if deeper else (file.uri, name, file.media_type, file.size))
        if not children:  # an empty directory has none either
            top = self._copy(entry.tree)
            folders = (path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())
            if uri not in {_uri(entry.base, path.relative_to(top).as_posix()) for path in folders}:
                raise NotFound(NOT_FOUND)
        return tuple(children[name] for name in sorted(children))

    def startable(self, starter: By) -> tuple[Skill, ...]:
        """Return the skills that both a person and *starter* may start, sorted by location.

        Skills of other servers are none of them: their texts must not be taken for words of the person.
        """
        listed = (skill for skill in self.view.skills.values() if skill.user_invocable and not skill.hidden)
        startable = (skill for skill in listed if skill.folder is not None and refuse_by(skill, starter) is None)
        return tuple(sorted(startable, key=lambda skill: skill.location))

    def prompt(self, skill: Skill, values: Mapping[str, str]) -> str:
        """Return the texts of what *skill* imports, and its own with its arguments filled in. Reads files.

        Raises BadRequest: an argument is not declared, or they make too much text; FileRefused.
        """
        unknown = values.keys() - {argument.name for argument in skill.arguments}
        if unknown:
            raise BadRequest(f"{skill.full_id} has no argument {min(unknown)!r}")
        body, longest = skill.body, max(map(len, values.values()), default=0)
        if len(body) + longest * (body.count("$") + body.count("{{")) > MAX_PROMPT:
            raise BadRequest(f"with these arguments the prompt could have more than {MAX_PROMPT:,} characters")
        granted = self.view.resolve(skill.full_id, by="code")
        imports = granted.closure[:-1] if isinstance(granted, Granted) else ()
        return "\n\n".join([*(each.body for each in imports), render_body(body, skill.arguments, values).text])

    def _copy(self, tree: str) -> Path:
        return self.cache / "stage" / tree.removeprefix("sha256:")

    def _tree(self, skill: Skill, *, shown: bool = False) -> str:
        """Return the digest of the files of a skill that others could use, or of those *shown* to models. Raises
        Unpublishable.
        """
        if skill.hidden:
            raise Unpublishable("it is hidden")
        if refuse_by(skill, self.starter) is not None:
            raise Unpublishable("it is not for this caller to start")
        if skill.folder is None or skill.path is None:
            raise Unpublishable("it has no files")
        if skill.name != skill.id or not NAME.fullmatch(skill.id) or not NAME.fullmatch(skill.namespace):
            problem = "its name is not the last part of its path, or has other characters than a-z, 0-9 and -"
            raise Unpublishable(problem)
        if skill.path.name != SKILL_FILE:
            raise Unpublishable(f"its file is not called {SKILL_FILE}")
        try:
            return shown_digest(skill) if shown else skill.tree_digest()
        except FileRefused as error:
            raise Unpublishable(error.message) from error

    def _entry(self, skill: Skill) -> PublishedEntry:
        tree = self._tree(skill, shown=True)
        assert skill.folder is not None
        try:
            cached = self.cached_entries.get((skill.full_id, tree))
            if cached is not None and self._copy(tree).is_dir():
                return cached
            copy = stage_skill(SkillMount(skill.full_id, skill.folder, tree), self.cache)
        except (RootChanged, RootMissing, FileRefused) as error:
            raise Unpublishable(error.message) from error
        entry = _entry_of(skill, tree, copy)
        while len(self.cached_entries) >= MAX_KEPT:  # versions of long ago; each is made again when it is asked for
            self.cached_entries.pop(next(iter(self.cached_entries)), None)
        self.cached_entries[(skill.full_id, tree)] = entry
        return entry


def _entry_of(skill: Skill, tree: str, copy: Path) -> PublishedEntry:
    """Return the entry of the copy of a skill. Raises Unpublishable."""
    base = skill.location.removesuffix(f"/{SKILL_FILE}")
    files: list[PublishedFile] = []
    total = 0
    for item in walk_tree(copy):
        if item.kind != "file":
            continue
        total += item.size
        if len(files) == MAX_FILES or total > MAX_BYTES:
            raise Unpublishable(f"it has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
        try:
            item.path.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Unpublishable("the name of a file is no UTF-8") from error
        data = read_file(copy, item.path, limit=MAX_BYTES).data
        files.append(PublishedFile(item.path, _uri(base, item.path), len(data), _digest(data)))
    return PublishedEntry(
        uri=skill.location,
        full_id=skill.full_id,
        name=skill.name,
        description=skill.description,
        tree=tree,
        frontmatter=_frontmatter(read_file(copy, SKILL_FILE, limit=MAX_BYTES).data),
        files=tuple(sorted(files, key=lambda file: file.uri)),
    )


def _frontmatter(data: bytes) -> Mapping[str, Any]:
    """Return all fields of a SKILL.md as JSON has them. Raises Unpublishable."""
    frontmatter = read_frontmatter(data, FileFindings("lenient", SKILL_FILE))
    if frontmatter is None or frontmatter.repairs or frontmatter.document.duplicates:
        raise Unpublishable("its frontmatter is no clean YAML, so that others would read it differently")
    fields: dict[str, Any] = to_python(frontmatter.fields)
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise Unpublishable("its frontmatter has numbers that JSON lacks") from error
    return fields


def _uri(base: str, path: str) -> str:
    return f"{base}/{quote(path)}"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
