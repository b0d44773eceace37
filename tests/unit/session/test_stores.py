"""The store in memory keeps every promise of a store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kdskills.session.store import SPARE_BODIES, MemoryStore, SessionStore, StoreConflict
from kdskills.testing.stores import STORE_CHECKS, StoreCheck, expect, sample


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.name)
async def test_memory_store(check: StoreCheck) -> None:
    """The store in memory passes each named check."""
    await check.run(MemoryStore())


def test_it_is_a_store() -> None:
    """MemoryStore has every method of the protocol."""
    assert isinstance(MemoryStore(), SessionStore)


class Forgetful(MemoryStore):
    """A store that takes every put: the suite must notice."""

    async def put(self, record, *, expect):
        with self._lock:
            self._records[record.session_id] = record


@pytest.mark.parametrize("name", ["compare_and_set", "one_winner", "delete"])
async def test_the_suite_notices_a_careless_store(name: str) -> None:
    """Checks fail on a store without compare-and-set."""
    check = next(check for check in STORE_CHECKS if check.name == name)
    with pytest.raises(AssertionError):
        await check.run(Forgetful())


def test_expect_says_what_broke() -> None:
    """A broken promise is told in words."""
    with pytest.raises(AssertionError, match="words"):
        expect(False, "words")


async def test_unused_texts_do_not_pile_up() -> None:
    """Texts no session refers to are dropped beyond 256; those in use stay."""
    store = MemoryStore()
    await store.put_body("used", "text")
    await store.put(sample("s", "writer", 1, "used"), expect=None)
    for number in range(SPARE_BODIES + 10):
        await store.put_body(f"d{number}", "x")
    assert await store.get_body("used") == "text"
    assert [await store.get_body(f"d{number}") for number in (0, 9, 10)] == [None, None, "x"]


async def test_a_replaced_text_becomes_spare() -> None:
    """When a session moves on, its old text is only spare."""
    store = MemoryStore()
    await store.put_body("a", "A")
    await store.put_body("b", "B")
    await store.put(sample("s", "writer", 1, "a"), expect=None)
    await store.put(sample("s", "writer", 2, "b"), expect=1)
    for number in range(SPARE_BODIES):
        await store.put_body(f"d{number}", "x")
    assert (await store.get_body("a"), await store.get_body("b")) == (None, "B")


async def test_threads() -> None:
    """Writers on many threads lose no update."""
    store = MemoryStore()
    await store.put(replace(sample(), max_active=1), expect=None)

    async def bump() -> None:
        while True:
            record = await store.get("s")
            assert record is not None
            try:
                await store.put(
                    replace(record, version=record.version + 1, max_active=record.max_active + 1), expect=record.version
                )
            except StoreConflict:
                continue
            return

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, bump()) for _ in range(8)))
    record = await store.get("s")
    assert record is not None
    assert (record.version, record.max_active) == (9, 9)
