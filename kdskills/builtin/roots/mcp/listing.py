"""The catalog of an MCP root: made of entries alone, with the sets of files the operator accepted."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kdskills.builtin.roots.mcp.accepted import AcceptedSets, FileSet, Sets
from kdskills.builtin.roots.mcp.content import FarFiles, Verify, verify
from kdskills.builtin.roots.mcp.entries import SKILL_FILE, Entry, EntryRefused, read_entry
from kdskills.builtin.roots.mcp.wire import Server, ServerFailed
from kdskills.errors import Conflict, Diagnostic, KdskillsError, NotFound
from kdskills.skills import Skill
from kdskills.skills.digest import rows_digest
from kdskills.skills.far import SetChange
from kdskills.skills.marks import NO_STAMP, RootScan, SkillRecord
from kdskills.skills.parse import parse_skill_bytes

FRESH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Seen:
    entry: Entry | None
    uri: str
    problem: str = ""


class McpListing:
    """Lists a server's skills; implements `kdskills.skills.far.ApprovedListing`. Safe from any thread.

    Args:
        label: Name the operator gave the server.
        server: Answers questions.
        folder: Where fetched files and accepted sets are kept; no discovery looks there.
        allow_dynamic: Whether skills without a list of files are taken.
        check: Compares fetched bytes with the entry.
        clock: Seconds.
        beside: Does something while others go on; in a thread of its own when omitted.
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
        beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._label = label
        self._server = server
        self._folder = folder
        self._accepted = AcceptedSets(folder)
        self._dynamic = allow_dynamic
        self._check = check
        self._clock = clock
        self._beside = beside or self._in_thread
        self._lock = threading.RLock()
        self._looked: float | None = None
        self._entries: dict[str, _Seen] = {}
        self._added: dict[str, _Seen] = {}
        self._scan = RootScan(0, {}, {}, (), rows_digest([]), present=False)

    @property
    def label(self) -> str:
        """Name the operator gave the server."""
        return self._label

    def scan(self) -> RootScan:
        """Return what is listed. Only the first call waits for the server.

        Later the server is asked beside whoever looks, at most once a minute: a look answers with what is known, and one
        after it with what is new. What the server said before stays when it fails.
        """
        with self._lock:
            if self._looked is None:
                self._looked = self._clock()
                self._found(self._listed())
                return self._scan
            if self._clock() - self._looked < FRESH_S:
                return self._scan
            self._looked = self._clock()
        self._beside(self._look)
        with self._lock:
            return self._scan

    def _in_thread(self, do: Callable[[], None]) -> None:
        threading.Thread(target=do, name=f"mcp-{self._label}-listing", daemon=True).start()

    def _look(self) -> None:
        """Ask without holding up anybody, and keep the answer."""
        listed = self._listed()
        with self._lock:
            self._found(listed)

    def _listed(self) -> dict[str, _Seen] | str:
        """Return what the server lists, or why it cannot be had."""
        try:
            rows = self._server.entries()
        except KdskillsError as error:
            return error.message
        return {seen.uri: seen for seen in (self._seen(row) for row in rows)}

    def _found(self, listed: dict[str, _Seen] | str) -> None:
        if isinstance(listed, str):
            self._unreachable(listed)
            return
        self._entries = listed
        try:
            self._rebuild()
        except OSError as error:  # what is listed for the first time cannot be noted, so it is not taken
            self._unreachable(f"what is accepted cannot be noted: {error.strerror or error}")

    def _unreachable(self, why: str) -> None:
        words = f"The skills of {self._label} cannot be listed now: {why.rstrip('.')}."
        note = Diagnostic("mcp_unreachable", "warning", words, ref=f"mcp:{self._label}")
        self._set(replace(self._scan, notes=(note,)))

    def add(self, uri: str) -> str:
        """Take a skill the listing leaves out, by its bare uri, and return its full id.

        Raises:
            ServerFailed: The server does not answer, or not with this skill.
            NotFound: What it answered cannot be used.
        """
        seen = self._seen(self._server.entry(uri))
        if seen.entry is None or seen.uri != uri:
            raise NotFound(f"the server {self._label!r} has no usable skill {uri}: {seen.problem or 'another uri'}")
        with self._lock:
            self._added[uri] = seen
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
            self._entries = {seen.uri: seen for seen in (self._seen(row) for row in rows)}
            self._rebuild()
            accepted, ids = self._accepted.read(), self._ids()
            found = [
                each.change(uri, f"mcp-{self._label}.{ids[uri]}", (accepted or {}).get(uri))
                for uri, each in self._sets().items()
                if _differs(each, uri, accepted)
            ]
        return tuple(sorted(found, key=lambda change: change.full_id))

    def accept(self, changes: Sequence[SetChange]) -> None:
        """Accept these sets of files.

        Raises:
            Conflict: `mcp_set_changed`; one of them is not listed any more.
        """
        with self._lock:
            listed = self._sets()
            for change in changes:
                if change.uri not in listed or listed[change.uri].digest != change.digest:
                    message = f"{change.full_id} is not what it was when you looked: look again"
                    raise Conflict(message, code="mcp_set_changed", uri=change.uri)
            self._accepted.accept({change.uri: listed[change.uri] for change in changes}, listed=listed)
            self._rebuild()

    def _seen(self, row: Mapping[str, Any]) -> _Seen:
        try:
            entry = read_entry(row, allow_dynamic=self._dynamic)
        except EntryRefused as reason:
            return _Seen(None, str(row.get("uri")), str(reason))
        if entry.frontmatter.get("name") != entry.parts[-1]:
            return _Seen(None, entry.uri, "its name is not the last part of its path")
        return _Seen(entry, entry.uri)

    def _look_again(self, entry: Entry) -> None:
        """Ask for one entry after a file was not what it says."""
        try:
            seen = self._seen(self._server.entry(entry.uri))
        except ServerFailed:  # the mismatch itself is told to whoever read; the next listing says more
            return
        with self._lock:
            where = self._added if entry.uri in self._added else self._entries
            where[entry.uri] = seen if seen.uri == entry.uri else _Seen(None, entry.uri, "it is another skill now")
            self._rebuild()

    # ---- making the catalog; the lock is held --------------------------------------------------------------------

    def _usable(self) -> dict[str, Entry]:
        return {uri: seen.entry for uri, seen in (self._added | self._entries).items() if seen.entry is not None}

    def _sets(self) -> Sets:
        """Return the sets of files listed now; skills whose server does not say are left out."""
        found = {uri: FileSet.of(entry) for uri, entry in self._usable().items()}
        return {uri: each for uri, each in found.items() if each is not None}

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
        if accepted is not None and (first := {uri: each for uri, each in sets.items() if uri not in accepted}):
            accepted = self._accepted.note(first)
        ids = self._ids()
        before = self._scan.skills
        records: dict[str, SkillRecord] = {}
        notes: list[Diagnostic] = []
        for uri, seen in sorted((self._added | self._entries).items()):
            if seen.entry is None:
                notes.append(_note(self._label, "mcp_entry_invalid", "warning", uri, f"is not used: {seen.problem}"))
                continue
            changed = accepted is None or (uri in sets and _differs(sets[uri], uri, accepted))
            record = self._record(ids[uri], seen.entry, changed=changed)
            old = before.get(record.path)
            same = old is not None and old.digests == record.digests and (old.skill is None) == (record.skill is None)
            records[record.path] = old if same and old is not None else record
        total = rows_digest([(path, *record.digests) for path, record in records.items()])
        self._set(RootScan(0, {}, records, tuple(notes), total, present=True))

    def _set(self, scan: RootScan) -> None:
        if scan != self._scan:
            self._scan = scan

    def _record(self, skill_id: str, entry: Entry, *, changed: bool) -> SkillRecord:
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

    def _skill(self, skill_id: str, entry: Entry) -> tuple[Skill | None, tuple[Diagnostic, ...]]:
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


def _differs(each: FileSet, uri: str, accepted: Sets | None) -> bool:
    """Whether a listed set is another one than was accepted."""
    return accepted is None or uri not in accepted or accepted[uri].digest != each.digest
