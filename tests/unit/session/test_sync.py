"""The blocking facade from many threads: nobody is left waiting for ever."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kdskills.errors import BadRequest, SessionError
from kdskills.session.runtime import SyncFacade

LONG = 60


class Target:
    """Something with async methods, one of which never ends by itself."""

    def __init__(self):
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.closed = 0

    async def answer(self, number):
        """Return what was given, a little later."""
        await asyncio.sleep(0)
        return number

    async def hang(self):
        """Wait until cancelled."""
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def fail(self):
        """Raise."""
        raise LookupError("as asked")

    async def aclose(self):
        """Count."""
        self.closed += 1


@pytest.fixture
def target():
    """Return the target."""
    return Target()


@pytest.fixture
def facade(target):
    """Return a facade over it, closed afterwards."""
    made = SyncFacade(target)
    yield made
    made.aclose()


def test_many_threads_get_their_own_answers(facade):
    """One loop serves them all."""
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(facade.answer, range(300))) == list(range(300))


def test_errors_come_back_as_they_were(facade):
    """What the method raises is what the caller sees."""
    with pytest.raises(LookupError, match="as asked"):
        facade.fail()


def test_closing_ends_what_other_threads_wait_for(facade, target):
    """A call under way when the facade is closed is told so; its coroutine is ended properly."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(facade.hang)
        assert target.begun.wait(LONG)
        facade.aclose()
        with pytest.raises(SessionError) as caught:
            waiting.result(LONG)
    assert (caught.value.code, target.ended.is_set()) == ("cancelled", True)


def test_calls_and_closings_side_by_side_all_come_back(facade, target):
    """Whatever comes between a closing and the next call: an answer, or the word that it was closed."""

    def call(number):
        if number % 7 == 0:
            facade.aclose()
            return number
        try:
            return facade.answer(number)
        except SessionError as error:
            return error.code

    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(call, number) for number in range(400)]
        answers = [future.result(LONG) for future in futures]
    assert all(answer in {number, "cancelled"} for number, answer in enumerate(answers))
    assert target.closed == len(range(0, 400, 7))


def test_it_can_be_used_again_after_closing(facade):
    """The next call starts another loop."""
    assert facade.answer(1) == 1
    facade.aclose()
    assert facade.answer(2) == 2


async def test_a_running_loop_is_never_blocked(facade):
    """Inside a loop every call is refused, before its coroutine is made."""
    with pytest.raises(BadRequest) as caught:
        facade.answer(1)
    assert caught.value.code == "sync_in_loop"
