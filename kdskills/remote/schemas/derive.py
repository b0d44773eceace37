"""Derives the schemas and descriptions of a handler from its annotations and docstring, and converts arguments accordingly.

Each annotation is resolved on its own, so that one unknown name spoils nothing else.
"""

from __future__ import annotations

import base64
import binascii
import collections
import functools
import inspect
import itertools
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, is_dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, Flag
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, ForwardRef, Literal, NamedTuple, NotRequired, Required, TypeVar
from uuid import UUID

from pydantic import AliasChoices, BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo

from kdskills.models.schemas import linear_validator
from kdskills.remote.ports import JsonObject, RemoteCall
from kdskills.remote.schemas.checks import checked_schema, permissive_schema

_PARAMETERS = ("attributes", "attrs", "args", "arguments", "parameters", "params", "keyword args", "keyword arguments")
_RETURNS = ("returns", "return")
_OTHER_SECTIONS = (
    *("example", "examples", "note", "notes", "raises", "references", "see also", "todo"),
    *("warning", "warnings", "warns", "yield", "yields"),
)
_SECTIONS = frozenset({*_PARAMETERS, *_RETURNS, *_OTHER_SECTIONS})
_HEADER = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):\s*")
_ITEM = re.compile(r"\*{0,2}([A-Za-z_]\w*)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?")
_WORD = r"[\w.]+(?:\[[^:]*\])?"
_TYPE = re.compile(rf"`{{0,2}}{_WORD}(?:\s*(?:\||\bor\b|\bof\b)\s*{_WORD})*`{{0,2}}\s*:(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring says."""

    summary: str | None = None  # the first paragraph in one line
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # or attributes
    returns: str | None = None  # what is said of the result, without its type


def parse_docstring(text: str | None) -> Docstring:
    """Return what a docstring says; nothing of it is guessed."""
    if not text or not text.strip():
        return Docstring()
    lines = inspect.cleandoc(text).splitlines()
    body = next((line for line in lines[1:] if line.strip()), None)
    if _section(lines[0]) and body is not None and not body[0].isspace() and not _section(body):
        lines[1:] = [f"    {line}" for line in lines[1:]]  # a lone section on the first line keeps its body indented
    summary: list[str] = []
    sections: dict[str, list[str]] = {}
    current: list[str] | None = summary
    for line in lines:
        blank = not line.strip()
        if name := _section(line):
            current = sections.setdefault(name, [])
        elif blank if current is summary else not (blank or line[0].isspace()):
            current = None  # a blank line ends the summary, text at the left edge a section
        elif current is not None:
            current.append(line)
    parameters: dict[str, str] = {}
    for name in _PARAMETERS:
        parameters.update(_entries(sections.get(name, ())))
    returns = _joined(next((section for name in _RETURNS if (section := sections.get(name))), ()))
    typed = _TYPE.match(returns)
    returns = returns[typed.end() :].strip() if typed else returns
    return Docstring(_joined(summary) or None, MappingProxyType(parameters), returns or None)


def _section(line: str) -> str | None:
    match = _HEADER.fullmatch(line)
    return match[1].lower() if match and match[1].lower() in _SECTIONS else None


def _entries(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    indents = [len(line) - len(line.lstrip()) for line in lines]
    edge = min((indent for indent, line in zip(indents, lines, strict=True) if line.strip()), default=0)
    current: list[str] = []
    for indent, line in zip(indents, lines, strict=True):
        item = _ITEM.fullmatch(line.strip()) if indent == edge else None
        if item:
            current = items.setdefault(item[1], [])
        current.append((item[2] or "") if item else line)
    return {name: text for name, item_lines in items.items() if (text := _joined(item_lines))}


def _joined(lines: Sequence[str]) -> str:
    return " ".join(part for line in lines if (part := line.strip()))


def target_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose annotations and docstring speak for a handler."""
    target: Any = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the function behind it is wanted, not a yes or no
    unwrapped: Callable[..., Any] = inspect.unwrap(target)
    return unwrapped


def _scope_of(handler: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global and the enclosing names a handler's annotations may use."""
    function = target_of(handler)
    if inspect.isclass(function):
        return module_names(function), {}
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    local: dict[str, Any] = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # a name of the enclosing function that has no value yet
            local[name] = cell.cell_contents
    return dict(getattr(function, "__globals__", {})), local


def module_names(cls: type) -> dict[str, Any]:
    """Return the names of the module a class was written in."""
    return dict(vars(sys.modules.get(cls.__module__, types.ModuleType("none"))))


def resolve(annotation: object, names: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """Return the type an annotation means; for an unknown name `Any`, or `RemoteCall` where it says so."""
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})  # of a class, where `ClassVar` is allowed
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - an annotation is the handler's own code and may fail in any way: unresolvable is `{}`
        spelt = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
        parts = spelt.replace("Optional[", "").replace("]", "").split("|") if isinstance(spelt, str) else []
        return RemoteCall if RemoteCall.__name__ in {part.strip().rpartition(".")[2] for part in parts} else Any


def class_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a class and its bases, each resolved where it was written."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        # Of the class's own names only classes inside it: a field `date: date = None` must not hide the type by its default.
        local = {name: inner for name, inner in vars(base).items() if inspect.isclass(inner)} | {base.__name__: base}
        names, annotations = module_names(base), inspect.get_annotations(base)
        hints.update({name: resolve(annotation, names, local) for name, annotation in annotations.items()})
    return hints


def _signature(handler: Callable[..., Any]) -> inspect.Signature:
    """Return a handler's signature; an empty one when Python cannot tell it."""
    try:
        return inspect.signature(handler)
    except (TypeError, ValueError):
        return inspect.Signature()


def return_of(handler: Callable[..., Any]) -> Any:
    """Return what a handler says it returns, coroutines unwrapped; `inspect.Signature.empty` when it says nothing."""
    annotation = _signature(handler).return_annotation
    if annotation is inspect.Signature.empty or inspect.isclass(target_of(handler)):
        return inspect.Signature.empty
    resolved = resolve(annotation, *_scope_of(handler))
    origin, arguments = typing.get_origin(resolved), typing.get_args(resolved)
    is_awaited = arguments and getattr(origin, "__name__", "") in {"Awaitable", "Coroutine"}
    return arguments[-1] if is_awaited else resolved


def is_call(annotation: object) -> bool:
    """Whether a parameter of this annotation takes the `RemoteCall`."""
    return annotation is RemoteCall or (is_union(annotation) and RemoteCall in typing.get_args(annotation))


def is_union(annotation: object) -> bool:
    """Whether an annotation is `X | Y`, in either spelling."""
    return typing.get_origin(annotation) in {typing.Union, types.UnionType}


def bare(annotation: Any) -> Any:
    """Return an annotation without its wrappers: `Annotated`, `Required`, `Final`, `InitVar`, `NewType`, type variables."""
    while True:
        if typing.get_origin(annotation) in {Annotated, Required, NotRequired, Final}:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, InitVar):
            annotation = annotation.type
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif hasattr(annotation, "__value__") and type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def note_of(annotation: Any) -> str | None:
    """Return the description an `Annotated` carries, as text or in an object's `description`."""
    for extra in getattr(annotation, "__metadata__", ()):
        note = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(note, str) and note.strip():
            return note
    return None


