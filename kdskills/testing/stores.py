"""The promises of a `SessionStore`, as named checks any implementation can be run through.

@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.name)
async def test_my_store(check):
await check.run(MyStore())
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from kdskills.session.store import LoadedSkill, SessionRecord, SessionStore, StoreConflict

START: Final = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """One promise: `run` takes an empty store and raises AssertionError when it is broken."""

    name: str
    promise: str
    run: Callable[[SessionStore], Coroutine[object, object, None]]


def sample(session_id: str = "s", consumer: str = "writer", version: int = 1, *digests: str) -> SessionRecord:
    """Return a record whose entries need the texts of *digests*."""
    active = tuple(
        LoadedSkill(f"acme.{number}", digest, "sha256:tree", START, "user") for number, digest in enumerate(digests)
    )
    return SessionRecord(session_id, consumer, version, START, START, 8, active)


def expect(truth: bool, said: str) -> None:
    """Raise AssertionError unless *truth*; unlike `assert`, also under -O."""
    if not truth:
        raise AssertionError(said)


async def _conflicts(put: Coroutine[object, object, None]) -> bool:
    try:
        await put
    except StoreConflict:
        return True
    return False


async def _round_trip(store: SessionStore) -> None:
    record = sample("s", "writer", 1, "sha256:a")
    await store.put_body("sha256:a", "text")
    await store.put(record, expect=None)
    expect(await store.get("s") == record, "a record comes back equal, times to the microsecond included")
    expect(await store.get("S") is None, "ids differ by case")
    expect(await store.get("unknown") is None, "an unknown id is None")


async def _compare_and_set(store: SessionStore) -> None:
    first, second = sample(), replace(sample(), version=2, max_active=None)
    await store.put(first, expect=None)
    expect(await _conflicts(store.put(first, expect=None)), "a present id is no new one")
    expect(await _conflicts(store.put(second, expect=7)), "another version is a conflict")
    expect(await store.get("s") == first, "a conflict changes nothing")
    await store.put(second, expect=1)
    expect(await store.get("s") == second, "the expected version is replaced")
    expect(await _conflicts(store.put(second, expect=1)), "the old version is gone")
    expect(await _conflicts(store.put(sample("t", "writer", 2), expect=1)), "an absent id has no version")


async def _one_winner(store: SessionStore) -> None:
    await store.put(sample(), expect=None)
    tries = [replace(sample(), version=2, consumer=f"c{number}") for number in range(16)]
    lost = await asyncio.gather(*(_conflicts(store.put(record, expect=1)) for record in tries))
    expect(lost.count(False) == 1, "of sixteen writers at once exactly one wins")
    kept = await store.get("s")
    expect(kept is not None and kept.consumer == f"c{lost.index(False)}", "what is kept is the winner's")


async def _touch(store: SessionStore) -> None:
    await store.put(sample(), expect=None)
    later = START + timedelta(seconds=5)
    expect(await store.touch("s", later), "a present session is touched")
    kept = await store.get("s")
    expect(kept is not None and (kept.touched_at, kept.version) == (later, 1), "touching makes no version")
    await store.touch("s", START)
    kept = await store.get("s")
    expect(kept is not None and kept.touched_at == later, "the idle clock never goes back")
    expect(not await store.touch("unknown", later), "an unknown id is False")


async def _delete(store: SessionStore) -> None:
    await store.put(sample(), expect=None)
    expect(await store.delete("s"), "the first delete is True")
    expect(not await store.delete("s"), "the second is False")
    expect(await store.get("s") is None, "what is deleted is gone")
    expect(await _conflicts(store.put(replace(sample(), version=2), expect=1)), "a deleted session is not revived")


async def _pages(store: SessionStore) -> None:
    for number in (3, 1, 2, 5, 4):
        await store.put(sample(f"s{number}", "writer" if number % 2 else "reader"), expect=None)
    first = await store.page(consumer=None, after=None, limit=2)
    expect([head.session_id for head in first] == ["s1", "s2"], "pages are sorted by id")
    rest = await store.page(consumer=None, after="s2", limit=9)
    expect([head.session_id for head in rest] == ["s3", "s4", "s5"], "a page begins after the given id")
    mine = await store.page(consumer="reader", after=None, limit=9)
    expect([head.session_id for head in mine] == ["s2", "s4"], "a page may be of one consumer")
    expect(mine[0] == sample("s2", "reader").head(), "a head holds the record's facts")


async def _purge(store: SessionStore) -> None:
    await store.put(sample("old"), expect=None)
    await store.put(replace(sample("new"), touched_at=START + timedelta(hours=1)), expect=None)
    expect(await store.purge(START) == 0, "what was touched at the moment itself stays")
    expect(await store.purge(START + timedelta(minutes=1)) == 1, "purge counts what it forgot")
    expect(await store.get("old") is None and await store.get("new") is not None, "only idle sessions go")


async def _bodies(store: SessionStore) -> None:
    text = "---\nname: a\n---\nKörper 🙂\r\n\x0c"
    expect(await store.get_body("sha256:a") is None, "an unknown digest is None")
    await store.put_body("sha256:a", text)
    await store.put_body("sha256:a", text)
    await store.put(sample("s", "writer", 1, "sha256:a"), expect=None)
    expect(await store.get_body("sha256:a") == text, "a text comes back character by character")
    await store.put(sample("t", "writer", 1, "sha256:a"), expect=None)
    await store.delete("s")
    expect(await store.get_body("sha256:a") == text, "a text lives as long as one session needs it")


STORE_CHECKS: Final = (
    StoreCheck("round_trip", "records come back equal", _round_trip),
    StoreCheck("compare_and_set", "a put of another version is StoreConflict and changes nothing", _compare_and_set),
    StoreCheck("one_winner", "of writers at once exactly one wins", _one_winner),
    StoreCheck("touch", "touching renews the idle clock only", _touch),
    StoreCheck("delete", "deleting is final", _delete),
    StoreCheck("pages", "listings are sorted, paged and by consumer", _pages),
    StoreCheck("purge", "idle sessions go, others stay", _purge),
    StoreCheck("bodies", "texts are kept by digest while needed", _bodies),
)
