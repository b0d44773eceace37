"""What handlers return, as the text a model reads."""

from __future__ import annotations

import base64
import enum
import json
import math
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kdskills.remote.dispatch.payloads import ValueRefused, as_text, plain


@dataclass
class Parcel:
    """A dataclass."""

    weight: float
    parts: set[str]


class Order(BaseModel):
    """A pydantic model."""

    number: int
    at: datetime


class Size(enum.Enum):
    """An enum that is no text."""

    SMALL = 1


class Word(enum.StrEnum):
    """An enum that is text."""

    HELLO = "hello"


class Level(enum.IntEnum):
    """An enum that is a number."""

    LOW = 3


Point = namedtuple("Point", "x y")
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ("", ""),
        ("plain ü text", "plain ü text"),
        (Word.HELLO, "hello"),
        (True, "true"),
        (0, "0"),
        (Level.LOW, "3"),
        (1.5, "1.5"),
        (math.nan, '"NaN"'),
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        ({"b": 1, "a": "ü"}, '{"a": "\\u00fc", "b": 1}'),
        ([1, (2, 3), None], "[1, [2, 3], null]"),
        (Point(1, 2), "[1, 2]"),
        ({"z", "a", "m"}, '["a", "m", "z"]'),
        (frozenset({3, 1, 2}), "[1, 2, 3]"),
        ({1, "1", None}, '["1", 1, null]'),
        (b"\x00\xff", f'"{base64.b64encode(bytes([0, 255])).decode()}"'),
        (bytearray(b"a"), '"YQ=="'),
        (memoryview(b"a"), '"YQ=="'),
        (MOMENT, '"2026-01-02T03:04:05+00:00"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (time(3, 4), '"03:04:00"'),
        (Path("/a/b"), '"/a/b"'),
        (PurePosixPath("c"), '"c"'),
        (Parcel(math.nan, {"b", "a"}), '{"parts": ["a", "b"], "weight": "NaN"}'),
        (Order(number=7, at=MOMENT), '{"at": "2026-01-02T03:04:05+00:00", "number": 7}'),
        ([Order(number=7, at=MOMENT)], '[{"at": "2026-01-02T03:04:05+00:00", "number": 7}]'),
        (Decimal("1.10"), '"1.10"'),
        (uuid.UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
        (Size.SMALL, '"Size.SMALL"'),
        (ValueError("x"), '"x"'),
        (
            {2: "a", None: "b", True: "c", 1.5: "d", math.nan: "e"},
            '{"1.5": "d", "2": "a", "NaN": "e", "null": "b", "true": "c"}',
        ),
        ({(1, 2): "a", Size.SMALL: "b"}, '{"Size.SMALL": "b", "[1, 2]": "a"}'),
        (OrderedDict(b=1, a=2), '{"a": 2, "b": 1}'),
        (10**400, str(10**400)),
    ],
    ids=[str(number) for number in range(36)],
)
def test_values_as_text(value: object, text: str) -> None:
    """Text as it is, everything else as JSON with sorted keys in ASCII, each kind as the spec says."""
    assert as_text(value) == text


def test_classes_are_told_by_name() -> None:
    """A dataclass itself is no object of it."""
    assert json.loads(as_text(Parcel)) == str(Parcel)


@pytest.mark.parametrize(("broken", "mended"), [("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ud83d\ude00", "😀")])
def test_halves_of_pairs_never_reach_the_wire(broken: str, mended: str) -> None:
    """A server drops a line that holds half a surrogate pair, and the call would hang."""
    assert as_text(broken) == mended
    assert json.loads(as_text([broken])) == [mended]
    assert json.loads(as_text({broken: Path(broken)})) == {mended: mended}


def test_values_inside_themselves_are_refused() -> None:
    """A list inside itself ends in words, not in a crash."""
    inner: list[object] = []
    inner.append({"again": inner})
    with pytest.raises(ValueRefused, match="deeper than 100 levels"):
        as_text(inner)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.decimals(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner) | st.tuples(inner)
        ),
        max_leaves=15,
    )
)
def test_any_value_is_strict_json(value: object) -> None:
    """Whatever is returned: the text is JSON other languages read, and ASCII."""
    text = as_text([value])
    assert text.isascii()
    assert json.loads(text, parse_constant=pytest.fail) == [json.loads(json.dumps(plain(value)))]


@given(st.sets(st.integers() | st.text() | st.none() | st.booleans()))
def test_sets_have_one_spelling(value: set[object]) -> None:
    """Equal sets give equal texts, however they were built."""
    assert as_text(value) == as_text({*reversed(list(value))})
