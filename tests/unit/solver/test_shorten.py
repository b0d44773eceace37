"""Cutting long results."""

import json

from hypothesis import given
from hypothesis import strategies as st

from kdskills.solver.dispatch import cut_middle, shorten

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def test_what_fits_is_left_alone():
    """Nothing is touched without need."""
    assert shorten('{"a":  1}', 9) == '{"a":  1}'
    assert cut_middle("abc", 3) == "abc"


def test_the_longest_texts_of_an_object_are_cut():
    """The object stays JSON; short members stay whole, the tail is kept most."""
    text = json.dumps({"status": "ok", "stdout": "begin" + "x" * 9000 + "end", "stderr": "y" * 9000, "exit_code": 0})
    found = json.loads(shorten(text, 3000))
    assert (found["status"], found["exit_code"]) == ("ok", 0)
    assert found["stdout"].startswith("begin")
    assert found["stdout"].endswith("end")
    assert abs(len(found["stdout"]) - len(found["stderr"])) < 20
    assert "characters left out" in found["stdout"]


def test_other_texts_are_cut_in_the_middle():
    """Head and tail stay, and the number says how much is missing."""
    short = shorten("a" * 50 + "b" * 900 + "c" * 50, 150)
    assert short.startswith("a" * 50)
    assert short.endswith("c" * 50)
    assert "850 characters left out" in short


@given(st.dictionaries(st.text(max_size=6), values, max_size=5), st.integers(200, 3000))
def test_an_object_is_cut_to_an_object_or_to_text_that_fits(value, room):
    """Whatever is in it, the result is about as long as asked, and unchanged when it fits."""
    text = json.dumps(value, ensure_ascii=False)
    short = shorten(text, room)
    assert (short == text) if len(text) <= room else (len(short) <= 2 * room + 60 * (text.count('"') + 1))
