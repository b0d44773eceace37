"""A call is run once, whoever delivers it how often; what is answered is written down first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kdskills.remote.dispatch import CallOutcome, RemoteDispatcher
from kdskills.remote.dispatch.dispatcher import CallAttempt, CallLeases
from kdskills.remote.journal import JournalUnavailable, MemoryJournal, strong_key
from kdskills.remote.ports import JournalRow, RemoteCall, StoredAnswer
from kdskills.session.threads import shared_loop


def drive(coroutine):
    """Wait for a coroutine as a sync facade does."""
    return shared_loop().run(lambda: coroutine)


class Counted:
    """A handler that counts its effects."""

    def __init__(self, result: Any = "parcel 7") -> None:
        self.effects = 0
        self.result = result

    def __call__(self, **_: Any) -> Any:
        self.effects += 1
        return self.result


def text(outcome: CallOutcome) -> str:
    """The one text of an outcome's payload."""
    (item,) = outcome.response_payload["contentItems"]
    return item["text"]


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, sql_journal):
    """Both journals."""
    return MemoryJournal() if request.param == "memory" else sql_journal


def test_a_call_delivered_again_is_answered_from_the_journal(journal, make_dispatcher, make_skill, make_call) -> None:
    """The handler runs once; the second delivery gets the same answer and says that it is a replay."""
    handler = Counted()
    dispatcher = make_dispatcher(journal)
    first = drive(dispatcher.call(make_skill(handler), make_call.strong(), None))
    again = drive(dispatcher.call(make_skill(handler), make_call.strong(), None))
    assert (first.replayed, first.result, first.state) == (False, "parcel 7", "done")
    assert (again.replayed, again.result, again.state) == (True, None, "done")
    assert again.response_payload == first.response_payload
    assert (handler.effects, again.key, again.duplicate) == (1, first.key, False)


