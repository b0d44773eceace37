"""The state of one session, shared by all its handles: registry, last reports, listeners."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kdskills.errors import Diagnostic
from kdskills.remote.lint import check_name
from kdskills.remote.names import clean_name
from kdskills.remote.ports import CatalogBackend, CatalogError, JsonObject
from kdskills.remote.registry import Layer, RemoteSkill, RemoteSkillRegistry, unchanged
from kdskills.remote.schemas import derive
from kdskills.remote.text import instruction_text, wire_tools

if TYPE_CHECKING:
    from kdskills.remote.core import Driver
    from kdskills.remote.core_facade import FacadeCore
    from kdskills.remote.receipts import ReceiptSkillEntry

DRAFT = "draft"


class SessionCore:
    """The state behind every handle of one session.

    Args:
        owner: The facade's core.
        session_id: The server's thread id, or `draft`.
        draft: Whether this collects skills for a session that does not exist yet.
    """

    def __init__(self, owner: FacadeCore, session_id: str, *, draft: bool = False) -> None:
        self.owner = owner
        self.session_id = session_id
        self.draft = draft
        self.registry = RemoteSkillRegistry(owner.profile)
        self.last_catalog: JsonObject | None = None
        self.pushed: list[JsonObject] | None = None
        self.pushed_layers: list[Layer] = []
        self.active: tuple[str, str] | None = None  # the turn last started here, and on which connection
        self.published: tuple[ReceiptSkillEntry, ...] = ()
        self.published_tools: Mapping[str, RemoteSkill] = {}  # what `publish` registered, by qualified name
        self.view_digest: str | None = None  # of the view that is published here
        self.roots_digest: str | None = None  # the same, where it is published as roots
        self.roots_folder: str | None = None
        self._listeners: tuple[Callable[[Any], None], ...] = ()

    @property
    def driver(self) -> Driver:
        """How to wait and call: on an event loop, or blocking."""
        return self.owner.driver

    @property
    def backend(self) -> CatalogBackend | None:
        """The client's catalog backend, or None."""
        return self.owner.backend

    def live(self) -> None:
        """Refuse a draft.

        Raises:
            RuntimeError: There is no session yet.
        """
        if self.draft:
            raise RuntimeError("a draft session only collects skills; the session exists once create_session returned")

    def note(self, code: str, message: str, *, fix: str | None = None) -> None:
        """Add a warning about this session to the diagnostics."""
        self.registry.note(Diagnostic(code, "warning", message, ref=self.session_id, fix=fix))

    def tools(self) -> list[JsonObject]:
        """Return the wire tools of the visible skills."""
        return wire_tools(self.registry.skills())

    def text(self) -> str:
        """Return the instruction text of the visible skills."""
        return instruction_text(self.registry.skills())

    def register(self, name: str, handler: Callable[..., Any], options: Mapping[str, Any]) -> RemoteSkill:
        """Register the base skill of a name."""
        return self.registry.register(self.build_skill(name, handler, **options))

    def open_window(self, name: str, handler: Callable[..., Any], options: Mapping[str, Any]) -> Layer:
        """Open a window: its skill hides the base until the window is closed."""
        return self.registry.open(self.build_skill(name, handler, **options))

    def adopt(self, draft: SessionCore, skills: Sequence[RemoteSkill]) -> None:
        """Take over the skills of a draft, and the records of those that were published there."""
        for skill in skills:
            self.registry.register(skill)
        if draft.view_digest is not None:
            self.published, self.published_tools = draft.published, draft.published_tools
            self.view_digest = draft.view_digest

    @contextmanager
    def listening(self, hear: Callable[[Any], None]) -> Iterator[None]:
        """Call *hear* with every call that is answered in the body of the `with`."""
        self._listeners = (*self._listeners, hear)
        try:
            yield
        finally:
            self._listeners = tuple(listener for listener in self._listeners if listener is not hear)

    def listeners(self) -> tuple[Callable[[Any], None], ...]:
        """Return the present listeners."""
        return self._listeners

    @property
    def active_turn(self) -> str | None:
        """The running turn as far as this session knows; a turn of an earlier connection counts as ended."""
        return self.active[0] if self.active is not None and self.active[1] == self.owner.connection else None

    def unpublish(self) -> None:
        """Forget the published skills of bundles, whose tools were removed."""
        self.published, self.published_tools = (), {}
        self.view_digest = None

    def remember_pushed(self, tools: list[JsonObject], layers: Sequence[Layer]) -> None:
        """Remember the catalog that was pushed to the model."""
        self.pushed = copy.deepcopy(tools)
        self.pushed_layers = list(layers)

    def build_skill(
        self,
        name: str,
        handler: Callable[..., Any],
        *,
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        namespace: str | None = None,
        deadline_seconds: float | None = 120.0,
        idempotent: bool = False,
        defer_loading: bool = False,
    ) -> RemoteSkill:
        """Return the skill these parameters of `register` describe, linted.

        Raises:
            ValueError: The name is blank, or the deadline is no positive number.
            CatalogError: The server would refuse, drop or shadow it, or a schema is invalid.
            TypeError: The handler cannot be called.
        """
        name = clean_name(name)
        if not callable(handler):
            raise TypeError(f"the handler of `{name}` cannot be called: it is a {type(handler).__name__}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds of `{name}` must be positive or None, got {deadline_seconds!r}")
        namespace = namespace.strip() if namespace is not None else None
        check_name(namespace, name, self.registry.profile, defer_loading=defer_loading)
        derived = derive(name, handler, input_schema, output_schema)
        model_text = description if description is not None and description.strip() else derived.description
        return RemoteSkill(
            name,
            handler,
            _sendable(name, model_text or f"Remote skill {name}"),
            derived.input_schema,
            derived.output_schema,
            namespace,
            deadline_seconds,
            idempotent,
            defer_loading,
            derived.output_description,
            derived.coerce or unchanged,
            derived.call_parameter,
        )


def _sendable(name: str, description: str) -> str:
    try:
        description.encode()
    except UnicodeEncodeError as error:
        raise CatalogError(
            f"the description of `{name}` cannot be sent: {error.reason} at character {error.start}",
            rule="description_text",
            suggestion="describe it in characters that exist",
        ) from error
    return description
