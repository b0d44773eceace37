"""The promises of a `ConversationStore`, as named checks any implementation can be run through.

@pytest.mark.parametrize("check", CONVERSATION_CHECKS, ids=lambda check: check.name)
async def test_my_store(check):
    await check.run(MyConversations())
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from kdskills.models import Message, ToolCall, Usage
from kdskills.session.conversations import (
    Conversation,
    ConversationBusy,
    ConversationHead,
    ConversationStore,
    ConversationTurn,
    TurnSummary,
    UndoableConversations,
)
from kdskills.sources import SourcesPool
from kdskills.testing.stores import START, expect


@dataclass(frozen=True, slots=True)
class ConversationCheck:
    """One promise: `run` takes an empty store and raises AssertionError when it is broken."""

    name: str
    promise: str
    run: Callable[[ConversationStore], Coroutine[object, object, None]]


def talk(conversation_id: str = "c", turns: int = 1, user: str | None = None, *, words: str = "hello") -> Conversation:
    """Return a conversation of so many turns, with a tool exchange, a pin and a source in each."""
    conversation, pool = Conversation.begin(conversation_id, "writer", user, START), SourcesPool()
    for number in range(1, turns + 1):
        pool = pool.merge([{"title": f"Source {number}", "url": f"https://example.org/{number}"}]).pool
        messages = (
            Message("user", f"{words} {number} Körper 🙂\0\ud800"),
            Message("assistant", calls=(ToolCall(f"c{number}", "read", '{"a": "1"}'),)),
            Message("tool", "no", call_id=f"c{number}", tool="read", ok=False, pin="skill:a@b"),
            Message("assistant", f"See [[S:{number}]]."),
        )
        ended_at = START + timedelta(microseconds=number)
        turn = ConversationTurn(
            f"turn-{number}", ended_at, "final", messages[0].text, messages, Usage(7, number), ("a.md",)
        )
        conversation = conversation.following(turn, pool)
    return conversation


async def stored(store: ConversationStore, conversation: Conversation) -> Conversation:
    """Add every turn of *conversation* to *store*, and return it."""
    step = replace(conversation, head=replace(conversation.head, number=0), turns=())
    for turn in conversation.turns:
        step = step.following(turn, conversation.pool)
        await store.add(step)
    return conversation


async def refused(store: ConversationStore, conversation: Conversation) -> bool:
    """Whether *store* refuses to add the last turn of *conversation* to what it has."""
    try:
        await store.add(conversation)
    except ConversationBusy:
        return True
    return False


async def _round_trip(store: ConversationStore) -> None:
    conversation = await stored(store, talk(turns=3, user="u"))
    expect(await store.get("c") == conversation, "a conversation comes back equal, texts character by character")
    expect(await store.get("C") is None, "ids differ by case")
    expect(await store.get("unknown") is None, "an unknown id is None")


async def _cuts(store: ConversationStore) -> None:
    conversation = await stored(store, talk(turns=3))
    pinned = conversation.turns[0].messages[1:3]
    summary = TurnSummary(("turn-1",), "In short: Körper 🙂", pinned)
    longer = replace(talk(turns=4), receipts=2, summary=summary)
    await store.add(longer)
    expect(await store.get("c") == longer, "what is shown shorter comes back equal, and what it stands for, too")


async def _compare_and_set(store: ConversationStore) -> None:
    first = await stored(store, talk())
    expect(await refused(store, talk(words="other")), "a conversation that has begun does not begin again")
    expect(await refused(store, talk(turns=3)), "no turn is left out")
    expect(await store.get("c") == first, "who is refused changes nothing")
    await store.add(talk(turns=2))
    expect(await refused(store, talk(turns=2, words="other")), "a turn has one winner")
    expect(await store.get("c") == talk(turns=2), "the turn that came first stays")
    expect(await refused(store, talk("d", turns=2)), "a conversation that is not there has no second turn")


async def _one_winner(store: ConversationStore) -> None:
    await stored(store, talk())
    tries = [talk(turns=2, words=f"w{number}") for number in range(16)]
    lost = await asyncio.gather(*(refused(store, conversation) for conversation in tries))
    expect(lost.count(False) == 1, "of sixteen turns at once exactly one is added")
    current = await store.get("c")
    winner = tries[lost.index(False)]
    expect(current is not None and current.turns[-1] == winner.turns[-1], "and it is the winner's, whole")


async def _delete(store: ConversationStore) -> None:
    conversation = await stored(store, talk())
    expect(await store.delete("c"), "the first delete is True")
    expect(not await store.delete("c"), "the second is False")
    expect(await store.get("c") is None, "what is deleted is gone")
    expect(await refused(store, talk(turns=2)), "a deleted conversation is not revived by a turn that ends late")
    later = START + timedelta(hours=1)
    again = replace(conversation, head=replace(conversation.head, created_at=later))
    await store.add(again)
    expect(await refused(store, talk(turns=2)), "nor is its turn added to a new one of the same id")
    expect(await store.get("c") == again, "a new one of that id holds nothing of the old")


async def _pages(store: ConversationStore) -> None:
    for number in (3, 1, 2, 5, 4):
        await stored(store, talk(f"c{number}", user="odd" if number % 2 else None))
    first = await store.page(user=None, after=None, limit=2)
    expect([head.conversation_id for head in first] == ["c1", "c2"], "pages are sorted by id")
    rest = await store.page(user=None, after="c2", limit=9)
    expect([head.conversation_id for head in rest] == ["c3", "c4", "c5"], "a page begins after the given id")
    theirs = await store.page(user="odd", after=None, limit=9)
    expect([head.conversation_id for head in theirs] == ["c1", "c3", "c5"], "a page may be of one user")
    expect(first[0] == talk("c1", user="odd").head, "a head holds the conversation's facts")


async def _purge(store: ConversationStore) -> None:
    await stored(store, talk("old"))
    new = await stored(store, talk("new", turns=2))
    moment = START + timedelta(microseconds=2)
    expect(await store.purge(START + timedelta(microseconds=1)) == 0, "what ended at the moment itself stays")
    expect(await store.purge(moment) == 1, "purge counts what it forgot")
    expect(await store.get("old") is None and await store.get("new") == new, "only idle conversations go")


async def _erase(store: ConversationStore) -> None:
    for number in range(3):
        await stored(store, talk(f"u{number}", turns=2, user="u"))
    other = await stored(store, talk("v", user="U"))
    nobody = await stored(store, talk("n"))
    expect(await store.erase("u") == 3, "erase counts what it forgot")
    expect(await store.page(user="u", after=None, limit=9) == [], "nothing of the user is left")
    expect(await store.erase("u") == 0, "a second time there is nothing")
    expect([await store.get("v"), await store.get("n")] == [other, nobody], "other users keep theirs")


async def _take_back(store: ConversationStore) -> None:
    if not isinstance(store, UndoableConversations):
        return
    three = await stored(store, talk(turns=3, user="u"))
    late = three.following(replace(three.turns[-1], turn_id="late"), three.pool)
    shorter = await store.take_back(three)
    expect(shorter == await store.get("c"), "what is left is what is kept")
    expect(
        (shorter.turns, shorter.pool) == (three.turns[:2], three.pool), "the last turn is gone, numbers of sources stay"
    )
    expect(await refused(store, late), "a turn that began before is not added any more")
    await store.add(shorter.following(three.turns[-1], shorter.pool))
    expect((await stored_head(store)).number == 3, "a turn that begins now is")
    try:
        await store.take_back(shorter)
    except ConversationBusy:
        pass
    else:
        expect(False, "a conversation that is not what is kept is refused")
    for _ in range(3):
        current = await store.get("c")
        assert current is not None
        await store.take_back(current)
    expect(await store.get("c") is None, "without its only turn the conversation is gone")
    await stored(store, talk())


async def stored_head(store: ConversationStore) -> ConversationHead:
    """Return the head of the conversation `c` of *store*."""
    (head,) = await store.page(user=None, after=None, limit=1)
    return head


CONVERSATION_CHECKS: Final = (
    ConversationCheck("round_trip", "conversations come back equal", _round_trip),
    ConversationCheck("cuts", "summaries and receipts come back equal, beside all turns", _cuts),
    ConversationCheck("compare_and_set", "a turn is added to the turns it began with, or to none", _compare_and_set),
    ConversationCheck("one_winner", "of turns at once exactly one is added", _one_winner),
    ConversationCheck("take_back", "the last turn can be taken back, where the store has it", _take_back),
    ConversationCheck("delete", "deleting is final", _delete),
    ConversationCheck("pages", "listings are sorted, paged and by user", _pages),
    ConversationCheck("purge", "idle conversations go, others stay", _purge),
    ConversationCheck("erase", "what a user said is forgotten, and nothing else", _erase),
)
