"""Bundles that callers name by their folder: whose code may run, consumers that no agent is, and refs that nearly fit."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable, Iterable
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.app.operations.table import Context
from kdskills.app.resources import shipped_folders
from kdskills.bundle.descriptor import CODEGEN, DECISION, EVERYONE
from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.bundle.load import untrusted
from kdskills.errors import Diagnostic, FileRefused, ReplayError, Severity
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.projects.views import ProjectSkills
from kdskills.skills.refs import parse_ref
from kdskills.skills.safe_open import read_file
from kdskills.skills.selection import refuse_by
from kdskills.turn import Refused

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.settings import Settings
    from kdskills.bundle import Bundle
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem, SkillView


class BundleLoader:
    """Loads bundles that callers name by their folder, and skills as callers see them.

    Args:
        settings: Say which bundle is the account's own.
        load: Loads the bundle at a path; its keyword `python` says whether its code runs.
        subsystem: Puts the skills of a bundle under its policy.
        project_skills: Returns the skills of a project.
    """

    def __init__(
        self,
        settings: Settings,
        load: Callable[..., Bundle],
        subsystem: Callable[[Bundle | None], SkillsSubsystem],
        project_skills: Callable[[str], Awaitable[ProjectSkills]],
    ) -> None:
        self.load = load
        self.subsystem = subsystem
        self._settings = settings
        self._project_skills = project_skills

    def open(self, path: Path, context: Context, *, tools: bool = False) -> Bundle:
        """Load a bundle by its folder; its code runs where the caller trusts it, and in folders that are the caller's own.

        Own are shipped bundles, the bundle of the settings and, to who calls from the command line or a program, the
        working folder and what lies below it. Elsewhere a descriptor of literals is read as data.

        Args:
            path: The folder.
            context: Whether the caller said to trust it.
            tools: Whether its `tools.py` is going to run.

        Raises:
            BundleError: It cannot be loaded; `bundle_untrusted` where that takes running code that nobody trusted.
        """
        bundle = self.load(path, python="execute" if context.trust or self._runs_anyway(path, context) else "read")
        if tools and bundle.tools_path is not None and not bundle.trusted:
            raise untrusted(bundle.tools_path, 1, "it holds tools of the bundle")
        return bundle

    async def skills(self, path: Path | None, context: Context) -> ProjectSkills:
        """Return the skills of the bundle at *path*, or those of the caller's project. Raises as `open`."""
        if path is None:
            return await self._project_skills(context.identity.project)
        bundle = self.open(path, context)
        return ProjectSkills(bundle.name, self.subsystem(bundle), bundle.diagnostics)

    def _runs_anyway(self, path: Path, context: Context) -> bool:
        """Whether *path* leads to a folder whose code the caller runs anyway; links and `..` are followed first."""
        try:
            target = path.resolve()
            folders = list(shipped_folders())
            if context.identity.door in {"library", "cli"}:
                folders.append(Path.cwd())
            if self._settings.bundle is not None:
                folders.append(self._settings.bundle)
            return any(target.is_relative_to(folder.resolve()) for folder in folders)
        except (OSError, ValueError, RuntimeError):
            return False  # a working folder that is gone, a path that is none


def visible_skills(view: SkillView, identity: Identity) -> dict[str, Skill]:
    """Return the skills a caller elsewhere is told of: those it may start, without hidden ones; all others do not exist."""
    return {
        full_id: skill
        for full_id, skill in view.skills.items()
        if not skill.hidden and refuse_by(skill, identity.starter) is None
    }


SOLVER: Final = (DECISION, CODEGEN)
TYPO: Final = 0.92
"""From here on two names are one, mistyped: a letter or two of a name of usual length."""
ALIKE: Final = 0.85
LEAST: Final = 0.7
"""Below this, two names are not compared letter by letter."""
MAX_DEMO: Final = 4 * 1024 * 1024
MOST_SUGGESTED: Final = 3


def rule_findings(bundle: Bundle) -> list[Diagnostic]:
    """Return what is wrong with the consumers that a bundle's rules name.

    Known are the solver's own consumers, those of `demo.yaml`, and what the bundle lists as its `consumers`. Where it
    lists any, every other one is an error. Where it lists none, a name is an error when it is a known one mistyped, and
    a warning when it is merely like one.
    """
    listed = bundle.descriptor.consumers
    consumers = dict.fromkeys((*listed, *SOLVER, *demo_consumers(demo_of(bundle.root))))
    findings = []
    for consumer in bundle.descriptor.agents_config:
        nearest_name, ratio = nearest(consumer, consumers)
        if consumer == EVERYONE or consumer in consumers or (not listed and ratio < ALIKE):
            continue
        severity: Severity = "error" if listed or ratio >= TYPO else "warning"
        like = f"is like {nearest_name}, and no agent has that name"
        reason = "is not among the consumers of this bundle" if listed else like
        advice = f"write {nearest_name!r}, or " if ratio >= ALIKE else ""
        fix = f"{advice}list {consumer!r} under `consumers` in the descriptor"
        message, ref = f"{consumer} {reason}: its rules hold for nobody", f"agents_config.{consumer}"
        path, line = _descriptor_line(bundle, consumer)
        findings.append(Diagnostic("consumer_unknown", severity, message, path=path, line=line, ref=ref, fix=fix))
    return findings