@dataclass(frozen=True, slots=True)
class Member:
    """One property of an object: its name in JSON, its resolved type (`Any` without one), and what is said of it."""

    name: str
    annotation: Any
    required: bool
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A class as a JSON object; its description is the first paragraph of the class's own docstring."""

    # How objects of it come to be: `dataclass` by its parameters, `model` by pydantic, `dict` and `class` not at all.
    kind: Literal["dataclass", "model", "dict", "class"]
    members: tuple[Member, ...]
    description: str | None


def is_typed_dict(cls: object) -> bool:
    """Whether a class is a TypedDict, of `typing` or of `typing_extensions`."""
    return inspect.isclass(cls) and issubclass(cls, dict) and hasattr(cls, "__required_keys__")


def shape_of(annotation: Any) -> Shape | None:
    """Return the shape of a class or of a generic class with its arguments; None when it has none."""
    cls = typing.get_origin(annotation) or annotation
    if not inspect.isclass(cls) or getattr(cls, "_is_protocol", False):
        return None
    kind: Literal["dataclass", "model", "dict", "class"] = "dataclass"
    if issubclass(cls, BaseModel):
        kind, scope = "model", (module_names(cls), {cls.__name__: cls})
        members = [
            Member(_alias(name, info), resolve(info.annotation, *scope), info.is_required(), info.description)
            for name, info in cls.model_fields.items()
        ]
    elif is_typed_dict(cls):
        kind, members = "dict", []
        for name, hint in class_hints(cls).items():
            # A TypedDict written under `from __future__ import annotations` does not know its own markers.
            origin = typing.get_origin(hint)
            is_named = name in getattr(cls, "__required_keys__", ())
            members.append(Member(name, hint, origin is Required or (origin is not NotRequired and is_named)))
    elif is_dataclass(cls):
        members = _init_members(cls)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints, defaults = class_hints(cls), getattr(cls, "_field_defaults", {})
        members = [Member(name, hints.get(name, Any), name not in defaults) for name in cls._fields]
    elif isinstance(getattr(cls, "__init__", None), types.FunctionType):
        kind, members = "class", _init_members(cls)
    else:
        fields = {
            name: hint for name, hint in class_hints(cls).items() if ClassVar not in (hint, typing.get_origin(hint))
        }
        kind, members = "class", [Member(name, hint, not hasattr(cls, name)) for name, hint in fields.items()]
        if not members:
            return None
    text = cls.__dict__.get("__doc__")
    written = isinstance(text, str) and not text.startswith(f"{cls.__name__}(")  # dataclasses write one of their own
    doc = parse_docstring(text if written else None)
    variables = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))
    for number, member in enumerate(members):
        note = member.description or note_of(member.annotation) or doc.parameters.get(member.name)
        members[number] = replace(member, annotation=_substituted(member.annotation, variables), description=note)
    return Shape(kind, tuple(members), doc.summary)


