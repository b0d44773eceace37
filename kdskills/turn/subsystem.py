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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from kdskills.bundle.descriptor import EVERYONE, IMPORT_POLICIES, AgentRules, SkillsDescriptor, is_group
from kdskills.errors import ContextOrder, Diagnostic, NoActiveSkills, PolicyUnavailable, StrPath, path_argument
from kdskills.skills.model import Skill
from kdskills.skills.roots import RefreshReport, SkillRoot, Snapshot, order_roots
from kdskills.skills.selection import EMPTY, Rules, tool_ids
from kdskills.turn.export import (
    Exported,
    HitOrder,
    SubsystemState,
    export_view,
    index_maker,
    place_roots,
    vectors_maker,
)
from kdskills.turn.overlays import AddedSkills, overlay_roots, with_added
from kdskills.turn.view import PickerEntry, SkillView, build_view, extended_view, picker_of

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

    import jinja2

    from kdskills.search import EmbedderGuard
    from kdskills.skills.registry import SkillJudge
    from kdskills.sources import SourceKey, SourceResolver


Filter = Callable[[str | None, Sequence[Skill]], Mapping[str, str]]
Check = Callable[[Skill], Iterable[Diagnostic]]

_VIEWS = 64
JUDGES: Final = "kdskills.trust"
"""Group of the entry point that makes what keeps a descriptor's policy of trust, of the descriptor and the bundle's folder."""


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


