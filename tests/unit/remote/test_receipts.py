"""Receipts of turns: what they were run with, and what their calls came to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.remote.calls import (
    KEPT_PER_SESSION,
    MemoryReceipts,
    Receipt,
    ReceiptCallEntry,
    ReceiptJournal,
    Receipts,
    ReceiptSkillEntry,
)
from kdskills.remote.journal import MemoryJournal, SqlJournal, journal_url
from kdskills.remote.ports import CallJournal
from kdskills.testing.journals import SESSION, answer, claim, ran

FACTS = Receipt(
    SESSION,
    "t1",
    "cat" * 5,
    "ctx" * 5,
    "reload",
    ("acme.ship", "track"),
    (ReceiptSkillEntry("acme.packing", "sha256:1"),),
)


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CallJournal]:
    """Both journals."""
    made: CallJournal = MemoryJournal() if request.param == "memory" else SqlJournal(journal_url(tmp_path))
    yield made
    made.close()


def test_a_receipt_says_everything(journal: CallJournal) -> None:
    """Digests, strategy, tools and skills as noted; calls with key, state and the digest of what was answered."""
    receipts = Receipts(journal)
    receipts.note(FACTS)
    ran(journal, "k1", "parcel 7")
    claim(journal, "a", key="k2")
    payload = json.dumps(answer("parcel 7").payload, sort_keys=True, separators=(",", ":"))
    expected = (
        ReceiptCallEntry("k1", "acme.ship", "done", hashlib.sha256(payload.encode()).hexdigest()),
        ReceiptCallEntry("k2", "acme.ship", "claimed", None),
    )
    assert receipts.receipt(SESSION, "t1") == replace(FACTS, calls=expected)
    assert receipts.receipts(SESSION) == [replace(FACTS, calls=expected)]


def test_unknown_turns_have_none(journal: CallJournal) -> None:
    """Neither noted nor called: no receipt."""
    receipts = Receipts(journal)
    receipts.note(FACTS)
    assert receipts.receipt(SESSION, "t2") is None
    assert receipts.receipt("other", "t1") is None
    assert receipts.receipts("other") == []


def test_turns_known_by_their_calls(journal: CallJournal) -> None:
    """A turn that was run elsewhere still shows its calls."""
    receipts = Receipts(journal)
    receipts.note(FACTS)
    ran(journal, "k9", "x", turn="t9")
    found = receipts.receipt(SESSION, "t9")
    assert found is not None
    assert (found.strategy, [call.key for call in found.calls]) == (None, ["k9"])
    assert [receipt.turn_id for receipt in receipts.receipts(SESSION)] == ["t1", "t9"]


def test_receipts_of_earlier_releases_are_read(tmp_path: Path) -> None:
    """A receipt that was kept without the strategy asked for says that it is not known; later ones tell it."""
    journal = SqlJournal(journal_url(tmp_path))
    body = FACTS.to_json()
    del body["calls"], body["strategy_asked"]
    journal.keep_receipt(SESSION, "t1", json.dumps(body))
    receipts, told = Receipts(journal), replace(FACTS, turn_id="t2", strategy_asked="native")
    receipts.note(told)
    assert receipts.receipts(SESSION) == [FACTS, told]
    journal.close()


def test_noting_again_replaces(journal: CallJournal) -> None:
    """A turn has one receipt, the newest; its calls are the journal's, whatever was noted."""
    receipts = Receipts(journal)
    receipts.note(FACTS)
    receipts.note(replace(FACTS, strategy="native", calls=(ReceiptCallEntry("forged", "x", "done", None),)))
    assert receipts.receipt(SESSION, "t1") == replace(FACTS, strategy="native")
    assert len(receipts.receipts(SESSION)) == 1


def test_receipts_outlive_the_process_with_the_journal(tmp_path: Path) -> None:
    """Another program that opens the journal reads them."""
    for turn in ("t1", "t2"):
        journal = SqlJournal(journal_url(tmp_path))
        Receipts(journal).note(replace(FACTS, turn_id=turn))
        journal.close()
    journal = SqlJournal(journal_url(tmp_path))
    assert [receipt.turn_id for receipt in Receipts(journal).receipts(SESSION)] == ["t1", "t2"]
    assert isinstance(journal, ReceiptJournal)
    journal.close()


def test_receipts_in_memory_do_not_grow() -> None:
    """The newest are kept."""
    kept = MemoryReceipts()
    for number in range(KEPT_PER_SESSION + 3):
        kept.keep_receipt("s", f"t{number}", str(number))
    assert len(kept.receipts("s")) == KEPT_PER_SESSION
    assert kept.receipts("s", "t2") == []
    assert kept.receipts("s", "t3") == ["3"]


def test_a_receipt_is_json(journal: CallJournal) -> None:
    """Its JSON has plain lists and objects, for the command line and other doors."""
    receipts = Receipts(journal)
    receipts.note(FACTS)
    found = receipts.receipt(SESSION, "t1")
    assert found is not None
    assert json.loads(json.dumps(found.to_json())) == {
        "session_id": SESSION,
        "turn_id": "t1",
        "catalog_digest": "cat" * 5,
        "context_digest": "ctx" * 5,
        "strategy": "reload",
        "visible_tools": ["acme.ship", "track"],
        "skills": [{"ref": "acme.packing", "body_digest": "sha256:1"}],
        "calls": [],
        "strategy_asked": None,
    }
