"""What no database, file or transport can take is refused before an operation sees it, whatever the operation."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kdskills.app.operations import OPERATIONS, Context
from kdskills.app.operations.calling import require_text, text_problems, validated
from kdskills.app.wire import json_facts, json_text
from kdskills.errors import BadRequest, KdskillsError

FIELDS = [(row.name, field) for row in OPERATIONS.values() for field in row.input.model_fields]
PATHS = {"path", "bundle", "into", "out", "transcript"}


@pytest.mark.parametrize(("operation", "field"), FIELDS)
def test_half_a_character_is_refused_in_every_field(operation: str, field: str) -> None:
    """Half a surrogate pair is out of shape in any argument, in lists and in tables of any argument."""
    row = OPERATIONS[operation]
    for value in ("a\ud800", ["a\ud800"], {"name": "a\ud800"}, {"a\ud800": "x"}, [{"x": ["\udfff"]}]):
        with pytest.raises(KdskillsError) as refused:
            validated(row, {field: value})
        assert refused.value.code == ("invalid_argument" if row.for_models else "bad_request")
        assert refused.value.details["errors"][0]["path"].startswith(f"/{field}")
        assert json_facts(refused.value.to_json()).encode()


@pytest.mark.parametrize(("operation", "field"), FIELDS)
def test_nul_is_refused_in_every_field(operation: str, field: str) -> None:
    """NUL is out of shape in any argument but those that say they may hold it."""
    model = OPERATIONS[operation].input
    allowed = any(fnmatchcase(f"/{field}", pattern) for pattern in getattr(model, "MAY_HOLD_NUL", ()))
    assert list(text_problems(model, {field: "a\0b"})) == ([] if allowed else [(f"/{field}", "holds NUL")])
    assert list(text_problems(model, {field: [{"x": "\0"}]})) == [(f"/{field}/0/x", "holds NUL")]


def test_content_of_files_may_hold_nul() -> None:
    """The text of an input file may hold NUL; a variable of the same name may not."""
    model = OPERATIONS["skills.start_job"].input
    inputs = [{"path": "a", "text": "x\0y"}]
    assert list(text_problems(model, {"inputs": inputs, "steps": [{"inputs": inputs}]})) == []
    assert list(text_problems(model, {"env": {"text": "\0"}})) == [("/env/text", "holds NUL")]


def test_file_names_of_this_machine_may_be_no_text() -> None:
    """A path of this machine may have bytes that are no UTF-8; half a character that is no byte is refused there, too."""
    model = OPERATIONS["skills.check"].input
    assert list(text_problems(model, {"path": "a\udcff"})) == []
    assert list(text_problems(model, {"path": "a\ud800"})) == [("/path", "holds half a character")]


def test_names_that_callers_make_up_are_printable_and_short() -> None:
    """An unknown argument's name comes back in a form that every transport carries."""
    with pytest.raises(BadRequest) as refused:
        validated(OPERATIONS["skills.list"], {"a" * 100_000: 1, "b\n\x1b": 2})
    assert len(json_facts(refused.value.to_json())) < 1000
    assert "\x1b" not in refused.value.message


@pytest.mark.parametrize("key", ["a\ud800", "a\0"])
def test_an_idempotency_key_is_text(key: str) -> None:
    """A key that nothing could keep is refused."""
    with pytest.raises(BadRequest):
        require_text(Context(idempotency_key=key))


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner),
)  # fmt: skip


@given(value=JSON)
def test_text_is_never_refused(value: object) -> None:
    """Whatever is text throughout has no problem."""
    assert list(text_problems(OPERATIONS["skills.list"].input, {"x": value})) == []


def test_depth_is_no_trouble() -> None:
    """Arguments as deep as a parser gives them are looked through to the bottom."""
    value: object = "\ud800"
    for _ in range(5000):
        value = [value]
    assert len(list(text_problems(OPERATIONS["skills.list"].input, {"x": value}))) == 1


class Row(BaseModel):
    """An answer with names of files."""

    name: str
    facts: dict[str, str]


def test_answers_are_always_encodable() -> None:
    """A file name with bytes that are no text is shown with U+FFFD instead of breaking the answer."""
    assert json_text(Row(name="a\udcff", facts={"b\ud800": "c"})) == '{"name": "a\ufffd", "facts": {"b\ufffd": "c"}}'
