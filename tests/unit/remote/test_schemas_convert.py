"""Arguments as handlers want them, and schemas that are refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypedDict
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from kdskills.remote import CatalogError
from kdskills.remote.schemas import ArgumentError
from kdskills.remote.schemas.derive import convert


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Odd(enum.Enum):
    PAIR = (1, 2)


@dataclass
class Address:
    street: str
    colour: Colour = Colour.RED
    near: list[Address] = field(default_factory=list)


@dataclass
class Even:
    number: int

    def __post_init__(self):
        if self.number % 2:
            raise ValueError("is odd")


class Item(BaseModel):
    name: str = Field(alias="itemName")
    size: int = Field(default=1, gt=0)


class Order(TypedDict):
    address: Address


class Plain:
    def __init__(self, a: int):
        self.a = a


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (Address, {"street": "s"}, Address("s")),
        (Address, {"street": "s", "colour": 1}, Address("s", Colour.ONE)),
        (Address, {"street": "s", "near": [{"street": "t"}]}, Address("s", near=[Address("t")])),
        (Address | None, None, None),
        (Address | None, {"street": "s"}, Address("s")),
        (list[Address], [{"street": "s"}], [Address("s")]),
        (Sequence[Colour], ["red"], [Colour.RED]),
        (dict[str, Colour], {"a": 1}, {"a": Colour.ONE}),
        (Mapping[str, Even], {"a": {"number": 2}}, {"a": Even(2)}),
        (tuple[Colour, ...], ["red", 1], (Colour.RED, Colour.ONE)),
        (tuple[int, Colour], [1, "red"], (1, Colour.RED)),
        (set[int], [1, 2], {1, 2}),
        (frozenset, [1], frozenset({1})),
        (Order, {"address": {"street": "s"}}, {"address": Address("s")}),
        (Colour, "red", Colour.RED),
        (Odd, "PAIR", Odd.PAIR),
        (Literal[Colour.RED, "x"], "red", Colour.RED),
        (Even | Address, {"street": "s"}, Address("s")),
        (Address | Even, {"number": 2}, Even(2)),
        (int | Colour, "red", Colour.RED),
        (int | str, "red", "red"),
        (int, 3.0, 3),
        (float, 3, 3),
        (bool, True, True),
        (datetime, "2024-01-02T03:04:05+00:00", datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (date, "2024-01-02", date(2024, 1, 2)),
        (UUID, "12345678-1234-5678-1234-567812345678", UUID("12345678-1234-5678-1234-567812345678")),
        (Path, "a/b", Path("a/b")),
        (Decimal, 1.5, Decimal("1.5")),
        (bytes, "aGk=", b"hi"),
        (Plain, {"a": 1}, {"a": 1}),
        (Any, {"a": [1]}, {"a": [1]}),
        (list, [{"a": 1}], [{"a": 1}]),
    ],
    ids=str,
)
def test_values_become_what_the_annotation_asks_for(annotation, value, wanted):
    """Instances of dataclasses and Enums at any depth; a plain class only describes a shape."""
    found = convert(annotation, value, "x")
    assert found == wanted
    assert type(found) is type(wanted)


def test_a_pydantic_model_arrives_as_an_instance():
    """By its aliases, with its own checks."""
    assert convert(Item, {"itemName": "n"}, "x") == Item(itemName="n")
    assert convert(list[Item], [{"itemName": "n", "size": 2}], "x")[0].size == 2


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (Item, {"itemName": "n", "size": 0}, "x.size: Input should be greater than 0"),
        (list[Even], [{"number": 2}, {"number": 1}], "x[1]: is odd"),
        (dict[str, Even], {"a": {"number": 1}}, "x.a: is odd"),
        (datetime, "soon", "x: Invalid isoformat"),
        (bytes, "?", "x: not base64"),
        (UUID, "1", "x: badly formed"),
        (Even | Colour, {"number": 1}, "x: is odd"),
    ],
    ids=["model", "list", "dict", "datetime", "bytes", "uuid", "union"],
)
def test_a_refused_value_is_named_by_its_path(annotation, value, message):
    """What the schema cannot say, the class says: where, and why."""
    with pytest.raises(ArgumentError) as refused:
        convert(annotation, value, "x")
    assert str(refused.value).startswith(message)


def test_handlers_get_instances_from_the_wire(duo):
    """A whole call: JSON comes in, instances reach the handler."""
    session = duo.session()
    seen = []

    @session.skill()
    def ship(to: Address, colours: list[Colour], item: Item):
        seen.append((to, colours, item))
        return item.size

    arguments = {"to": {"street": "s"}, "colours": ["red"], "item": {"itemName": "n"}}
    dispatch = duo.do(session.dispatch_tool_call(tool="ship", arguments=arguments))
    assert seen == [(Address("s"), [Colour.RED], Item(itemName="n"))]
    assert (dispatch.handled, dispatch.result, dispatch.arguments) == (True, 1, arguments)


def test_an_explicit_schema_leaves_arguments_alone(duo):
    """Only inferred parameters are converted."""
    session = duo.session()

    def ship(to: Address):
        return type(to).__name__

    session.register("ship", ship, input_schema={"type": "object"})
    assert duo.do(session.dispatch_tool_call(tool="ship", arguments={"to": {"street": "s"}})).result == "dict"


def test_a_value_its_class_refuses_fails_the_call(duo):
    """The handler does not run, and the model reads where and why."""
    session = duo.session()
    session.register("even", lambda: None)

    def even(number: Even):
        raise AssertionError("must not run")

    session.register("even", even)
    dispatch = duo.do(session.dispatch_tool_call(tool="even", arguments={"number": {"number": 1}}))
    assert (dispatch.handled, dispatch.response_payload["success"]) == (False, False)
    assert dispatch.error == "remote skill even failed: number: is odd"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "objekt"},
        {"type": 5},
        {"properties": []},
        {"required": "x"},
        {"properties": {"a": {"$ref": "#/$defs/Missing"}}},
        {"properties": {"a": {"$ref": "#/properties/b/$defs/X"}, "b": {"type": "object"}}},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "other.json"},
        {"enum": [float("nan")]},
        {"enum": [{1, 2}]},
        {"enum": ["\ud800"]},
        {"properties": {1: {}}},
        {"required": ("a",)},
    ],
    ids=[
        "type",
        "type_number",
        "properties",
        "required",
        "ref",
        "nested",
        "remote",
        "file",
        "nan",
        "set",
        "surrogate",
        "key",
        "tuple",
    ],
)
def test_an_invalid_schema_is_refused(session, schema):
    """`CatalogError`, whether it is for arguments or results, with rule and suggestion; nothing is registered."""
    for options in ({"input_schema": schema}, {"output_schema": schema}):
        with pytest.raises(CatalogError) as refused:
            session.register("a", lambda: None, **options)
        assert refused.value.details["rule"] == "schema_invalid"
        assert next(iter(options)) in refused.value.message
    assert session.list() == []


def test_a_schema_inside_itself_is_refused(session):
    """A circular dict is no JSON."""
    schema: dict[str, Any] = {}
    schema["not"] = schema
    with pytest.raises(CatalogError):
        session.register("a", lambda: None, input_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}},
        {"properties": {"$ref": {"type": "string"}, "next": {"$ref": "#"}}},
        {"enum": [{"$ref": "#/nowhere"}]},
        {"$id": "https://example.org/x", "$ref": "#here", "$defs": {"x": {"$anchor": "here"}}},
        {"allOf": [{"type": "object"}], "items": {"$ref": "#/allOf/0"}},
    ],
    ids=["empty", "defs", "escaped", "property", "data", "anchor", "index"],
)
def test_a_valid_schema_stays_as_it_is(session, schema):
    """References that lead somewhere, properties called `$ref`, data that look like references."""
    assert session.register("a", lambda: None, input_schema=schema).input_schema == schema
