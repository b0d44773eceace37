"""Arguments against their schema: faults by path, the permissive schema checks nothing."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.schemas.checks import MAX_FAULTS, faults, own_copy, permissive_schema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "minLength": 2},
        "lines": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}},
        "kind": {"type": ["string", "null"], "enum": ["a", None]},
    },
    "required": ["order"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"order": "ab"}, []),
        ({"order": "ab", "kind": None, "lines": [{"n": 1}]}, []),
        ({}, ["$: 'order' is a required property"]),
        (None, ["$: 'order' is a required property"]),
        ({"order": 7}, ["$.order: 7 is not of type 'string'"]),
        ({"order": "a"}, ["$.order: 'a' is too short"]),
        ([1], ["$: [1] is not of type 'object'"]),
        ("text", ["$: 'text' is not of type 'object'"]),
        (
            {"order": "ab", "lines": [{"n": 1}, {"n": 0}, {"n": "x"}]},
            ["$.lines[1].n: 0 is less than the minimum of 1", "$.lines[2].n: 'x' is not of type 'integer'"],
        ),
        (
            {"order": "ab", "more": 1},
            ["$: Additional properties are not allowed ('more' was unexpected)"],
        ),
    ],
)
def test_faults_by_path(arguments: Any, expected: list[str]) -> None:
    """Every fault says where it is and what is wrong, sorted by place."""
    assert faults(SCHEMA, arguments) == expected


@pytest.mark.parametrize("arguments", [None, {}, {"x": 1}, [1], "text", 5])
def test_the_permissive_schema_checks_nothing(arguments: Any) -> None:
    """A handler that declares nothing gets whatever came."""
    assert faults(dict(permissive_schema()), arguments) == []


def test_an_explicit_schema_is_checked_in_full() -> None:
    """Keywords the server strips before the model sees them are checked here all the same."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "number", "maximum": 3, "multipleOf": 0.5}, "s": {"pattern": "^a"}},
    }
    assert faults(schema, {"n": 4, "s": "b"}) == [
        "$.n: 4 is greater than the maximum of 3",
        "$.s: 'b' does not match '^a'",
    ]


def test_recursive_schemas() -> None:
    """A reference into the schema's own definitions is followed."""
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Tree"}},
        "$defs": {
            "Tree": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
        },
    }
    assert faults(schema, {"tree": {"kids": [{"kids": []}]}}) == []
    assert faults(schema, {"tree": {"kids": [{"kids": 1}]}}) == ["$.tree.kids[0].kids: 1 is not of type 'array'"]


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to another place is a fault; no connection is opened for it."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a schema was fetched"))
    found = faults({"type": "object", "$ref": "http://127.0.0.1:9/schema.json"}, {})
    assert found == ["$: the schema refers to http://127.0.0.1:9/schema.json, which is not in it"]


def test_many_faults_are_counted() -> None:
    """A thousand faults do not fill the model's context."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    found = faults(schema, {f"k{number:04}": "x" for number in range(1000)})
    assert len(found) == MAX_FAULTS + 1
    assert found[-1].startswith("and ")


def test_long_values_are_cut_in_words() -> None:
    """A fault about a megabyte of text is one line."""
    found = faults({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": "x\n" * 500_000})
    assert len(found[0]) < 400
    assert "\n" not in found[0]


def test_deep_arguments_are_a_fault() -> None:
    """Arguments nested beyond the stack are refused, not crashed upon."""
    deep: Any = {}
    for _ in range(5000):
        deep = {"kids": deep}
    schema = {"$ref": "#/$defs/T", "$defs": {"T": {"type": "object", "properties": {"kids": {"$ref": "#/$defs/T"}}}}}
    assert faults(schema, deep) == ["$: nested too deeply"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def containers(value: Any) -> list[Any]:
    """Return every list and object in a value, itself included."""
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            found.append(one)
            left.extend(one.values() if isinstance(one, dict) else one)
    return found


@given(JSON)
def test_a_copy_is_equal_and_shares_nothing_that_changes(value: Any) -> None:
    """Whatever JSON it is: the copy is equal, and none of its lists and objects is one of the original's."""
    copied = own_copy(value)
    assert copied == value
    assert not {id(one) for one in containers(copied)} & {id(one) for one in containers(value)}


def test_copies_of_what_is_deep_or_inside_itself() -> None:
    """Depth costs no recursion, and a value inside itself is copied as one."""
    deep: Any = "end"
    for _ in range(50_000):
        deep = [deep]
    assert len(containers(own_copy(deep))) == 50_000
    inside: dict[str, Any] = {}
    inside["self"] = inside
    copied = own_copy(inside)
    assert copied is not inside
    assert copied["self"] is copied
