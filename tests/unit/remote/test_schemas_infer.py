"""Schemas derived from annotations."""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    Optional,
    Required,
    TypedDict,
    TypeVar,
)
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, RootModel

from kdskills.remote import RemoteCall
from kdskills.remote.schemas import derive
from kdskills.remote.schemas.derive import SchemaBuilder, nullable

PERMISSIVE = {"type": "object", "properties": {}, "additionalProperties": True}
T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"


class Odd(enum.Enum):
    PAIR = (1, 2)
    NONE = None


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


@dataclass
class Address:
    street: str
    number: int = 1


@dataclass
class Late:
    given: InitVar[int]
    name: str
    tags: list[str] = field(default_factory=list)
    made: str = field(init=False, default="x")
    shared: ClassVar[int] = 3


class Order(TypedDict):
    id: str
    note: NotRequired[str]


class Loose(TypedDict, total=False):
    id: Required[int]
    note: str


class Grown(Loose):
    more: bool


class Item(BaseModel):
    """One thing.

    Attributes:
        size: How large.
    """

    name: str = Field(description="What it is called.")
    size: int = 3
    kind: Colour | None = None
    other: str = Field(alias="otherName")


class Plain:
    def __init__(self, a: int, b: str = "x", *rest, **more):
        self.a, self.b = a, b


class Bare:
    a: int
    b: str = "x"
    c: ClassVar[int] = 1


class Nothing:
    pass


class Node(BaseModel):
    value: int
    children: list[Node] = []
    parent: Node | None = None


@dataclass
class Ping:
    pong: Pong | None


@dataclass
class Pong:
    ping: Ping


@dataclass
class Box(Generic[T]):
    content: T
    many: list[T] = field(default_factory=list)


@dataclass
class Growing(Generic[T]):
    deeper: Growing[list[T]] | None = None


class Point(NamedTuple):
    x: int
    y: int = 0


class Numbers(RootModel[list[int]]):
    pass


class Shaped(typing.Protocol):
    a: int


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
ADDRESS = {
    "type": "object",
    "properties": {"street": STRING, "number": INTEGER},
    "additionalProperties": False,
    "required": ["street"],
}


def of(annotation):
    builder = SchemaBuilder()
    return builder.finish(builder.schema_of(annotation))


@pytest.mark.parametrize(
    "handler",
    [
        lambda: None,
        lambda x: x,
        lambda *args, **kw: None,
        functools.partial(lambda x: x, 1),
        print,
        len,
        dict,
    ],
    ids=["lambda", "lambda_x", "lambda_any", "partial", "print", "len", "dict"],
)
def test_handlers_that_say_nothing_get_the_permissive_schema(handler):
    """No annotated parameter: exactly the open object, never a closed one, and nothing described in it."""
    assert derive("h", handler).input_schema == PERMISSIVE


def test_a_return_annotation_alone_says_nothing_of_parameters():
    """Only parameters count."""

    def handler(x) -> int:
        """Does it."""
        return x

    assert derive("h", handler).input_schema == PERMISSIVE


@pytest.mark.parametrize("given", [None, 5, "x", [("type", "object")]])
def test_what_is_no_dict_is_derived(given):
    """`input_schema` that is no dict means: derive it."""
    assert derive("h", lambda: None, given).input_schema == PERMISSIVE


def test_an_explicit_empty_schema_stays():
    """`{}` is a dict."""
    assert derive("h", lambda x: x, {}).input_schema == {}


def test_parameters_become_properties():
    """Required are those without default, in order; unannotated ones say nothing; `*args` is skipped."""

    def handler(b: str, a, *rest: int, c: int = 3, d, e: float = 0.5):
        return None

    assert derive("h", handler).input_schema == {
        "type": "object",
        "properties": {"b": STRING, "a": {}, "c": INTEGER, "d": {}, "e": {"type": "number"}},
        "additionalProperties": False,
        "required": ["b", "a", "d"],
    }


def test_keywords_open_the_schema():
    """`**kw` takes anything else."""

    def handler(a: int = 1, **kw: str):
        return None

    assert derive("h", handler).input_schema == {
        "type": "object",
        "properties": {"a": INTEGER},
        "additionalProperties": True,
    }