def asker_findings(subsystem: SkillsSubsystem, consumer: str | None, demo: Cassette | None) -> tuple[Diagnostic, ...]:
    """Return a warning when nothing names the consumer that asks: no rule is its own, only those for all hold.

    Roles of *demo*, the bundle's recording, are known; an anonymous consumer is never unknown.
    """
    terms = subsystem.descriptor
    consumers = dict.fromkeys((*terms.agents_config, *terms.consumers, *SOLVER, *demo_consumers(demo)))
    if consumer is None or consumer in consumers or consumer == EVERYONE:
        return ()
    patterns = [entry for skill in subsystem.registry.values() for entry in skill.include_for]
    if any(fnmatchcase(consumer.lower(), entry) for entry in patterns):
        return ()
    nearest_name, ratio = nearest(consumer, consumers)
    otherwise = "list it under `consumers` in the descriptor, or give it rules"
    fix = f"ask as {nearest_name!r}" if ratio >= ALIKE else otherwise
    message = f"no rule, skill or agent names {consumer}: only what holds for every consumer is in force"
    return (Diagnostic("consumer_unknown", "warning", message, ref=consumer, fix=fix),)


def demo_of(folder: Path | None) -> Cassette | None:
    """Return the recording of the bundle in *folder*; None without one that can be read, which a replay will say."""
    if folder is None:
        return None
    path = folder / "demo.yaml"
    try:
        status = path.lstat()
        return read_cassette(path) if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_DEMO else None
    except (ReplayError, OSError, ValueError):
        return None


def demo_consumers(demo: Cassette | None) -> tuple[str, ...]:
    """Return the consumers that a recording was made with."""
    if demo is None:
        return ()
    role = demo.expect.get("answer_role")
    return tuple(dict.fromkeys((*(reply.role for reply in demo.replies), *((role,) if isinstance(role, str) else ()))))


def nearest(name: str, candidates: Iterable[str]) -> tuple[str, float]:
    """Return the known name most like *name*, and how alike they are, from 0 to 1; case does not count."""

    def likeness(candidate: str) -> float:
        first, second = name.casefold(), candidate.casefold()
        total = len(first) + len(second)
        if not total or 2 * min(len(first), len(second)) < LEAST * total:
            return 0.0  # cannot be alike: a name of a megabyte is not even compared
        return SequenceMatcher(None, first, second, autojunk=False).ratio()

    rated = ((candidate, likeness(candidate)) for candidate in candidates if candidate != EVERYONE)
    return max(rated, key=lambda pair: pair[1], default=("", 0.0))


def _descriptor_line(bundle: Bundle, consumer: str) -> tuple[str | None, int | None]:
    """Return the descriptor's file and the line a consumer stands in, as far as they can be seen."""
    for name in DESCRIPTOR_NAMES:
        try:
            lines = read_file(bundle.root, name, limit=1 << 20).data.decode("utf-8", "replace").splitlines()
        except FileRefused:
            continue
        return name, next((number for number, text in enumerate(lines, 1) if consumer in text), None)
    return None, None


def meant_id(subsystem: SkillsSubsystem, view: SkillView, ref: str) -> str:
    """Return the full id a reference means: *ref* itself, but the one skill of a bare id that the view does not know.

    A bare id means a skill of namespace `public` where nothing else is said. To people it means the only skill of that
    id, whatever its namespace and whether it is granted or not.
    """
    answer = view.resolve(ref, by="code")
    if not isinstance(answer, Refused) or answer.code != "unknown_skill" or parse_ref(ref).kind != "bare":
        return ref
    full_ids = _of_id(subsystem, parse_ref(ref).value)
    return full_ids[0] if len(full_ids) == 1 else ref


def suggestions(subsystem: SkillsSubsystem, ref: str) -> tuple[str, ...]:
    """Return full ids that *ref* may have been meant for: those of its id, else those of a name like it."""
    parsed = parse_ref(ref)
    if parsed.kind not in {"bare", "full"}:
        return ()
    full_ids = _of_id(subsystem, parsed.value.rpartition(".")[2])
    if full_ids:
        return tuple(full_ids[:MOST_SUGGESTED])
    candidates = {*subsystem.registry, *subsystem.snapshot.invalid}
    rated = [(nearest(parsed.value, (full_id, full_id.partition(".")[2]))[1], full_id) for full_id in candidates]
    similar = sorted((-ratio, full_id) for ratio, full_id in rated if ratio >= LEAST)
    return tuple(full_id for _, full_id in similar[:MOST_SUGGESTED])


def _of_id(subsystem: SkillsSubsystem, bare: str) -> list[str]:
    """Return the full ids of skills of that id, those refused at load among them."""
    full_ids = {*subsystem.registry, *subsystem.snapshot.invalid}
    return sorted(full_id for full_id in full_ids if full_id.partition(".")[2] == bare)
