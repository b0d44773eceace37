"""What a skill brings along: its imports, depth first, each once, before what needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kdskills.errors import Diagnostic
from kdskills.skills.model import Skill
from kdskills.skills.refs import parse_ref
from kdskills.skills.selection import KnownSkills, Policy, Refused, decide_dependency

_CHAIN = 16


@dataclass(frozen=True, slots=True)
class Closure:
    """Skills in the order they are read, and what was left out.

    Attributes:
        order: Dependencies before dependents, each once, in order of first request.
        refused: The asked references that were refused.
        diagnostics: `import_cycle` and `import_skipped` findings.
        skipped: Dependencies left out, each with its reason and chain.
    """

    order: tuple[Skill, ...] = ()
    refused: tuple[Refused, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    skipped: tuple[Refused, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The full ids of `order`."""
        return tuple(skill.full_id for skill in self.order)


def dependency_id(known_skills: KnownSkills, importer: Skill, ref: str) -> str | None:
    """Return the full id an import means; a bare id is a sibling when there is one, else public. None: no id at all."""
    parsed = parse_ref(ref)
    if parsed.kind == "bare":
        sibling = parsed.full_id(importer.namespace)
        if sibling in known_skills:
            return sibling
    return parsed.full_id()


def dependency(known_skills: KnownSkills, policy: Policy, importer: Skill, ref: str) -> Skill | Refused:
    """Decide about one import of *importer*."""
    full_id = dependency_id(known_skills, importer, ref)
    if full_id is None:
        number = parse_ref(ref).kind == "number"
        code, why = ("unknown_skill", "numbers belong to one view") if number else ("invalid_ref", "it is no skill id")
        return Refused(code, f"the import {ref!r} of {importer.full_id} is left out: {why}", ref)
    return decide_dependency(known_skills, policy, importer, full_id, ref=ref)


class _Walk:
    """One depth-first walk, without recursion: an import chain may be as long as a root has skills."""

    def __init__(self, known_skills: KnownSkills, policy: Policy) -> None:
        self.known_skills = known_skills
        self.policy = policy
        self.order: dict[str, Skill] = {}
        self.skipped: list[Refused] = []
        self.diagnostics: list[Diagnostic] = []

    def visit(self, top: Skill) -> None:
        if top.full_id in self.order:
            return
        path: dict[str, Iterator[str]] = {top.full_id: iter(top.imports)}
        skills = [top]
        while skills:
            importer = skills[-1]
            ref = next(path[importer.full_id], None)
            if ref is None:
                self.order[importer.full_id] = importer
                del path[importer.full_id]
                skills.pop()
                continue
            decision = dependency(self.known_skills, self.policy, importer, ref)
            if isinstance(decision, Refused):
                self._skip(decision, path)
            elif decision.full_id in path:
                chain = " -> ".join([*_ends(path), decision.full_id])
                self.diagnostics.append(
                    Diagnostic("import_cycle", "warning", f"an import leads back: {chain}", ref=importer.full_id)
                )
            elif decision.full_id not in self.order:
                path[decision.full_id] = iter(decision.imports)
                skills.append(decision)

    def _skip(self, refusal: Refused, path: dict[str, Iterator[str]]) -> None:
        chain = _ends(path)
        full_chain = [*chain, refusal.full_id or refusal.ref]
        refused = Refused(
            refusal.code, refusal.reason, refusal.ref, refusal.full_id, {**refusal.details, "chain": full_chain}
        )
        self.skipped.append(refused)
        message = f"{chain[-1]} goes without its import {refusal.ref!r}: {refusal.reason}"
        self.diagnostics.append(Diagnostic("import_skipped", "warning", message, ref=chain[-1]))


def _ends(path: dict[str, Iterator[str]]) -> list[str]:
    """Return the ids of a path, a long one cut in the middle: chains are read by people."""
    if len(path) <= _CHAIN:
        return [*path]
    return [next(iter(path)), "…", *reversed([*islice(reversed(path), _CHAIN - 2)])]


def close(known_skills: KnownSkills, policy: Policy, skills: Iterable[Skill]) -> Closure:
    """Return *skills* with everything they bring along.

    Args:
        known_skills: The skills there are.
        policy: The consumer's policy.
        skills: Skills already granted, in the order asked for.
    """
    walk = _Walk(known_skills, policy)
    for skill in skills:
        walk.visit(skill)
    return Closure(tuple(walk.order.values()), (), tuple(walk.diagnostics), tuple(walk.skipped))


def broken_imports(known_skills: KnownSkills, policy: Policy, skills: Sequence[Skill]) -> frozenset[str]:
    """Return the ids whose imports, at any depth, hold a refused one: what `imports: strict` refuses.

    Linear in skills and imports: refused edges are found once and handed up to the importers.
    """
    importers: dict[str, list[str]] = {}
    broken: set[str] = set()
    visited = {skill.full_id for skill in skills}
    waiting = list(skills)
    while waiting:
        skill = waiting.pop()
        for ref in skill.imports:
            decision = dependency(known_skills, policy, skill, ref)
            if isinstance(decision, Refused):
                broken.add(skill.full_id)
                continue
            importers.setdefault(decision.full_id, []).append(skill.full_id)
            if decision.full_id not in visited:
                visited.add(decision.full_id)
                waiting.append(decision)
    spread = list(broken)
    while spread:
        for importer in importers.get(spread.pop(), ()):
            if importer not in broken:
                broken.add(importer)
                spread.append(importer)
    return frozenset(broken)


def import_refusal(known_skills: KnownSkills, policy: Policy, skill: Skill, ref: str) -> Refused | None:
    """Return why `imports: strict` refuses *skill*, with the chain to the first refused import, or None."""
    skipped = close(known_skills, policy, (skill,)).skipped
    if not skipped:
        return None
    first = skipped[0]
    chain = list(first.details["chain"])
    reason = f"{skill.full_id} needs an import that is refused: {' -> '.join(chain)} ({first.code})"
    return Refused("import_refused", reason, ref, skill.full_id, {"chain": chain, "code": first.code})