def test_the_call_itself_is_no_argument():
    """A parameter annotated `RemoteCall` is skipped, in every spelling, and named for whoever runs the handler."""

    def plain(a: int, call: RemoteCall):
        return None

    def optional(a: int, call: RemoteCall | None = None):
        return None

    def unknown_here(a: int, call: absent.RemoteCall):  # noqa: F821 - as if imported for type checkers only
        return None

    for handler in (plain, optional, unknown_here):
        known = derive("h", handler)
        assert list(known.input_schema["properties"]) == ["a"]
        assert known.input_schema["required"] == ["a"]
        assert known.call_parameter == "call"


def test_a_handler_of_the_call_alone_takes_nothing():
    """It has an annotated parameter, so its schema is closed."""

    def handler(call: RemoteCall):
        return None

    assert derive("h", handler).input_schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_one_unknown_name_spoils_nothing_else():
    """Unresolvable is `{}`, for that parameter only."""

    def handler(a: Missing, b: int, c: list[Missing], d: 1 / 0):  # noqa: F821 - that is the point
        return None

    properties = derive("h", handler).input_schema["properties"]
    assert properties == {"a": {}, "b": INTEGER, "c": {}, "d": {}}


def test_names_of_the_enclosing_function_are_known():
    """A handler made inside a function may use what it closes over."""

    @dataclass
    class Local:
        x: int

    def handler(a: Local):
        return Local(a.x)

    assert derive("h", handler).input_schema["properties"]["a"]["properties"] == {"x": INTEGER}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, STRING),
        (bool, {"type": "boolean"}),
        (int, INTEGER),
        (float, {"type": "number"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1, True], {"type": ["string", "integer", "boolean"], "enum": ["a", 1, True]}),
        (Literal[None, "a"], {"type": ["string", "null"], "enum": [None, "a"]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Word, {"type": "string", "enum": ["a"]}),
        (Odd, {"type": "string", "enum": ["PAIR", "NONE"]}),
        (Bits, INTEGER),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": INTEGER}),
        (Sequence[str], {"type": "array", "items": STRING}),
        (set[int], {"type": "array", "items": INTEGER, "uniqueItems": True}),
        (frozenset, {"type": "array", "uniqueItems": True}),
        (tuple, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (tuple[int, str], {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2}),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (Mapping[str, Any], {"type": "object"}),
        (int | str, {"anyOf": [INTEGER, STRING]}),
        (typing.Union[int, str], {"anyOf": [INTEGER, STRING]}),  # noqa: UP007 - the older spelling, too
        (int | Any, {}),
        (datetime, {"type": "string", "format": "date-time"}),
        (date, {"type": "string", "format": "date"}),
        (UUID, {"type": "string", "format": "uuid"}),
        (Path, STRING),
        (bytes, {"type": "string", "contentEncoding": "base64"}),
        (Annotated[int, "told elsewhere"], INTEGER),
        (typing.NewType("Id", int), INTEGER),
        (T, {}),
        (type[int], {}),
        (typing.Callable[[int], int], {}),
        (Nothing, {}),
        (Shaped, {}),
        (complex, {}),
    ],
    ids=lambda value: None if isinstance(value, dict) else getattr(value, "__name__", str(value)).split(" at ")[0],
)
def test_annotations_have_their_schemas(annotation, schema):
    """The table of plain types."""
    assert of(annotation) == schema


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (int | None, {"type": ["integer", "null"]}),
        (Optional[str], {"type": ["string", "null"]}),  # noqa: UP045 - the older spelling, too
        (None | float, {"type": ["number", "null"]}),
        (Colour | None, {"type": ["string", "null"], "enum": ["red", "blue", None]}),
        (Literal["a", 1] | None, {"type": ["string", "integer", "null"], "enum": ["a", 1, None]}),
        (Literal["a", None] | None, {"type": ["string", "null"], "enum": ["a", None]}),
        (list[int] | None, {"type": ["array", "null"], "items": INTEGER}),
        (Address | None, {**ADDRESS, "type": ["object", "null"]}),
        (int | str | None, {"anyOf": [INTEGER, STRING, {"type": "null"}]}),
        (Any | None, {}),
    ],
    ids=["int", "str", "first", "enum", "literal", "literal_none", "list", "dataclass", "union", "any"],
)
def test_null_is_let_in_without_nullable(annotation, schema):
    """`X | None` widens `type` and joins an enum; only what cannot is an `anyOf`; the word `nullable` never comes."""
    assert of(annotation) == schema
    assert "nullable" not in str(schema)


