"""Build the plugin manager, take what plugins register, and combine the answers of hooks in one place.

There is one manager per Host, never a global one.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pluggy

from kdskills import hookspecs
from kdskills.errors import BadRequest, Diagnostic, KdskillsError, NameTaken, PluginFailed, PluginInvalid
from kdskills.hooks import NAME, Register

if TYPE_CHECKING:
    from kdskills.app.operations.table import Operation
    from kdskills.app.settings import Settings
    from kdskills.bundle import SkillsDescriptor
    from kdskills.evals.grading import CheckFunction
    from kdskills.execution import ExecutorFactory
    from kdskills.models import ModelFactory
    from kdskills.search import EmbedderFactory, SearchHit
    from kdskills.session import SessionStore
    from kdskills.session.approval import AccessRequest, Denial
    from kdskills.skills import Skill, SkillRoot
    from kdskills.solver import SolverTool
    from kdskills.sources import SourceResolver
    from kdskills.turn.export import HitOrder


RESERVED: Final = ("skills.", "kd.")
OPERATION_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}(\.[a-z][a-z0-9_]{0,62}){1,3}")


class OperationRegister(Register["Operation"]):
    """Takes operations of plugins; shipped names and reserved ones are not to be had, whatever order plugins come in."""

    def __call__(self, name: str, entry: Operation) -> None:
        """Add an operation. Raises PluginInvalid and NameTaken, for reserved names with the code `name_reserved`."""
        from kdskills.app.operations import OPERATIONS, Operation

        if isinstance(entry, Operation):
            if not OPERATION_NAME.fullmatch(name) or name != entry.name:
                form = "words in lower case joined by dots, as in `acme.report`"
                raise PluginInvalid(f"{name!r} is no name of an operation: {form}", plugin=name)
            if name.startswith(RESERVED) or name in OPERATIONS:
                own = f"kdskills' own, and so is all that begins with {' or '.join(RESERVED)}"
                raise NameTaken(f"the operation {name!r} is {own}", code="name_reserved", name=name, kind=self.kind)
        super().__call__(name, entry)


T = TypeVar("T")

_LOG: Final = logging.getLogger("kdskills.plugins")

#: Shipped plugins by dotted name, so that this module imports none of them.
BUILTIN = (
    "kdskills.builtin.executors.bubblewrap",
    "kdskills.builtin.executors.docker",
    "kdskills.builtin.executors.e2b",
    "kdskills.builtin.executors.kubernetes",
    "kdskills.builtin.executors.landlock",
    "kdskills.builtin.executors.srt",
    "kdskills.builtin.executors.subprocess",
    "kdskills.builtin.roots.mcp",
    "kdskills.builtin.stores.memory",
    "kdskills.builtin.stores.sql",
    "kdskills.builtin.models.replay",
    "kdskills.builtin.models.pydantic_ai",
    "kdskills.builtin.models.record",
    "kdskills.builtin.models.decisions",
    "kdskills.builtin.models.embeddings",
)


class PluginManager(pluggy.PluginManager):
    """A pluggy manager that refuses, when a plugin is registered, what would never be called, or not as it is meant."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.add_hookspecs(hookspecs)

    def get_canonical_name(self, plugin: object) -> str:
        """Return a module's name, or an object's class; a further object of the class gets a number."""
        name = getattr(plugin, "__name__", None)
        if isinstance(name, str):
            return name
        base = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
        names = (base if number == 1 else f"{base}#{number}" for number in itertools.count(1))
        return next(name for name in names if self.get_plugin(name) is None)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register *plugin*.

        Raises PluginInvalid: it is registered already, or has no hooks; hooks are async, wrappers, unknown or not marked.
        """
        plugin_name = name or self.get_canonical_name(plugin)
        try:
            registered = super().register(plugin, name)
            self.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginInvalid(f"plugin {plugin_name}: {error}", plugin=plugin_name) from error
        if registered is not None and not self.get_hookcallers(plugin):
            words = f"plugin {plugin_name}: {shortened(plugin)} has no hooks: functions named in kdskills.hookspecs"
            raise PluginInvalid(words, plugin=plugin_name)
        return registered

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Return pluggy's options of an implementation; what is none, though it looks like one, is refused here."""
        opts = super().parse_hookimpl_opts(plugin, name)
        if opts is None:
            if hasattr(hookspecs, name) and name.startswith(f"{NAME}_") and callable(getattr(plugin, name)):
                raise pluggy.PluginValidationError(plugin, f"{name} is not marked with kdskills.hooks.hookimpl")
            return None
        method = getattr(plugin, name)
        if inspect.isclass(plugin) and inspect.isfunction(inspect.getattr_static(plugin, name)):
            raise pluggy.PluginValidationError(plugin, f"{name} is a method, but the plugin is a class, not an object")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise pluggy.PluginValidationError(plugin, f"{name} is async, but hooks are called, not awaited")
        if opts["wrapper"] or opts["hookwrapper"]:
            message = f"{name} is a wrapper, which could take back what another plugin refuses"
            raise pluggy.PluginValidationError(plugin, message)
        return opts


