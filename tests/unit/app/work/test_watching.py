"""Watches: they tell what changed, join by key, and are never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kdskills.app.work import ProgressEvent, Snapshot, Watches
from kdskills.errors import Conflict, NotFound

QUICK = 0.01
LONG = 60.0


@dataclass
class Thing:
    """Something that changes when a test says so."""

    revision: int = 1
    output: int = 0
    over: bool = False
    looks: int = 0
    failure: Exception | None = None
    told: list[ProgressEvent] = field(default_factory=list)

    async def look(self) -> Snapshot:
        """Look at it."""
        self.looks += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return Snapshot(self.revision, self.output, self.over, (self.revision, self.output))

    async def until(self, truth: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(LONG):
            while True:
                if truth():
                    return
                await asyncio.sleep(0.002)


async def watch(thing: Thing, watches: Watches | None = None, **more: object) -> object:
    """Watch a thing to its end."""
    options = {"heartbeat_s": LONG, "timeout_s": LONG, "after": 0} | more
    key = options.pop("key", None)
    tell = options.pop("tell", thing.told.append)
    joined = (watches or Watches()).join(key, options.pop("about", "it"), thing.look, QUICK)
    return await joined.listen(tell, **options)


def kinds(thing: Thing) -> list[str]:
    """Return the kinds of events told so far."""
    return [event.kind for event in thing.told]


async def test_states_are_told_in_order() -> None:
    """Each state is told once, with growing numbers; the answer is the last facts and no event of its own."""
    thing = Thing()
    watching = asyncio.create_task(watch(thing))
    for revision in (2, 3, 4):
        await thing.until(lambda: bool(thing.told) and thing.told[-1].facts == (thing.revision, 0))
        thing.revision = revision
    await thing.until(lambda: thing.told[-1].facts == (4, 0))
    thing.over, thing.revision = True, 5
    ended = await asyncio.wait_for(watching, LONG)
    assert (ended.facts, ended.timed_out) == ((5, 0), False)
    assert [event.facts for event in thing.told] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]
    seqs = [event.seq for event in thing.told]
    assert seqs == sorted(set(seqs))


async def test_output_is_told_and_numbered() -> None:
    """Growing output is an event of the same state, with a number of its own below the next state's."""
    thing = Thing()
    watching = asyncio.create_task(watch(thing))
    await thing.until(lambda: kinds(thing) == ["state"])
    thing.output = 10
    await thing.until(lambda: kinds(thing) == ["state", "output"])
    thing.output = 20
    await thing.until(lambda: len(thing.told) == 3)
    thing.over, thing.revision = True, 2
    await asyncio.wait_for(watching, LONG)
    assert kinds(thing) == ["state", "output", "output", "state"]
    seqs = [event.seq for event in thing.told]
    assert seqs == sorted(set(seqs))


async def test_what_is_over_answers_at_once() -> None:
    """Watching what is over tells its state once and returns it."""
    thing = Thing(revision=9, over=True)
    ended = await asyncio.wait_for(watch(thing), LONG)
    assert (ended.timed_out, kinds(thing), thing.looks) == (False, ["state"], 1)


async def test_a_timeout_returns_what_is_known() -> None:
    """A watch whose time is over returns the current facts, even when it has no time at all."""
    thing = Thing(revision=3)
    ended = await asyncio.wait_for(watch(thing, timeout_s=0), LONG)
    assert (ended.facts, ended.timed_out) == ((3, 0), True)


async def test_heartbeats_come_in_silence_and_change_nothing() -> None:
    """In silence the last number is repeated as a heartbeat; the answer is still the final state."""
    thing = Thing()
    watching = asyncio.create_task(watch(thing, heartbeat_s=0.02))
    await thing.until(lambda: kinds(thing)[1:4] == ["heartbeat"] * 3)
    assert len({event.seq for event in thing.told}) == 1
    thing.over, thing.revision = True, 2
    ended = await asyncio.wait_for(watching, LONG)
    assert (ended.facts, thing.told[-1].kind) == ((2, 0), "state")


async def test_taking_up_a_watch_repeats_nothing() -> None:
    """A watch that goes on from a number tells only what came after it, in a process that knows nothing of the first."""
    thing = Thing(revision=4)
    first = await watch(thing, timeout_s=0)
    assert first.timed_out
    known = thing.told[-1].seq
    thing.told.clear()
    await watch(thing, timeout_s=0, after=known)
    assert thing.told == []
    thing.revision = 5
    await watch(thing, timeout_s=0, after=known)
    assert [event.facts for event in thing.told] == [(5, 0)]
    assert thing.told[0].seq > known


async def test_going_on_after_output_still_tells_the_next_state() -> None:
    """A number that counts many pieces of output is below the number of every later state."""
    thing = Thing(revision=4)
    await watch(thing, timeout_s=0)
    known = thing.told[-1].seq + 500
    thing.told.clear()
    before = thing.looks
    watching = asyncio.create_task(watch(thing, after=known))
    await thing.until(lambda: thing.looks >= before + 2)  # its first look is over, so that what follows is a change
    thing.output = 1
    await thing.until(lambda: bool(thing.told))
    assert thing.told[0].seq > known
    thing.over, thing.revision = True, 5
    await asyncio.wait_for(watching, LONG)
    assert thing.told[-1].facts == (5, 1)