class ViewQuery(NamedTuple):
    """What a view is asked for: by which consumer, with which tools, and for a user of which groups and rules."""

    consumer: str | None
    tools: frozenset[str] | None
    include_internal: bool
    groups: frozenset[str] = frozenset()
    further: tuple[tuple[str, AgentRules], ...] = ()

    def under(self, terms: OverlayTerms) -> ViewQuery:
        """Return the question with the groups and rules of an overlay."""
        return self._replace(groups=self.groups | terms.groups, further=(*terms.further, *self.further))


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
        judge: Holds skills to what was locked and signed. Without one, the descriptor's own policy is kept by the installed
            one, entry point `default` of group `kdskills.trust`.
        environment: jinja2 templates in place of the shipped ones.
        source_key: Overrides what makes two rows of sources one, in instruction blocks.
        source_resolver: Completes rows of sources before they are merged, in instruction blocks.
        embedder: Asks an embedder, so that searches go by meaning, too; None searches by words.
        hit_order: Called with consumer, query and the best hits of each search, reorders and drops them.
        source: Skills found otherwise than by looking through roots: the far side of an export has one.

    `descriptor` holds the rules.

    Raises:
        DescriptorError: The descriptor, or its root, cannot be used.
        PolicyUnavailable: The descriptor has a policy of trust, and nothing is installed that keeps it.
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
        judge: SkillJudge | None = None,
        environment: jinja2.Environment | None = None,
        source_key: SourceKey | None = None,
        source_resolver: SourceResolver | None = None,
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
            judge = judge or _installed_judge(self.descriptor, bundle_root)
            registry = SkillRegistry(located_roots, index_dir=index_dir, check=check, judge=judge)
            source = SubsystemSource(registry, order_roots(located_roots), mounts)
        self.roots = source.roots
        self.filters = tuple(filters)
        self._source = source
        self._check, self._judge = check, judge
        self._auto_refresh = auto_refresh
        self._environment = environment
        self._source_key, self._source_resolver = source_key, source_resolver
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
        self._views: OrderedDict[ViewQuery, SkillView] = OrderedDict()

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
        terms = self.descriptor
        asking = [terms.rules(name, terms.groups if is_group(name) else ()) for name in ("", *terms.agents_config)]
        unmatched = dict.fromkeys(finding for rules in asking for finding in rules.findings(known_ids))
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
                    source_resolver=self._source_resolver,
                    hit_order=self._hit_order,
                    exported=self._source.exported,
                    entries=self._state.reusable_entries(snapshot) if self._state is not None else {},
                    search_index=self._search_index,
                    skill_vectors=self._skill_vectors,
                )
                self._views.clear()
            return self._state

    def view(
        self,
        consumer: str | None = None,
        tools: Iterable[Any] | str | None = None,
        *,
        include_internal: bool = False,
        parent: SkillView | None = None,
    ) -> SkillView:
        """Return what *consumer* may use now; it stays as it is.

        Args:
            consumer: Who asks; None is an anonymous consumer, bound by `"*"` like any other.
            tools: The consumer's tools: ids, mappings or objects. None means no tool gate, `[]` no tools.
            include_internal: Whether the internal namespace is open.
            parent: View of the agent that hands over to *consumer*: what its rules deny or leave out is refused, too.

        Raises:
            PolicyUnavailable: This is a restored view of another consumer.
            OSError: Looking for changes failed.
        """
        return self.queried_view(ViewQuery(consumer, tool_ids(tools), include_internal), parent)

    def queried_view(self, query: ViewQuery, parent: SkillView | None = None) -> SkillView:
        """Return the view of a question put together, for subsystems laid over this one."""
        exported = self._source.exported
        if exported is not None:
            exported.admit(query.consumer, query.tools, query.include_internal)
            if exported.rules is not None:
                query = query._replace(further=(("activation.rules", exported.rules),))
        every, before = self._auto_refresh, self._refreshed
        if every is not None and before is not None and time.monotonic() - before >= every:
            self.refresh()
        state = self._current_state()
        query = query._replace(groups=query.groups & self.descriptor.groups)
        # What filters say may be another thing each time, so they are asked; the view is made anew only when it is.
        denied = self._denied(query.consumer, state.snapshot.skills)
        with self._lock:
            view = self._views.get(query) if parent is None else None
            if view is not None and view.state is state and view.rules.plugin_denied == denied:
                self._views.move_to_end(query)
                return view
        own_rules = self.descriptor.rules(query.consumer, query.groups, query.further)
        policies = (own_rules.imports, own_rules.imports if parent is None else parent.rules.imports)
        rules = replace(
            own_rules,
            imports=max(policies, key=IMPORT_POLICIES.index),
            tools=query.tools,
            include_internal=query.include_internal,
            plugin_denied=denied,
            parent=None if parent is None else parent.rules,
        )
        view = build_view(state, rules)
        if parent is not None:  # what its rules say is no part of the question
            return view
        with self._lock:
            if self._state is state:
                self._views[query] = view
                while len(self._views) > _VIEWS:
                    self._views.popitem(last=False)
        return view

    def overlay(
        self,
        roots: Sequence[SkillRoot] = (),
        rules: AgentRules | Mapping[str, Any] | None = None,
        *,
        groups: Iterable[str] = (),
    ) -> SkillsOverlay:
        """Return this subsystem with one user's skills and rules laid over it, for a run; nothing here changes.

        Args:
            roots: Where the user's skills are, the last one winning an id. They never replace a skill that is here, none here
                imports them, and they go by their full id; their namespace is that of their root, else `user`. A root that
                cannot be read costs its own skills.
            rules: Rules of this user for every consumer, as in one entry of `agents_config`: they deny more, and their
                allow-list joins that of the consumer. No denial is ever lifted.
            groups: Roles of the user; rules under `"@role"` then hold.

        Raises:
            BadRequest: A root that is none, or of the namespace `internal`.
            DescriptorError: *rules* cannot be understood.
            PolicyUnavailable: This is a restored export, which nothing can be laid over.
        """
        if self._source.exported is not None:
            raise PolicyUnavailable("nothing can be laid over what was exported")
        return SkillsOverlay(
            self,
            OverlayTerms(
                overlay_roots(roots, sum(root.kind == "overlay" for root in self.roots)),
                () if rules is None else (("overlay.rules", AgentRules.from_json(rules, "rules.")),),
                frozenset((groups,) if isinstance(groups, str) else groups),
            ),
            source=self._source,
            state=self._current_state,
            check=self._check,
            judge=self._judge,
            auto_refresh=self._auto_refresh,
        )

    def completed(self, query: ViewQuery) -> ViewQuery:
        """Return a question with the groups and rules of all overlays."""
        return query

    def activate(
        self, consumer: str | None = None, tools: Iterable[Any] | str | None = None, *, include_internal: bool = False
    ) -> AbstractContextManager[SkillView]:
        """Return a context manager that puts a view in force and resets it on every exit."""
        return activated(self, self.view(consumer, tools, include_internal=include_internal))

    def picker(self, patterns: Iterable[str] | str | None = None) -> list[PickerEntry]:
        """Return what a person configures agents with: no hidden, internal, agent-only skills, none denied to all."""
        denials = self._user_rules().denials
        allowed = (s for s in self.registry.values() if not any(denied.match(s.full_id) for _, denied in denials))
        return picker_of(allowed, patterns)

    def _user_rules(self) -> Rules:
        """Return what holds whatever consumer asks, for the user of overlays, too."""
        query = self.completed(ViewQuery(EVERYONE, None, False))
        return self.descriptor.rules(query.consumer, query.groups, query.further)

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
        return export_view(state, state.snapshot.skills, refused=refused, scope="subsystem", rules=self._user_rules())

    def _denied(self, consumer: str | None, asked_skills: Mapping[str, Skill]) -> Mapping[str, str]:
        """Return `{full id: reason}` of what plugins denied before an export, and deny now; the first reason counts."""
        skills = tuple(asked_skills.values()) if self.filters else ()
        denied: dict[str, str] = {}
        for skill_filter in self.filters:
            denied = {**skill_filter(consumer, skills), **denied}
        recorded = self._source.exported.refused if self._source.exported is not None else EMPTY
        return {full_id: "as exported" for full_id, code in recorded.items() if code == "plugin_denied"} | denied


