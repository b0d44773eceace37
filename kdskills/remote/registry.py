"""The skills of one session: layers per name, checked when they are registered, and their catalog as wire tools and text."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kdskills.errors import Diagnostic
from kdskills.remote.names import HEADER, check_name, check_neighbours, clean_name, qualify
from kdskills.remote.ports import CatalogError, JsonObject, ServerProfile
from kdskills.remote.schemas import derive

MAX_DIAGNOSTICS = 1000  # findings kept per session; the oldest go first

Handler = Callable[..., Any]
Coercion = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RemoteSkill:
    """One registered function; carries the parameters of `register`."""

    name: str  # of the tool inside its namespace
    handler: Handler = field(repr=False)
    description: str  # what the model reads
    input_schema: JsonObject
    output_schema: JsonObject | None = None  # for the instruction text only
    namespace: str | None = None
    deadline_seconds: float | None = 120.0  # how long a call may take, queueing included; None for no bound
    idempotent: bool = False  # whether a call whose worker died may be run again
    defer_loading: bool = False  # whether the server may keep the tool out of the first request
    output_description: str | None = None  # what the docstring says under `Returns:`
    coerce: Coercion = field(default=dict, repr=False, compare=False)  # makes of arguments what the annotations ask for
    call_parameter: str | None = None  # the one that takes the `RemoteCall`

    @property
    def qualified_name(self) -> str:
        """`namespace.name`, or the name alone."""
        return qualify(self.namespace, self.name)

    def copied(self) -> RemoteSkill:
        """Return the skill with schemas of its own."""
        schemas = {name: copy.deepcopy(getattr(self, name)) for name in ("input_schema", "output_schema")}
        return replace(self, **schemas)

    def to_tool(self) -> JsonObject:
        """Return the wire tool: with exactly the keys a Codex server reads."""
        schema = copy.deepcopy(self.input_schema)
        tool: JsonObject = {"name": self.name, "description": self.description, "inputSchema": schema}
        if self.namespace:
            tool["namespace"] = self.namespace
        if self.defer_loading:
            tool["deferLoading"] = True
        return tool


@dataclass(slots=True)
class _Stack:
    """The layers of one qualified name: a base, and windows in the order they were opened.

    A layer is its skill, compared by identity: two windows may have equal skills.
    """

    base: RemoteSkill | None = None
    windows: list[RemoteSkill] = field(default_factory=list)

    @property
    def visible(self) -> RemoteSkill | None:
        return self.windows[-1] if self.windows else self.base


class RemoteSkillRegistry:
    """Layers of skills per qualified name, safe from any thread; *profile* has the rules of the server that is shown them."""

    def __init__(self, profile: ServerProfile) -> None:
        self.profile = profile
        self._stacks: dict[str, _Stack] = {}
        self._diagnostics: deque[Diagnostic] = deque(maxlen=MAX_DIAGNOSTICS)
        self._lock = threading.RLock()

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """The findings so far, oldest first, as a new list."""
        with self._lock:
            return list(self._diagnostics)

    def note(self, diagnostic: Diagnostic) -> None:
        """Add a finding."""
        with self._lock:
            self._diagnostics.append(diagnostic)

    def build(
        self,
        name: str,
        handler: Callable[..., Any],
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        namespace: str | None = None,
        deadline_seconds: float | None = 120.0,
        idempotent: bool = False,
        defer_loading: bool = False,
    ) -> RemoteSkill:
        """Return the skill these parameters of `register` describe. Raises ValueError, CatalogError, TypeError."""
        name = clean_name(name)
        if not callable(handler):
            raise TypeError(f"the handler of `{name}` cannot be called: it is a {type(handler).__name__}")
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds of `{name}` must be positive or None, got {deadline_seconds!r}")
        namespace = namespace.strip() if namespace is not None else None
        check_name(namespace, name, self.profile, defer_loading=defer_loading)
        derived = derive(name, handler, input_schema, output_schema)
        model_text = description if description is not None and description.strip() else derived.description
        model_text = model_text or f"Remote skill {name}"
        try:
            model_text.encode()
        except UnicodeEncodeError as error:
            message = f"the description of `{name}` cannot be sent: {error.reason} at character {error.start}"
            advice = "describe it in characters that exist"
            raise CatalogError(message, rule="description_text", suggestion=advice) from error
        options = {"deadline_seconds": deadline_seconds, "idempotent": idempotent, "defer_loading": defer_loading}
        facts = derived._asdict() | options | {"description": model_text, "namespace": namespace}
        return RemoteSkill(name, handler, **facts)

    def register(self, skill: RemoteSkill) -> RemoteSkill:
        """Register the base of the skill's name; a replaced base keeps its position. Raises CatalogError."""
        name = skill.qualified_name
        with self._lock:
            self._check(skill)
            stack = self._stacks.setdefault(name, _Stack())
            replaced, stack.base = stack.base, skill
            if stack.windows:
                words = f"`{name}` was registered under an open window, which stays visible until it is left"
                self.note(Diagnostic("shadowed_by_window", "warning", words, ref=name))
            elif replaced is not None:
                words = f"`{name}` was registered again; the newer handler is in force"
                fix = "unregister the name first when the change is meant"
                self.note(Diagnostic("remote_skill_overwritten", "warning", words, ref=name, fix=fix))
        return skill

    def open(self, skill: RemoteSkill) -> RemoteSkill:
        """Put a window's skill on top of its name and return it; `close` removes it."""
        with self._lock:
            self._check(skill)
            self._stacks.setdefault(skill.qualified_name, _Stack()).windows.append(skill)
        return skill

    def close(self, skill: RemoteSkill) -> bool:
        """Remove this window's skill from its stack; return False when it was removed before."""
        name = skill.qualified_name
        with self._lock:
            stack = self._stacks.get(name)
            if stack is None or not any(window is skill for window in stack.windows):
                return False
            stack.windows = [window for window in stack.windows if window is not skill]
            if stack.visible is None:
                del self._stacks[name]
            return True

    def unregister(self, qualified_name: str) -> bool:
        """Drop every layer of a name; False when there was none."""
        with self._lock:
            return self._stacks.pop(qualified_name, None) is not None

    def clear(self) -> int:
        """Drop every layer of every name; returns how many skills were visible."""
        with self._lock:
            count, self._stacks = len(self._stacks), {}
            return count

    def skills(self) -> list[RemoteSkill]:
        """Return the visible skills in registration order; not copied, for this room only."""
        with self._lock:
            return [skill for stack in self._stacks.values() if (skill := stack.visible) is not None]

    def bases(self) -> list[RemoteSkill]:
        """Return the base of each name in registration order."""
        with self._lock:
            return [stack.base for stack in self._stacks.values() if stack.base is not None]

    def find(self, tool: str, namespace: str | None = None) -> RemoteSkill | None:
        """Return the visible skill a call names, or None; without a namespace also `namespace.name` or `namespace__name`."""
        name = tool.strip()
        with self._lock:
            stack = self._stacks.get(qualify(namespace, name))
            if stack is not None and stack.visible is not None:
                return stack.visible
            flat = (s for s in self.skills() if not namespace and s.namespace and f"{s.namespace}__{s.name}" == name)
            return next(flat, None)

    def _check(self, skill: RemoteSkill) -> None:
        check_neighbours(skill.namespace, skill.name, [(s.namespace, s.name) for s in self.skills()])


