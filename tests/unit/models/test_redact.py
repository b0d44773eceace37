"""Secrets stay out of what is written down."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.models import MASK, Redactor, parse_object


def test_declared_secrets_are_masked_everywhere():
    """A declared secret goes from texts, keys and nested values."""
    redactor = Redactor(["tok-1"])
    assert redactor.value({"tok-1": ["a tok-1 b", {"x": "tok-1"}], "n": 1}) == {
        "***": ["a *** b", {"x": "***"}],
        "n": 1,
    }


def test_values_of_env_are_masked_in_place_and_long_ones_anywhere():
    """Every value of a call's env is masked; a short one does not spoil other text."""
    redactor = Redactor()
    raw = json.dumps({"env": {"A": "1", "B": "sesame-open"}, "args": ["1", "sesame-open"]})
    assert json.loads(redactor.arguments(raw)) == {"env": {"A": "***", "B": "***"}, "args": ["1", "***"]}
    assert redactor.text("got sesame-open and 1") == "got *** and 1"


def test_a_longer_secret_goes_before_the_part_of_it():
    """No rest of a secret is left beside the mask of a shorter one."""
    assert Redactor(["abc", "abcdef"]).text("abcdef") == "***"


def test_escaped_spellings_are_found():
    """A secret with quotes is found inside JSON text."""
    secret = 'pa"ss\n'
    assert secret not in json.loads(Redactor([secret]).text(json.dumps({"a": secret})))["a"]


def test_malformed_arguments_are_treated_as_text():
    """Bad JSON is masked as text and otherwise left as it is."""
    assert Redactor(["tok"]).arguments('{"a": tok') == '{"a": ***'
    assert Redactor().arguments("[1, 2]") == "[1, 2]"


def test_untouched_arguments_keep_their_spelling():
    """Without a secret the very text stays."""
    assert Redactor(["zzz"]).arguments('{ "a":1 }') == '{ "a":1 }'


def test_deep_nesting_is_no_object():
    """A bomb of brackets is text."""
    assert parse_object("[" * 100_000) is None
    assert parse_object('{"a":' * 100_000) is None


@given(st.text(), st.text(min_size=4))
def test_a_masked_text_holds_no_secret(text, secret):
    """Whatever surrounds it, the secret is gone."""
    if secret.strip() and secret not in "***":
        assert secret not in Redactor([secret]).text(text + secret + text).replace("***", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plain", "plain"),
        ("a tok", "a "),
        ("a toke", "a "),
        ("a token", "a token"),
        ("tokento", "token"),
        ("token tok", "token "),
        ("to tot", "to to"),
        ("", ""),
    ],
)
def test_what_may_become_a_secret_is_held_back(text, told):
    """Of a growing text the end that may be the beginning of a secret is not told yet."""
    assert text[: Redactor(["token"]).safe_length(text)] == told


def test_a_secret_that_overlaps_itself_is_not_cut():
    """The part of a whole secret that looks like its beginning stays with it."""
    redactor = Redactor(["abab", "ab"])
    assert redactor.safe_length("xabab") == 1
    assert redactor.safe_length("xababc") == 6


@given(st.lists(st.text("abc", max_size=5), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_pieces_told_hold_no_secret(pieces, secrets):
    """However a text is cut, what is told piece by piece never adds up to more than the text masked as a whole."""
    redactor, waiting, told = Redactor(secrets), "", []
    for piece in pieces:
        waiting += piece
        end = redactor.safe_length(waiting)
        told.append(waiting[:end])
        waiting = waiting[end:]
    told.append(waiting)
    text = "".join(pieces)
    assert "".join(told) == text
    masked = "".join(redactor.text(part) for part in told)
    for secret in secrets:
        assert secret not in masked


@pytest.mark.parametrize(
    "text", ['{"path":"x","env":{"K":"hunter2hunter2"', '{"env" : {"K":"hunter2hun', '{"a":1}{"env":["hunter2"]']
)
def test_broken_arguments_show_nothing_of_their_env(text):
    """A call cut off in the middle of its env cannot be read, so what follows is left out whole."""
    shown = Redactor().arguments(text)
    assert "hunter2" not in shown
    assert shown.endswith(MASK)
