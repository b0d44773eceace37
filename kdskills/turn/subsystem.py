"""The skills of one bundle and its roots, with policy, which every view is taken from; and which of them are active here."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from kdskills.bundle.descriptor import EVERYONE, SkillsDescriptor
from kdskills.errors import ContextOrder, Diagnostic, NoActiveSkills, StrPath, path_argument
from kdskills.skills.model import Skill
from kdskills.skills.refs import compile_rules
from kdskills.skills.roots import RefreshReport, SkillRoot, Snapshot, order_roots
from kdskills.skills.selection import EMPTY, tool_ids
from kdskills.turn.export import (
    Exported,
    HitOrder,
    SubsystemState,
    export_view,
    index_maker,
    place_roots,
    vectors_maker,
)
from kdskills.turn.view import PickerEntry, SkillView, build_view, picker_of

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    import jinja2

    from kdskills.search import EmbedderGuard
    from kdskills.sources import SourceKey


Filter = Callable[[str | None, Sequence[Skill]], Mapping[str, str]]
Check = Callable[[Skill], Iterable[Diagnostic]]

_VIEWS = 64


class Registry(Protocol):
    """Where snapshots come from."""

    def snapshot(self) -> Snapshot:
        """Return what is known now."""

    def refresh(self) -> RefreshReport:
        """Look again."""

    def clear_cache(self) -> None:
        """Forget everything."""


class SubsystemSource(NamedTuple):
    """Where a subsystem's skills come from: a registry, its roots, and where they are on this host."""

    registry: Registry
    roots: tuple[SkillRoot, ...]
    mounts: Mapping[str, str]
    exported: Exported | None = None


