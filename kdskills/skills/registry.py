"""All skills of all roots, kept up to date and safe to use from any thread."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kdskills.errors import CallerMustAct, Diagnostic, StrPath
from kdskills.skills.discovery import SCAN_LIMITS, RootScanner, ScanLimits, SkillLoader
from kdskills.skills.folder import ContentReader
from kdskills.skills.index import IndexStore
from kdskills.skills.model import Skill
from kdskills.skills.roots import (
    InvalidSkill,
    RefreshReport,
    RootScan,
    RootState,
    SkillRecord,
    SkillRoot,
    Snapshot,
    order_roots,
)
from kdskills.skills.safe_open import join, printable_path

Check = Callable[[Skill], Iterable[Diagnostic]]


class SkillJudge(Protocol):
    """Decides, beside checks, whether a skill's files are those that they should be; an error refuses the skill."""

    def __call__(self, skill: Skill, record: SkillRecord, stamps: Mapping[str, bytes]) -> Iterable[Diagnostic]:
        """Return what is wrong with *skill*; of one that may be used, the content is held to the files of now.

        *record* is what discovery has of it just now, *stamps* are those of other files that it met, by path below the root.
        """

    def outdated(self, skills: Iterable[Skill]) -> Collection[str]:
        """Return the full ids of those of *skills* of which something else may have to be said now."""

    def settle(self) -> None:
        """Hear that every skill was asked about."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running inside: it would look at all skills again for every few hundred new ones.

    The collector is one for the process: another thread's cycles wait as long. It is turned on again by whoever turned it
    off, never by anybody else.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _DiscoveryRun:
    """One discovery under way, and who waits for it."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.outcome: tuple[Snapshot, RefreshReport] | None = None
        self.error: Exception | None = None


class _Judged(NamedTuple):
    """What plugins said of a skill, kept as long as the skill stays the same object."""

    checked: Skill
    skill: Skill | None
    findings: tuple[Diagnostic, ...]


def _judge(skill: Skill, findings: tuple[Diagnostic, ...]) -> _Judged:
    if not findings:
        return _Judged(skill, skill, ())
    if any(finding.severity == "error" for finding in findings):
        return _Judged(skill, None, findings)
    return _Judged(skill, replace(skill, diagnostics=(*skill.diagnostics, *findings)), findings)


class Winner(NamedTuple):
    """The record that answers to a full id, and its root."""

    record: SkillRecord
    root: SkillRoot

    @property
    def path(self) -> str:
        """The skill file, posix and relative to the root."""
        return printable_path(join(self.record.path, self.record.files[0]))

    def refused(self, extra: tuple[Diagnostic, ...] = ()) -> InvalidSkill:
        """Return the winner as a refused skill."""
        findings = (*self.record.diagnostics, *extra)
        return InvalidSkill(self.record.full_id, self.path, self.root, findings, self.record.digest)


def merge(scans: Sequence[tuple[SkillRoot, RootScan]]) -> tuple[dict[str, Winner], list[Diagnostic]]:
    """Join the scans of all roots, weakest first; return winners by full id, unsorted, and every finding so far.

    The last root wins a full id and replaces the whole skill, also when its own skill was refused; within a root the
    later path wins.
    """
    winners: dict[str, Winner] = {}
    diagnostics: list[Diagnostic] = []
    for root, scan in scans:
        diagnostics += scan.notes
        for folder in scan.folders.values():
            diagnostics += folder.notes
        for record in scan.skills.values():
            diagnostics += record.notes
            diagnostics += record.diagnostics
            name, winner = record.full_id, Winner(record, root)
            loser = winners.get(name)
            winners[name] = winner
            if loser is not None and loser.root is root:
                message = f"{loser.path} and {winner.path} are both {name}; the later one is used."
                diagnostics.append(Diagnostic("duplicate_id", "warning", message, winner.path, ref=name))
            elif loser is not None:
                stronger, weaker = f"{root.label} ({winner.path})", f"{loser.root.label} ({loser.path})"
                message = f"{name} of the root {stronger} replaces the one of {weaker}."
                diagnostics.append(Diagnostic("skill_overridden", "info", message, winner.path, ref=name))
    return winners, diagnostics


