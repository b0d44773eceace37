"""The catalog of an MCP root: made of entries alone, with the sets of files the operator accepted (spec runtime §5)."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kdskills.builtin.roots.mcp.content import FarFiles, Verify, verify
from kdskills.builtin.roots.mcp.entries import SKILL_FILE, Entry, EntryRefused, read_entry
from kdskills.builtin.roots.mcp.wire import Server, ServerFailed
from kdskills.errors import Diagnostic, NotFound
from kdskills.skills import Skill
from kdskills.skills.digest import rows_digest
from kdskills.skills.marks import NO_STAMP, RootScan, SkillRecord
from kdskills.skills.parse import parse_skill_bytes

FRESH_S: Final = 60.0
ACCEPTED: Final = "accepted.json"


@dataclass(frozen=True, slots=True)
class _Seen:
    entry: Entry | None
    uri: str
    problem: str = ""


class McpListing:
    """Lists a server's skills; implements `kdskills.skills.far.Listing`. Safe from any thread.

    Args:
        label: Name the operator gave the server.
        server: Answers questions.
        folder: Where fetched files and accepted sets are kept; no discovery looks there.
        allow_dynamic: Whether skills without a list of files are taken.
        check: Compares fetched bytes with the entry.
        clock: Seconds.
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
    ) -> None:
        self._label = label
        self._server = server
        self._folder = folder
        self._dynamic = allow_dynamic
        self._check = check
        self._clock = clock
        self._lock = threading.RLock()
        self._looked: float | None = None
        self._entries: dict[str, _Seen] = {}
        self._added: dict[str, _Seen] = {}
        self._scan = RootScan(0, {}, {}, (), rows_digest([]), present=False)

    def scan(self) -> RootScan:
        """Return what is listed; the server is asked at most once a minute, and what it said before stays if it fails."""
        with self._lock:
            if self._looked is not None and self._clock() - self._looked < FRESH_S:
                return self._scan
            self._looked = self._clock()
            try:
                rows = self._server.entries()
            except ServerFailed as error:
                note = Diagnostic(
                    "mcp_unreachable",
                    "warning",
                    f"The skills of {self._label} cannot be listed now: {error.message}.",
                    ref=f"mcp:{self._label}",
                )
                self._set(replace(self._scan, notes=(note,)))
                return self._scan
            self._entries = {seen.uri: seen for seen in (self._seen(row) for row in rows)}
            self._rebuild()
            return self._scan

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

    def accept(self, uri: str) -> None:
        """Accept the set of files that *uri* is listed with now. Raises NotFound."""
        with self._lock:
            seen = (self._entries | self._added).get(uri)
            if seen is None or seen.entry is None:
                raise NotFound(f"the server {self._label!r} lists no usable skill {uri}")
            self._write({**(self._read() or {}), uri: seen.entry.set_digest or ""})
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

    def _ids(self) -> dict[str, str]:
        """Return an id for each usable entry: its name, with path parts in front where names are equal."""
        usable = {uri: seen.entry for uri, seen in (self._added | self._entries).items() if seen.entry is not None}
        names = Counter(entry.parts[-1] for entry in usable.values())
        return {
            uri: "-".join(entry.parts) if names[entry.parts[-1]] > 1 else entry.parts[-1]
            for uri, entry in usable.items()
        }

    def _rebuild(self) -> None:
        accepted = self._read()
        first: dict[str, str] = {}
        ids = self._ids()
        before = self._scan.skills
        records: dict[str, SkillRecord] = {}
        notes: list[Diagnostic] = []
        for uri, seen in sorted((self._added | self._entries).items()):
            if seen.entry is None:
                notes.append(self._note("mcp_entry_invalid", "warning", uri, f"is not used: {seen.problem}"))
                continue
            known = (accepted or {}).get(uri)
            digest = seen.entry.set_digest
            if digest is not None and known is None and accepted is not None:
                first[uri] = digest
            changed = accepted is None or (digest is not None and known is not None and known != digest)
            record = self._record(ids[uri], seen.entry, changed=changed)
            old = before.get(record.path)
            same = old is not None and old.digests == record.digests and (old.skill is None) == (record.skill is None)
            records[record.path] = old if same and old is not None else record
        if first:
            self._write({**(accepted or {}), **first})
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
            findings = (self._note("mcp_changed", "error", full_id, f"({entry.uri}) changed, needs approval"),)
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

    def _note(self, code: str, severity: Any, ref: str, problem: str) -> Diagnostic:
        return Diagnostic(
            code,
            severity,
            f"{ref} of the MCP server {self._label} {problem}.",
            ref=ref,
            fix=f"Look at what changed, then remove its line from {ACCEPTED}." if code == "mcp_changed" else None,
        )

    def _read(self) -> dict[str, str] | None:
        """Return accepted sets by uri; None when the file cannot be read: then no set counts as accepted."""
        try:
            found = json.loads((self._folder / ACCEPTED).read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return {str(uri): str(digest) for uri, digest in found.items()} if isinstance(found, dict) else None

    def _write(self, accepted: Mapping[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".new-", delete=False) as new:
            json.dump(dict(sorted(accepted.items())), new, indent=1)
        Path(new.name).replace(self._folder / ACCEPTED)