class SkillsSubsystem:
    """Skills, rules and views. Safe to use from any thread.

    Args:
        descriptor: Where the custom root is and who may use what; a mapping is read as one. None says nothing.
        bundle_root: Folder relative roots are joined to, instead of the descriptor's own.
        roots: Further roots; the custom root always comes last.
        index_dir: Where what was found is kept for the next start: `"default"` (the user's cache), a folder, or None.
        auto_refresh: Seconds after which `view` looks for changes; None means never.
        filters: Called with consumer and skills, each returns `{full id: reason}` to deny; the union denies.
        check: Further findings about a skill; an error refuses it.
        environment: jinja2 templates in place of the shipped ones.
        source_key: Overrides what makes two rows of sources one, in instruction blocks.
        embedder: Asks an embedder, so that searches go by meaning, too; None searches by words.
        hit_order: Called with consumer, query and the best hits of each search, reorders and drops them.
        source: Skills found otherwise than by looking through roots: the far side of an export has one.

    `descriptor` holds the rules.

    Raises:
        DescriptorError: The descriptor, or its root, cannot be used.
    """

    def __init__(
        self,
        descriptor: SkillsDescriptor | Mapping[str, Any] | None = None,
        *,
        bundle_root: StrPath | None = None,
        roots: Sequence[SkillRoot] | None = None,
        index_dir: StrPath | None = "default",
        auto_refresh: float | None = 1.0,
        filters: Sequence[Filter] = (),
        check: Check | None = None,
        environment: jinja2.Environment | None = None,
        source_key: SourceKey | None = None,
        embedder: EmbedderGuard | None = None,
        hit_order: HitOrder | None = None,
        source: SubsystemSource | None = None,
    ) -> None:
        self.bundle_root = None if bundle_root is None else path_argument(bundle_root, "bundle_root")
        """Folder of the bundle, or None."""
        self.descriptor = SkillsDescriptor() if descriptor is None else SkillsDescriptor.from_json(descriptor)
        if source is None:
            from kdskills.skills.registry import SkillRegistry

            located_roots, mounts = place_roots(self.descriptor, bundle_root, roots or ())
            source = SubsystemSource(
                SkillRegistry(located_roots, index_dir=index_dir, check=check), order_roots(located_roots), mounts
            )
        self.roots = source.roots
        self.filters = tuple(filters)
        self._source = source
        self._auto_refresh = auto_refresh
        self._environment = environment
        self._source_key = source_key
        self._hit_order = hit_order
        file = None
        if source.exported is None:
            from kdskills.skills.index import search_file

            file = search_file(index_dir, self.roots)
        self._search_index = index_maker(file)
        self._skill_vectors = vectors_maker(embedder, file)
        self._lock = threading.Lock()
        self._refreshed: float | None = None
        self._state: SubsystemState | None = None
        self._views: OrderedDict[tuple[str | None, frozenset[str] | None, bool], SkillView] = OrderedDict()

    @property
    def registry(self) -> Mapping[str, Skill]:
        """Usable skills by full id, sorted; the same object until something changes."""
        return self._current_state().snapshot.skills

    @property
    def snapshot(self) -> Snapshot:
        """Everything known now: skills, refused ones, roots, findings."""
        return self._current_state().snapshot

    @property
    def fingerprint(self) -> str:
        """Digest over descriptor, root digests and the winner of each id."""
        return self._current_state().fingerprint

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Findings about the descriptor, roots, skills, and rules that match nothing."""
        state = self._current_state()
        known_ids = state.skill_index(include_internal=False).ids()
        consumers = (None, *self.descriptor.agents_config)
        unmatched = dict.fromkeys(
            finding for name in consumers for finding in self.descriptor.rules(name).findings(known_ids)
        )
        return (*self.descriptor.diagnostics, *state.snapshot.diagnostics, *unmatched)

    def refresh(self) -> RefreshReport:
        """Look through the roots again; if that fails with an OSError, what was known stays."""
        report = self._source.registry.refresh()
        self._refreshed = time.monotonic()
        return report

    def clear_cache(self) -> None:
        """Forget everything read; the next `registry` is a new object."""
        self._source.registry.clear_cache()
        with self._lock:
            self._state = None
            self._views.clear()

    def _current_state(self) -> SubsystemState:
        """Return the current `SubsystemState`; the same object as long as the registry's snapshot is the same."""
        snapshot = self._source.registry.snapshot()
        with self._lock:
            if self._refreshed is None:
                self._refreshed = time.monotonic()
            if self._state is None or self._state.snapshot is not snapshot:
                self._state = SubsystemState(
                    self.descriptor,
                    snapshot,
                    self._source.mounts,
                    environment=self._environment,
                    source_key=self._source_key,
                    hit_order=self._hit_order,
                    exported=self._source.exported,
                    entries=self._state.reusable_entries(snapshot) if self._state is not None else {},
                    search_index=self._search_index,
                    skill_vectors=self._skill_vectors,
                )
                self._views.clear()
            return self._state

    def view(
        self, consumer: str | None = None, tools: Iterable[Any] | str | None = None, *, include_internal: bool = False
    ) -> SkillView:
        """Return what *consumer* may use now; it stays as it is.

        Args:
            consumer: Who asks; None is an anonymous consumer, bound by `"*"` like any other.
            tools: The consumer's tools: ids, mappings or objects. None means no tool gate, `[]` no tools.
            include_internal: Whether the internal namespace is open.

        Raises:
            PolicyUnavailable: This is a restored view of another consumer.
            OSError: Looking for changes failed.
        """
        tool_set = tool_ids(tools)
        if self._source.exported is not None:
            self._source.exported.admit(consumer, tool_set, include_internal)
        every, before = self._auto_refresh, self._refreshed
        if every is not None and before is not None and time.monotonic() - before >= every:
            self.refresh()
        state = self._current_state()
        key = (consumer, tool_set, include_internal)
        with self._lock:
            view = self._views.get(key)
            if view is not None and view.state is state:
                self._views.move_to_end(key)
                return view
        rules = replace(
            self.descriptor.rules(consumer),
            tools=tool_set,
            include_internal=include_internal,
            plugin_denied=self._denied(consumer, state),
        )
        view = build_view(state, rules)
        if self.filters:  # what they say may be another thing the next time
            return view
        with self._lock:
            if self._state is state:
                self._views[key] = view
                while len(self._views) > _VIEWS:
                    self._views.popitem(last=False)
        return view

    def activate(
        self, consumer: str | None = None, tools: Iterable[Any] | str | None = None, *, include_internal: bool = False
    ) -> AbstractContextManager[SkillView]:
        """Return a context manager that puts a view in force and resets it on every exit."""
        return activated(self, self.view(consumer, tools, include_internal=include_internal))

    def picker(self, patterns: Iterable[str] | str | None = None) -> list[PickerEntry]:
        """Return what a person configures agents with: no hidden, internal, agent-only skills, none denied to all."""
        denied = compile_rules(self.descriptor.rules(EVERYONE).disabled_for_all, bare="anywhere")
        return picker_of((skill for skill in self.registry.values() if denied.match(skill.full_id) is None), patterns)

    def export_runtime_globals(self) -> dict[str, Any]:
        """Return `{"SKILLS_DESCRIPTOR": …}` of all skills, for any consumer.

        With filters it is the export of the anonymous consumer, since what plugins would say to others is not known.
        """
        state = self._current_state()
        if self._source.exported is not None and not self._source.exported.complete:
            exported = self._source.exported
            return self.view(
                exported.consumer, exported.tools, include_internal=exported.include_internal
            ).export_runtime_globals()
        if self.filters:
            view = self.view()
            return export_view(state, view.index.skills, refused=view.codes)
        refused = dict.fromkeys(state.snapshot.invalid, "skill_invalid")
        if self._source.exported is not None:
            refused |= self._source.exported.refused
        return export_view(state, state.snapshot.skills, refused=refused, scope="subsystem")

    def _denied(self, consumer: str | None, state: SubsystemState) -> Mapping[str, str]:
        """Return `{full id: reason}` of what plugins denied before an export, and deny now; the first reason counts."""
        skills = tuple(state.snapshot.skills.values()) if self.filters else ()
        denied: dict[str, str] = {}
        for skill_filter in self.filters:
            denied = {**skill_filter(consumer, skills), **denied}
        recorded = self._source.exported.refused if self._source.exported is not None else EMPTY
        return {full_id: "as exported" for full_id, code in recorded.items() if code == "plugin_denied"} | denied


