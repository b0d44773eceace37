"""The shipped stores of conversations keep every promise, in memory and on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
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