def plugin_manager(*extra: object, entry_points: bool = True, blocked: Sequence[str] = ()) -> PluginManager:
    """Return a manager holding the shipped plugins, installed ones, then *extra*. Raises PluginInvalid."""
    pm = PluginManager()
    for name in blocked:
        pm.set_blocked(name)
    for name in BUILTIN:
        if not pm.is_blocked(name):
            pm.register(importlib.import_module(name), name)
    if entry_points:
        for point in sorted(metadata.entry_points(group=NAME), key=lambda point: point.name):
            if not pm.is_blocked(point.name) and not pm.has_plugin(point.name):
                pm.register(_installed(point), point.name)
    for plugin in extra:
        pm.register(plugin)
    return pm


def _installed(point: metadata.EntryPoint) -> object:
    """Return the plugin of an entry point. Raises PluginInvalid."""
    try:
        return point.load()
    except Exception as error:
        source = "" if point.dist is None else f" of package {point.dist.name}"
        message = f"plugin {point.name}{source} cannot be imported: {type(error).__name__}: {error}"
        raise PluginInvalid(message, plugin=point.name) from error


@dataclass(frozen=True)
class HookAnswers:
    """The one place where hooks are called, and their answers combined by the rule in each hook's docstring.

    What a plugin raises or answers wrongly is told with its name. Filters are monotone: hidden is the union of all
    answers, one denial denies, so the order of plugins cannot open a hole. A filter that fails closes: nothing is
    granted until its plugin works or is taken out.
    """

    pm: PluginManager

    def answers(self, hook: str, accept: Callable[[Any], T | None], **arguments: Any) -> list[T]:
        """Return the answers of all plugins in the order they were registered, without those that are None.

        *accept* returns an answer as it is used, or None for one that is no answer to this hook.
        Raises PluginFailed: a plugin raised, or gave what *accept* does not take.
        """
        answers = (self._ask(hook, call, accept, arguments) for call in reversed(self._calls(hook)))
        return [answer for answer in answers if answer is not None]

    def first(self, hook: str, accept: Callable[[Any], T | None], **arguments: Any) -> T | None:
        """Return the first answer that is not None; plugins registered last are asked first. As `answers`."""
        for call in self._calls(hook):
            answer = self._ask(hook, call, accept, arguments)
            if answer is not None:
                return answer
        return None

    def tell(self, hook: str, **arguments: Any) -> None:
        """Call *hook* of every plugin, although some fail. Raises PluginFailed, which names all that did."""
        failures: list[PluginFailed] = []
        for call in reversed(self._calls(hook)):
            try:
                self._ask(hook, call, _anything, arguments)
            except PluginFailed as error:
                failures.append(error)
        if len(failures) > 1:
            plugins = [failure.details["plugin"] for failure in failures]
            raise PluginFailed("; ".join(failure.message for failure in failures), plugins=plugins, hook=hook)
        if failures:
            raise failures[0]

    def register(self, hook: str, register: Register[Any]) -> None:
        """Let every plugin add to *register*. Raises PluginInvalid, NameTaken for a second claim, and PluginFailed."""
        for call in reversed(self._calls(hook)):
            register.plugin = call.plugin_name
            try:
                self._ask(hook, call, _anything, {"register": register})
            finally:
                register.plugin = None

    def skill_roots(self, descriptor: SkillsDescriptor) -> tuple[SkillRoot, ...]:
        """Return the plugins' roots in plugin order. Raises PluginFailed."""
        from kdskills.skills import SkillRoot

        answers = self.answers("kdskills_skill_roots", _all_of(SkillRoot), descriptor=descriptor)
        return tuple(root for roots in answers for root in roots)

    def open_skill_root(self, uri: str, base: Path) -> SkillRoot | None:
        """Return the first plugin's answer for *uri*. Raises PluginFailed."""
        from kdskills.skills import SkillRoot

        return self.first("kdskills_open_skill_root", _instance_of(SkillRoot), uri=uri, base=base)

    def check_skill(self, skill: Skill) -> tuple[Diagnostic, ...]:
        """Join the problems all plugins find in *skill*; a plugin that fails is a problem of its own, an error."""
        try:
            answers = self.answers("kdskills_check_skill", _all_of(Diagnostic), skill=skill)
        except PluginFailed as error:
            return (Diagnostic(error.code, "error", error.message, ref=skill.full_id),)
        return tuple(diagnostic for answer in answers for diagnostic in answer)

    def hide_skills(self, consumer: str | None, skills: Sequence[Skill]) -> Mapping[str, str]:
        """Return the union of what plugins hide from *consumer*, with the first reason of each. Raises PluginFailed."""
        hidden: dict[str, str] = {}
        for answer in self.answers("kdskills_hide_skills", _texts, agent=consumer or "", skills=skills):
            hidden = dict(answer) | hidden
        return hidden

    @property
    def hit_order(self) -> HitOrder | None:
        """`rank_skills`, or None where no plugin ranks: searches need not gather hits for it then."""
        return self.rank_skills if self._calls("kdskills_rank_skills") else None

    def rank_skills(
        self, consumer: str | None, query: str, hits: Sequence[SearchHit]
    ) -> tuple[Sequence[SearchHit], tuple[Diagnostic, ...]]:
        """Let one plugin after the other reorder and drop *hits*; the answer of one that fails changes nothing and is told."""
        hook = "kdskills_rank_skills"
        problems: list[Diagnostic] = []
        arguments = {"consumer": consumer or "", "query": query}
        for call in reversed(self._calls(hook)):
            try:
                order = self._ask(hook, call, _full_ids, {**arguments, "hits": hits})
            except PluginFailed as error:
                problems.append(Diagnostic(error.code, "warning", error.message))
                continue
            if order is None:
                continue
            by_id = {hit.full_id: hit for hit in hits}
            ranked = [by_id.pop(full_id) for full_id in order if full_id in by_id]
            if len(ranked) < len(order):
                strangers = self._failed(hook, call, "ids that are not among the hits, or repeated")
                problems.append(Diagnostic(strangers.code, "warning", strangers.message))
            hits = tuple(ranked)
        return hits, tuple(problems)

    def deny(self, request: AccessRequest) -> Denial | None:
        """Return the first denial, or None when no plugin denies. Raises PluginFailed: then nothing is granted."""
        from kdskills.session.approval import Denial

        denials = self.answers("kdskills_deny", _instance_of(Denial), request=request)
        return denials[0] if denials else None

    def source_key(self, source: Mapping[str, Any]) -> str | None:
        """Return the first plugin's merge key for a source row. Raises PluginFailed."""
        return self.first("kdskills_source_key", _instance_of(str), source=source)

    def source_resolver(self, settings: Settings) -> SourceResolver | None:
        """Return what asks plugins about rows of sources, or None where the setting is off or no plugin resolves."""
        if not settings.resolve_sources or not self._calls("kdskills_resolve_source"):
            return None
        from kdskills.sources import SourceResolver

        return SourceResolver(self.resolve_source)

    def resolve_source(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the first plugin's fuller form of a source row. Raises PluginFailed."""
        return self.first("kdskills_resolve_source", _instance_of(Mapping), row=row)

    def turn_started(self, turn: Any) -> None:
        """Tell plugins that *turn* became active. Raises PluginFailed when all have been told."""
        self.tell("kdskills_turn_started", turn=turn)

    def turn_finished(self, turn: Any, outcome: Any) -> None:
        """Tell plugins that *turn* ended. Raises PluginFailed when all have been told."""
        self.tell("kdskills_turn_finished", turn=turn, outcome=outcome)

    def _calls(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations of *hook*, last registered first."""
        caller: pluggy.HookCaller = getattr(self.pm.hook, hook)
        return caller.get_hookimpls()[::-1]

    def _ask(
        self, hook: str, call: pluggy.HookImpl, accept: Callable[[Any], T | None], arguments: Mapping[str, Any]
    ) -> T | None:
        try:
            answer = call.function(*(arguments[name] for name in call.argnames))
            accepted = None if answer is None else accept(answer)
        except KdskillsError as error:
            if hook in _JUDGES:
                raise self._failed(hook, call, f"{error.code}: {error.message}") from error
            error.details = {"plugin": call.plugin_name, "hook": hook} | error.details
            raise  # said in words already, such as a name that is taken or a part that is not installed
        except Exception as error:
            raise self._failed(hook, call, f"{type(error).__name__}: {error}") from error
        if answer is not None and accepted is None:
            raise self._failed(hook, call, f"the answer {shortened(answer)}")
        return accepted

    def _failed(self, hook: str, call: pluggy.HookImpl, problem: str) -> PluginFailed:
        expected = str(inspect.signature(getattr(hookspecs, hook)).return_annotation)
        return plugin_failed(call.plugin_name, hook, expected, problem)


_JUDGES: Final = frozenset({"kdskills_hide_skills", "kdskills_deny", "kdskills_rank_skills"})
"""Hooks whose failure is never another error's: whatever they raise, the plugin is named, and what it says does not count."""


def plugin_failed(plugin: str, hook: str, expected: str, problem: str) -> PluginFailed:
    """Return the error of a plugin that failed, and write it to the log for the operator."""
    message = f"plugin {plugin} failed in {hook}: {problem}; expected {expected}"
    error = PluginFailed(message, plugin=plugin, hook=hook, expected=expected, found=problem)
    _LOG.error("%s", error.message)
    return error


def shortened(value: object) -> str:
    """Return what *value* is in a few words, for messages."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a foreign object may not even be shown
        text = "of an object that cannot be shown"
    return f"{text[:80]} ({type(value).__name__})"


def _anything(answer: object) -> object:
    """Take any answer: nobody uses it."""
    return answer


@dataclass(frozen=True)
class Registers:
    """What plugins registered while the Host was built."""

    executors: Register[ExecutorFactory]
    models: Register[ModelFactory]
    stores: Register[Callable[[str], SessionStore]]
    embedders: Register[EmbedderFactory]
    tools: Register[SolverTool]
    interpreters: Register[Sequence[str]]
    checks: Register[CheckFunction]
    operations: Register[Operation]


def collect(pm: PluginManager) -> Registers:
    """Let every plugin register what it brings. Raises as `HookAnswers.register`."""
    registers = Registers(
        Register("executor", _no_factory),
        Register("model", _no_factory),
        Register("store", _no_factory),
        Register("embedder", _no_factory),
        Register("tool", _no_tool),
        Register("interpreter", _no_interpreter),
        Register("check", _no_check),
        OperationRegister("operation", _no_operation),
    )
    answers = HookAnswers(pm)
    for field in fields(registers):
        answers.register(f"kdskills_register_{field.name}", getattr(registers, field.name))
    return registers


def _no_factory(name: str, entry: object) -> str | None:
    return None if callable(entry) else f"{shortened(entry)} is no function that makes one"


def _no_operation(name: str, entry: object) -> str | None:
    from kdskills.app.operations.table import Operation

    return None if isinstance(entry, Operation) else "it is no Operation"


def _no_tool(name: str, entry: object) -> str | None:
    from kdskills.solver.tools import tool_problem

    return tool_problem(entry, name)


def _no_interpreter(name: str, entry: object) -> str | None:
    from kdskills.session.config import merged_interpreters

    if isinstance(entry, str | bytes) or not isinstance(entry, Sequence) or not all(isinstance(w, str) for w in entry):
        return f"{shortened(entry)} is no list of words"
    try:
        merged_interpreters({name: entry})
    except BadRequest as error:
        return error.message
    return None


def _no_check(name: str, entry: object) -> str | None:
    from kdskills.evals.grading import CHECKS, arguments_of

    if name in CHECKS:
        return "a shipped check has this name"
    if not inspect.isroutine(entry):
        return f"{shortened(entry)} is no function"
    try:
        arguments_of(entry)
    except PluginInvalid as error:
        return error.message
    return None


def make_part(register: Register[Callable[..., T]], name: str, expected: type[Any], *arguments: Any) -> T:
    """Return what the factory registered under *name* makes of *arguments*, held to the protocol *expected*.

    Raises UnknownName where nobody registered the name, and PluginFailed.
    """
    factory = register[name]
    plugin, hook = register.plugin_of(name) or "unknown", f"kdskills_register_{register.kind}s"
    words = f"the factory of {register.kind} {name!r} to make a kdskills {expected.__name__}"
    try:
        entry = factory(*arguments)
    except KdskillsError:
        raise  # said in words already
    except Exception as error:
        raise plugin_failed(plugin, hook, words, f"{type(error).__name__}: {error}") from error
    if not isinstance(entry, expected):
        raise plugin_failed(plugin, hook, words, shortened(entry))
    return entry


def _instance_of(kind: type[T]) -> Callable[[object], T | None]:
    return lambda answer: answer if isinstance(answer, kind) else None


def _all_of(kind: type[T]) -> Callable[[object], tuple[T, ...] | None]:
    def accept(answer: object) -> tuple[T, ...] | None:
        if not isinstance(answer, Iterable):
            return None
        items = tuple(answer)
        return items if all(isinstance(item, kind) for item in items) else None

    return accept


def _texts(answer: object) -> Mapping[str, str] | None:
    if not isinstance(answer, Mapping):
        return None
    return answer if all(isinstance(text, str) for pair in answer.items() for text in pair) else None


MAX_ORDER: Final = 1000
"""Ids that are read of one answer about hits; a generator may never end."""


def _full_ids(answer: object) -> tuple[str, ...] | None:
    """Take what has an order and only texts: of a set the order differs from process to process."""
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        return None
    ids = tuple(itertools.islice(answer, MAX_ORDER))
    return ids if all(isinstance(full_id, str) for full_id in ids) else None


Filter = Callable[[str | None, Sequence["Skill"]], Mapping[str, str]]