class SkillRegistry:
    """Finds skills in roots and keeps them.

    Nothing is read before the first `snapshot`. Concurrent callers share one discovery; if it fails, what was known
    stays, and every one of them gets the error.

    Args:
        roots: Where to look; used in the order of kinds, then as given. The last one wins a full id.
        index_dir: Where to keep what was found for the next start; `"default"` is the user's cache, None keeps nothing.
        check: Further findings about a skill; an error refuses it.
        judge: Decides whether the skill's files are those that were locked and signed; None asks nothing.
        verified: Whether this is a child whose files must be those of the export: a missing root is an error, and a
            changed text is refused (`skill_changed`) instead of served with `stale`.
        clock: Nanoseconds since the epoch.
        limits: Bounds of one root.
    """

    def __init__(
        self,
        roots: Sequence[SkillRoot],
        *,
        index_dir: StrPath | None = "default",
        check: Check | None = None,
        judge: SkillJudge | None = None,
        verified: bool = False,
        clock: Callable[[], int] = time.time_ns,
        limits: ScanLimits = SCAN_LIMITS,
    ) -> None:
        self.roots = order_roots(roots)
        self.verified = verified
        self._check = check
        self._judge_files = judge
        self._clock = clock
        self._limits = limits
        self._store = IndexStore(index_dir)
        self._reader = ContentReader(verified=verified, clock=clock)
        self._lock = threading.Lock()
        self._building = threading.RLock()
        self._run: _DiscoveryRun | None = None
        self._current: Snapshot | None = None
        self._scans: dict[int, RootScan] = {}
        self._index_notes: dict[int, Diagnostic] = {}
        self._fill_notes: list[Diagnostic] = []
        self._behind: dict[int, frozenset[str]] = {}
        self._judged: dict[str, _Judged] = {}
        self._generation = 0

    def snapshot(self) -> Snapshot:
        """Return what is known now; the first call looks through the roots."""
        current = self._current
        return current if current is not None else self._shared()[0]

    def refresh(self) -> RefreshReport:
        """Look through the roots again and swap in what was found.

        Without any change the snapshot stays the same object. Callers who come while a refresh is running get the
        answer of that one.

        Raises:
            OSError: The system failed in a way that is no fault of a skill; the old snapshot stays.
        """
        return self._shared()[1]

    def clear_cache(self) -> None:
        """Forget everything, so that the next snapshot is a new object, built from the index and the files."""
        with self._building:
            self._scans = {}
            self._judged = {}
            self._index_notes = {}
            self._behind = {}
            self._current = None
            self._reader.clear()

    def _shared(self) -> tuple[Snapshot, RefreshReport]:
        while True:
            with self._lock:
                run = self._run
                mine = run is None
                if run is None:
                    run = self._run = _DiscoveryRun()
            if mine:
                return self._lead(run)
            if run.owner == threading.get_ident():
                raise CallerMustAct("a check of skills may not use the registry that is calling it", code="reentrant")
            run.done.wait()
            if run.error is not None:
                raise run.error
            if run.outcome is not None:
                return run.outcome
            # The leader was interrupted (KeyboardInterrupt and the like): somebody else leads the next run.

    def _lead(self, run: _DiscoveryRun) -> tuple[Snapshot, RefreshReport]:
        try:
            with self._building, collector_paused():
                outcome = run.outcome = self._rebuild()
        except Exception as error:
            run.error = error
            raise
        else:
            return outcome
        finally:
            with self._lock:
                self._run = None
            run.done.set()

    def _rebuild(self) -> tuple[Snapshot, RefreshReport]:
        scans: dict[int, RootScan] = {}
        index_notes = dict(self._index_notes)
        fill_notes = [note for root in self.roots if root.fill is not None for note in root.fill()]
        stamps: dict[int, dict[str, bytes]] = {}
        for number, root in enumerate(self.roots):
            scans[number] = self._scan(number, root, index_notes, stamps)
        old = self._current
        outdated: Collection[str] = ()
        if self._judge_files is not None:
            outdated = self._judge_files.outdated([entry.checked for entry in self._judged.values()])
        if (
            old is not None
            and not outdated
            and (index_notes, fill_notes) == (self._index_notes, self._fill_notes)
            and all(scan is self._scans.get(number) for number, scan in scans.items())
        ):  # then nothing has to be merged and judged again
            return old, RefreshReport((), (), (), old.diagnostics, old.generation)
        root_scans = [(root, scans[number]) for number, root in enumerate(self.roots)]
        winners, notes = merge(root_scans)
        skills, invalid, judged = self._judge(winners, notes, outdated, stamps)
        diagnostics = tuple(  # a root that is missing is an error in a verified child
            replace(note, severity="error") if self.verified and note.code == "root_missing" else note
            for note in (*index_notes.values(), *fill_notes, *notes)
        )
        states = tuple(RootState(root, scan.digest, scan.present) for root, scan in root_scans)
        before = old.skills if old is not None else {}
        added, removed = tuple(sorted(skills.keys() - before.keys())), tuple(sorted(before.keys() - skills.keys()))
        # An unchanged skill is the same object in both.
        changed = tuple(sorted(name for name in skills.keys() & before.keys() if skills[name] is not before[name]))
        unchanged = (
            old is not None
            and not (added or changed or removed)
            and (old.roots, old.invalid, old.diagnostics) == (states, invalid, diagnostics)
        )
        if old is not None and unchanged:
            snapshot = old
        else:
            self._generation += 1
            snapshot = Snapshot(
                MappingProxyType(skills),
                MappingProxyType(invalid),
                diagnostics,
                states,
                MappingProxyType({name: winners[name].root for name in skills}),
                self._generation,
                self._clock(),
            )
        self._scans, self._index_notes, self._judged, self._current = scans, index_notes, judged, snapshot
        self._fill_notes = fill_notes
        return snapshot, RefreshReport(added, changed, removed, snapshot.diagnostics, snapshot.generation)

    def _scan(
        self, number: int, root: SkillRoot, notes: dict[int, Diagnostic], stamps: dict[int, dict[str, bytes]]
    ) -> RootScan:
        """Look through one root; *stamps* get those of the root's files, by its identity, where they are judged."""
        if root.listing is not None:
            return root.listing.scan()
        base = os.path.realpath(root.path)
        loader = SkillLoader(root, base, self._reader)
        old = self._scans.get(number)
        if old is None and root.fill is None:  # a filled folder has another path at the next start
            old, ignored = self._store.load(root, base, loader.content)
            if ignored is not None:
                notes[number] = ignored
        file_stamps = None if self._judge_files is None else stamps.setdefault(id(root), {})
        scanner = RootScanner(root, base, old, loader, self._clock, self._limits, file_stamps)
        scan = scanner.run()
        # An index that is a little behind only makes the next start read a little more, and costs no writing now. Folders
        # are counted, not visits: one that changed a moment ago is listed at every look until its stamp proves something.
        behind = self._behind.get(number, frozenset()) | scanner.listed
        if root.fill is None and scan is not old and (old is None or len(behind) * 100 > len(scan.skills)):
            failed = self._store.save(root, base, scan)
            behind = frozenset()
            if failed is not None:
                notes[number] = failed
        self._behind[number] = behind
        return scan

    def _judge(
        self,
        winners: dict[str, Winner],
        diagnostics: list[Diagnostic],
        outdated: Collection[str],
        stamps: Mapping[int, Mapping[str, bytes]],
    ) -> tuple[dict[str, Skill], dict[str, InvalidSkill], dict[str, _Judged]]:
        """Sort winners into usable and refused; plugins may add findings, and an error refuses (fail closed)."""
        skills: dict[str, Skill] = {}
        invalid: dict[str, InvalidSkill] = {}
        judged: dict[str, _Judged] = {}
        for name in sorted(winners):
            winner = winners[name]
            skill = winner.record.skill
            findings: tuple[Diagnostic, ...] = ()
            if skill is not None and (self._check is not None or self._judge_files is not None):
                verdict = self._judged.get(name)
                if verdict is None or verdict.checked is not skill or name in outdated:
                    if self._judge_files is not None:
                        file_stamps = stamps.get(id(winner.root), {})
                        findings = tuple(self._judge_files(skill, winner.record, file_stamps))
                    if self._check is not None:
                        findings += tuple(self._check(skill))
                    verdict = _judge(skill, findings)
                judged[name] = verdict
                skill, findings = verdict.skill, verdict.findings
                diagnostics += findings
            if skill is None:
                invalid[name] = winner.refused(findings)
            else:
                skills[name] = skill
        if self._judge_files is not None:
            self._judge_files.settle()
        return skills, invalid, judged