def _installed_judge(descriptor: SkillsDescriptor, bundle_root: StrPath | None) -> SkillJudge | None:
    """Return what keeps a descriptor's policy of trust; None where it asks for nothing. Raises PolicyUnavailable."""
    if not any(policy.judges for policy in descriptor.trust.values()):
        return None
    from importlib.metadata import entry_points

    points = entry_points(group=JUDGES, name="default")
    if not points:
        message = (
            f"the descriptor has a policy of trust, and no entry point of group {JUDGES} keeps it: reinstall kdskills"
        )
        raise PolicyUnavailable(message)
    return cast("SkillJudge", next(iter(points)).load()(descriptor, bundle_root))


class OverlayTerms(NamedTuple):
    """What an overlay adds: roots, further rules with where they stand, and the user's groups."""

    roots: tuple[SkillRoot, ...]
    further: tuple[tuple[str, AgentRules], ...]
    groups: frozenset[str]


class SkillsOverlay(SkillsSubsystem):
    """A subsystem with the skills and rules of one user laid over it; `SkillsSubsystem.overlay` makes it.

    It is a subsystem like any other: views, prompts, search and exports have both. What lies below is shared, not built
    again. Safe to use from any thread, and for several runs of the same user.
    """

    def __init__(
        self,
        base: SkillsSubsystem,
        terms: OverlayTerms,
        *,
        source: SubsystemSource,
        state: Callable[[], SubsystemState],
        check: Check | None,
        judge: SkillJudge | None,
        auto_refresh: float | None,
    ) -> None:
        self._base, self._terms, self._state_below = base, terms, state
        self._added = AddedSkills(terms.roots, check, judge)
        super().__init__(
            base.descriptor,
            bundle_root=base.bundle_root,
            index_dir=None,
            auto_refresh=auto_refresh,
            filters=base.filters,
            check=check,
            judge=judge,
            source=source._replace(roots=(*terms.roots, *base.roots)),
        )

    def lies_over(self, subsystem: SkillsSubsystem) -> bool:
        """Whether this is an overlay of *subsystem*, directly or by way of other overlays."""
        return self._base is subsystem or (isinstance(self._base, SkillsOverlay) and self._base.lies_over(subsystem))

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """What is wrong with the user's skills as they are now, and why some are left out."""
        base = self._base.findings if isinstance(self._base, SkillsOverlay) else ()
        return (*base, *self._added.current(self._state_below().snapshot).diagnostics)

    def refresh(self) -> RefreshReport:
        """Look through all roots again; a report tells about those below alone."""
        self._added.refresh()
        return self._base.refresh()

    def clear_cache(self) -> None:
        """Forget everything read, also below."""
        self._added.clear()
        self._base.clear_cache()
        super().clear_cache()

    def _current_state(self) -> SubsystemState:
        return self._state_over(self._state_below())

    def _state_over(self, below_it: SubsystemState) -> SubsystemState:
        """Return the state below with the user's skills; the same object as long as both are the same."""
        added = self._added.current(below_it.snapshot)
        if not added.roots:
            return below_it
        with self._lock:
            if self._state is None or self._state.over != (below_it, added):
                self._state = with_added(below_it, added)
                self._views.clear()
            return self._state

    def queried_view(self, query: ViewQuery, parent: SkillView | None = None) -> SkillView:
        """Return the view below with those of the user's skills that are granted."""
        query = query.under(self._terms)
        self._added.refresh(self._auto_refresh)
        over = self._base.queried_view(query, parent)
        state = self._state_over(over.state)
        if state is over.state:
            return over
        added = state.over[1].skills if state.over else EMPTY
        denied = self._denied(query.consumer, added)
        rules = replace(over.rules, plugin_denied={**over.rules.plugin_denied, **denied}) if denied else over.rules
        with self._lock:
            view = self._views.get(query)
        if (
            view is not None
            and view.over is over
            and view.state is state
            and view.rules.plugin_denied == rules.plugin_denied
        ):
            return view
        view = extended_view(over, state, rules, added)
        with self._lock:
            if self._state is state and parent is None:
                self._views[query] = view
        return view

    def completed(self, query: ViewQuery) -> ViewQuery:
        """Return a question with the groups and rules of this overlay and those below."""
        return self._base.completed(query.under(self._terms))


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
