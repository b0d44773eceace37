"""What a turn adds to a session: its frozen view, files, sources, text and listeners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdskills.errors import Diagnostic
from kdskills.prompts import hidden_alias
from kdskills.skills.model import Skill
from kdskills.sources import MergeResult, SourceKey, SourcesPool, normalize_sources, rewrite_citations

if TYPE_CHECKING:
    from kdskills.session.config import Budget
    from kdskills.session.receipts import Sink
    from kdskills.session.source import Gate
    from kdskills.session.workspace import Workspace
    from kdskills.skills.model import TokenCounter


class TurnSources:
    """The turn's pool of sources, grown by each skill that is loaded or read.

    Args:
        pool: Sources the turn begins with.
        merged: Called with `(full id, MergeResult)` after the sources of a skill were merged.
        key: Overrides what makes two rows one source.
        found: Called once with each finding about a skill's rows and citations, so that none is dropped silently.
    """

    def __init__(
        self,
        pool: SourcesPool,
        merged: Callable[[str, MergeResult], None] | None = None,
        *,
        key: SourceKey | None = None,
        found: Callable[[Diagnostic], None] | None = None,
    ) -> None:
        self._key = key
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

    def adopt(self, skill: Skill, text: str, *, digest: str = "") -> str:
        """Merge the skill's sources into the pool, once per *digest*, and return *text* with the pool's sids.

        Merging the same rows again, for another digest, changes nothing: a sid never changes owner.
        """
        key = (skill.full_id, digest or skill.digest)
        sid_map = self._maps.get(key)
        if sid_map is None:
            rows, findings = normalize_sources(skill.sources)
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

    Attributes:
        view: The view frozen for the turn, or None for the live gate. Removal still acts at once.
        workspace: The turn's files, or None.
        sources: The turn's pool, or None: bodies are shown as written.
        base: The bundle's own text, between rules and catalog.
        tools: Dotted ids of the skill tools the model is offered, or None for all that are enabled.
        style: Spelling of tool names in the rules, `safe` or `dotted`.
        budget: Token shares of the model at hand, or None for the runtime's.
        count: The provider's token counter, or None for the runtime's.
        events: Listener of this turn, or None for the runtime's.
        secrets: Called with the secret values of a script before it runs, so that they can be masked.
    """

    view: Gate | None = None
    workspace: Workspace | None = None
    sources: TurnSources | None = None
    base: str = ""
    tools: Sequence[str] | None = None
    style: str = "safe"
    budget: Budget | None = None
    count: TokenCounter | None = None
    events: Sink | None = field(default=None, compare=False)
    secrets: Callable[[Iterable[str]], None] | None = field(default=None, compare=False)


NO_TURN = TurnScope()
