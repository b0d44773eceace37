"""Every extension point of kdskills, in the order a request meets them.

Two kinds of hook, told apart by their first word:

* ``register_*`` runs once, while the Host is built. It receives a register and adds named factories to it. A taken
  name is an error (`NameTaken`), never a silent override.
* everything else runs per subsystem, turn or call; its answers are combined by the rule written in its docstring, in
  one place (`kdskills.app.plugins`).

Hooks are plain functions: pluggy has no async calls, and an ``async def`` implementation is refused when it is
registered. Whatever must await lives on the object a plugin registers (`Executor.run`, `ModelProvider.reply`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from kdskills.hooks import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import jinja2
    import typer

    from kdskills.app.operations import Operation
    from kdskills.bundle import SkillsDescriptor
    from kdskills.errors import Diagnostic
    from kdskills.evals.grading import CheckFunction
    from kdskills.execution import ExecutorFactory
    from kdskills.hooks import Register
    from kdskills.models import ModelProvider
    from kdskills.search import EmbedderFactory, SearchHit
    from kdskills.session import SessionStore
    from kdskills.session.approval import AccessRequest, Denial
    from kdskills.skills import Skill, SkillRoot
    from kdskills.solver import SolverTool, Turn, TurnResult

hookspec = pluggy.HookspecMarker(NAME)

# ---- while the Host is built -------------------------------------------------------------------------------------


@hookspec
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Add execution engines: ``register(name, factory)``; ``factory(options)`` gets the operator's `ExecutionOptions`."""


@hookspec
def kdskills_register_stores(register: Register[Callable[[str], SessionStore]]) -> None:
    """Add session stores by URL scheme: ``register("sqlite", factory)``; ``factory(url)`` opens one."""


@hookspec
def kdskills_register_models(register: Register[Callable[[str], ModelProvider]]) -> None:
    """Add model providers: ``register(prefix, factory)``; ``factory("rest")`` serves ``--model prefix:rest``."""


@hookspec
def kdskills_register_embedders(register: Register[EmbedderFactory]) -> None:
    """Add makers of vectors: ``register(prefix, factory)``; ``factory("rest")`` gives an `Embedder` for ``prefix:rest``.

    Only the one that the setting ``embedder`` names is made, at the first search, and only then is any text sent to it.
    """


@hookspec
def kdskills_register_tools(register: Register[SolverTool]) -> None:
    """Add tools every solver of this Host offers: ``register(tool.id, tool)``."""


@hookspec
def kdskills_register_interpreters(register: Register[Sequence[str]]) -> None:
    """Say how a script suffix is started: ``register(".rb", ["ruby", "{path}"])``."""


@hookspec
def kdskills_register_checks(register: Register[CheckFunction]) -> None:
    """Add checks of evaluations: ``register("acme.signed", signed)``; ``signed(outcome, key: str)`` gives ``(passed, what was seen)``.

    The parameters after the outcome, each with a type, are the arguments that a row gives. Shipped names are refused.
    """


@hookspec
def kdskills_register_operations(register: Register[Operation]) -> None:
    """Add operations to the table every door serves: ``register(operation.name, operation)``.

    Names of shipped operations, and all that begin with ``skills.`` or ``kd.``, are refused with `name_reserved`.
    """


@hookspec
def kdskills_register_commands(cli: typer.Typer) -> None:
    """Add commands to the `kdskills` command line."""


@hookspec
def kdskills_prepare_templates(env: jinja2.Environment) -> None:
    """Add filters or tests to the jinja2 environment which renders catalogs and instruction blocks."""


# ---- while a subsystem is built ----------------------------------------------------------------------------------


@hookspec
def kdskills_skill_roots(descriptor: SkillsDescriptor) -> Iterable[SkillRoot]:
    """Bring further skill roots, of kind `plugin`. All are used, in plugin order, below user, project and bundle."""


@hookspec(firstresult=True)
def kdskills_open_skill_root(uri: str, base: Path) -> SkillRoot | None:
    """Open a skill root from its URI; None when the scheme is not yours. First answer wins."""


@hookspec
def kdskills_check_skill(skill: Skill) -> Iterable[Diagnostic]:
    """Return further problems found in a skill. Problems of all plugins are joined."""


# ---- within a turn -----------------------------------------------------------------------------------------------


@hookspec
def kdskills_hide_skills(agent: str, skills: Sequence[Skill]) -> Mapping[str, str]:
    """Return {full id: reason} to hide from this consumer.

    Plugins can hide, never reveal: the union of all answers is refused with `plugin_denied`, so their order does not
    matter. The answer holds whoever the agent works for: what depends on the user is for `kdskills_deny`, whose request has
    the user, or for the rules of a group.
    """


@hookspec
def kdskills_rank_skills(consumer: str, query: str, hits: Sequence[SearchHit]) -> Iterable[str] | None:
    """Return full ids of *hits* in a better order, or None for no opinion; a hit that is not named is dropped.

    Called in every search that has hits, with the best hundred of them and the first 4,000 characters of the query. Plugins
    are asked in the order they were registered, each gets the order of the one before, so the last has the last word. They
    can reorder and drop, never add: other ids, and repeated ones, are ignored.
    """


@hookspec
def kdskills_deny(request: AccessRequest) -> Denial | None:
    """Return a Denial to refuse a load, read, run or tool call, else None. One Denial refuses."""


@hookspec(firstresult=True)
def kdskills_source_key(source: Mapping[str, Any]) -> str | None:
    """Return the key under which a source row is merged, or None for the usual one. First answer wins."""


@hookspec(firstresult=True)
def kdskills_resolve_source(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a row of sources in a fuller form, such as with the title and URL of its DOI, or None for no opinion.

    First answer wins. Called where the setting `resolve_sources` is on, in a thread, before a skill's rows get their
    numbers; the `sid` of the row stays. All rows of a skill have five seconds together, and no more than 200 are asked
    about; answers are remembered. A row that is not resolved stays as written, with the diagnostic `source_unresolved`.
    """


@hookspec
def kdskills_turn_started(turn: Turn) -> None:
    """Told when a turn becomes active, before its first model call; answers are ignored."""


@hookspec
def kdskills_turn_finished(turn: Turn, outcome: TurnResult) -> None:
    """Told when a turn ends, whatever its outcome; answers are ignored."""
