"""Many callers at once."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from kdskills.errors import KdskillsError, SessionError
from kdskills.session import MemoryStore, SkillCatalog, SkillRuntime
from kdskills.session.bodies import Abandoned, Bodies, Flights, read_pieces
from kdskills.session.store import StoreConflict


class SlowReader:
    """Reads like the real one, but only once `go` is set; counts and notes abandonment."""

    def __init__(self, *slow: str) -> None:
        self.slow = slow
        self.go = threading.Event()
        self.began = threading.Event()
        self.reads: list[str] = []
        self.abandoned = threading.Event()

    def __call__(self, folder, name, limit, abandoned):
        """Read a file."""
        self.reads.append(folder.name)
        if folder.name in self.slow:
            self.began.set()
            while not self.go.wait(0.005):
                if abandoned.is_set():
                    self.abandoned.set()
                    raise Abandoned
        return read_pieces(folder, name, limit, abandoned)


@pytest.fixture
def slow(make):
    """Builds a runtime whose reads of the named skills wait."""

    def build(*names: str, **options) -> tuple[SkillRuntime, SlowReader]:
        runtime, reader = make(**options), SlowReader(*names)
        runtime._core.bodies = Bodies(2 * 1024 * 1024, reader=reader)
        return runtime, reader

    return build


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def joined(flights: Flights, count: int) -> None:
    """Wait until *count* callers wait for one flight."""
    async with asyncio.timeout(60):
        while [flight.waiters for flight in flights._flying.values()] != [count]:  # noqa: ASYNC110 - no event of it
            await asyncio.sleep(0.005)


async def refused(awaiting):
    with pytest.raises(KdskillsError) as caught:
        await awaiting
    return caught.value


async def test_sixteen_callers_one_read(slow):
    """Sixteen sessions loading one skill at once cause one body read."""
    runtime, reader = slow("sales")
    sessions = [await runtime.create_session() for _ in range(16)]
    loads = [asyncio.create_task(session.load(["sales"])) for session in sessions]
    await until(reader.began)
    await joined(runtime._core.bodies._flights, 16)
    reader.go.set()
    receipts = await asyncio.gather(*loads)
    assert {receipt.active_skills[0].name for receipt in receipts} == {"sales"}
    assert reader.reads == ["sales"]


async def test_a_cancelled_waiter_harms_no_other(slow):
    """Cancelling some of the callers leaves the read and the others alone."""
    runtime, reader = slow("sales")
    sessions = [await runtime.create_session() for _ in range(4)]
    loads = [asyncio.create_task(session.load(["sales"])) for session in sessions]
    await until(reader.began)
    for load in loads[:3]:
        load.cancel()
    results = await asyncio.gather(*loads[:3], return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 3
    assert not reader.abandoned.is_set()
    reader.go.set()
    assert (await loads[3]).changed
    assert [await session.active() for session in sessions[:3]] == [[], [], []]


async def test_the_read_stops_when_the_last_leaves(slow):
    """With nobody waiting the read ends, and the next load reads anew."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()
    load = asyncio.create_task(session.load(["sales"]))
    await until(reader.began)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    await until(reader.abandoned)
    reader.go.set()
    assert (await session.load(["sales"])).changed
    assert reader.reads == ["sales", "sales"]


async def test_removal_during_a_load(slow, bundle):
    """A load whose skill, or import, is removed ends with skill_not_found while the text is still being read; nothing is committed."""
    for gone, asked in (("sales", "sales"), ("base", "report")):
        catalog = SkillCatalog.from_directory(bundle.root / "skills")
        runtime, reader = slow(gone, catalog=catalog)
        session = await runtime.create_session(initial=["charts"])
        load = asyncio.create_task(session.load([asked], "add"))
        await until(reader.began)
        await runtime.remove_skill(gone)
        assert (await refused(load)).code == "skill_not_found"
        reader.go.set()
        assert [skill.name for skill in await session.active()] == ["charts"]