def _substituted(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation of a generic class with its type variables filled in."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if variables and parameters and not inspect.isclass(annotation):
        return annotation[tuple(variables.get(name, name) for name in parameters)]
    return annotation


def _alias(name: str, info: FieldInfo) -> str:
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        alias = next((choice for choice in alias.choices if isinstance(choice, str)), None)
    return alias if isinstance(alias, str) else info.alias or name


def _init_members(cls: type) -> list[Member]:
    init = getattr(cls, "__init__")  # noqa: B009 - of the class, not of an object
    hints, names = class_hints(cls), {**module_names(cls), **getattr(init, "__globals__", {})}
    members = []
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        annotation = hints.get(parameter.name, Any)
        if parameter.name not in hints and parameter.annotation is not parameter.empty:
            annotation = resolve(parameter.annotation, names, {cls.__name__: cls})
        members.append(Member(parameter.name, annotation, parameter.default is parameter.empty))
    return members


def _from_base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


SCALARS: tuple[tuple[type, JsonObject, Callable[[Any], Any] | None], ...] = (
    (bool, {"type": "boolean"}, None),
    # 3.0 is an integer for JSON Schema
    (int, {"type": "integer"}, lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
    (float, {"type": "number"}, None),
    (str, {"type": "string"}, None),
    (bytes, {"type": "string", "contentEncoding": "base64"}, _from_base64),
    (datetime, {"type": "string", "format": "date-time"}, datetime.fromisoformat),
    (date, {"type": "string", "format": "date"}, date.fromisoformat),
    (time, {"type": "string", "format": "time"}, time.fromisoformat),
    (Decimal, {"type": "number"}, lambda value: Decimal(str(value))),
    (PurePath, {"type": "string"}, None),
    (UUID, {"type": "string", "format": "uuid"}, UUID),
)
"""Classes, the schema of each and its subclasses, and how a JSON scalar becomes an object of exactly this class.

The first that fits counts, so bool before int. Paths are made by their own class.
"""


MAX_DEPTH = 24
"""Nesting of types beyond which a schema says nothing more; only generic classes that grow without end reach it."""

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Iterator, abc.Collection, collections.deque)
SETS = (set, frozenset, abc.Set, abc.MutableSet)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping, collections.OrderedDict, collections.defaultdict)
_NON_WORD = re.compile(r"\W+", re.ASCII)
_KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", types.NoneType: "null"}


