"""Parts of a Host that others take: what a solver needs of it, and what it keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kdskills.app.identity import LOCAL
from kdskills.app.plugins import HookAnswers, Registers, make_part
from kdskills.app.settings import Settings, TrustSettings
from kdskills.bundle import Bundle, SkillsDescriptor, load_bundle
from kdskills.bundle.descriptor import TrustPolicy
from kdskills.errors import StrPath, path_argument
from kdskills.projects.views import Build, ProjectViews

if TYPE_CHECKING:
    from pathlib import Path

    from kdskills.app.tokens import Tokens
    from kdskills.environments.scripts import ScriptPackages
    from kdskills.errors import Diagnostic
    from kdskills.evals.grading import CheckTable
    from kdskills.execution import Executor
    from kdskills.models import ModelProvider
    from kdskills.projects.service import Projects
    from kdskills.solver import SolverTool
    from kdskills.storage.database import Database
    from kdskills.supply.verification import TrustJudge
    from kdskills.turn import SkillsSubsystem

_LOG = logging.getLogger("kdskills.execution")


def skills_judge(
    settings: Settings, descriptor: SkillsDescriptor, root: StrPath | None, *, always: bool = False
) -> TrustJudge | None:
    """Return what holds skills to the lock and to signatures as settings and descriptor ask for, or None where neither does."""
    usual = settings.trust.policy
    if not (always or usual.judges or descriptor.trust):
        return None
    from kdskills.skills.index import IndexStore
    from kdskills.supply.verification import judge_of

    cache = IndexStore(settings.index_dir or "default").folder
    folder = None if root is None else path_argument(root, "root")
    return judge_of(descriptor, folder, settings.state_dir, usual=usual, cache=cache, always=always)


def policy_judge(descriptor: SkillsDescriptor, bundle_root: StrPath | None) -> TrustJudge | None:
    """Return what keeps a descriptor's own policy without a Host; entry point `default` of `kdskills.trust`."""
    settings = Settings.load(trust=TrustSettings())
    return skills_judge(
        settings, descriptor, None if bundle_root is None else path_argument(bundle_root, "bundle_root")
    )


class HostWiring:
    """What a solver needs of a Host, `solver.parts.Wiring`: names become objects, and hooks answer."""

    def __init__(
        self,
        settings: Settings,
        registers: Registers,
        answers: HookAnswers,
        *,
        engines: Callable[[], Sequence[Executor]],
        subsystem: Callable[[Bundle], SkillsSubsystem],
    ) -> None:
        self._settings, self._models, self._engines = settings, registers.models, engines
        self._reaped: set[str] = set()
        self.interpreters: Mapping[str, Sequence[str]] = dict(registers.interpreters.items())
        self.tools: Sequence[SolverTool] = tuple(tool for _, tool in registers.tools.items())
        self._plugin_checks = registers.checks
        self.subsystem = subsystem
        self.deny, self.source_key = answers.deny, answers.source_key
        self.source_resolver = answers.source_resolver(settings)
        self.turn_started, self.turn_finished = answers.turn_started, answers.turn_finished

    @cached_property
    def checks(self) -> CheckTable:
        """What outcomes of evaluations can be checked for, by name: shipped checks and those of plugins."""
        from kdskills.evals.grading import CHECKS

        return {**CHECKS, **dict(self._plugin_checks.items())}

    def packages(self, subsystem: SkillsSubsystem) -> ScriptPackages | None:
        """Return which built packages the scripts of *subsystem* get, by the lock of its bundle; None where the setting is `off`."""
        if self._settings.environments == "off":
            return None
        from kdskills.app.environments import Environments
        from kdskills.bundle.lock_file import lock_of
        from kdskills.environments.scripts import ScriptPackages

        root, environments = subsystem.bundle_root, Environments(self._settings)
        bring = environments.bring if self._settings.environments == "auto" else None
        lock = None if root is None else lock_of(root)
        return ScriptPackages(lock, lambda: environments.store, lambda: environments.image, bring)

    def model(self, name: str) -> ModelProvider:
        """Return the provider a model string names. Raises UnknownName, PluginFailed."""
        from kdskills.models import ModelProvider, split_name

        prefix, model_name = split_name(name)
        return make_part(self._models, prefix, ModelProvider, model_name)

    async def executor(self, name: str | None = None) -> Executor:
        """Return the engine of that name, else of the settings; for `auto` the first that works. Raises ExecRefused.

        Before its first use what a kdskills that was killed left is ended, and the log says so.
        """
        from kdskills.execution.run import choose

        settings = self._settings
        engine = await choose(
            self._engines(),
            name or settings.executor,
            min_isolation=settings.isolation,
            allow_unisolated=settings.allow_unisolated,
        )
        if engine.name not in self._reaped:
            self._reaped.add(engine.name)
            report = await engine.reap()
            for line in report.ended:
                _LOG.info("%s: ended what a dead owner left: %s", engine.name, line)
            for line in report.failed:
                _LOG.warning("%s: a dead owner's leftover cannot be ended: %s", engine.name, line)
        return engine


class Storage:
    """What a Host keeps: its database, projects and tokens. Nothing is made on disk before something is asked."""

    def __init__(self, settings: Settings, build: Build) -> None:
        self._settings = settings
        self._build = build
        self._present = False

    @property
    def present(self) -> bool:
        """Whether there may be anything to read: reading must not make a database nobody asked for."""
        if not self._present:  # every call asks; once there is a database it stays
            from kdskills.storage.database import sqlite_file

            file = sqlite_file(self._settings.work_database)
            self._present = file is None or file.exists()
        return self._present

    @cached_property
    def database(self) -> Database:
        """The database. Raises MissingExtra."""
        from kdskills.storage.database import Database, upgrade
        from kdskills.storage.folder import database_folder, require_restored

        url, state_dir = self._settings.work_database, self._settings.state_dir

        def prepare(database: Database) -> None:
            require_restored(state_dir)
            database_folder(url, state_dir)
            upgrade(database, "service")

        return Database(url, label="the service's database", prepare=prepare, role="service")

    @cached_property
    def projects(self) -> Projects:
        """Projects, their skills and versions. Raises MissingExtra."""
        settings, database = self._settings, self.database
        from kdskills.jobs.artifacts import open_blobs
        from kdskills.projects.service import Projects

        return Projects(
            database,
            settings.state_dir,
            ProjectViews(self._build, load_bundle),
            bundle_of=lambda project: settings.bundle if project == LOCAL.project else None,
            blobs=None if settings.artifacts is None else open_blobs(settings.artifacts),
            gate=self._gate,
        )

    def _gate(self, terms: SkillsDescriptor | None, folder: Path) -> tuple[Diagnostic, ...]:
        """Audit an upload, as the settings or the terms of its project's bundle ask, whichever is stricter."""
        from kdskills.supply.audit import judge_folder

        asked = TrustPolicy(audit="block-high") if terms is None else terms.guarded_policy("public", None)
        return judge_folder(folder, self._settings.trust.policy.stricter(asked).audit)

    @cached_property
    def tokens(self) -> Tokens:
        """Tokens of callers elsewhere. Raises MissingExtra."""
        database = self.database
        from kdskills.app.tokens import Tokens

        return Tokens(database)

    async def aclose(self) -> None:
        """Close the connections, if any were opened."""
        if "database" in self.__dict__:
            await self.database.aclose()
