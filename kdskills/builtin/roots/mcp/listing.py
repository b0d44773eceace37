"""The catalog of an MCP root: made of entries alone, with the sets of files the operator accepted.

The sets are kept in a file that several processes share.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kdskills.builtin.roots.mcp.content import (
    SKILL_FILE,
    EntryRefused,
    FarFiles,
    ListedSkill,
    Verify,
    read_entry,
    verify,
)
from kdskills.builtin.roots.mcp.wire import Server, ServerFailed
from kdskills.errors import Conflict, Diagnostic, KdskillsError, NotFound
from kdskills.skills import Skill
from kdskills.skills.digest import rows_digest
from kdskills.skills.listing import NO_STAMP, RootScan, SkillRecord
from kdskills.skills.parse import parse_skill_bytes
from kdskills.skills.private_files import open_private, private_folder
from kdskills.skills.roots import SetChange

ACCEPTED: Final = "accepted.json"
NEVER: Final = ""
"""Stands for a set that was not accepted: no set has this digest."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """What an approval is bound to: the digest over every (uri, digest), and the digests of files by path.

    Files are None where a set was noted without them.
    """

    digest: str
    files: Mapping[str, str] | None = None

    @classmethod
    def from_skill(cls, entry: ListedSkill) -> FileSet | None:
        """Return the set of an entry; None when the server does not say what files there are."""
        if entry.files is None or entry.set_digest is None:
            return None
        return cls(entry.set_digest, {path: file.digest for path, file in entry.files.items()})

    def change(self, uri: str, full_id: str, accepted: FileSet | None) -> SetChange:
        """Return what is different from the set that was accepted."""
        new, old = self.files or {}, accepted.files if accepted is not None else None
        has_files = old is not None
        old = old or {}
        return SetChange(
            uri=uri,
            full_id=full_id,
            digest=self.digest,
            files_known=has_files,
            added=tuple(sorted(new.keys() - old.keys())) if has_files else (),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(path for path in new.keys() & old.keys() if new[path] != old[path])),
        )


Sets = dict[str, FileSet]


class AcceptedSets:
    """Accepted sets by uri, in a file below *folder*; processes write one after the other, so that none is lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Sets | None:
        """Return what was accepted; None when the file cannot be read: then no set counts as accepted."""
        try:
            rows = json.loads((self._folder / ACCEPTED).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return {str(uri): _set_of(value) for uri, value in rows.items()} if isinstance(rows, dict) else None

    def note(self, first: Mapping[str, FileSet]) -> Sets | None:
        """Accept what is listed for the first time, and return everything accepted. Raises OSError."""
        with self._alone():
            accepted = self.read()
            if accepted is None:
                return None
            self._write({**first, **accepted})
            return {**first, **accepted}

    def accept(self, sets: Mapping[str, FileSet], *, listed: Mapping[str, FileSet]) -> None:
        """Accept *sets*, whatever was accepted before; where that is unreadable, nothing else *listed* is. Raises OSError."""
        with self._alone():
            accepted = self.read()
            if accepted is None:
                accepted = {uri: FileSet(NEVER) for uri in listed}
            self._write({**accepted, **sets})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from writing meanwhile."""
        private_folder(self._folder)
        with open_private(self._folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, sets: Sets) -> None:
        rows = {uri: {"set": each.digest, "files": each.files} for uri, each in sorted(sets.items())}
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".new-", delete=False) as new:
            json.dump(rows, new, indent=1)
        Path(new.name).replace(self._folder / ACCEPTED)


def _set_of(value: Any) -> FileSet:
    """Return the set in a row of the file; a malformed row gives a set that equals none, and so needs approval."""
    if isinstance(value, str):
        return FileSet(value)
    if not isinstance(value, dict) or not isinstance(value.get("set"), str):
        return FileSet(NEVER)
    files = value.get("files")
    has_digests = isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())
    return FileSet(value["set"], files if has_digests else None)


FRESH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _CheckedRow:
    entry: ListedSkill | None
    uri: str
    problem: str = ""


class McpListing:
    """Lists a server's skills; implements `kdskills.skills.roots.ApprovedListing`. Safe from any thread.

    Args:
        label: Name the operator gave the server.
        server: Answers questions.
        folder: Where fetched files and accepted sets are kept; no discovery looks there.
        allow_dynamic: Whether skills without a list of files are taken.
        check: Compares fetched bytes with the entry.
        clock: Seconds.
        in_background: Runs a function without making its caller wait; in a new thread when omitted.
    """

    def __init__(
        self,
        label: str,
        server: Server,
        folder: Path,
        *,
        allow_dynamic: bool = False,
        check: Verify = verify,
        clock: Callable[[], float] = time.monotonic,
        in_background: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._label = label
        self._server = server
        self._folder = folder
        self._accepted = AcceptedSets(folder)
        self._dynamic = allow_dynamic
        self._check = check
        self._clock = clock
        self._in_background = in_background or self._in_thread
        self._lock = threading.RLock()
        self._looked: float | None = None
        self._entries: dict[str, _CheckedRow] = {}
        self._added: dict[str, _CheckedRow] = {}
        self._scan = RootScan(0, {}, {}, (), rows_digest([]), present=False)

    @property
    def label(self) -> str:
        """Name the operator gave the server."""
        return self._label

    def scan(self) -> RootScan:
        """Return what is listed. Only the first call waits for the server.

        Later the server is asked in the background, at most once a minute: this call returns the last listing, a later
        one the new. When the server fails, the last listing stays.
        """
        with self._lock:
            if self._looked is None:
                self._looked = self._clock()
                self._take_rows(self._listed())
                return self._scan
            if self._clock() - self._looked < FRESH_S:
                return self._scan
            self._looked = self._clock()
        # `_looked` was renewed under the lock: one call a minute comes this far.
        self._in_background(self._look)
        with self._lock:
            return self._scan

    def _in_thread(self, task: Callable[[], None]) -> None:
        threading.Thread(target=task, name=f"mcp-{self._label}-listing", daemon=True).start()

    def _look(self) -> None:
        """Ask the server without the lock, so that `scan` does not wait, and take its answer."""
        listed = self._listed()
        with self._lock:
            self._take_rows(listed)

    def _listed(self) -> dict[str, _CheckedRow] | str:
        """Return what the server lists, by uri, or the message of its failure."""
        try:
            rows = self._server.entries()
        except KdskillsError as error:
            return error.message
        return {checked.uri: checked for checked in (self._checked(row) for row in rows)}

    def _take_rows(self, listed: dict[str, _CheckedRow] | str) -> None:
        if isinstance(listed, str):
            self._unreachable(listed)
            return
        self._entries = listed
        try:
            self._rebuild()
        except OSError as error:  # a first listing that cannot be written down as accepted must not be used
            self._unreachable(f"the accepted sets of files cannot be written: {error.strerror or error}")

    def _unreachable(self, problem: str) -> None:
        words = f"The skills of {self._label} cannot be listed now: {problem.rstrip('.')}."
        note = Diagnostic("mcp_unreachable", "warning", words, ref=f"mcp:{self._label}")
        self._set(replace(self._scan, notes=(note,)))

    def add(self, uri: str) -> str:
        """Add a skill that the server does not list, by its uri, and return its full id.

        Raises:
            ServerFailed: The server does not answer, or not with this skill.
            NotFound: What it answered cannot be used.
        """
        checked = self._checked(self._server.entry(uri))
        if checked.entry is None or checked.uri != uri:
            raise NotFound(f"the server {self._label!r} has no usable skill {uri}: {checked.problem or 'another uri'}")
        with self._lock:
            self._added[uri] = checked
            self._rebuild()
            return f"mcp-{self._label}.{self._ids()[uri]}"

    def changes(self) -> tuple[SetChange, ...]:
        """Ask the server now, and return what waits for approval, sorted by full id.

        Raises:
            ServerFailed: It does not answer.
            MissingExtra: The mcp package is not installed.
        """
        rows = self._server.entries()
        with self._lock:
            self._looked = self._clock()
            self._entries = {checked.uri: checked for checked in (self._checked(row) for row in rows)}
            self._rebuild()
            accepted, ids = self._accepted.read(), self._ids()
            changes = [
                file_set.change(uri, f"mcp-{self._label}.{ids[uri]}", (accepted or {}).get(uri))
                for uri, file_set in self._sets().items()
                if _differs(file_set, uri, accepted)
            ]
        return tuple(sorted(changes, key=lambda change: change.full_id))

    def accept(self, changes: Sequence[SetChange]) -> None:
        """Accept these sets of files.

        Raises:
            Conflict: `mcp_set_changed`; one of them is not listed any more.
        """
        with self._lock:
            listed = self._sets()
            for change in changes:
                if change.uri not in listed or listed[change.uri].digest != change.digest:
                    message = f"the files of {change.full_id} changed after the change was shown: look at it again"
                    raise Conflict(message, code="mcp_set_changed", uri=change.uri)
            self._accepted.accept({change.uri: listed[change.uri] for change in changes}, listed=listed)
            self._rebuild()

    def _checked(self, row: Mapping[str, Any]) -> _CheckedRow:
        try:
            entry = read_entry(row, allow_dynamic=self._dynamic)
        except EntryRefused as reason:
            return _CheckedRow(None, str(row.get("uri")), str(reason))
        if entry.frontmatter.get("name") != entry.parts[-1]:
            return _CheckedRow(None, entry.uri, "its name is not the last part of its path")
        return _CheckedRow(entry, entry.uri)

    def _look_again(self, entry: ListedSkill) -> None:
        """Ask for one skill again after one of its files was not as listed."""
        try:
            checked = self._checked(self._server.entry(entry.uri))
        except ServerFailed:  # the reader gets the mismatch as an error; the next listing corrects the rest
            return
        with self._lock:
            entries = self._added if entry.uri in self._added else self._entries
            entries[entry.uri] = (
                checked if checked.uri == entry.uri else _CheckedRow(None, entry.uri, "it is another skill now")
            )
            self._rebuild()

    # ---- making the catalog; the lock is held --------------------------------------------------------------------

    def _usable(self) -> dict[str, ListedSkill]:
        return {
            uri: checked.entry for uri, checked in (self._added | self._entries).items() if checked.entry is not None
        }

    def _sets(self) -> Sets:
        """Return the sets of files listed now; skills whose server does not say are left out."""
        sets = {uri: FileSet.from_skill(entry) for uri, entry in self._usable().items()}
        return {uri: file_set for uri, file_set in sets.items() if file_set is not None}

    def _ids(self) -> dict[str, str]:
        """Return an id for each usable entry: its name, with path parts in front where names are equal."""
        usable = self._usable()
        names = Counter(entry.parts[-1] for entry in usable.values())
        return {
            uri: "-".join(entry.parts) if names[entry.parts[-1]] > 1 else entry.parts[-1]
            for uri, entry in usable.items()
        }

    def _rebuild(self) -> None:
        accepted = self._accepted.read()
        sets = self._sets()
        if accepted is not None and (first := {uri: file_set for uri, file_set in sets.items() if uri not in accepted}):
            accepted = self._accepted.note(first)
        ids = self._ids()
        before = self._scan.skills
        records: dict[str, SkillRecord] = {}
        notes: list[Diagnostic] = []
        for uri, checked in sorted((self._added | self._entries).items()):
            if checked.entry is None:
                notes.append(_note(self._label, "mcp_entry_invalid", "warning", uri, f"is not used: {checked.problem}"))
                continue
            changed = accepted is None or (uri in sets and _differs(sets[uri], uri, accepted))
            record = self._record(ids[uri], checked.entry, changed=changed)
            former = before.get(record.path)
            unchanged = (
                former is not None
                and former.digests == record.digests
                and (former.skill is None) == (record.skill is None)
            )
            records[record.path] = former if unchanged and former is not None else record
        total = rows_digest([(path, *record.digests) for path, record in records.items()])
        self._set(RootScan(0, {}, records, tuple(notes), total, present=True))

    def _set(self, scan: RootScan) -> None:
        if scan != self._scan:
            self._scan = scan

    def _record(self, skill_id: str, entry: ListedSkill, *, changed: bool) -> SkillRecord:
        full_id = f"mcp-{self._label}.{skill_id}"
        skill, findings = self._skill(skill_id, entry)
        if changed:
            skill = None
            findings = (_note(self._label, "mcp_changed", "error", full_id, f"({entry.uri}) changed, needs approval"),)
        identity = rows_digest(
            [(entry.uri, json.dumps(dict(entry.frontmatter), sort_keys=True), entry.set_digest or "")]
        )
        return SkillRecord(
            skill_id, "", (), (SKILL_FILE,), (identity,), NO_STAMP, 0, (), (), full_id, skill, findings
        )  # fmt: skip

    def _skill(self, skill_id: str, entry: ListedSkill) -> tuple[Skill | None, tuple[Diagnostic, ...]]:
        text = json.dumps(dict(entry.frontmatter), ensure_ascii=False)
        parsed = parse_skill_bytes(f"---\n{text}\n---\n\n".encode("utf-8", "replace"), folder=entry.parts[-1])
        findings = tuple(finding for finding in parsed.diagnostics if finding.code != "empty_body")
        if parsed.skill is None:
            return None, findings
        file = None if entry.files is None else entry.files[SKILL_FILE]
        skill = replace(
            parsed.skill,
            id=skill_id,
            namespace=f"mcp-{self._label}",
            content=FarFiles(entry, self._server, self._folder / "files", self._look_again, self._check),
            imports=(),
            allowed_tools=None,
            allowed_tool_names=(),
            diagnostics=findings,
            digest="" if file is None else file.digest,
            size=0 if file is None else file.size,
            tokens=0 if file is None else -(-file.size // 4),
            layer="user",
        )
        return skill, findings


def _note(label: str, code: str, severity: Any, ref: str, problem: str) -> Diagnostic:
    return Diagnostic(
        code,
        severity,
        f"{ref} of the MCP server {label} {problem}.",
        ref=ref,
        fix=f"See what changed with `kdskills mcp accept {label} --dry-run`, then accept it without --dry-run."
        if code == "mcp_changed"
        else None,
    )


def _differs(file_set: FileSet, uri: str, accepted: Sets | None) -> bool:
    """Whether a listed set is another one than was accepted."""
    return accepted is None or uri not in accepted or accepted[uri].digest != file_set.digest
