"""What a model is told of calls it never saw answered."""

from __future__ import annotations

from typing import Any

import pytest

from kdskills.remote.dispatch.payloads import INTRODUCTION, MAX_CALLS, outcomes_text
from kdskills.remote.journal import MemoryJournal, strong_key
from kdskills.remote.ports import CallState, JournalRow, StoredAnswer
from kdskills.session.threads import shared_loop


def drive(coroutine):
    """Wait for a coroutine as a sync facade does."""
    return shared_loop().run(lambda: coroutine)


def answer(*items: dict[str, Any]) -> StoredAnswer:
    """An answer of these items."""
    return StoredAnswer({"contentItems": list(items), "success": True}, handled=True)


def say(text: str) -> StoredAnswer:
    """An answer of one text."""
    return answer({"type": "inputText", "text": text})


def row(state: CallState, **facts: Any) -> JournalRow:
    """A row of a call."""
    facts = {"tool": "ship", "turn_id": "t1", "call_id": "c1", "namespace": None, **facts}
    return JournalRow(facts.pop("key", "k"), state, "o", False, 0.0, False, **facts)


def lines(text: str | None) -> list[str]:
    """The lines after the introduction."""
    assert text is not None
    first, *rest = text.splitlines()
    assert first == INTRODUCTION
    return rest


def test_nothing_to_tell() -> None:
    """Without such calls there is no context at all."""
    assert outcomes_text([]) is None


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (row("done", answer=say("parcel 7")), "- ship (call c1, turn t1): recorded: parcel 7"),
        (row("done", answer=say("a\n b\t c")), "- ship (call c1, turn t1): recorded: a b c"),
        (row("done", answer=say("x"), namespace="acme"), "- acme.ship (call c1, turn t1): recorded: x"),
        (row("done", answer=say("x"), turn_id=None, call_id=None), "- ship (call -, turn -): recorded: x"),
        (row("overdue", answer=say("no result")), "- ship (call c1, turn t1): recorded: no result"),
        (row("overdue", answer=say("no result"), late=say("at last")), "- ship (call c1, turn t1): late: at last"),
        (row("unknown", answer=say("x"), late=say("at last")), "- ship (call c1, turn t1): late: at last"),
        (
            row("unknown", answer=say("x")),
            "- ship (call c1, turn t1): unknown: outcome unknown: the worker stopped before recording a result",
        ),
        (
            row("running"),
            "- ship (call c1, turn t1): unknown: outcome unknown: the worker stopped before recording a result",
        ),
        (
            row(
                "done",
                answer=answer(
                    {"type": "inputImage", "imageUrl": "data:image/png;base64,AA"}, {"type": "inputText", "text": "t"}
                ),
            ),
            "- ship (call c1, turn t1): recorded: [inputImage] t",
        ),
    ],
)
def test_each_kind_is_told(found: JournalRow, line: str) -> None:
    """Recorded, late, unknown: one line a call."""
    assert lines(outcomes_text([found])) == [line]


def test_long_answers_are_shortened() -> None:
    """A long answer does not fill the context."""
    (line,) = lines(outcomes_text([row("done", answer=say("x" * 10_000))]))
    assert len(line) < 700
    assert line.endswith("…")


def test_many_calls_are_counted() -> None:
    """The newest are told, the others counted."""
    rows = [row("done", key=f"k{n}", call_id=f"c{n}", answer=say("x")) for n in range(MAX_CALLS + 5)]
    context = outcomes_text(rows)
    assert lines(context)[0] == "(5 earlier calls are not listed.)"
    assert lines(context)[-1].startswith(f"- ship (call c{MAX_CALLS + 4},")


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_crash_is_told_once(kind, sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """After a turn that did not complete its calls are told in the next one, and never again; completed turns are not."""
    journal = MemoryJournal() if kind == "memory" else sql_journal
    dispatcher = make_dispatcher(journal)
    drive(dispatcher.call(make_skill(lambda: "seen"), make_call.strong("c0", turn="t0"), None))
    journal.settle("s1", "t0")
    drive(dispatcher.call(make_skill(lambda: "parcel 7"), make_call.strong("c1", turn="t1"), None))
    lost = make_call.strong("c2", turn="t1")
    journal.claim(strong_key(lost), lost, "dead", -1.0, idempotent=False)
    journal.start(strong_key(lost), "dead")
    rows = journal.outcomes("s1")
    assert [line.split(": ")[1] for line in lines(outcomes_text(rows))] == ["recorded", "unknown"]
    drive(dispatcher.call(make_skill(lambda: "never"), lost, None))  # somebody asks again: now it is known as unknown
    journal.tell([row.key for row in rows])
    assert outcomes_text(journal.outcomes("s1")) is None
