"""Tools a solver offers beside the skill tools: typed functions, those of a bundle's `tools.py`, and `remote.<name>`.

A remote session is any object with the two methods of `RemoteSession`; `kdskills.remote` has them. Its own dispatcher
validates arguments, runs the handler within its deadline and answers in words, so nothing of that is written here.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
import traceback
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from kdskills.errors import BundleError, ModelMustAct, NameTaken, PluginInvalid, ToolCallRefused
from kdskills.models import ModelImage, ToolSpec
from kdskills.session.brief import BriefText
from kdskills.session.threads import HandlerThreads
from kdskills.session.tools import pointer, safe_name

if TYPE_CHECKING:
    from kdskills.session.approval import User
    from kdskills.solver.turn import Turn


T = TypeVar("T")

_THREADS = HandlerThreads()
_HALVES = re.compile("[\ud800-\udfff]")


class TookTooLong(Exception):
    """The time is up; unlike `TimeoutError`, nothing but `within` raises it."""


def whole_text(text: str) -> str:
    """Return *text* with halves of surrogate pairs replaced: no transport can encode them."""
    return _HALVES.sub("\ufffd", text)


async def within(work: Coroutine[Any, Any, T], limit: float, grace: float) -> T:
    """Return what *work* gives within *limit* seconds, else raise TookTooLong.

    When the time is up or the caller is cancelled, *work* is cancelled and waited for at most *grace* seconds: what
    ignores its cancellation is left behind.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit)
        if task.done():
            return task.result()
        raise TookTooLong
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace)
        if task.done() and not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not warn about it later


async def in_thread(function: Callable[[], T]) -> T:
    """Return what *function* gives, run in a daemon thread that sees this context.

    The loop's own pool is small and shared: functions that never return would use it up, and the end of the process
    would wait for them.
    """
    return await _THREADS.call(partial(contextvars.copy_context().run, function))


MAX_NESTING = 8
"""How often a type may stand within itself before its schema ends."""


class ToolError(ModelMustAct, code="tool_error"):
    """What a tool could not do, in words for the model; of other exceptions it reads the class name only."""


@dataclass(frozen=True)
class ToolContext:
    """What a tool may know of the call it serves: the turn, and the call's id."""

    turn: Turn
    call_id: str

    @property
    def user(self) -> User | None:
        """Whom the turn is for; only the id may be written anywhere."""
        return self.turn.session.scope.user

    @property
    def deps(self) -> Any:
        """What the caller of the turn gave as `deps`, the same object."""
        return self.turn.session.scope.deps


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool may return beside a plain JSON value.

    `artifacts` are paths of the turn's files it wrote; `changed` says that the turn's state is another one, so that a
    repeated call may answer differently; `pin` marks a text a compactor must keep; `images` are shown beside the value,
    to a model that `Turn.takes_images`. `later`, in place of a value, gives the answer once the calls beside this one are
    done, in the order of the calls: for what may not depend on which of them is done first.
    """

    value: Any
    artifacts: tuple[str, ...] = ()
    changed: bool = False
    pin: str | None = None
    ok: bool = True
    images: tuple[ModelImage, ...] = ()
    later: Callable[[], Awaitable[ToolAnswer]] | None = None


ToolBody = Callable[[BaseModel, ToolContext], Awaitable[Any]]


@dataclass(frozen=True)
class SolverTool:
    """A tool.

    Attributes:
        id: Dotted id, such as `tools.lookup`.
        description: What it does, for the model.
        input_model: Arguments; unknown ones are refused.
        body: Does it; raises `ToolError` to tell the model why not.
        barrier: Whether a call of these arguments changes state others read, so that it runs alone.
        timeout_s: Seconds it may take; None: as the settings say.
        schema: JSON Schema shown instead of the model's own.
        brief: Its few words for models with a small window; False: it is offered as it is, None: not at all there.
    """

    id: str
    description: str
    input_model: type[BaseModel]
    body: ToolBody
    barrier: Callable[[BaseModel], bool] = field(default=lambda _arguments: False)
    timeout_s: float | None = None
    schema: Mapping[str, Any] | None = None
    brief: BriefText | Literal[False] | None = False

    def spec(self, *, brief: bool = False) -> ToolSpec:
        """Return the tool as offered to a model, under its safe spelling."""
        schema = self.schema if self.schema is not None else plain_schema(self.input_model)
        full_spec = ToolSpec(safe_name(self.id), self.description, schema, self.id)
        return self.brief.spec(full_spec) if brief and self.brief else full_spec

    def parse(self, raw: str) -> BaseModel:
        """Return the arguments in the JSON text *raw*; raises `invalid_argument` with JSON pointers and the schema."""
        try:
            return self.input_model.model_validate_json(raw or "{}")
        except ValidationError as error:
            mistakes = error.errors(include_url=False, include_input=False)
            problems = [{"path": pointer(item["loc"]), "problem": item["msg"]} for item in mistakes]
            summary = "; ".join(f"{p['path'] or 'the arguments'}: {p['problem']}" for p in problems[:5])
            message, schema = f"invalid arguments: {summary}", dict(self.spec().input_schema)
            raise ToolCallRefused(message, code="invalid_argument", errors=problems[:20], schema=schema) from None


def plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON Schema without `$ref` and titles; objects refuse unknown fields."""
    raw = model.model_json_schema()
    schema = _flat(raw, raw.pop("$defs", {}), 0)
    schema.pop("description", None)
    return {**schema, "additionalProperties": False}