P = ParamSpec("P")
R = TypeVar("R")


class Activation:
    """A subsystem and a view in force since this handle was made, until it is closed.

    Use it as a context manager, or close it yourself: in the same context, the last one first.
    """

    def __init__(self, subsystem: SkillsSubsystem, view: SkillView) -> None:
        self.subsystem = subsystem
        self.view = view
        self._token: Token[Activation | None] | None = None

    def open(self) -> Activation:
        """Put the view in force here."""
        self._token = _ACTIVE.set(self)
        return self

    def close(self) -> None:
        """Put back what was in force before; closing twice does nothing.

        Raises ContextOrder: another activation is still open on top of this one, or this is another context.
        """
        if self._token is None:
            return
        if _ACTIVE.get() is not self:
            raise ContextOrder("close the activation opened last first, in the context it was opened in")
        try:
            _ACTIVE.reset(self._token)
        except ValueError as error:
            raise ContextOrder("an activation is closed in the context it was opened in") from error
        self._token = None

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_ACTIVE: ContextVar[Activation | None] = ContextVar("kdskills_active", default=None)


def current() -> Activation:
    """Return what is in force here; raises NoActiveSkills, none is made up."""
    active = _ACTIVE.get()
    if active is None:
        raise NoActiveSkills("no skills are active here: use subsystem.activate(...), or bound(fn) for threads")
    return active


def get_active_skills_subsystem() -> SkillsSubsystem:
    """Return the subsystem in force in this context; raises NoActiveSkills: plain threads start with nothing."""
    return current().subsystem


def get_active_view() -> SkillView:
    """Return the view in force in this context; raises NoActiveSkills."""
    return current().view


def set_active_skills_subsystem(
    subsystem: SkillsSubsystem, *, consumer: str | None = None, tools: Iterable[Any] | str | None = None
) -> Activation:
    """Put a subsystem in force at once, for entry points; None is the anonymous consumer, or no tool gate.

    Returns a handle that is a context manager; leaving or closing it puts back what was in force before.
    """
    return Activation(subsystem, subsystem.view(consumer, tools)).open()


@contextmanager
def activated(subsystem: SkillsSubsystem, view: SkillView) -> Iterator[SkillView]:
    """Put *view* in force for a `with` block, and put back what was before on every exit."""
    with Activation(subsystem, view).open():
        yield view


def bound(fn: Callable[P, R]) -> Callable[P, R]:
    """Return *fn* with what is active here in force wherever it runs, such as in a thread; raises NoActiveSkills."""
    active = current()

    if iscoroutinefunction(fn):
        awaitable = cast("Callable[P, Awaitable[Any]]", fn)

        @wraps(fn)
        async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
            with activated(active.subsystem, active.view):
                return await awaitable(*args, **kwargs)

        return cast("Callable[P, R]", later)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with activated(active.subsystem, active.view):
            return fn(*args, **kwargs)

    return call
