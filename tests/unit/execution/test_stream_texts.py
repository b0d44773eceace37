"""Output as text: whole characters only, nothing lost, nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution.streams import StreamText, text_of

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@given(text=TEXTS, cut=st.integers(0, 200))
def test_a_tail_never_begins_within_a_character(text: str, cut: int) -> None:
    """The end of any text is an end of that text: the bytes left out are the rest of one character."""
    data = text.encode()
    begin = min(cut, len(data))
    found = text_of(data[begin:], cut_before=begin > 0, more_after=False)
    assert text.endswith(found.text)
    assert "\ufffd" not in found.text or "\ufffd" in text
    assert len(found.text.encode()) + found.skipped == len(data) - begin
    assert (found.incomplete, found.skipped <= 3) == (0, True)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=100))
def test_pieces_join_to_the_text(text: str, sizes: list[int]) -> None:
    """Reading on from where each piece stopped gives every character once, wherever the pieces are cut."""
    data, at, said, number = text.encode(), 0, "", 0
    while at < len(data):
        size = max(4, sizes[number % len(sizes)])
        piece = data[at : at + size]
        found = text_of(piece, cut_before=False, more_after=at + size < len(data))
        said += found.text
        at += len(piece) - found.incomplete
        number += 1
    assert said == text


@given(data=st.binary(max_size=60), cut=st.booleans(), more=st.booleans())
def test_any_bytes_become_text(data: bytes, cut: bool, more: bool) -> None:
    """Bytes of any kind give text, with at most three left out at either end."""
    found = text_of(data, cut_before=cut, more_after=more)
    middle = data[found.skipped : len(data) - found.incomplete]
    assert found.text == middle.decode("utf-8", "replace")
    assert (found.skipped <= 3, found.incomplete <= 3) == (True, True)


@pytest.mark.parametrize(
    ("data", "cut", "more", "expected"),
    [
        (b"", True, True, StreamText("")),
        (b"\xbc", True, False, StreamText("", skipped=1)),
        (b"\xbc", False, False, StreamText("\ufffd")),
        (b"a\xc3", False, True, StreamText("a", incomplete=1)),
        (b"a\xc3", False, False, StreamText("a\ufffd")),
        ("ä€😀".encode(), False, True, StreamText("ä€😀")),
        ("😀".encode()[:3], False, True, StreamText("", incomplete=3)),
        (b"\x80\x80\x80\x80x", True, False, StreamText("\ufffd" * 4 + "x")),
        (b"nul\0inside", False, False, StreamText("nul\0inside")),
        (b"\xff\xfe", False, True, StreamText("\ufffd\ufffd")),
        (b"\xf5", False, True, StreamText("\ufffd")),
    ],
)
def test_edges(data: bytes, cut: bool, more: bool, expected: StreamText) -> None:
    """Characters cut in front, begun at the end, and bytes that begin none."""
    assert text_of(data, cut_before=cut, more_after=more) == expected