def _plain(value: Any) -> Any:
    """Return the JSON scalar of a value whose class is a subclass of one (`StrEnum` members, for instance)."""
    if isinstance(value, Enum):
        value = value.value
    if type(value) in _KINDS:
        return value
    return next((kind(value) for kind in (str, int, float) if isinstance(value, kind)), value)


def enum_schema(values: Sequence[Any]) -> JsonObject:
    """Return `type` and `enum` of the values; nothing when one of them is no JSON scalar."""
    kinds = list(dict.fromkeys(_KINDS.get(type(value), "") for value in values))
    if not kinds or "" in kinds:
        return {}
    kinds.sort(key=lambda kind: kind == "null")  # null last; the others as they came
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def enum_values(cls: type[Enum]) -> list[Any]:
    """Return what stands for the members in JSON: their values, or their names when a value is no JSON scalar."""
    values = [_plain(member.value) for member in cls]
    return values if all(type(value) in _KINDS for value in values) else [member.name for member in cls]


def nullable(schema: JsonObject) -> JsonObject:
    """Return the schema with null let in: in `type` and `enum` where that says it, else by `anyOf`; never `nullable`."""
    kind = schema.get("type")
    if not schema or kind == "null":
        return schema
    if "anyOf" in schema:
        branches = schema["anyOf"]
        return schema if {"type": "null"} in branches else {**schema, "anyOf": [*branches, {"type": "null"}]}
    if kind is None:
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = kind if isinstance(kind, list) else [kind]
    widened = {**schema, "type": kinds if "null" in kinds else [*kinds, "null"]}
    if "enum" in schema and None not in schema["enum"]:
        widened["enum"] = [*schema["enum"], None]
    return widened


class SchemaBuilder:
    """Builds the schemas of one root; `defs` then holds its recursive classes."""

    def __init__(self) -> None:
        self.defs: dict[str, JsonObject] = {}
        self._open: list[Any] = []
        self._names: list[tuple[Any, str]] = []

    def schema_of(self, annotation: Any) -> JsonObject:
        """Return the schema of one annotation; `{}` for what says nothing."""
        annotation = bare(annotation)
        if annotation is None or annotation is types.NoneType:
            return {"type": "null"}
        origin, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if is_union(annotation):
            return self._union(type_arguments)
        if origin is Literal:
            return enum_schema([_plain(value) for value in type_arguments])
        cls = origin or annotation
        if not inspect.isclass(cls) or len(self._open) > MAX_DEPTH:
            return {}
        if issubclass(cls, Enum):
            return {"type": "integer"} if issubclass(cls, Flag) else enum_schema(enum_values(cls))
        for scalar, schema, _ in SCALARS:
            if issubclass(cls, scalar):
                return dict(schema)
        if issubclass(cls, RootModel):
            return self.schema_of(cls.model_fields["root"].annotation)
        if not is_typed_dict(cls) and not hasattr(cls, "_fields"):
            collection = self._collection(cls, type_arguments)
            if collection is not None:
                return collection
        return self._object(annotation)

    def finish(self, schema: JsonObject) -> JsonObject:
        """Return a root schema with the recursive classes its references need."""
        return {**schema, "$defs": self.defs} if self.defs else schema

    def _collection(self, cls: type, type_arguments: tuple[Any, ...]) -> JsonObject | None:
        if cls in MAPPINGS or issubclass(cls, dict):
            values = self.schema_of(type_arguments[1]) if len(type_arguments) > 1 else {}
            return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
        if issubclass(cls, tuple):
            if type_arguments and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
                fixed = [self.schema_of(item) for item in type_arguments]
                return {"type": "array", "prefixItems": fixed, "minItems": len(fixed), "maxItems": len(fixed)}
        elif cls not in (*SETS, *LISTS) and not issubclass(cls, (set, frozenset, list)):
            return None
        items = self.schema_of(type_arguments[0]) if type_arguments else {}
        schema: JsonObject = {"type": "array", "items": items} if items else {"type": "array"}
        return {**schema, "uniqueItems": True} if cls in SETS or issubclass(cls, (set, frozenset)) else schema

    def _union(self, members: tuple[Any, ...]) -> JsonObject:
        schemas: list[JsonObject] = []
        for member in members:
            if member is not types.NoneType and (schema := self.schema_of(member)) not in schemas:
                schemas.append(schema)
        if {} in schemas:
            return {}
        joined = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return nullable(joined) if types.NoneType in members else joined

    def _object(self, annotation: Any) -> JsonObject:
        if annotation in self._open:
            return {"$ref": f"#/$defs/{self._name(annotation)}"}
        shape = shape_of(annotation)
        if shape is None:
            return {}
        schema: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
        self._open.append(annotation)
        try:
            for member in shape.members:
                member_schema = self.schema_of(member.annotation)
                schema["properties"][member.name] = described(member_schema, member.description, over=True)
        finally:
            self._open.pop()
        if required := [member.name for member in shape.members if member.required]:
            schema["required"] = required
        schema = described(schema, shape.description)
        if all(named != annotation for named, _ in self._names):
            return schema
        self.defs[self._name(annotation)] = schema
        return {"$ref": f"#/$defs/{self._name(annotation)}"}

    def _name(self, annotation: Any) -> str:
        """Return the name of a recursive class in `$defs`, a new one when it has none."""
        for named_annotation, name in self._names:
            if named_annotation == annotation:
                return name
        cls = typing.get_origin(annotation) or annotation
        stem = _NON_WORD.sub("_", cls.__name__) or "Object"
        used_names = {name for _, name in self._names}
        candidates = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        name = next(name for name in candidates if name not in used_names)
        self._names.append((annotation, name))
        return name


