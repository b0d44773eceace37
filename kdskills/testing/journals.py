"""The promises of a `CallJournal`, as named checks any implementation can be run through.

::

    @pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.name)
    def test_my_journal(check):
        check.run(MyJournal())

Each check takes an empty journal. A lease of a negative length is one that has run out: no check waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kdskills.remote.ports import CallClaim, CallIdentity, CallJournal, JournalRow, StoredAnswer

ALIVE: Final = 600.0
DEAD: Final = -1.0
SESSION: Final = "thread-1"


@dataclass(frozen=True, slots=True)
class JournalCheck:
    """One promise: `run` takes an empty journal and raises AssertionError when it is broken."""

    name: str
    promise: str
    run: Callable[[CallJournal], None]


def identity(call: str = "c1", turn: str = "t1", session: str = SESSION) -> CallIdentity:
    """Return the identity of a call."""
    return CallIdentity(session, "ship", "0" * 64, session, turn, call, "acme")


def answer(text: str = "parcel 7", *, success: bool = True) -> StoredAnswer:
    """Return an answer of one text."""
    payload = {"contentItems": [{"type": "inputText", "text": text}], "success": success}
    return StoredAnswer(payload, handled=success, error=None if success else text)


def expect(truth: bool, said: str) -> None:
    """Raise AssertionError unless *truth*; unlike `assert`, also under -O."""
    if not truth:
        raise AssertionError(said)


def claim(
    journal: CallJournal,
    owner: str,
    *,
    key: str = "k",
    lease: float = ALIVE,
    idempotent: bool = False,
    turn: str = "t1",
) -> CallClaim:
    """Claim a call."""
    return journal.claim(key, identity(key, turn), owner, lease, idempotent=idempotent)


def ran(journal: CallJournal, key: str, text: str, turn: str = "t1") -> None:
    """Run a call to its end."""
    claim(journal, "a", key=key, turn=turn)
    journal.start(key, "a")
    journal.finish(key, "a", answer(text))


def row_of(journal: CallJournal, key: str = "k") -> JournalRow:
    """Return a row that must be there."""
    row = journal.get(key)
    if row is None:
        raise AssertionError(f"the row {key} is there")
    return row


def _insert_wins(journal: CallJournal) -> None:
    expect(journal.get("k") is None, "an unknown key is None")
    first, second = claim(journal, "a"), claim(journal, "b")
    expect(first.mine and first.row.state == "claimed" and first.row.owner == "a", "the insert wins")
    expect(not second.mine and second.row.owner == "a" and second.row.alive, "the loser sees the winner's row")
    row = first.row
    named = (row.session_id, row.thread_id, row.turn_id, row.call_id, row.namespace, row.tool)
    expect(named == (SESSION, SESSION, "t1", "k", "acme", "ship"), "a row says whose call it is")
    expect(not claim(journal, "a").mine, "claiming one's own call again is no second claim")


def _done(journal: CallJournal) -> None:
    claim(journal, "a")
    expect(journal.start("k", "a"), "a claim starts")
    expect(not journal.start("k", "a"), "a call starts once")
    done = journal.finish("k", "a", answer())
    expect(done is not None and done.state == "done" and done.answer == answer(), "the answer is returned as kept")
    again = journal.finish("k", "a", answer("another"))
    expect(again is not None and again.answer == answer() and again.late is None, "the first answer stays")
    late = claim(journal, "b")
    expect(not late.mine and late.row.answer == answer(), "a later claim is told the answer")


def _refused_before_start(journal: CallJournal) -> None:
    claim(journal, "a")
    done = journal.finish("k", "a", answer("no such skill", success=False))
    expect(done is not None and done.state == "done", "a claimed call may be refused")
    expect(not journal.start("k", "a"), "and never starts afterwards")


def _strangers_move_nothing(journal: CallJournal) -> None:
    claim(journal, "a")
    expect(not journal.start("k", "b"), "another owner cannot start a call")
    journal.finish("k", "b", answer())
    journal.overdue("k", "b", answer())
    journal.lose("k", "b", answer(), dead=False)
    journal.renew({"k": "b"}, ALIVE * 2)
    expect(row_of(journal) == claim(journal, "c").row, "nothing moved")
    expect(row_of(journal).state == "claimed", "the call is still claimed")
    for known in (journal.finish("x", "a", answer()), journal.overdue("x", "a", answer()), journal.get("x")):
        expect(known is None, "an unknown key is None everywhere")


def _overdue(journal: CallJournal) -> None:
    claim(journal, "a")
    journal.start("k", "a")
    gone = journal.overdue("k", "a", answer("no result", success=False))
    expect(gone is not None and gone.state == "overdue", "a deadline moves a running call")
    late = journal.finish("k", "a", answer("at last"))
    expect(late is not None and late.state == "overdue", "a late result moves nothing")
    expect(late is not None and late.late == answer("at last"), "a late result is kept")
    expect(row_of(journal).answer == answer("no result", success=False), "the answer given stays")
    journal.finish("k", "a", answer("again"))
    expect(row_of(journal).late == answer("at last"), "the first late result stays")


def _overdue_in_queue(journal: CallJournal) -> None:
    claim(journal, "a")
    gone = journal.overdue("k", "a", answer("no result"))
    expect(gone is not None and gone.state == "overdue", "a deadline moves a claimed call")
    expect(not journal.start("k", "a"), "and it never starts afterwards")


def _result_before_deadline(journal: CallJournal) -> None:
    ran(journal, "k", "in time")
    row = journal.overdue("k", "a", answer("no result"))
    expect(row is not None and row.state == "done" and row.answer == answer("in time"), "a result in time wins")


def _dead_claims(journal: CallJournal) -> None:
    claim(journal, "a", lease=DEAD)
    expect(not row_of(journal).alive, "a lease that has run out is no life")
    taken = claim(journal, "b")
    expect(taken.mine and taken.row.owner == "b" and taken.row.alive, "a dead owner's claim is anybody's")
    expect(not journal.start("k", "a"), "and no longer the dead one's")
    expect(journal.start("k", "b"), "the new owner starts it")


def _dead_runs(journal: CallJournal) -> None:
    claim(journal, "a", lease=DEAD)
    journal.start("k", "a")
    expect(not claim(journal, "b").mine, "what ran is not run again")
    lost = journal.lose("k", "a", answer("unknown", success=False))
    expect(lost is not None and lost.state == "unknown", "it is lost instead")
    back = journal.finish("k", "a", answer("I live"))
    expect(
        back is not None and back.state == "unknown" and back.late == answer("I live"), "a result of the dead is late"
    )
    expect(claim(journal, "c").row.answer == answer("unknown", success=False), "everybody is told the same")


def _dead_idempotent_runs(journal: CallJournal) -> None:
    claim(journal, "a", lease=DEAD, idempotent=True)
    journal.start("k", "a")
    expect(not claim(journal, "b", idempotent=False).mine, "both sides must say idempotent")
    taken = claim(journal, "c", idempotent=True)
    expect(taken.mine and taken.row.state == "claimed", "an idempotent call of the dead is claimed again")
    journal.start("k", "c")
    journal.finish("k", "a", answer("first"))
    expect(row_of(journal).state == "running" and row_of(journal).late is None, "the first attempt changes nothing now")
    done = journal.finish("k", "c", answer("second"))
    expect(done is not None and done.answer == answer("second"), "the second attempt answers")


def _living_runs(journal: CallJournal) -> None:
    claim(journal, "a")
    journal.start("k", "a")
    kept = journal.lose("k", "a", answer("unknown"))
    expect(kept is not None and kept.state == "running", "a call of the living is not lost")
    own = journal.lose("k", "a", answer("unknown"), dead=False)
    expect(own is not None and own.state == "unknown", "its owner may give it up")


def _renewed(journal: CallJournal) -> None:
    claim(journal, "a", lease=DEAD)
    claim(journal, "a", key="other", lease=DEAD)
    journal.renew({"k": "a", "nobody": "a"}, ALIVE)
    expect(row_of(journal).alive and not row_of(journal, "other").alive, "only the named rows are renewed")
    expect(not claim(journal, "b").mine, "a renewed claim is not taken")


def _running(journal: CallJournal) -> None:
    claim(journal, "a", key="claimed")
    claim(journal, "a", key="running")
    journal.start("running", "a")
    ran(journal, "done", "x")
    claim(journal, "a", key="dead", lease=DEAD)
    found = sorted(row.key for row in journal.running(SESSION))
    expect(found == ["claimed", "running"], "living calls without an answer are running")
    expect(journal.running("thread-2") == [], "of this session only")


def _calls(journal: CallJournal) -> None:
    for key, turn in (("k1", "t1"), ("k2", "t2"), ("k3", "t1")):
        ran(journal, key, key, turn)
    expect({row.key for row in journal.calls(SESSION)} == {"k1", "k2", "k3"}, "all calls of a session")
    expect({row.key for row in journal.calls(SESSION, "t1")} == {"k1", "k3"}, "all calls of a turn")
    expect(journal.calls(SESSION, "t3") == [], "none of a turn without calls")


def _outcomes(journal: CallJournal) -> None:
    ran(journal, "seen", "x", "t0")
    journal.settle(SESSION, "t0")
    ran(journal, "recorded", "x", "t1")
    claim(journal, "a", key="lost", lease=DEAD)
    journal.start("lost", "a")
    claim(journal, "a", key="never-ran", lease=DEAD)
    ran(journal, "now", "x", "t2")
    found = {row.key for row in journal.outcomes(SESSION, "t2")}
    expect(found == {"recorded", "lost"}, f"what was not told: recorded and lost calls of other turns, not {found}")
    journal.tell(["recorded", "seen", "nobody"])
    expect({row.key for row in journal.outcomes(SESSION, "t2")} == {"lost"}, "what was told is not told again")


def _late_outcomes(journal: CallJournal) -> None:
    claim(journal, "a")
    journal.start("k", "a")
    journal.overdue("k", "a", answer("no result"))
    journal.settle(SESSION, "t1")
    expect(journal.outcomes(SESSION) == [], "the model has seen that the deadline passed")
    journal.finish("k", "a", answer("at last"))
    expect([row.key for row in journal.outcomes(SESSION)] == ["k"], "a late result is news")
    journal.settle(SESSION, "t1")
    expect([row.key for row in journal.outcomes(SESSION)] == ["k"], "which no turn has shown")
    journal.tell(["k"])
    expect(journal.outcomes(SESSION) == [], "until it is told")


def _race(journal: CallJournal) -> None:
    winners: list[str] = []
    gate = threading.Barrier(8)

    def take(owner: str) -> None:
        gate.wait()
        if claim(journal, owner).mine and journal.start("k", owner):
            winners.append(owner)

    threads = [threading.Thread(target=take, args=(f"owner-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(len(winners) == 1, f"one of eight wins, not {len(winners)}")


def _takeover_race(journal: CallJournal) -> None:
    claim(journal, "dead", lease=DEAD)
    _race(journal)


def _odd_words(journal: CallJournal) -> None:
    words = 'nul \x00 quote " tab \t é 🜁 ' + "x" * 50_000
    odd = replace(answer(words), error="\x00")
    claim(journal, "a", key="odd")
    journal.start("odd", "a")
    journal.finish("odd", "a", odd)
    expect(row_of(journal, "odd").answer == odd, "any text comes back as it was")
    strange = CallIdentity("s", "to\x00ol", "0", "th\ud800", "tu\x00", "\udfff", "n\x00")
    expect(journal.claim("strange", strange, "a", ALIVE, idempotent=False).mine, "calls of any names are kept")


JOURNAL_CHECKS: Final = (
    JournalCheck("insert-wins", "One claim of a new call wins, whoever else asks", _insert_wins),
    JournalCheck("done", "A finished call keeps its first answer for good", _done),
    JournalCheck("refused", "A claimed call may be refused and never starts then", _refused_before_start),
    JournalCheck("strangers", "Only its owner moves a call", _strangers_move_nothing),
    JournalCheck("overdue", "After a deadline the answer stays and the result is kept as late", _overdue),
    JournalCheck("overdue-queued", "A deadline in the queue ends the call", _overdue_in_queue),
    JournalCheck("in-time", "A result that came first is the answer", _result_before_deadline),
    JournalCheck("dead-claim", "A dead owner's claim is taken over", _dead_claims),
    JournalCheck("dead-run", "A dead owner's run is lost, not run again", _dead_runs),
    JournalCheck("dead-idempotent", "An idempotent one is run again", _dead_idempotent_runs),
    JournalCheck("living-run", "A living owner's run is lost by its own wish only", _living_runs),
    JournalCheck("renew", "Leases are renewed row by row", _renewed),
    JournalCheck("running", "Running calls of a session are known", _running),
    JournalCheck("calls", "Calls are found by session and turn", _calls),
    JournalCheck("outcomes", "Untold answers and losses are told once", _outcomes),
    JournalCheck("late-outcomes", "A late result is told although its turn has ended", _late_outcomes),
    JournalCheck("race", "Of many threads one wins a new call", _race),
    JournalCheck("takeover-race", "Of many threads one takes over a dead owner's call", _takeover_race),
    JournalCheck("words", "Any text is kept exactly", _odd_words),
)
"""Every promise of a journal."""
