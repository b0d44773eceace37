"""Objects, their JSON, and back: schemas and conversion agree with each other and with an independent writer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Literal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter
from typing_extensions import TypedDict

from kdskills.remote.schemas import derive
from kdskills.remote.schemas.derive import SchemaBuilder, convert


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


@dataclass(frozen=True)
class Leaf:
    name: str
    colour: Colour
    when: date | None = None


@dataclass
class Branch:
    leaves: list[Leaf]
    first: Leaf | None = None
    marks: dict[str, Colour] = field(default_factory=dict)
    pair: tuple[int, Leaf] | None = None


class Shape(BaseModel):
    branch: Branch
    kind: Literal["a", "b"] | None = None


class Row(TypedDict):
    id: UUID
    at: datetime


KINDS = {
    "leaf": Leaf,
    "branch": Branch,
    "model": Shape,
    "dict": Row,
    "set": set[int],
    "frozen": frozenset[Leaf],
    "many": list[dict[str, Leaf]],
    "union": int | Leaf | None,
    "tuple": tuple[Colour, ...],
    "scalars": tuple[int, str, bool, bytes],
}


@pytest.mark.parametrize("name", sorted(KINDS))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_written_fits_its_schema_and_comes_back(name, data):
    """JSON of any object meets the inferred schema, and becomes an equal object again."""
    kind = KINDS[name]
    made = data.draw(st.from_type(kind))
    if name == "scalars":
        written = [
            made[0],
            made[1],
            made[2],
            TypeAdapter(bytes, config={"ser_json_bytes": "base64"}).dump_python(made[3], mode="json"),
        ]
        written[3] = written[3].replace("-", "+").replace("_", "/")
    else:
        written = TypeAdapter(kind).dump_python(made, mode="json")
    builder = SchemaBuilder()
    schema = builder.finish(builder.schema_of(kind))
    assert list(Draft202012Validator(schema).iter_errors(written)) == []
    assert convert(kind, written, "x") == made


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3)))
def test_undeclared_arguments_pass_as_they_are(arguments):
    """Conversion never drops or renames an argument."""

    def handler(a: Leaf, **kw):
        return a

    known = derive("h", handler)
    arguments.pop("a", None)
    assert known.coerce(arguments) == arguments