def described(schema: JsonObject, description: str | None, *, over: bool = False) -> JsonObject:
    """Return the schema with a description, where it has none or *over* the one it has."""
    if not description or not description.strip() or ("description" in schema and not over):
        return schema
    return {**schema, "description": description}


class ArgumentError(ValueError):
    """An argument that fits its schema and yet cannot become what the handler's annotation asks for."""


def convert(annotation: Any, value: Any, path: str) -> Any:
    """Return a validated JSON value as an object of the annotation; what the annotation does not name stays as it is.

    Raises ArgumentError, which begins with the path, when the class refused the value.
    """
    annotation = bare(annotation)
    if value is None or annotation is Any:
        return value
    origin, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        return _member_of_union(type_arguments, value, path)
    if origin is Literal:
        enums = (choice for choice in type_arguments if isinstance(choice, Enum) and choice.value == value)
        return next((choice for choice in enums if type(choice.value) is type(value)), value)
    cls = origin or annotation
    if not inspect.isclass(cls):
        return value
    if issubclass(cls, Enum):
        for member, plain in zip(cls, enum_values(cls), strict=True):
            if plain == value and isinstance(plain, bool) == isinstance(value, bool):
                return member
        return _constructed(cls, path, value)
    if issubclass(cls, BaseModel):
        return _model(cls, value, path)
    if isinstance(value, list):
        return _items(cls, type_arguments, value, path)
    if isinstance(value, dict):
        return _object(cls, annotation, type_arguments, value, path)
    if issubclass(cls, PurePath):
        return _constructed(cls, path, value)
    read = next((read for kind, _, read in SCALARS if cls is kind), None)
    return value if read is None else _constructed(read, path, value)


def _items(cls: type, type_arguments: tuple[Any, ...], value: list[Any], path: str) -> Any:
    kinds: abc.Iterable[Any] = itertools.repeat(type_arguments[0] if type_arguments else Any)
    if issubclass(cls, tuple) and type_arguments and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
        kinds = type_arguments
    numbered = enumerate(zip(kinds, value, strict=False))
    items = [convert(kind, item, f"{path}[{number}]") for number, (kind, item) in numbered]
    if issubclass(cls, tuple):
        return tuple(items)
    if cls in SETS or issubclass(cls, (set, frozenset)):
        return _constructed(frozenset if cls is frozenset else set, path, items)
    return items if cls in LISTS else value


def _object(cls: type, annotation: Any, type_arguments: tuple[Any, ...], value: JsonObject, path: str) -> Any:
    if cls in MAPPINGS:
        kind = type_arguments[1] if len(type_arguments) > 1 else Any
        return {key: convert(kind, item, f"{path}.{key}") for key, item in value.items()}
    shape = shape_of(annotation)
    if shape is None or shape.kind == "class":
        return value
    kinds = {member.name: member.annotation for member in shape.members}
    members = {key: convert(kinds.get(key, Any), item, f"{path}.{key}") for key, item in value.items()}
    return members if shape.kind == "dict" else _constructed(cls, path, **members)


