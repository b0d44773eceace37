"""Answers fit for the wire: checked payloads, cut texts, kept rests."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.dispatch.payloads import HEAD, KEPT_S, LIMIT, TAIL, AnswerBuilder, Spool, fair_share, is_payload

IMAGE = {"type": "inputImage", "imageUrl": "data:image/png;base64,AAAA"}
AUDIO = {"type": "inputAudio", "audioUrl": "https://example.com/a.wav"}
TEXT = {"type": "inputText", "text": "hello"}


def shaped(*items: Any, success: Any = True) -> dict[str, Any]:
    """A pre-shaped payload."""
    return {"contentItems": list(items), "success": success}


def words(answer: Any) -> str:
    """The text of an answer of one item."""
    (item,) = answer.payload["contentItems"]
    assert item["type"] == "inputText"
    return item["text"]


@pytest.mark.parametrize("payload", [shaped(), shaped(TEXT), shaped(TEXT, IMAGE, AUDIO), shaped(TEXT, success=False)])
def test_valid_payloads_pass_unchanged(payload: dict[str, Any]) -> None:
    """What a handler shaped itself goes out as it is, handled, with its own word about success."""
    answer = AnswerBuilder().of_value("t", payload)
    assert (answer.payload, answer.handled, answer.error) == (payload, True, None)
    assert answer.payload is not payload


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "inputText"}, "inputText needs the text `text`"),
        ({"type": "inputText", "text": 7}, "inputText needs the text `text`"),
        ({"type": "inputText", "text": None}, "inputText needs the text `text`"),
        ({"type": "inputImage", "imageUrl": "https://example.com/a.png"}, "imageUrl must begin with data:image/"),
        ({"type": "inputImage", "imageUrl": "data:text/html,x"}, "imageUrl must begin with data:image/"),
        ({"type": "inputImage", "text": "x"}, "inputImage needs the text `imageUrl`"),
        ({"type": "inputAudio"}, "inputAudio needs the text `audioUrl`"),
        ({"type": "input_text", "text": "x"}, "type is one of inputAudio, inputImage, inputText, not 'input_text'"),
        ({"type": ["inputText"]}, "type is one of inputAudio, inputImage, inputText, not \"['inputText']\""),
        ({}, "type is one of inputAudio, inputImage, inputText, not 'None'"),
        ("hello", "an item is an object, not str"),
        (None, "an item is an object, not NoneType"),
    ],
)
def test_bad_items_are_named(item: Any, said: str) -> None:
    """An item the server would refuse fails with its index, so that the model and the author know where."""
    answer = AnswerBuilder().of_value("t", shaped(TEXT, item))
    assert words(answer) == f"remote skill t failed: contentItems[1]: {said}"
    assert (answer.handled, answer.payload["success"], answer.error) == (False, False, words(answer))


@pytest.mark.parametrize(
    "value",
    [
        {"contentItems": [], "success": 1},
        {"contentItems": (), "success": True},
        {"contentItems": []},
        {"success": True},
        [{"contentItems": [], "success": True}],
    ],
)
def test_other_dicts_are_values(value: Any) -> None:
    """Only a list of items and a bool make a payload; everything else is a value, told as JSON."""
    assert not is_payload(value)
    answer = AnswerBuilder().of_value("t", value)
    assert answer.handled
    assert answer.payload["success"] is True


def test_payloads_that_are_no_json_fail() -> None:
    """A payload with something unsendable beside its items is an answer that says so."""
    answer = AnswerBuilder().of_value("t", {**shaped(TEXT), "more": {1, 2}})
    assert words(answer).startswith("remote skill t failed: the payload is no JSON")


def test_half_pairs_in_payloads_are_mended() -> None:
    """The server would drop the line."""
    answer = AnswerBuilder().of_value("t", shaped({"type": "inputText", "text": "a\ud800"}))
    assert words(answer) == "a\ufffd"


@pytest.mark.parametrize("size", [LIMIT, LIMIT - 1, 1])
def test_short_texts_are_whole(size: int) -> None:
    """Up to eleven thousand characters pass."""
    assert words(AnswerBuilder().of_value("t", "x" * size)) == "x" * size


def test_long_texts_keep_head_and_tail(tmp_path: Path) -> None:
    """Two megabytes become head, a line that says how much is missing and where it is, and tail."""
    text = "".join(f"{number:07}," for number in range(250_000))
    told = words(AnswerBuilder(Spool(tmp_path / "spool")).of_value("t", text))
    (kept,) = (tmp_path / "spool").iterdir()
    missing = len(text) - HEAD - TAIL
    assert told == f"{text[:HEAD]}\n[... {missing} characters cut; the whole text is in {kept} ...]\n{text[-TAIL:]}"
    assert kept.read_text() == text
    assert len(told) < LIMIT
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_without_a_spool_the_loss_is_told() -> None:
    """A cut text never reads as a whole one."""
    assert f"[... {LIMIT + 1 - HEAD - TAIL} characters cut; they were not kept ...]" in words(
        AnswerBuilder().of_value("t", "x" * (LIMIT + 1))
    )


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """Where the rest cannot be kept the answer is given all the same, and says so."""
    (tmp_path / "spool").write_text("a file where the folder should be")
    told = words(AnswerBuilder(Spool(tmp_path / "spool")).of_value("t", "x" * 20_000))
    assert "characters cut; they could not be kept" in told


def test_exceptions_are_cut_too(tmp_path: Path) -> None:
    """A message of two megabytes is an answer like any other."""
    answer = AnswerBuilder(Spool(tmp_path)).of_error("t", ValueError("y" * 2_000_000))
    assert len(words(answer)) < LIMIT
    assert answer.error == words(answer)


def test_payload_texts_share_the_room() -> None:
    """Several texts that are too long together are cut, the longest ones; images and small texts stay whole."""
    small = {"type": "inputText", "text": "small"}
    long = {"type": "inputText", "text": "z" * 9_000}
    answer = AnswerBuilder().of_value("t", shaped(small, IMAGE, long, dict(long)))
    items = answer.payload["contentItems"]
    assert items[:2] == [small, IMAGE]
    assert all("characters cut" in item["text"] for item in items[2:])
    assert sum(len(item.get("text", "")) for item in items) <= LIMIT


@given(st.lists(st.integers(0, 50_000), max_size=8))
def test_shares_fit(sizes: list[int]) -> None:
    """Cut to their share, all texts together fit the room; when they fit anyway nobody is cut."""
    share = fair_share(sizes, LIMIT)
    assert sum(min(size, share) for size in sizes) <= LIMIT
    if sum(sizes) > LIMIT:
        assert sum(min(size, share) for size in sizes) > LIMIT - len(sizes)


class Silent(Exception):
    """An exception without words."""


class Unspeakable(Exception):
    """An exception whose words fail."""

    def __str__(self) -> str:
        raise SystemError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no stock"), "no stock"),
        (ValueError(), "ValueError"),
        (ValueError("  "), "ValueError"),
        (Silent(), "Silent"),
        (Unspeakable(), "Unspeakable"),
        (KeyError("order"), "'order'"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RuntimeError("password=abc"), "password=***"),
    ],
)
def test_exceptions_are_told(error: BaseException, said: str) -> None:
    """The message, redacted, or the type's name."""
    answer = AnswerBuilder().of_error("ship", error)
    assert words(answer) == f"remote skill ship failed: {said}"
    assert (answer.handled, answer.payload["success"]) == (False, False)


def test_the_spool_is_swept(tmp_path: Path) -> None:
    """Files older than a week go when another is written; other files are left alone."""
    spool = Spool(tmp_path)
    old, other = Path(spool.keep("old")), tmp_path / "notes.md"
    other.write_text("x")
    for path in (old, other):
        before = path.stat().st_mtime - KEPT_S - 60
        os.utime(path, (before, before))
    young = Path(spool.keep("young"))
    assert sorted(tmp_path.iterdir()) == sorted([young, other])


@pytest.mark.parametrize("limit", [0, 1, 3, 100, LIMIT])
def test_a_cut_never_grows_with_a_smaller_limit(limit: int) -> None:
    """Where nothing is left for the tail, the tail is empty and not the whole text."""
    assert len(AnswerBuilder().cut("y" * 50_000, limit)) <= limit + 100