def _flat(node: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if isinstance(node, list):
        return [_flat(item, definitions, depth) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        if depth > MAX_NESTING:  # a recursive type: its deeper levels are any object
            return {"type": "object"}
        target = definitions[node["$ref"].rpartition("/")[2]]
        overrides = {key: value for key, value in node.items() if key != "$ref"}
        return _flat({**target, **overrides}, definitions, depth + 1)
    members = {key: value for key, value in node.items() if key != "title" and not (key == "default" and value is None)}
    properties = members.pop("properties", None)
    schema = {key: _flat(value, definitions, depth) for key, value in members.items()}
    if properties is not None:
        schema["properties"] = {name: _flat(value, definitions, depth) for name, value in properties.items()}
    return schema


def tool_from_function(function: Callable[..., Any], *, tool_id: str | None = None) -> SolverTool:
    """Return a typed function as a tool: its docstring's first paragraph describes it, parameters are the arguments.

    A parameter annotated `ToolContext` is filled in. A plain `def` runs in a thread, where the turn's skills are
    active, too. Raises PluginInvalid for a parameter without a type, or with one that has no JSON form.
    """
    name = tool_id or f"tools.{function.__name__}"
    hints = typing.get_type_hints(function, include_extras=True)
    context: str | None = None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
            raise PluginInvalid(f"tool {name}: *{parameter.name} has no JSON form", tool=name)
        if parameter.name not in hints:
            raise PluginInvalid(f"tool {name}: the parameter {parameter.name} has no type", tool=name)
        if hints[parameter.name] is ToolContext:
            context = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid", frozen=True), **fields)
        schema = plain_schema(model)
    except PydanticUserError as error:
        raise PluginInvalid(f"tool {name}: {error.message.splitlines()[0]}", tool=name) from None

    async def body(arguments: BaseModel, call: ToolContext) -> Any:
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        if context is not None:
            values[context] = call
        if inspect.iscoroutinefunction(function):
            return await function(**values)
        result = await in_thread(partial(function, **values))
        return await result if inspect.isawaitable(result) else result

    paragraph = " ".join((inspect.getdoc(function) or name).split("\n\n", 1)[0].split())
    return SolverTool(name, paragraph, model, body, schema=schema)


def tool_problem(entry: object, name: str) -> str | None:
    """Return why *entry* is no tool that can be offered under the id *name*, or None: told when it is registered."""
    if not isinstance(entry, SolverTool):
        if callable(entry):
            return "it is a function: make a tool of it with tool_from_function(function, tool_id=...)"
        return f"a {type(entry).__name__} is no SolverTool"
    tool: Any = entry  # plugins are not typed: its fields may be anything
    if tool.id != name:
        return f"the tool's own id is {tool.id!r}"
    if not isinstance(tool.input_model, type) or not issubclass(tool.input_model, BaseModel):
        return "its input_model is no pydantic model"
    if not callable(tool.body) or not callable(tool.barrier):
        return "its body and barrier must be functions"
    if not isinstance(tool.description, str) or not tool.description.strip():
        return "it has no description"
    try:
        json.dumps(dict(entry.spec().input_schema))
    except (PydanticUserError, TypeError, ValueError) as error:
        return f"its arguments have no JSON Schema: {str(error).splitlines()[0]}"
    return None


def as_tool(entry: object, *, of_bundle: bool = False) -> SolverTool:
    """Return an entry of `TOOLS` or `tools=` as a tool. Raises PluginInvalid for anything but functions and sound tools."""
    if isinstance(entry, SolverTool):
        if of_bundle and not entry.id.startswith("tools."):
            raise PluginInvalid(f"a bundle's tool is named tools.<name>, not {entry.id!r}", tool=entry.id)
        problem = tool_problem(entry, entry.id)
        if problem is not None:
            raise PluginInvalid(f"the tool {entry.id!r} cannot be used: {problem}", tool=str(entry.id))
        return entry
    if callable(entry) and hasattr(entry, "__name__"):
        return tool_from_function(entry)
    raise PluginInvalid(f"{entry!r} is neither a function nor a SolverTool")


def load_bundle_tools(path: Path) -> tuple[SolverTool, ...]:
    """Return the tools of a bundle's `tools.py`: trusted code, run in a namespace of its own, outside `sys.modules`.

    Raises BundleError `bundle_tools_failed`, with file and line.
    """
    namespace: dict[str, Any] = {"__name__": "kdskills_bundle_tools", "__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), namespace)  # noqa: S102 - trusted by contract
        return tuple(as_tool(entry, of_bundle=True) for entry in namespace["TOOLS"])
    except (Exception, SystemExit) as error:
        line = _line(error, str(path))
        problem = "there is no list TOOLS" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        message = f"{path.name}, line {line}: {problem}"
        raise BundleError(message, code="bundle_tools_failed", file=path.name, line=line) from error


def _line(error: BaseException, path: str) -> int:
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    # Not `extract_tb`: it reads sources through a cache all threads share, and which breaks when two of them use it.
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return next((line for line in reversed(lines) if line), 1)


class ToolTable:
    """The tools of a system by either spelling; raises NameTaken when two share an id or safe spelling."""

    def __init__(self, tools: Sequence[SolverTool]) -> None:
        self._by_name: dict[str, SolverTool] = {}
        for tool in tools:
            for spelling in dict.fromkeys((safe_name(tool.id), tool.id)):
                if spelling in self._by_name:
                    first_id = self._by_name[spelling].id
                    raise NameTaken(f"the tools {first_id} and {tool.id} share one name", name=spelling, kind="tool")
                self._by_name[spelling] = tool
        self.all = tuple(tools)

    @property
    def ids(self) -> tuple[str, ...]:
        """Dotted ids."""
        return tuple(tool.id for tool in self.all)

    def get(self, name: str) -> SolverTool | None:
        """Return the tool of either spelling, or None."""
        return self._by_name.get(name)


@runtime_checkable
class RemoteSession(Protocol):
    """A session with registered functions; its methods may be coroutines."""

    def list(self) -> Sequence[Any]:
        """Return the functions; each has a `qualified_name`, a `description` and an `input_schema`."""

    def dispatch_tool_call(self, *, tool: str, arguments: Any = None, call_id: str | None = None) -> Any:
        """Run one; the answer has `response_payload` and `error`."""


class RemoteArguments(BaseModel):
    """Any JSON object: the session validates it against the function's own schema."""

    model_config = ConfigDict(extra="allow", frozen=True)


def remote_tools(session: RemoteSession) -> tuple[SolverTool, ...]:
    """Return the session's functions as tools, as they are registered now."""

    async def dispatch(name: str, arguments: BaseModel, context: ToolContext) -> str:
        given = dict(arguments.model_extra or {})
        call = partial(session.dispatch_tool_call, tool=name, arguments=given, call_id=context.call_id)
        # A sync session runs the handler in the calling thread, which must not be the event loop's.
        reply = await (call() if inspect.iscoroutinefunction(session.dispatch_tool_call) else in_thread(call))
        # An image or a sound is named, because the solver's answers are text.
        items: Sequence[Mapping[str, Any]] = reply.response_payload["contentItems"]
        text = "\n".join(str(i["text"]) if i.get("type") == "inputText" else f"[{i.get('type')}]" for i in items)
        if not reply.response_payload["success"]:
            raise ToolError(text)
        return text

    return tuple(
        SolverTool(
            f"remote.{skill.qualified_name}",
            skill.description,
            RemoteArguments,
            partial(dispatch, skill.qualified_name),
            schema=dict(skill.input_schema),
        )
        for skill in session.list()
    )