async def test_close_during_a_load(slow):
    """A load whose session is closed ends at once with session_not_found."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()
    load = asyncio.create_task(session.load(["sales"]))
    await until(reader.began)
    assert await session.close()
    assert (await refused(load)).code == "session_not_found"
    reader.go.set()
    assert await runtime.list_sessions() == []


async def test_unload_during_add(slow):
    """unload(a) while add(b) reads: both hold."""
    runtime, reader = slow("brief")
    session = await runtime.create_session(initial=["sales", "charts"])
    load = asyncio.create_task(session.load(["brief"], "add"))
    await until(reader.began)
    await session.unload(["sales"])
    reader.go.set()
    assert [receipt.name for receipt in (await load).active_skills] == ["charts", "brief"]
    assert [skill.name for skill in await session.active()] == ["charts", "brief"]


async def test_adds_at_once_all_hold(make):
    """Four adds at once on one session lose none."""
    runtime = make()
    session = await runtime.create_session()
    await asyncio.gather(*(session.load([name], "add") for name in ("sales", "charts", "brief", "base")))
    assert sorted(skill.name for skill in await session.active()) == ["base", "brief", "charts", "sales"]


async def test_calls_of_one_reply_wait_for_the_load_sent_before_them(slow):
    """Sent side by side, a read and an unload find what the load before them loads; other sessions do not wait."""
    runtime, reader = slow("sales")
    session, other = await runtime.create_session(), await runtime.create_session(initial=["charts"])
    load = asyncio.create_task(session.call("skills_load", {"names": ["sales"]}))
    read = asyncio.create_task(session.call("skills_read", {"path": "SKILL.md"}))
    unload = asyncio.create_task(session.call("skills_unload", {"names": ["sales"]}))
    late = asyncio.create_task(session.call("skills_read", {"path": "SKILL.md"}))
    await until(reader.began)
    assert (await other.call("skills_read", {"path": "SKILL.md"})).ok
    assert not read.done()
    reader.go.set()
    replies = await asyncio.gather(load, read, unload, late)
    assert [reply.ok for reply in replies] == [True, True, True, False]
    assert replies[3].error["code"] == "no_active_skills"
    assert runtime._core.order._changes == {}


async def test_a_call_that_gives_up_lets_no_later_one_overtake(slow):
    """Cancelling a load that waits for another neither ends that one nor lets calls behind it go first."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()
    first = asyncio.create_task(session.call("skills_load", {"names": ["sales"]}))
    second = asyncio.create_task(session.call("skills_load", {"names": ["charts"]}))
    read = asyncio.create_task(session.call("skills_read", {"path": "SKILL.md"}))
    await until(reader.began)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    assert not read.done()
    reader.go.set()
    assert [reply.ok for reply in await asyncio.gather(first, read)] == [True, True]
    assert [skill.name for skill in await session.active()] == ["sales"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_calls_of_other_loops_wait_too(slow, cancelled):
    """A load of another thread's loop is waited for, and a loop that ends in the middle of it keeps nobody waiting."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()

    async def load() -> None:
        loading = asyncio.create_task(session.call("skills_load", {"names": ["sales"]}))
        await until(reader.began)
        if not cancelled:
            await loading  # else the end of this loop cancels it

    other = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(load())))
    await until(reader.began)
    read = asyncio.create_task(session.call("skills_read", {"path": "SKILL.md"}))
    if not cancelled:
        await asyncio.sleep(0)
        assert not read.done()
        reader.go.set()
    assert (await read).ok is not cancelled
    reader.go.set()
    await other


async def test_what_waits_for_a_load_is_answered_when_its_session_closes(slow):
    """Closing ends the load, and the calls behind it."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()
    calls = [asyncio.create_task(session.call("skills_load", {"names": ["sales"]})) for _ in range(2)]
    await until(reader.began)
    assert await session.close()
    assert [reply.error["code"] for reply in await asyncio.gather(*calls)] == ["session_not_found"] * 2
    reader.go.set()


class Racing(MemoryStore):
    """A store in which somebody else is always faster."""

    def __init__(self, wins: int) -> None:
        super().__init__()
        self.wins = wins

    async def put(self, record, *, expect):
        """Lose the race a number of times."""
        if expect is not None and self.wins:
            self.wins -= 1
            raise StoreConflict("overtaken")
        await super().put(record, expect=expect)


@pytest.mark.parametrize(("wins", "outcome"), [(4, "held"), (5, "conflict")])
async def test_five_tries(make, wins, outcome):
    """Four lost races are tried again; the fifth is conflict for the caller, and nothing has changed."""
    runtime = make(store=Racing(0))
    session = await runtime.create_session()
    runtime.store.wins = wins
    if outcome == "held":
        assert (await session.load(["sales"])).changed
    else:
        error = await refused(session.load(["sales"]))
        assert (type(error), error.code, error.who) == (SessionError, "conflict", "caller")
        assert await session.active() == []


async def test_two_runtimes_race_on_one_store(make):
    """Adds from two runtimes on one store all hold."""
    store = MemoryStore()
    runtimes = [make(store=store, max_active=None) for _ in range(2)]
    await runtimes[0].create_session("s")
    names = ("sales", "charts", "brief", "base")
    await asyncio.gather(*(runtimes[number % 2].load("s", [name], "add") for number, name in enumerate(names)))
    assert sorted(skill.name for skill in await runtimes[1].active("s")) == sorted(names)


async def test_threads_with_loops_of_their_own(make):
    """Any thread or loop may call: eight loops share one read cache and one store."""
    runtime = make()

    def work(number: int) -> list[str]:
        async def inside() -> list[str]:
            session = await runtime.create_session(f"t{number}", initial=["sales"])
            await session.load(["charts"], "add")
            return [skill.name for skill in await session.active()]

        return asyncio.run(inside())

    found = await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(8)))
    assert found == [["sales", "charts"]] * 8