@given(st.sampled_from([INTEGER, STRING, {}, {"type": "string", "enum": ["a"]}, {"$ref": "#/x"}, {"anyOf": [STRING]}]))
def test_letting_null_in_twice_changes_nothing(schema):
    """`nullable` is idempotent, and what it returns takes null."""
    once = nullable(schema)
    assert nullable(once) == once
    if "$ref" not in str(once):
        assert Draft202012Validator(once).is_valid(None)


@pytest.mark.parametrize(
    ("annotation", "properties", "required"),
    [
        (Address, {"street": STRING, "number": INTEGER}, ["street"]),
        (Late, {"given": INTEGER, "name": STRING, "tags": {"type": "array", "items": STRING}}, ["given", "name"]),
        (Order, {"id": STRING, "note": STRING}, ["id"]),
        (Loose, {"id": INTEGER, "note": STRING}, ["id"]),
        (Grown, {"id": INTEGER, "note": STRING, "more": {"type": "boolean"}}, ["id", "more"]),
        (Plain, {"a": INTEGER, "b": STRING}, ["a"]),
        (Bare, {"a": INTEGER, "b": STRING}, ["a"]),
        (Point, {"x": INTEGER, "y": INTEGER}, ["x"]),
        (Box[int], {"content": INTEGER, "many": {"type": "array", "items": INTEGER}}, ["content"]),
        (Box, {"content": {}, "many": {"type": "array"}}, ["content"]),
    ],
    ids=[
        "dataclass",
        "late",
        "typed_dict",
        "not_total",
        "grown",
        "init",
        "annotations",
        "named_tuple",
        "generic",
        "open",
    ],
)
def test_classes_are_inline_objects(annotation, properties, required):
    """Own `required`, closed, and in place: no reference."""
    schema = of(annotation)
    assert schema == {"type": "object", "properties": properties, "additionalProperties": False, "required": required}


def test_a_pydantic_model_is_an_inline_object():
    """Its fields under their aliases, described as the model says."""
    assert of(Item) == {
        "type": "object",
        "description": "One thing.",
        "properties": {
            "name": {"type": "string", "description": "What it is called."},
            "size": {"type": "integer", "description": "How large."},
            "kind": {"type": ["string", "null"], "enum": ["red", "blue", None]},
            "otherName": STRING,
        },
        "additionalProperties": False,
        "required": ["name", "otherName"],
    }
    assert of(Numbers) == {"type": "array", "items": INTEGER}