async def test_one_key_is_one_watch() -> None:
    """Who repeats a key joins: one of them looks, both hear everything, both get the answer."""
    thing, watches = Thing(), Watches()
    first = asyncio.create_task(watch(thing, watches, key=("p", "k")))
    await thing.until(lambda: kinds(thing) == ["state"])
    other: list[ProgressEvent] = []
    second = asyncio.create_task(watch(thing, watches, key=("p", "k"), tell=other.append))
    await thing.until(lambda: len(other) == 1)
    thing.revision = 2
    await thing.until(lambda: len(other) == 2)
    assert other == thing.told
    thing.over, thing.revision = True, 3
    answers = await asyncio.wait_for(asyncio.gather(first, second), LONG)
    assert answers[0] == answers[1]
    assert [event.seq for event in other] == [event.seq for event in thing.told]


async def test_without_a_key_watches_are_apart() -> None:
    """Two watches without a key look for themselves."""
    thing, watches = Thing(revision=1, over=True), Watches()
    await asyncio.gather(watch(thing, watches), watch(thing, watches))
    assert thing.looks == 2


async def test_a_key_is_of_one_thing() -> None:
    """A key that is in use for something else is a conflict; once its watch ended it is free."""
    thing, watches = Thing(), Watches()
    running = asyncio.create_task(watch(thing, watches, key=("k",)))
    await thing.until(lambda: bool(thing.told))
    with pytest.raises(Conflict) as refused:
        await watch(Thing(), watches, key=("k",), about="another")
    assert refused.value.code == "watch_key_taken"
    thing.over = True
    await asyncio.wait_for(running, LONG)
    other = Thing(over=True)
    await asyncio.wait_for(watch(other, watches, key=("k",), about="another"), LONG)


async def test_one_leaves_and_the_other_goes_on() -> None:
    """A joined watch survives the one who began it; when the last has left nobody looks any more."""
    thing, watches = Thing(), Watches()
    first = asyncio.create_task(watch(thing, watches, key=("k",)))
    await thing.until(lambda: bool(thing.told))
    second = asyncio.create_task(watch(thing, watches, key=("k",), tell=None))
    await thing.until(lambda: thing.looks > 3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    looks = thing.looks
    await thing.until(lambda: thing.looks > looks + 2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    looks = thing.looks
    await asyncio.sleep(10 * QUICK)
    assert thing.looks == looks


async def test_one_who_joins_late_hears_the_present() -> None:
    """Who joins a watch whose beginner knew the state already is told that state."""
    thing, watches = Thing(revision=4), Watches()
    await watch(thing, timeout_s=0)
    known = thing.told[-1].seq
    first = asyncio.create_task(watch(thing, watches, key=("k",), after=known, tell=None))
    await thing.until(lambda: thing.looks >= 3)
    late: list[ProgressEvent] = []
    second = asyncio.create_task(watch(thing, watches, key=("k",), tell=late.append))
    await thing.until(lambda: len(late) == 1)
    assert (late[0].kind, late[0].facts, late[0].seq >= known) == ("state", (4, 0), True)
    thing.over = True
    await asyncio.wait_for(asyncio.gather(first, second), LONG)


async def test_a_failing_listener_fails_alone() -> None:
    """A door whose channel broke gets its own error; the other one goes on hearing."""
    thing, watches = Thing(), Watches()

    def broken(event: ProgressEvent) -> None:
        raise ConnectionResetError("gone")

    good = asyncio.create_task(watch(thing, watches, key=("k",)))
    await thing.until(lambda: bool(thing.told))
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(watch(thing, watches, key=("k",), tell=broken), LONG)
    thing.over, thing.revision = True, 2
    ended = await asyncio.wait_for(good, LONG)
    assert ended.facts == (2, 0)


async def test_a_look_that_fails_ends_the_watch() -> None:
    """What is watched was removed meanwhile: everybody is told, nobody waits for ever."""
    thing, watches = Thing(), Watches()
    both = [asyncio.create_task(watch(thing, watches, key=("k",))) for _ in range(2)]
    await thing.until(lambda: bool(thing.told))
    thing.failure = NotFound("gone")
    ended = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), LONG)
    assert [type(item) for item in ended] == [NotFound, NotFound]


def test_a_key_of_another_loop_is_not_joined() -> None:
    """A watch of an event loop that is gone holds nobody up."""
    watches = Watches()

    async def abandoned() -> None:
        watching = asyncio.create_task(watch(Thing(), watches, key=("k",)))
        await asyncio.sleep(5 * QUICK)
        del watching

    asyncio.run(abandoned())
    ended = asyncio.run(watch(Thing(over=True), watches, key=("k",)))
    assert ended.timed_out is False
