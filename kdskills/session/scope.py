"""What a turn adds to a session: its frozen view, files, sources, text and listeners."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kdskills.errors import Diagnostic
from kdskills.prompts import hidden_alias
from kdskills.skills.model import Skill
from kdskills.sources import MergeResult, SourceKey, SourceResolver, SourcesPool, normalize_sources, rewrite_citations

if TYPE_CHECKING:
    from kdskills.session.approval import User
    from kdskills.session.config import Budget
    from kdskills.session.receipts import Sink
    from kdskills.session.source import Gate
    from kdskills.session.workspace import Workspace
    from kdskills.skills.model import TokenCounter
    from kdskills.turn import SkillsSubsystem


class TurnSources:
    """The turn's pool of sources, grown by each skill that is loaded or read.

    *merged* is called with `(full id, MergeResult)` after the sources of a skill were merged, *found* once with each
    finding about a skill's rows and citations; *key* overrides what makes two rows one source; *resolver* completes rows
    before they are merged.
    """

    def __init__(
        self,
        pool: SourcesPool,
        merged: Callable[[str, MergeResult], None] | None = None,
        *,
        key: SourceKey | None = None,
        resolver: SourceResolver | None = None,
        found: Callable[[Diagnostic], None] | None = None,
    ) -> None:
        self._key, self._resolver = key, resolver
        self._report_finding = found
        self._reported: set[Diagnostic] = set()
        self._lock = threading.Lock()
        self._pool = pool
        self._maps: dict[tuple[str, str], dict[int, int]] = {}
        self._merged = merged

    @property
    def pool(self) -> SourcesPool:
        """The pool as it is now."""
        return self._pool

    def replace(self, pool: SourcesPool) -> None:
        """Use *pool* from now on: it grew out of this one elsewhere, such as in an instruction block."""
        with self._lock:
            self._pool = pool

    async def resolve(self, skills: Iterable[Skill]) -> None:
        """Have the rows of *skills* resolved in a thread: `adopt` does not wait for a resolver then."""
        if self._resolver is not None:
            for skill in skills:
                if (skill.full_id, skill.digest) not in self._maps:
                    await asyncio.to_thread(self._resolver.complete, skill.sources)

    def merge(self, pool: SourcesPool) -> MergeResult:
        """Add all sources of another pool; `sid_map` of the answer has every number of that one, its aliases too."""
        with self._lock:
            result = self._pool.merge(pool.rows.values(), key=self._key)
            self._pool = result.pool
        sid_map = {sid: result.sid_map[owner] for sid, owner in pool.aliases.items()} | dict(result.sid_map)
        return replace(result, sid_map=sid_map)

    def adopt(self, skill: Skill, text: str, *, digest: str = "") -> str:
        """Merge the skill's sources into the pool, once per *digest*, and return *text* with the pool's sids.

        Merging the same rows again, for another digest, changes nothing: a sid never changes owner.
        """
        key = (skill.full_id, digest or skill.digest)
        sid_map = self._maps.get(key)
        if sid_map is None:
            written: Sequence[Mapping[str, Any]] = skill.sources
            if self._resolver is not None:
                written, problems = self._resolver.complete(written)
                self._tell(skill, problems)
            rows, findings = normalize_sources(written)
            self._tell(skill, findings)
            with self._lock:
                first = key not in self._maps
                result = self._pool.merge(rows, key=self._key)
                self._pool = result.pool
                sid_map = self._maps[key] = dict(result.sid_map)
            if first and rows and self._merged is not None:
                self._merged(skill.full_id, result)
            self._tell(skill, result.diagnostics)
        # an empty map drops every token
        rewritten = rewrite_citations(text, sid_map)
        self._tell(skill, rewritten.diagnostics)
        return rewritten.text

    def _tell(self, skill: Skill, findings: Iterable[Diagnostic]) -> None:
        """Report new findings only: a body is rendered with every prompt, with the same findings each time."""
        if self._report_finding is None:
            return
        location = hidden_alias(skill.full_id) if skill.hidden else skill.location
        for finding in findings:
            located = finding.at(location)
            with self._lock:
                repeated = located in self._reported
                self._reported.add(located)
            if not repeated:
                self._report_finding(located)


@dataclass(frozen=True, slots=True)
class TurnScope:
    """What calls made within one turn use; a session outside a turn has the empty scope.

    Under the turn's frozen `view` removal still acts at once; `request` is what a catalog that does not fit is ranked for; without `sources` bodies are shown as written. `base` is
    the bundle's own text, between rules and catalog; `tools` are dotted ids of those the model is offered, None is all
    that are enabled; `style` is `safe` or `dotted`. No `budget`, `count` or `events` means the runtime's. `secrets` is
    called with the secret values of a script before it runs, so that they can be masked. `user` is whom the turn is for,
    `deps` what its caller hands to tools and policy plugins, `subsystem` where the view is from, when that is not the runtime's.
    """

    view: Gate | None = None
    request: str = ""
    workspace: Workspace | None = None
    sources: TurnSources | None = None
    base: str = ""
    tools: Sequence[str] | None = None
    style: str = "safe"
    brief: bool = False
    budget: Budget | None = None
    count: TokenCounter | None = None
    events: Sink | None = field(default=None, compare=False)
    secrets: Callable[[Iterable[str]], None] | None = field(default=None, compare=False)
    user: User | None = None
    deps: object = field(default=None, repr=False, compare=False)
    subsystem: SkillsSubsystem | None = field(default=None, repr=False, compare=False)

    @property
    def user_id(self) -> str | None:
        """The id of whom the turn is for, the only part of a user that is written anywhere."""
        return None if self.user is None else self.user.id


NO_TURN = TurnScope()
