"""The Host: settings, plugins, engines, and the operations every door offers.

What only some operations need is imported where a Host first needs it: most commands look at a bundle and are gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.logs import Sparingly, note_request
from kdskills.app.operations.calling import require_allowed, require_own_words, require_text, validated
from kdskills.app.operations.overloads import OperationCalls
from kdskills.app.operations.table import RUNS, Context
from kdskills.app.plugins import Filter, HookAnswers, Registers, collect, make_part, plugin_manager
from kdskills.app.settings import Settings
from kdskills.app.telemetry import Telemetry
from kdskills.app.wiring import HostWiring, Storage, skills_judge
from kdskills.bundle import Bundle, SkillsDescriptor, load_bundle
from kdskills.bundle.load import PythonPolicy
from kdskills.errors import BadRequest, Diagnostic, KdskillsError, StrPath, path_argument
from kdskills.projects.views import ProjectSkills, descriptor_mark
from kdskills.turn import SkillsSubsystem

if TYPE_CHECKING:
    import jinja2
    from pydantic import BaseModel

    from kdskills.app.environments import Environments
    from kdskills.app.operations import Operation
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.conversation import Conversations
    from kdskills.app.publication import Publication, PublicFile, PublicSkill, PublishedEntry
    from kdskills.app.tokens import Tokens
    from kdskills.app.turn_runs import TurnRuns
    from kdskills.app.turns import TurnArchive
    from kdskills.app.upkeep import Readiness, Upkeep
    from kdskills.app.work import WorkService
    from kdskills.execution import Executor
    from kdskills.projects.service import Projects
    from kdskills.search import EmbedderGuard
    from kdskills.session import SessionStore
    from kdskills.skills import SkillRoot
    from kdskills.supply.verification import TrustJudge

_LOG = logging.getLogger("kdskills.service")


class Host(OperationCalls):
    """One composition of settings and plugins. Several Hosts in one process share nothing.

    Args:
        settings: What the operator decides; read from files and variables when omitted.
        plugins: Further plugins, beside the shipped and installed ones.
        entry_points: Whether plugins of installed packages are loaded; the setting's word when omitted.
        folder: A bundle that is project `local` of this Host, whatever settings and database have under that name.
        python: Whether code of that bundle runs, as `load_bundle` says.

    Raises:
        SettingsInvalid: A settings file or variable is not understood.
        PluginInvalid: A plugin cannot be used.
        NameTaken: Two plugins claim one name.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        plugins: Sequence[object] = (),
        entry_points: bool | None = None,
        folder: StrPath | None = None,
        python: PythonPolicy = "execute",
    ) -> None:
        self.settings = settings if settings is not None else Settings.load()
        self.folder = None if folder is None else path_argument(folder, "folder")
        self._python = python
        installed = self.settings.entry_points if entry_points is None else entry_points
        self.plugins = plugin_manager(*plugins, entry_points=installed, blocked=self.settings.plugins_blocked)
        self.registers: Registers = collect(self.plugins)
        self.answers = HookAnswers(self.plugins)
        self.telemetry = Telemetry()
        self._complaints = Sparingly()
        self._bundle_lock = threading.Lock()
        self._parts_lock = threading.Lock()
        self._bundle_skills: tuple[tuple[int, ...], ProjectSkills] | None = None
        self._public_skills: dict[tuple[str, ...], PublicSkill] = {}

    @cached_property
    def templates(self) -> jinja2.Environment:
        """The environment that catalogs and instruction blocks are rendered in, prepared by plugins."""
        from kdskills.prompts import prompt_environment

        env = prompt_environment()
        self.answers.tell("kdskills_prepare_templates", env=env)
        return env

    @cached_property
    def wiring(self) -> HostWiring:
        """What a solver needs of this Host."""
        engines, subsystem = self.engines, self.subsystem
        return HostWiring(self.settings, self.registers, self.answers, engines=engines, subsystem=subsystem)

    @cached_property
    def storage(self) -> Storage:
        """What this Host keeps; nothing is opened before it is used."""
        return Storage(self.settings, self.subsystem)

    @cached_property
    def bundles(self) -> BundleLoader:
        """Bundles that callers name by their folder, and the skills of a caller's project."""
        from kdskills.app.operations.bundles import BundleLoader

        return BundleLoader(self.settings, self.bundle, self.subsystem, self.project_skills)

    @cached_property
    def environments(self) -> Environments:
        """Packages of skills: what they need, what is locked, what is built."""
        from kdskills.app.environments import Environments

        return Environments(self.settings)

    @property
    def projects(self) -> Projects:
        """Projects, their skills and versions. Raises MissingExtra."""
        return self.storage.projects

    @property
    def tokens(self) -> Tokens:
        """Tokens of callers elsewhere. Raises MissingExtra."""
        return self.storage.tokens

    @cached_property
    def _engines(self) -> tuple[Executor, ...]:
        from kdskills.execution import Executor

        options, executors = self.settings.execution_options(), self.registers.executors
        return tuple(make_part(executors, name, Executor, options) for name in executors)

    def engines(self) -> tuple[Executor, ...]:
        """Return every registered engine, built once for this Host. Raises PluginFailed."""
        return self._engines

    def session_store(self, url: str) -> SessionStore:
        """Open the session store at *url*, such as `sqlite:///sessions.db`; its scheme names the plugin.

        Raises UnknownName for a scheme that no plugin registered, PluginFailed and StoreUnavailable.
        """
        from kdskills.session import SessionStore

        return make_part(self.registers.stores, url.partition(":")[0], SessionStore, url)

    def bundle(self, path: StrPath, *, python: PythonPolicy = "execute") -> Bundle:
        """Load the bundle at *path*; its code runs, unless *python* says otherwise. Raises BundleError."""
        return load_bundle(path, python=python)

    @cached_property
    def _opened_roots(self) -> tuple[SkillRoot, ...]:
        """The roots that settings name by URI, opened once: what they keep is shared by all subsystems."""
        opened: list[SkillRoot] = []
        for uri in self.settings.skill_roots:
            root = self.answers.open_skill_root(uri, self.settings.state_dir)
            if root is None:
                raise BadRequest(f"no plugin opens the skill root {uri!r}", code="skill_root_unknown")
            opened.append(root)
        return tuple(opened)

    @cached_property
    def _embedder(self) -> EmbedderGuard | None:
        """What asks the embedder of the settings, which is made at the first search; None searches by words."""
        name = self.settings.embedder
        if not name:
            return None
        from kdskills.models import split_name
        from kdskills.search import Embedder, EmbedderGuard

        prefix, target = split_name(name)
        return EmbedderGuard(name, lambda: make_part(self.registers.embedders, prefix, Embedder, target))

    def subsystem(
        self, bundle: Bundle | None, *, roots: Sequence[SkillRoot] = (), filters: Sequence[Filter] = ()
    ) -> SkillsSubsystem:
        """Return the skills of *bundle*, or of none, with the plugins' and further roots and filters in force.

        Every filter denies and never reveals.
        """
        options: dict[str, Any] = {} if self.settings.index_dir is None else {"index_dir": self.settings.index_dir}
        descriptor = SkillsDescriptor(custom_skills_root=None) if bundle is None else bundle.descriptor
        with self._parts_lock:  # threads ask for subsystems; what all of them share is made once
            environment, opened, embedder = self.templates, self._opened_roots, self._embedder
        return SkillsSubsystem(
            descriptor,
            bundle_root=None if bundle is None else bundle.root,
            roots=(*self.answers.skill_roots(descriptor), *opened, *roots),
            filters=(self.answers.hide_skills, *filters),
            check=self.answers.check_skill,
            judge=self.skills_judge(descriptor, None if bundle is None else bundle.root),
            environment=environment,
            source_key=self.answers.source_key,
            source_resolver=self.wiring.source_resolver,
            embedder=embedder,
            hit_order=self.answers.hit_order,
            **options,
        )

    def skills_judge(
        self, descriptor: SkillsDescriptor, root: StrPath | None, *, always: bool = False
    ) -> TrustJudge | None:
        """Return what holds the skills of a bundle in *root* to lock and signatures; None where nothing asks for it."""
        return skills_judge(self.settings, descriptor, root, always=always)

    @cached_property
    def operations(self) -> Mapping[str, Operation]:
        """Every operation by name: the shipped table and what plugins added to it."""
        from kdskills.app.operations import OPERATIONS

        return {**OPERATIONS, **dict(self.registers.operations.items())}

    @cached_property
    def work(self) -> WorkService:
        """Background work: tasks, jobs, services and what they left."""
        from kdskills.app.work import WorkService

        return WorkService(self.settings, self.storage, self.wiring, self.project_skills)

    @cached_property
    def conversations(self) -> Conversations:
        """Conversation sessions of callers at the doors."""
        from kdskills.app.operations.conversation import Conversations

        return Conversations(self.settings, self.wiring, self.project_skills, self.session_store)

    @cached_property
    def turns(self) -> TurnArchive:
        """Turns that are kept."""
        from kdskills.app.turns import TurnArchive

        return TurnArchive(self.settings.turns, self.settings.state_dir)

    @cached_property
    def turn_runs(self) -> TurnRuns:
        """Turns that run in this process, beside the calls that started them."""
        from kdskills.app.turn_runs import TurnRuns

        return TurnRuns(self.settings.turns.running)

    @cached_property
    def upkeep(self) -> Upkeep:
        """What a service does beside answering, and whether it can take work."""
        from kdskills.app.upkeep import Upkeep

        return Upkeep(self.settings, self.storage, self.work, self.wiring, self.telemetry, self.conversations)

    async def publication(
        self, identity: Identity, cached_entries: dict[tuple[str, str], PublishedEntry]
    ) -> Publication:
        """Return what a caller's view of its project publishes. Raises as `project_skills`."""
        from kdskills.app.publication import Publication

        skills = await self.project_skills(identity.project)
        view = skills.subsystem.view(identity.consumer, identity.held_tools)
        starter = "code" if identity.sees_all else identity.starter
        return Publication(view, cached_entries, starter=starter, deny=self.answers.deny)

    def public_skills(self, subsystem: SkillsSubsystem) -> tuple[tuple[PublicSkill, ...], tuple[Diagnostic, ...]]:
        """Return the skills of *subsystem* that anybody may fetch, and why others that are marked are not; blocks."""
        from kdskills.app.publication import Publication
        from kdskills.skills.refs import compile_rules

        publication = Publication(subsystem.view(None), {}, deny=self.answers.deny)
        return publication.public(compile_rules(subsystem.descriptor.public, bare="public"), self._public_skills)

    async def public_file(self, project: str, name: str) -> PublicFile | None:
        """Return a file of the site of *project*, its index or an artifact, or None where it has none of that name.

        The caller closes its stream. Raises as `project_skills`, and FileRefused.
        """
        from kdskills.app.publication import public_file

        skills = await self.project_skills(project)
        return await asyncio.to_thread(lambda: public_file(self.public_skills(skills.subsystem)[0], name))

    async def project_skills(self, project: str) -> ProjectSkills:
        """Return the skills of a project. Raises BundleError, and BadRequest, `no_bundle`, when it is not known."""
        if self.folder is not None and project == LOCAL.project:
            return await asyncio.to_thread(self._own_skills, self.folder)
        if self.storage.present:
            skills = await self.storage.projects.known_skills(project)
            if skills is not None:
                return skills
        path = self.settings.bundle
        if path is None or project != LOCAL.project:
            raise BadRequest(f"project {project!r} has no bundle: name one", code="no_bundle", project=project)
        return await asyncio.to_thread(self._own_skills, path)

    def _own_skills(self, path: Path) -> ProjectSkills:
        """Return the skills of the settings' bundle as they are now; blocks on its files and on what its roots ask."""
        with self._bundle_lock:
            mark = descriptor_mark(path)
            if self._bundle_skills is None or self._bundle_skills[0] != mark:
                bundle = self.bundle(path, python=self._python)
                self._bundle_skills = mark, ProjectSkills(bundle.name, self.subsystem(bundle), bundle.diagnostics)
            skills = self._bundle_skills[1]
        skills.subsystem.refresh()
        return skills

    def interpreters(self) -> dict[str, tuple[str, ...]]:
        """Return how each script suffix is started: the shipped table and what plugins added."""
        from kdskills.session.config import merged_interpreters

        return dict(merged_interpreters(dict(self.registers.interpreters.items())))

    @cached_property
    def version(self) -> str:
        """Version of kdskills."""
        return version("kdskills")

    async def ready(self) -> Readiness:
        """Tell whether new work can be taken: an engine works, and the database, the disk and the store of artifacts do."""
        return await self.upkeep.readiness()

    async def invoke(self, operation: str, arguments: Mapping[str, Any], context: Context) -> BaseModel:
        """Run an operation by name, such as `skills.list`, for the caller *context* names.

        *arguments* are fields of its input model, as they came. Raises BadRequest when the operation is unknown or they are
        out of shape, CallRefused when the caller may not run it, and KdskillsError as it documents.
        """
        entry = self.operations.get(operation)
        if entry is None:
            raise BadRequest(f"there is no operation {operation!r}", code="unknown_operation", operation=operation)
        identity = context.identity
        note_request(project=identity.project, agent=identity.agent, token=identity.token)
        with self.telemetry.operation(operation, identity.door):
            require_allowed(entry, context.identity)
            require_text(context)
            checked = validated(entry, arguments)
            if entry.runs_command(dict(checked)):
                require_allowed(self.operations[RUNS], context.identity)
            require_own_words(entry, checked, context.identity)
            with self.telling_operator():
                return await entry.run(self, checked, context)

    @contextmanager
    def telling_operator(self) -> Iterator[None]:
        """Log what the operator must mend, once in a while; a full disk raises StorageFull."""
        from kdskills.storage.folder import telling_full_disk

        try:
            with telling_full_disk():
                yield
        except KdskillsError as error:
            if error.who == "operator" and self._complaints.due(error.code):
                _LOG.error("%s: %s", error.code, error.message)
            raise


def default_wiring() -> HostWiring:
    """Return the wiring of a Host with the settings of this machine; entry point `default` of `kdskills.wiring`."""
    return Host().wiring
