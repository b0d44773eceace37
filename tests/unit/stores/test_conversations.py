"""The shipped stores of conversations keep every promise, in memory and on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kdskills.builtin.stores.sql import SqlStore
from kdskills.session import MemoryStore, StoreUnavailable
from kdskills.session.conversations import (
    MEMORY_CONVERSATIONS,
    ConversationStore,
    MemoryConversations,
    conversations_of,
)
from kdskills.testing.conversations import CONVERSATION_CHECKS, refused, stored, talk


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[ConversationStore]:
    """Give an empty store of that kind."""
    store = MemoryStore() if kind == "memory" else SqlStore(f"sqlite:///{folder / 'sessions.db'}")
    yield conversations_of(store)
    if isinstance(store, SqlStore):
        await store.aclose()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("check", CONVERSATION_CHECKS, ids=lambda check: check.name)
async def test_promises_hold(check, kind: str, tmp_path: Path) -> None:
    """Every promise of the shipped suite holds."""
    async with opened(kind, tmp_path) as store:
        await check.run(store)


class Careless(MemoryConversations):
    """A store that takes every turn: the suite must notice."""

    async def add(self, conversation):
        self._conversations[conversation.head.conversation_id] = conversation


@pytest.mark.parametrize("name", ["compare_and_set", "one_winner", "delete"])
async def test_the_suite_notices_a_careless_store(name: str) -> None:
    """Checks fail on a store without compare-and-set."""
    check = next(check for check in CONVERSATION_CHECKS if check.name == name)
    with pytest.raises(AssertionError):
        await check.run(Careless())


async def test_memory_is_bounded() -> None:
    """Over 1,024 conversations the one unused longest goes; reading one is a use."""
    store = MemoryConversations()
    for number in range(MEMORY_CONVERSATIONS):
        await stored(store, talk(f"c{number}"))
    assert await store.get("c0") is not None
    await stored(store, talk("one more"))
    assert [await store.get(name) is None for name in ("c0", "c1", "c2")] == [False, True, False]


async def test_texts_in_memory_are_bounded() -> None:
    """Beyond its characters the one unused longest goes, however few there are; the last one used stays, however long."""
    store = MemoryConversations(text=20_000)
    for name in ("c0", "c1", "c0 again"):
        await stored(store, talk(name, words="x" * 9_000))
    assert [await store.get(name) is None for name in ("c0", "c1", "c0 again")] == [True, False, False]
    await stored(store, talk("long", 3, words="x" * 9_000))
    assert [await store.get(name) is None for name in ("c1", "c0 again", "long")] == [True, True, False]


ADDING = """
import asyncio, sys
from kdskills.builtin.stores.sql import SqlStore
from kdskills.session.conversations import ConversationBusy
from kdskills.testing.conversations import talk

async def add():
    store, added = SqlStore(sys.argv[1]), 0
    print("ready", flush=True)
    sys.stdin.readline()
    while added < 10:
        conversation = await store.conversations.get("c") or talk(turns=0)
        number = conversation.head.number + 1
        try:
            await store.conversations.add(conversation.following(talk(turns=number).turns[-1], conversation.pool))
        except ConversationBusy:
            continue
        added += 1
    await store.aclose()

asyncio.run(add())
"""


async def test_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three processes add ten turns each to one conversation, and all thirty are there, in order."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    adding = [await asyncio.create_subprocess_exec(sys.executable, "-c", ADDING, url, **pipes) for _ in range(3)]
    for process in adding:
        assert await process.stdout.readline() == b"ready\n"
    await asyncio.gather(*(process.communicate(b"go\n") for process in adding))
    assert [process.returncode for process in adding] == [0, 0, 0]
    store = SqlStore(url)
    conversation = await store.conversations.get("c")
    await store.aclose()
    assert conversation is not None
    assert [turn.turn_id for turn in conversation.turns] == [f"turn-{number}" for number in range(1, 31)]


async def test_two_processes_have_one_winner(tmp_path: Path) -> None:
    """Two stores on one file refuse each other's second turn; what the winner wrote is what both read."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    stores = [SqlStore(url), SqlStore(url)]
    await stored(stores[0].conversations, talk())
    tries = [talk(turns=2, words=words) for words in ("left", "right")]
    lost = await asyncio.gather(
        *(refused(store.conversations, conversation) for store, conversation in zip(stores, tries, strict=True))
    )
    assert sorted(lost) == [False, True]
    both = [await store.conversations.get("c") for store in stores]
    assert both[0] == both[1]
    for store in stores:
        await store.aclose()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE kd_conversations SET state = '{}'",
        "UPDATE kd_conversation_turns SET turn = '[]'",
        "DELETE FROM kd_conversation_turns WHERE number = 1",
    ],
)
async def test_a_damaged_row_is_the_operators(damage: str, tmp_path: Path) -> None:
    """Rows that somebody else changed are `store_unavailable`, never half a conversation."""
    store = SqlStore(f"sqlite:///{tmp_path / 's.db'}")
    await stored(store.conversations, talk(turns=2))
    with sqlite3.connect(tmp_path / "s.db") as link:
        link.execute(damage)
    with pytest.raises(StoreUnavailable):
        await store.conversations.get("c")
    await store.aclose()


@pytest.mark.parametrize("hostile", ["'; DROP TABLE kd_conversations; --", "c%", "ключ"])
async def test_hostile_ids_are_values(hostile: str, tmp_path: Path) -> None:
    """An id or a user is a value, never SQL and never a pattern."""
    async with opened("sqlite", tmp_path) as store:
        conversation = await stored(store, talk(hostile, user=hostile))
        await stored(store, talk("c", user="c"))
        assert await store.get(hostile) == conversation
        assert await store.erase(hostile) == 1
        assert await store.get("c") is not None