TOOLS_KEYWORDS = ("dynamic_tools", "dynamicTools")
"""The two spellings of the keyword with wire tools; clients convert the first to the second."""

_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def wire_tools(skills: Iterable[RemoteSkill]) -> list[JsonObject]:
    """Return the tools of a catalog, sorted by qualified name, with schemas of their own."""
    return [skill.to_tool() for skill in sorted(skills, key=lambda skill: skill.qualified_name)]


def instruction_text(skills: Iterable[RemoteSkill]) -> str:
    """Return the catalog as text: empty without skills, no trailing newline."""
    lines = []
    for skill in sorted(skills, key=lambda skill: skill.qualified_name):
        lines.append(f"- {skill.qualified_name}: {_BREAK.sub(' ', skill.description)}")
        lines.append(f"  input_schema: {json.dumps(skill.input_schema, sort_keys=True)}")
        if skill.output_schema:
            lines.append(f"  output_schema: {json.dumps(skill.output_schema, sort_keys=True)}")
        if skill.output_description:
            lines.append(f"  output_description: {_BREAK.sub(' ', skill.output_description)}")
    return "\n".join([*HEADER, *lines]) if lines else ""


def inject(catalog: str, text: str) -> str:
    """Return the user's text below the catalog; the text alone when there is no catalog."""
    return f"{catalog}\n\nUser request:\n{text}" if catalog else text