def test_recursion_goes_to_definitions_of_the_root():
    """References lead to `$defs` of the root, never into nested ones."""

    def handler(node: Node, ping: Ping, other: dict[str, Node]):
        return None

    schema = derive("h", handler).input_schema
    assert schema["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert schema["properties"]["other"] == {"type": "object", "additionalProperties": {"$ref": "#/$defs/Node"}}
    node = schema["$defs"]["Node"]
    assert node["properties"]["children"] == {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    assert node["properties"]["parent"] == {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
    assert str(schema).count("$defs'") == 1
    validator = Draft202012Validator(schema)
    deep = {"value": 1, "children": [{"value": 2, "parent": {"value": 3}}]}
    assert validator.is_valid({"node": deep, "ping": {"pong": {"ping": {"pong": None}}}, "other": {}})
    assert not validator.is_valid(
        {"node": {"value": 1, "children": [{"value": "x"}]}, "ping": {"pong": None}, "other": {}}
    )


def test_recursive_classes_of_one_name_keep_apart():
    """A second class of the same name gets another definition."""

    def made():
        @dataclass
        class Same:
            next: Same | None = None

        return Same

    first, second = made(), made()
    builder = SchemaBuilder()
    assert builder.schema_of(first) != builder.schema_of(second)
    assert sorted(builder.defs) == ["Same", "Same_2"]


@dataclass
class Shadow:
    class Inner(enum.Enum):
        A = "a"

    date: date | None = None
    inner: Inner | None = None
    int: int = 3


def test_a_default_does_not_hide_the_type_of_its_name():
    """`date: date | None = None` means the type; classes inside the class are known."""
    assert of(Shadow)["properties"] == {
        "date": {"type": ["string", "null"], "format": "date"},
        "inner": {"type": ["string", "null"], "enum": ["a", None]},
        "int": INTEGER,
    }


@pytest.mark.parametrize("annotation", [5, "5", "(", "1 + 1", [int], {"a": 1}, lambda: 1], ids=list("abcdefg"))
def test_annotations_that_are_no_types_say_nothing(annotation):
    """Whatever stands there, the handler registers."""

    def handler(a):
        return a

    handler.__annotations__["a"] = annotation
    assert derive("h", handler).input_schema["properties"] == {"a": {}}


def test_a_class_that_grows_without_end_ends():
    """A generic class that asks for ever larger ones is cut where it says nothing more."""
    assert Draft202012Validator(of(Growing[int])).is_valid({"deeper": {"deeper": None}})


class Methods:
    """Handlers that are no plain functions."""

    def method(self, a: int):
        """A method."""

    @staticmethod
    def static(a: int):
        """A static one."""

    @classmethod
    def of_class(cls, a: int):
        """One of the class."""

    def __call__(self, a: int):
        """Called itself."""


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (Methods().method, "A method."),
        (Methods.static, "A static one."),
        (Methods().of_class, "One of the class."),
        (Methods(), "Called itself."),
        (functools.partial(Methods().method), "A method."),
        (functools.wraps(Methods.static)(lambda *a, **k: None), "A static one."),
    ],
    ids=["method", "static", "class", "object", "partial", "wrapped"],
)
def test_handlers_of_every_kind_are_read(handler, said):
    """Bound methods, callable objects, partials and wrapped functions speak for themselves."""
    known = derive("h", handler)
    assert known.input_schema["properties"] == {"a": INTEGER}
    assert known.input_schema["required"] == ["a"]
    assert known.description == said


def test_bound_arguments_of_a_partial_are_gone():
    """What is bound by position is no parameter; what is bound by name has a default."""

    def handler(a: int, b: int, c: int):
        return None

    assert derive("h", functools.partial(handler, 1, c=2)).input_schema == {
        "type": "object",
        "properties": {"b": INTEGER, "c": INTEGER},
        "additionalProperties": False,
        "required": ["b"],
    }


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (int, INTEGER),
        (Address, ADDRESS),
        (None, {"type": "null"}),
        (Any, None),
        (Awaitable[int], INTEGER),
        ("Missing", None),
    ],
    ids=["int", "dataclass", "none", "any", "awaitable", "unknown"],
)
def test_the_return_annotation_is_the_output_schema(annotation, schema):
    """Where nothing is known there is none."""

    def handler():
        return None

    handler.__annotations__["return"] = annotation
    assert derive("h", handler).output_schema == schema
    assert derive("h", lambda: None).output_schema is None


def test_an_output_schema_given_wins():
    """The argument comes before the annotation."""

    def handler() -> int:
        return 1

    assert derive("h", handler, None, {"type": "string"}).output_schema == STRING


SCALARS = st.sampled_from([int, str, bool, float, None, Colour, Literal["a", 2], Address, Order, Item, Node])
ANNOTATIONS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda kind: list[kind]),
        inner.map(lambda kind: dict[str, kind]),
        inner.map(lambda kind: kind | None if kind is not None else None),
        st.tuples(inner, inner).map(lambda two: typing.Union[two]),  # noqa: UP007 - built at run time
        st.tuples(inner, inner).map(lambda two: tuple[two]),
    ),
    max_leaves=6,
)


@given(ANNOTATIONS)
def test_every_inferred_schema_is_a_schema(annotation):
    """Valid by its metaschema, without `nullable`, and with references that lead somewhere in the root."""
    schema = of(annotation)
    Draft202012Validator.check_schema(schema)
    assert "nullable" not in str(schema)
    defined = set(schema.get("$defs", {}))

    def references(part):
        if isinstance(part, dict):
            for key, value in part.items():
                if key == "$ref":
                    yield value
                yield from references(value)
        elif isinstance(part, list):
            for item in part:
                yield from references(item)

    assert {found.removeprefix("#/$defs/") for found in references(schema)} <= defined