async def test_closing_the_runtime_ends_its_reads(slow):
    """Aclose ends loads on their way with cancelled; sessions stay in the store."""
    runtime, reader = slow("sales")
    session = await runtime.create_session()
    load = asyncio.create_task(session.load(["sales"]))
    await until(reader.began)
    await runtime.aclose()
    assert (await refused(load)).code == "cancelled"
    assert [head.session_id for head in await runtime.list_sessions()] == [session.id]


# ---- flights ----


async def test_a_failed_flight_is_not_kept():
    """Everybody waiting gets the error; the next caller starts anew."""
    flights: Flights[int] = Flights()
    tries, gate = [], threading.Event()

    def work(abandoned):
        tries.append(1)
        if len(tries) == 1:
            gate.wait(60)
            raise ValueError("first")
        return 7

    waiting = asyncio.gather(*(flights.fetch("k", work) for _ in range(3)), return_exceptions=True)
    await joined(flights, 3)
    gate.set()
    results = await waiting
    assert [str(result) for result in results] == ["first"] * 3
    assert await flights.fetch("k", work) == 7
    flights.close()


async def test_keys_fly_apart():
    """Different keys do not wait for one another."""
    flights: Flights[int] = Flights()
    gate = threading.Event()
    slow = asyncio.create_task(flights.fetch("a", lambda abandoned: gate.wait(100) and 1))
    assert await asyncio.wait_for(flights.fetch("b", lambda abandoned: 2), 60) == 2
    gate.set()
    assert await slow == 1
    flights.close()


async def test_what_changed_just_now_is_read_again(bundle):
    """A file whose time lies under two seconds before the read is hashed each time; an older one is read once."""
    reader = SlowReader()
    bodies = Bodies(2 * 1024 * 1024, reader=reader)
    view = bundle.subsystem().view("desk")
    old, new = view.skills["acme.sales"], view.skills["acme.charts"]
    long_ago = time.time_ns() - 3_000_000_000
    os.utime(bundle.root / "skills/acme/sales/SKILL.md", ns=(long_ago, long_ago))
    for _ in range(3):
        assert (await bodies.current(old)).digest == old.digest
        assert (await bodies.current(new)).digest == new.digest
    assert sorted(reader.reads) == ["charts", "charts", "charts", "sales"]
    bodies.close()
