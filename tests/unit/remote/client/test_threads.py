"""What notifications say of threads and turns."""

import asyncio

from kdskills.remote.client.server import MAX_TURNS, WatchedThreads, item_message, turn_record


def note(threads, method, **params):
    """Let a notification about thread `t` come in."""
    threads.note(method, {"threadId": "t", **params})


def test_a_turn_is_watched_from_start_to_end():
    """A started turn is active, its messages are kept, its end is known with the error."""
    threads = WatchedThreads()
    note(threads, "turn/started", turn={"id": "1"})
    assert threads.get("t").active_turn == "1"
    note(
        threads, "item/completed", turnId="1", item={"type": "userMessage", "content": [{"type": "text", "text": "hi"}]}
    )
    note(threads, "item/completed", turnId="1", item={"type": "agentMessage", "text": "hello"})
    note(threads, "turn/completed", turn={"id": "1", "status": "failed", "error": {"message": "no"}})
    thread = threads.get("t")
    assert thread.active_turn is None
    assert thread.turns["1"].error == {"message": "no"}
    assert thread.turns["1"].transcript() == [
        {"turnId": "1", "role": "user", "status": "failed", "text": "hi"},
        {"turnId": "1", "role": "assistant", "status": "failed", "text": "hello"},
    ]


def test_a_turn_that_ended_before_its_start_was_answered_is_not_active():
    """The answer of `turn/start` may be read after the turn's end."""
    threads = WatchedThreads()
    note(threads, "turn/completed", turn={"id": "1", "status": "completed"})
    threads.begin_turn("t", {"id": "1"})
    note(threads, "turn/started", turn={"id": "1"})
    assert threads.get("t").active_turn is None
    assert threads.get("t").turns["1"].status == "completed"


def test_closing_and_losing_the_connection():
    """A closed thread is not subscribed; a lost connection forgets turns whose end nobody will tell."""
    threads = WatchedThreads()
    threads.learn({"id": "t", "path": "/p"}, subscribed=True)
    note(threads, "thread/closed")
    assert (threads.get("t").subscribed, threads.get("t").closings) == (False, 1)
    threads.learn({"id": "t"}, subscribed=True)
    assert threads.get("t").path == "/p"
    note(threads, "turn/started", turn={"id": "1"})
    note(threads, "turn/completed", turn={"id": "0", "status": "completed"})
    threads.connection_lost()
    assert list(threads.get("t").turns) == ["0"]
    assert not threads.get("t").subscribed


def test_compactions_are_counted_however_they_are_told():
    """Older servers send `thread/compacted`, newer ones an item."""
    threads = WatchedThreads()
    note(threads, "thread/compacted")
    note(threads, "item/completed", item={"type": "contextCompaction"})
    assert threads.get("t").compactions == 2


def test_odd_notifications_are_harmless():
    """Notifications without a thread, or with parts of another shape, change nothing and raise nothing."""
    threads = WatchedThreads()
    for method in ("turn/started", "turn/completed", "item/completed", "thread/status/changed", "thread/closed"):
        for params in ({}, {"threadId": 5}, {"threadId": "t", "turn": 5, "item": [], "status": "x", "turnId": None}):
            threads.note(method, params)
    note(threads, "turn/completed", turn={"id": "9", "status": "whatever"})
    assert threads.get("t").turns["9"].status == "completed"
    assert item_message({"type": "userMessage", "content": "text"}) == {"role": "user", "text": ""}
    assert item_message({"type": "reasoning"}) is None
    assert turn_record({"id": 1, "items": [5, {"type": "agentMessage", "text": "x"}]}).messages == [
        {"role": "assistant", "text": "x"}
    ]


def test_memory_of_turns_is_bounded():
    """A long conversation keeps the newest turns only."""
    threads = WatchedThreads()
    for number in range(MAX_TURNS + 10):
        note(threads, "turn/completed", turn={"id": str(number), "status": "completed"})
    assert len(threads.get("t").turns) == MAX_TURNS
    assert str(MAX_TURNS + 9) in threads.get("t").turns


async def test_waiting_ends_with_the_change_or_the_time():
    """`until` wakes on a change, and says False when the time is up."""
    threads = WatchedThreads()
    waiting = asyncio.ensure_future(threads.until(lambda: threads.get("t").closings > 0, 60))
    await asyncio.sleep(0)
    note(threads, "thread/closed")
    assert await waiting is True
    assert await threads.until(lambda: False, 0.01) is False
    waiting = asyncio.ensure_future(threads.until(lambda: False, None))
    await asyncio.sleep(0)
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
