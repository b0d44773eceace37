"""One user's skills beside those of a subsystem: found in roots of their own, and joined to what is known.

Nothing of a user's may change what the others are: a skill of theirs that has the id of one below is left out, and a root that
cannot be read costs its own skills alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import is_not
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kdskills.errors import BadRequest, Diagnostic
from kdskills.skills.model import Skill
from kdskills.skills.refs import INTERNAL_NAMESPACE
from kdskills.skills.roots import SkillRoot, Snapshot
from kdskills.turn.export import SubsystemState, joined_maker, merged_ids

if TYPE_CHECKING:
    from kdskills.skills.registry import SkillJudge

USER_NAMESPACE: Final = "user"
MAX_FOLDERS: Final = 5_000
MAX_SKILLS: Final = 1_000
"""Of one root of a user's skills."""
READ_SECONDS: Final = 5.0
"""What a run waits for a root that is read by code of others."""

Check = Callable[[Skill], Iterable[Diagnostic]]


def overlay_roots(roots: Sequence[SkillRoot], first: int) -> tuple[SkillRoot, ...]:
    """Return *roots* as those of an overlay, numbered from *first*. Raises BadRequest for what is none."""
    roots_of_user = []
    for number, root in enumerate((roots,) if isinstance(roots, SkillRoot) else roots, first):
        if not isinstance(root, SkillRoot):
            raise BadRequest(
                f"an overlay has roots of skills, not a {type(root).__name__}", errors=[{"path": "/roots"}]
            )
        if root.namespace == INTERNAL_NAMESPACE:
            message = f"the namespace {INTERNAL_NAMESPACE} is the bundle's own: give the overlay another one"
            raise BadRequest(message, errors=[{"path": "/roots"}])
        namespace = root.namespace or USER_NAMESPACE
        roots_of_user.append(replace(root, kind="overlay", uri=f"overlay://{number}", namespace=namespace))
    return tuple(roots_of_user)


class _RootReader:
    """Reads one root of a user's, whatever that does: it may fail in any way, or never answer."""

    def __init__(self, root: SkillRoot, check: Check | None, judge: SkillJudge | None) -> None:
        from kdskills.skills.discovery import ScanLimits
        from kdskills.skills.registry import SkillRegistry

        limits = ScanLimits(folders=MAX_FOLDERS, skills=MAX_SKILLS)
        self.registry = SkillRegistry([root], index_dir=None, check=check, judge=judge, limits=limits)
        self._root = root
        self._late: threading.Thread | None = None
        self._error: BaseException | None = None

    def look(self) -> Snapshot | Diagnostic:
        """Return what is there now, or why it is left out."""
        if self._root.fill is None and self._root.listing is None:
            self._read()
        elif self._late is None or not self._late.is_alive():  # somebody else's code, which gets a thread
            self._late = threading.Thread(target=self._read, name="kdskills-overlay", daemon=True)
            self._late.start()
            self._late.join(READ_SECONDS)
        if self._late is not None and self._late.is_alive():
            return self._left_out(f"they could not be read within {READ_SECONDS:g} s")
        return self.registry.snapshot() if self._error is None else self._left_out(type(self._error).__name__)

    def _read(self) -> None:
        try:
            self.registry.refresh()
        except Exception as error:  # noqa: BLE001 - whatever one user's root does, the run goes on
            self._error = error
        else:
            self._error = None

    def _left_out(self, reason: str) -> Diagnostic:
        message = f"The user's skills of {self._root.label} are left out: {reason}."
        return Diagnostic("overlay_unreadable", "warning", message, ref=self._root.uri)


class AddedSkills:
    """The skills of an overlay's roots. Safe from any thread.

    Args:
        roots: Where they are; the last one wins a full id.
        check: Further findings about a skill; an error refuses it.
        judge: Holds skills to what was locked and signed.
    """

    def __init__(self, roots: Sequence[SkillRoot], check: Check | None, judge: SkillJudge | None = None) -> None:
        self._readers = tuple(_RootReader(root, check, judge) for root in roots)
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._scans: tuple[Snapshot, ...] = ()
        self._unreadable: tuple[Diagnostic, ...] = ()
        self._joined: tuple[Snapshot, tuple[Snapshot, ...], tuple[Diagnostic, ...], Snapshot] | None = None

    def refresh(self, every_s: float | None = 0.0) -> None:
        """Look through the roots, unless they were looked through in the last *every_s* seconds; None: ever."""
        with self._lock:
            if self._looked is not None and (every_s is None or time.monotonic() - self._looked < every_s):
                return
            seen = [reader.look() for reader in self._readers]
            scans = tuple(item for item in seen if isinstance(item, Snapshot))
            if len(scans) != len(self._scans) or any(map(is_not, scans, self._scans)):
                self._scans = scans
            unreadable = tuple(item for item in seen if isinstance(item, Diagnostic))
            self._unreadable = self._unreadable if unreadable == self._unreadable else unreadable
            self._looked = time.monotonic()

    def clear(self) -> None:
        """Forget everything read."""
        with self._lock:
            self._looked = None
            for reader in self._readers:
                reader.registry.clear_cache()

    def current(self, below_it: Snapshot) -> Snapshot:
        """Return what is added to a snapshot, with what is wrong with it; the same object as long as nothing changed."""
        self.refresh(None)
        with self._lock:
            asked = (below_it, self._scans, self._unreadable)
            if self._joined is None or any(old is not new for old, new in zip(self._joined[:3], asked, strict=True)):
                self._joined = (*asked, _joined(*asked))
            return self._joined[3]


def _joined(below_it: Snapshot, scans: Sequence[Snapshot], unreadable: Sequence[Diagnostic]) -> Snapshot:
    """Return one snapshot of all scans, without ids that are known below; a skill refused at load hides an earlier one."""
    skills: dict[str, Skill] = {}
    origins: dict[str, SkillRoot] = {}
    findings = [*unreadable]
    for scan in scans:
        for full_id in scan.invalid:
            skills.pop(full_id, None)
        skills |= scan.skills
        origins |= scan.origins
    for full_id in [full_id for full_id in skills if full_id in below_it.skills or full_id in below_it.invalid]:
        del skills[full_id]
        message = (
            f"{full_id} of the user's skills is left out: there is a skill of that id, which none of theirs replaces."
        )
        findings.append(Diagnostic("overlay_shadows", "warning", message, ref=full_id))
    findings += [finding for scan in scans for finding in scan.diagnostics]
    return Snapshot(
        MappingProxyType(skills),
        MappingProxyType({}),
        tuple(findings),
        tuple(state for scan in scans for state in scan.roots),
        MappingProxyType({full_id: origins[full_id] for full_id in skills}),
        sum(scan.generation for scan in scans),
        max((scan.built_at for scan in scans), default=0),
    )


def with_added(state: SubsystemState, added: Snapshot) -> SubsystemState:
    """Return *state* with the skills of an overlay; its caches are filled from what *state* has, which learns nothing."""
    below_it = state.snapshot
    snapshot = replace(
        below_it,
        skills=MappingProxyType(merged_ids(below_it.skills, added.skills)),
        diagnostics=(*below_it.diagnostics, *added.diagnostics),
        roots=(*added.roots, *below_it.roots),
        origins=MappingProxyType({**below_it.origins, **added.origins}),
    )
    mounts = {each.root.uri: str(each.root.path.resolve()) for each in added.roots if each.root.listing is None}
    return replace(
        state,
        snapshot=snapshot,
        mounts=MappingProxyType({**state.mounts, **mounts}),
        entries=state.entries.copy(),
        search_index=joined_maker(state, added.skills),
        over=(state, added),
    )