def _model(cls: type[BaseModel], value: Any, path: str) -> BaseModel:
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        faults = [f"{'.'.join([path, *map(str, fault['loc'])])}: {fault['msg']}" for fault in error.errors()]
        raise ArgumentError("; ".join(faults)) from error


def _constructed(make: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return make(*arguments, **keywords)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise ArgumentError(f"{path}: {str(error) or type(error).__name__}") from error


def _member_of_union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    """Convert to the first member that takes the value and whose schema it meets; the value itself when it meets none."""
    kinds = [member for member in members if member is not types.NoneType]
    if len(kinds) == 1:
        return convert(kinds[0], value, path)
    refused: ArgumentError | None = None
    for kind in kinds:
        builder = SchemaBuilder()
        if not linear_validator()(builder.finish(builder.schema_of(kind))).is_valid(value):
            continue
        try:
            return convert(kind, value, path)
        except ArgumentError as error:
            refused = error
    if refused is not None:
        raise refused
    return value


class Derived(NamedTuple):
    """The derived facts about a handler, as `RemoteSkill` has them."""

    description: str | None
    input_schema: JsonObject
    output_schema: JsonObject | None
    output_description: str | None
    coerce: Callable[[Mapping[str, Any]], dict[str, Any]]
    call_parameter: str | None


def derive(
    name: str, handler: Callable[..., Any], input_schema: object = None, output_schema: object = None
) -> Derived:
    """Return the facts about a handler; a schema that is no dict is derived. Raises CatalogError for an invalid one."""
    text = inspect.getdoc(target_of(handler))
    if not text and not inspect.isroutine(handler) and not isinstance(handler, functools.partial):
        text = inspect.getdoc(type(handler))  # a callable object may have its docstring at its class
    doc = parse_docstring(text)
    names, local = _scope_of(handler)
    parameters = [
        p if p.annotation is p.empty else p.replace(annotation=resolve(p.annotation, names, local))
        for p in _signature(handler).parameters.values()
    ]
    named = [p for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    call = next((p.name for p in named if is_call(p.annotation)), None)
    coerce: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    if isinstance(input_schema, dict):
        schema = _explained(checked_schema(input_schema, f"input_schema of `{name}`"), doc)
    elif any(p.annotation is not p.empty for p in parameters):
        taken = [p for p in named if not is_call(p.annotation)]
        schema = _inferred(taken, doc, is_open=any(p.kind is p.VAR_KEYWORD for p in parameters))
        annotations = {p.name: p.annotation for p in taken if p.annotation is not p.empty}

        def coerce(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return {name: convert(annotations.get(name, Any), value, name) for name, value in arguments.items()}

    else:
        schema = permissive_schema()
    output: JsonObject | None = None
    if isinstance(output_schema, dict):
        output = checked_schema(output_schema, f"output_schema of `{name}`")
    elif (annotation := return_of(handler)) is not inspect.Signature.empty:
        builder = SchemaBuilder()
        output = builder.finish(builder.schema_of(annotation)) or None
    return Derived(doc.summary, schema, output, doc.returns, coerce, call)


def _inferred(parameters: list[inspect.Parameter], doc: Docstring, *, is_open: bool) -> JsonObject:
    builder = SchemaBuilder()
    properties: JsonObject = {}
    for parameter in parameters:
        annotated = parameter.annotation is not parameter.empty
        schema = builder.schema_of(parameter.annotation) if annotated else {}
        note = doc.parameters.get(parameter.name) or (note_of(parameter.annotation) if annotated else None)
        properties[parameter.name] = described(schema, note, over=True)
    root_schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": is_open}
    if required := [p.name for p in parameters if p.default is p.empty]:
        root_schema["required"] = required
    return builder.finish(described(root_schema, doc.summary))


def _explained(schema: JsonObject, doc: Docstring) -> JsonObject:
    """Return a given schema with descriptions where they are missing; it gains nothing else."""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        explained = {
            name: described(member, doc.parameters.get(name)) if isinstance(member, dict) else member
            for name, member in properties.items()
        }
        schema = {**schema, "properties": explained}
    return described(schema, doc.summary)