def test_two_workers_share_a_journal(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """The second worker answers from the first one's row."""
    one, two = Counted("one"), Counted("two")
    first = drive(make_dispatcher(sql_journal).call(make_skill(one), make_call.strong(), None))
    second = drive(make_dispatcher(sql_journal).call(make_skill(two), make_call.strong(), None))
    assert (text(first), text(second), one.effects, two.effects) == ("one", "one", 1, 0)


def test_failures_are_replayed_as_they_were(journal, make_dispatcher, make_skill, make_call) -> None:
    """A failed call is no reason to run it again: the model has read that it failed."""
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise ValueError("no stock")

    dispatcher = make_dispatcher(journal)
    first = drive(dispatcher.call(make_skill(fails), make_call.strong(), None))
    again = drive(dispatcher.call(make_skill(lambda: "fine"), make_call.strong(), None))
    assert text(first) == text(again) == "remote skill ship failed: no stock"
    assert (again.handled, again.response_payload["success"], again.error, len(calls)) == (False, False, text(first), 1)


@pytest.mark.parametrize("other", [{"call": "c2"}, {"turn": "t2"}, {"arguments": {"n": 2}}, {"namespace": "acme"}])
def test_other_calls_run(journal, make_dispatcher, make_skill, make_call, other) -> None:
    """Another call, turn, namespace or other arguments: another call, though the request id is the same."""
    handler = Counted()
    dispatcher = make_dispatcher(journal)
    drive(dispatcher.call(make_skill(handler), make_call.strong(request_id="0"), None))
    identity = make_call.strong(**{"request_id": "0", **other})
    drive(dispatcher.call(make_skill(handler), identity, other.get("arguments")))
    assert handler.effects == 2


def test_request_ids_that_begin_again_are_other_calls(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """After a restart of the server request id 0 comes back: it names nothing."""
    handler = Counted()
    for run in range(3):
        dispatcher = make_dispatcher(sql_journal)
        for request in ("0", "1"):
            identity = make_call.strong(f"call-{run}-{request}", request_id=request)
            assert not drive(dispatcher.call(make_skill(handler), identity, None)).replayed
    assert handler.effects == 6


def test_weak_calls_are_known_in_this_process_only(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """A weak identity is deduplicated, and never written into a journal that outlives the request id."""
    handler = Counted()
    dispatcher = make_dispatcher(sql_journal)
    first = drive(dispatcher.call(make_skill(handler), make_call.weak(), None))
    again = drive(dispatcher.call(make_skill(handler), make_call.weak(), None))
    assert (handler.effects, again.replayed, again.key) == (1, True, first.key)
    assert sql_journal.calls("s1") == []
    drive(make_dispatcher(sql_journal).call(make_skill(handler), make_call.weak(), None))
    assert handler.effects == 2


def test_closed_sessions_forget_weak_calls(make_dispatcher, make_skill, make_call) -> None:
    """After a session is closed its request ids mean nothing."""
    handler = Counted()
    dispatcher = make_dispatcher()
    drive(dispatcher.call(make_skill(handler), make_call.weak(), None))
    dispatcher.forget("s1")
    drive(dispatcher.call(make_skill(handler), make_call.weak(), None))
    assert handler.effects == 2


def test_unnamed_calls_run_each_time(journal, make_dispatcher, make_skill, make_call) -> None:
    """Neither strong nor weak: no deduplication, nothing written down, no key."""
    handler = Counted()
    dispatcher = make_dispatcher(journal)
    for _ in range(2):
        assert drive(dispatcher.call(make_skill(handler), make_call.weak(None), None)).key is None
    assert (handler.effects, list(journal.calls("s1"))) == (2, [])


def test_run_asks_nothing_and_keeps_nothing(journal, make_dispatcher, make_skill, make_call) -> None:
    """A call for the program itself runs each time, whatever its identity; an unknown skill is refused at once."""
    handler = Counted()
    dispatcher = make_dispatcher(journal)
    for _ in range(2):
        outcome = drive(dispatcher.run(make_skill(handler), make_call.strong(), None))
        assert (outcome.result, outcome.key, outcome.replayed) == ("parcel 7", None, False)
    assert text(drive(dispatcher.run(None, make_call.strong(), None))) == "no remote skill registered for ship"
    assert (handler.effects, list(journal.calls("s1"))) == (2, [])


def test_accepted_answers_are_duplicates_on_their_connection_only(make_dispatcher, make_skill, make_call) -> None:
    """On the connection that took the answer nothing is submitted again; a new one gets the stored answer."""
    dispatcher = make_dispatcher()
    skill, identity = make_skill(Counted()), make_call.strong()
    first = drive(dispatcher.call(skill, identity, None, connection="one"))
    assert not drive(dispatcher.call(skill, identity, None, connection="one")).duplicate
    dispatcher.accepted(first, "one")
    assert drive(dispatcher.call(skill, identity, None, connection="one")).duplicate
    assert not drive(dispatcher.call(skill, identity, None, connection="two")).duplicate


def test_payloads_of_replays_are_the_callers_own(make_dispatcher, make_skill, make_call) -> None:
    """Whoever changes a payload changes no later answer."""
    dispatcher = make_dispatcher()
    skill, identity = make_skill(Counted()), make_call.strong()
    first = drive(dispatcher.call(skill, identity, None))
    first.response_payload["contentItems"][0]["text"] = "changed"
    first.response_payload["contentItems"].append({})
    assert text(drive(dispatcher.call(skill, identity, None))) == "parcel 7"


def test_losers_wait_for_the_winner(journal, make_dispatcher, make_skill, make_call) -> None:
    """Eight deliveries at once: one runs the handler, seven wait and say the same."""
    effects: list[int] = []
    gate = threading.Event()

    def slow() -> str:
        effects.append(1)
        assert gate.wait(60)
        return "parcel 7"

    skill = make_skill(slow)
    workers = [make_dispatcher(journal) for _ in range(2)]
    outcomes: list[CallOutcome] = []

    def deliver(dispatcher: RemoteDispatcher) -> None:
        outcomes.append(drive(dispatcher.call(skill, make_call.strong(), None)))

    threads = [threading.Thread(target=deliver, args=(workers[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(60)
    assert (len(effects), {text(outcome) for outcome in outcomes}) == (1, {"parcel 7"})
    assert sorted(outcome.replayed for outcome in outcomes) == [False] + [True] * 7


def test_a_claim_of_the_dead_is_run(journal, make_dispatcher, make_skill, make_call) -> None:
    """A worker died before its handler started: whoever is asked runs it."""
    identity, handler = make_call.strong(), Counted()
    journal.claim(strong_key(identity), identity, "dead", -1.0, idempotent=False)
    outcome = drive(make_dispatcher(journal).call(make_skill(handler), identity, None))
    assert (outcome.result, handler.effects) == ("parcel 7", 1)


def test_a_run_of_the_dead_is_unknown(journal, make_dispatcher, make_skill, make_call) -> None:
    """A worker died inside a handler: the effect may have happened, so the model is told that nobody knows."""
    identity, handler = make_call.strong(), Counted()
    journal.claim(strong_key(identity), identity, "dead", -1.0, idempotent=False)
    journal.start(strong_key(identity), "dead")
    for _ in range(2):
        outcome = drive(make_dispatcher(journal).call(make_skill(handler), identity, None))
        assert text(outcome) == (
            "remote skill ship failed: outcome unknown: the worker stopped before recording a result"
        )
        assert (outcome.state, outcome.handled, outcome.replayed, handler.effects) == ("unknown", False, True, 0)


def test_an_idempotent_run_of_the_dead_is_run_again(journal, make_dispatcher, make_skill, make_call) -> None:
    """What may run twice does."""
    identity, handler = make_call.strong(), Counted()
    journal.claim(strong_key(identity), identity, "dead", -1.0, idempotent=True)
    journal.start(strong_key(identity), "dead")
    outcome = drive(make_dispatcher(journal).call(make_skill(handler, idempotent=True), identity, None))
    assert (outcome.result, outcome.state, handler.effects) == ("parcel 7", "done", 1)


@pytest.mark.parametrize("skill_says", [False, None])
def test_an_idempotent_run_is_left_to_those_who_may(
    sql_journal, make_dispatcher, make_skill, make_call, skill_says
) -> None:
    """A worker whose own skill is not idempotent, or that has none, does not run it: after a while nobody knows."""
    identity, handler = make_call.strong(), Counted()
    sql_journal.claim(strong_key(identity), identity, "dead", -1.0, idempotent=True)
    sql_journal.start(strong_key(identity), "dead")
    skill = None if skill_says is None else make_skill(handler)
    outcome = drive(make_dispatcher(sql_journal, no_skill_s=0.05).call(skill, identity, None))
    assert (outcome.state, handler.effects) == ("unknown", 0)


def test_a_worker_that_was_taken_for_dead_does_not_start(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """Its claim was taken over while it slept: it waits for the other's answer instead of running."""
    identity, handler = make_call.strong(), Counted("mine")
    key = strong_key(identity)

    class Overtaken:
        """A journal in which another worker takes the call just before its handler starts."""

        shared = True

        def __getattr__(self, name: str) -> Any:
            return getattr(sql_journal, name)

        def start(self, key: str, owner: str) -> bool:
            sql_journal.renew({key: owner}, -1.0)
            assert sql_journal.claim(key, identity, "other", 600.0, idempotent=False).mine
            sql_journal.start(key, "other")
            answer = {"contentItems": [{"type": "inputText", "text": "theirs"}], "success": True}
            sql_journal.finish(key, "other", StoredAnswer(answer, handled=True))
            return sql_journal.start(key, owner)

    outcome = drive(make_dispatcher(Overtaken()).call(make_skill(handler), identity, None))
    assert (text(outcome), outcome.replayed, handler.effects, outcome.key) == ("theirs", True, 0, key)


def test_a_result_of_one_taken_for_dead_is_late(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """A worker slept through its lease inside a handler: the model was told unknown, and that stays the answer."""
    identity = make_call.strong()
    key = strong_key(identity)
    other = make_dispatcher(sql_journal)

    def slept() -> str:
        row = sql_journal.get(key)
        sql_journal.renew({key: row.owner}, -1.0)
        drive(other.call(skill, identity, None))
        return "I am back"

    skill = make_skill(slept, deadline_seconds=None)
    outcome = drive(make_dispatcher(sql_journal).call(skill, identity, None))
    assert "outcome unknown" in text(outcome)
    assert (outcome.state, outcome.late, outcome.result) == ("unknown", True, None)
    late = sql_journal.get(key).late
    assert late.payload["contentItems"][0]["text"] == "I am back"


@pytest.mark.parametrize(("knows", "seconds"), [(True, "skill"), (False, "session")])
def test_unknown_skills_are_left_to_others_first(
    sql_journal, make_dispatcher, make_skill, make_call, knows, seconds
) -> None:
    """A worker without the skill, or without the session, gives one that has it the time to claim the call."""
    waits = (
        {"no_skill_s": 60.0, "no_session_s": 0.0} if seconds == "skill" else {"no_skill_s": 0.0, "no_session_s": 60.0}
    )
    ignorant = make_dispatcher(sql_journal, **waits)
    outcomes: list[CallOutcome] = []

    def refuse() -> None:
        outcomes.append(drive(ignorant.call(None, make_call.strong(), None, knows_session=knows)))

    thread = threading.Thread(target=refuse)
    thread.start()
    handler = Counted()
    drive(make_dispatcher(sql_journal).call(make_skill(handler), make_call.strong(), None))
    thread.join(60)
    assert (text(outcomes[0]), outcomes[0].replayed, handler.effects) == ("parcel 7", True, 1)


def test_nobody_has_the_skill(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """When the time is over the refusal is claimed, and later deliveries get it, even where the skill is there now."""
    identity, handler = make_call.strong(namespace="acme"), Counted()
    first = drive(make_dispatcher(sql_journal, no_skill_s=0.01).call(None, identity, None))
    again = drive(make_dispatcher(sql_journal).call(make_skill(handler), identity, None))
    assert text(first) == text(again) == "no remote skill registered for acme.ship"
    assert (first.handled, first.state, again.replayed, handler.effects) == (False, "done", True, 0)


def test_refusals_in_memory_wait_for_nobody(make_dispatcher, make_call) -> None:
    """Where no other worker can see the call, an unknown skill is refused at once."""
    dispatcher = make_dispatcher(no_session_s=3600.0, no_skill_s=3600.0)
    assert "no remote skill" in text(drive(dispatcher.call(None, make_call.strong(), None, knows_session=False)))
    assert "no remote skill" in text(drive(dispatcher.call(None, make_call.weak(), None)))


def test_bad_arguments_are_answered_and_not_run(journal, make_dispatcher, make_skill, make_call) -> None:
    """Faults are listed by path; the row is done, the handler was never started."""
    handler = Counted()
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "m": {"type": "null"}}, "required": ["n"]}
    skill = make_skill(handler, input_schema=schema)
    outcome = drive(make_dispatcher(journal).call(skill, make_call.strong(), {"n": "x", "m": 1}))
    assert text(outcome) == "remote skill ship failed: $.m: 1 is not of type 'null'; $.n: 'x' is not of type 'integer'"
    assert (outcome.state, outcome.handled, handler.effects) == ("done", False, 0)
    assert "required" in text(drive(make_dispatcher(journal).call(skill, make_call.strong("c2"), None)))


def test_handlers_learn_of_their_call(journal, make_dispatcher, make_skill, make_call) -> None:
    """`RemoteCall` has the key, the ids and the deadline; the model cannot pass one itself."""
    seen: list[RemoteCall] = []
    skill = make_skill(lambda call, n: seen.append(call), call_parameter="call", deadline_seconds=60.0)
    outcome = drive(make_dispatcher(journal).call(skill, make_call.strong(), {"n": 1, "call": "forged"}))
    assert outcome.handled, outcome.error
    (call,) = seen
    assert (call.key, call.thread_id, call.turn_id, call.call_id) == (outcome.key, "s1", "t1", "c1")
    assert call.deadline is not None
    assert not call.cancelled


class Broken:
    """A journal that fails at chosen questions."""

    shared = True

    def __init__(self, *questions: str, times: int = 10**6) -> None:
        self._inner = MemoryJournal()
        self._questions = questions
        self._left = times

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inner = getattr(self._inner, name)

        def ask(*args: Any, **keywords: Any) -> Any:
            if name in self._questions and self._left > 0:
                self._left -= 1
                raise JournalUnavailable("gone")
            return inner(*args, **keywords)

        return ask


@pytest.mark.parametrize("question", ["claim", "start"])
def test_without_a_journal_nothing_runs(make_dispatcher, make_skill, make_call, question) -> None:
    """What cannot be claimed is not run, and the model is told so."""
    handler = Counted()
    outcome = drive(make_dispatcher(Broken(question)).call(make_skill(handler), make_call.strong(), None))
    assert text(outcome) == "remote skill ship failed: not run: the journal of calls does not answer"
    assert (outcome.handled, handler.effects) == (False, 0)


def test_an_answer_that_cannot_be_recorded_is_not_given(
    make_dispatcher, make_skill, make_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect happened, but nobody could repeat the answer: the model is told that the outcome is unknown."""
    monkeypatch.setattr("kdskills.remote.dispatch.dispatcher.WRITE_PAUSE_S", 0.0)
    handler = Counted()
    outcome = drive(make_dispatcher(Broken("finish")).call(make_skill(handler), make_call.strong(), None))
    assert text(outcome) == "remote skill ship failed: outcome unknown: the result could not be recorded"
    assert (outcome.handled, handler.effects) == (False, 1)


def test_a_journal_that_comes_back_is_written_to(
    make_dispatcher, make_skill, make_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short absence costs nothing but a moment."""
    monkeypatch.setattr("kdskills.remote.dispatch.dispatcher.WRITE_PAUSE_S", 0.0)
    outcome = drive(make_dispatcher(Broken("finish", times=2)).call(make_skill(Counted()), make_call.strong(), None))
    assert (text(outcome), outcome.handled) == ("parcel 7", True)


def test_waiters_bear_with_a_journal_that_is_away(make_dispatcher, make_skill, make_call) -> None:
    """A loser that cannot read the row for a moment goes on waiting."""
    journal = Broken("get", times=3)
    identity = make_call.strong()
    key = strong_key(identity)
    journal.claim(key, identity, "other", 600.0, idempotent=False)
    journal.start(key, "other")
    outcomes: list[CallOutcome] = []
    dispatcher = make_dispatcher(journal)
    thread = threading.Thread(
        target=lambda: outcomes.append(drive(dispatcher.call(make_skill(Counted()), identity, None)))
    )
    thread.start()
    journal.finish(
        key,
        "other",
        StoredAnswer({"contentItems": [{"type": "inputText", "text": "ok"}], "success": True}, handled=True),
    )
    thread.join(60)
    assert text(outcomes[0]) == "ok"


def test_leases_are_renewed_while_a_handler_runs(sql_journal, make_dispatcher, make_skill, make_call) -> None:
    """A handler may run for longer than a lease: its worker is not taken for dead, and nothing is held afterwards."""
    leases = CallLeases(lease_s=0.6, renew_s=0.05)
    renewed = threading.Event()
    key = strong_key(make_call.strong())
    first: list[JournalRow] = []

    class Watched:
        """A journal that tells of renewals."""

        shared = True

        def __getattr__(self, name: str) -> Any:
            return getattr(sql_journal, name)

        def renew(self, keys: dict[str, str], lease_s: float) -> None:
            sql_journal.renew(keys, lease_s)
            if first and sql_journal.get(key).lease_until > first[0].lease_until + 0.6:
                renewed.set()

    def long() -> str:
        first.append(sql_journal.get(key))
        assert renewed.wait(60)
        return "done"

    dispatcher = make_dispatcher(Watched(), leases=leases)
    assert text(drive(dispatcher.call(make_skill(long), make_call.strong(), None))) == "done"
    assert leases._leases == {}


def test_a_journal_that_fails_does_not_end_the_leases(make_dispatcher, make_call) -> None:
    """One failed renewal is logged; the next one is tried."""
    tried = threading.Semaphore(0)

    class Away(MemoryJournal):
        """A journal that is away."""

        def renew(self, keys: Any, lease_s: float) -> None:
            tried.release()
            raise OSError("away")

    leases = CallLeases(lease_s=1.0, renew_s=0.01)
    leases.hold(CallAttempt(make_dispatcher(Away()), None, make_call.strong(), None))
    for _ in range(3):
        assert tried.acquire(timeout=60)
    leases.close()
    leases.close()
