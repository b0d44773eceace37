"""Facades used in ways nobody meant: inside loops, by two loops, by many threads, after a fork, with hostile handlers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote import AsyncRemoteSkillsFacade, RemoteSkillsFacade
from kdskills.remote.dispatch import as_text

PATIENCE_S = 60.0


class NoServer:
    """A client whose server is never asked."""


class Unspeakable(BaseException):
    """An exception that raises another one, of any kind, when it is asked for its words."""

    def __init__(self, then):
        super().__init__()
        self._then = then

    def __str__(self):
        raise self._then


class Unprintable:
    """A value whose text raises."""

    def __init__(self, then):
        self._then = then

    def __str__(self):
        raise self._then


def raising(error):
    """Return a handler that raises."""

    def handler():
        raise error

    return handler


ERRORS = [
    SystemExit(1),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(1),
    MemoryError(),
    RecursionError("deep"),
    BaseExceptionGroup("many", [SystemExit(1)]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_handler_raises_is_answered(duo, error):
    """Every exception but an interrupt is an answer, and the next call finds everything in order."""
    session = duo.session("t")
    session.register("a", raising(error))
    session.register("b", lambda: "fine")
    found = duo.do(session.dispatch_tool_call(tool="a"))
    assert found.handled is False
    assert found.error.startswith("remote skill a failed: ")
    assert duo.do(session.dispatch_tool_call(tool="b")).result == "fine"


@pytest.mark.parametrize("error", [*ERRORS, KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_errors_and_values_without_words(duo, error):
    """An exception that cannot say what it is is told by its type; a value that cannot be said is a failure."""
    session = duo.session("t")
    session.register("a", raising(Unspeakable(error)))
    found = duo.do(session.dispatch_tool_call(tool="a"))
    assert found.error == "remote skill a failed: Unspeakable"
    if not isinstance(error, KeyboardInterrupt):
        session.register("b", lambda: [Unprintable(error)])
        found = duo.do(session.dispatch_tool_call(tool="b"))
        assert (found.handled, found.result) == (False, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({10, 9, 1}, "[1, 9, 10]"),
        (frozenset({2.5, -1, 30}), "[-1, 2.5, 30]"),
        ({"b", "a", 1}, '["a", "b", 1]'),
        ({(2, "x"), (1, "y")}, '[[1, "y"], [2, "x"]]'),
        ([float("nan"), float("-inf")], '["NaN", "-Infinity"]'),
    ],
)
def test_sets_are_sorted_as_people_sort(value, text):
    """Members of one kind by their own order, so that 9 comes before 10; of several kinds by their JSON."""
    assert as_text(value) == text


@given(st.sets(st.integers(), max_size=20), st.randoms())
def test_equal_sets_are_one_text(members, random):
    """However a set was filled, its text is the same, and numbers are in order."""
    shuffled = list(members)
    random.shuffle(shuffled)
    assert as_text(set(shuffled)) == as_text(members) == str(sorted(members))


def test_a_sync_session_inside_a_running_loop(client):
    """A sync facade needs no loop and minds none: called from a coroutine it blocks, and answers."""
    facade = RemoteSkillsFacade(client)
    session = facade.session("t")
    session.register("a", lambda: "done")

    async def inside():
        with session.using("b", lambda: "window"):
            return [session.dispatch_tool_call(tool=name).result for name in ("a", "b")]

    assert asyncio.run(inside()) == ["done", "window"]
    facade.close()


def test_a_coroutine_of_a_sync_session_is_closed(client):
    """A sync facade cannot await, in a loop or outside: the awaitable is closed, and the model is told whom to ask."""
    facade = RemoteSkillsFacade(client)
    session = facade.session("t")

    async def later():
        return "never"

    session.register("a", later)

    async def inside():
        return session.dispatch_tool_call(tool="a").error

    words = "remote skill a failed: got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
    assert [asyncio.run(inside()), session.dispatch_tool_call(tool="a").error] == [words, words]
    facade.close()


def test_an_async_facade_on_one_loop_after_the_other():
    """A facade outlives a loop: its sessions, journal and slots serve the next one."""
    facade = AsyncRemoteSkillsFacade(NoServer(), max_concurrency=2)
    session = facade.session("t")

    async def slow(n):
        await asyncio.sleep(0)
        return n

    session.register("a", slow)
    session.register("b", lambda n: n)

    async def use():
        calls = [session.dispatch_tool_call(tool=name, arguments={"n": n}) for n in range(4) for name in "ab"]
        return [found.result for found in await asyncio.gather(*calls)]

    for _ in range(3):
        assert asyncio.run(use()) == [0, 0, 1, 1, 2, 2, 3, 3]
    facade.close()


def test_an_async_facade_on_two_loops_at_once():
    """Two threads with a loop each share a facade: every call is answered on the loop that asked."""
    facade = AsyncRemoteSkillsFacade(NoServer(), max_concurrency=2)
    session = facade.session("t")
    start, found = threading.Barrier(2), {}

    async def where(n):
        await asyncio.sleep(0)
        return [n, id(asyncio.get_running_loop())]

    session.register("a", where)
    session.register("b", lambda n: n)

    def work(name):
        async def use():
            start.wait(PATIENCE_S)
            calls = [session.dispatch_tool_call(tool=tool, arguments={"n": n}) for n in range(10) for tool in "ab"]
            answers = [one.result for one in await asyncio.gather(*calls)]
            return id(asyncio.get_running_loop()), answers

        found[name] = asyncio.run(use())

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for loop, answers in found.values():
        assert answers == [answer for n in range(10) for answer in ([n, loop], n)]
    assert set(found) == {"one", "two"}
    facade.close()


def test_a_registry_under_many_threads(session):
    """Registering, windows, reading and calling at once: nothing is lost, torn or raised, and all windows are gone."""
    errors, start = [], threading.Barrier(6)

    def work(number):
        name = f"own-{number}"
        try:
            start.wait(PATIENCE_S)
            for round_ in range(20):
                session.register(name, lambda round_=round_: round_)
                with session.using("shared", lambda number=number: number):
                    assert session.dispatch_tool_call(tool=name).result == round_
                    assert session.dispatch_tool_call(tool="shared").result in range(6)
                    tools = [tool["name"] for tool in session.dynamic_tools()]
                    assert tools == sorted(tools)
                    assert session.instruction_text().count("- shared:") == 1
                session.unregister(name)
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (errors, session.list()) == ([], [])


def test_a_handler_may_use_its_own_session(session):
    """A handler that registers, unregisters itself and calls another skill finds no lock in its way."""

    def outer():
        session.register("inner", lambda: "inner's")
        session.unregister("outer")
        return session.dispatch_tool_call(tool="inner").result

    session.register("outer", outer)
    assert session.dispatch_tool_call(tool="outer").result == "inner's"
    assert [skill.name for skill in session.list()] == ["inner"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_runs_its_own_calls():
    """After a fork the child has no thread of its parent's: it starts its own, and slots held over there do not count."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("forked_use.py"))],
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        check=False,
    )
    assert done.stdout.splitlines() == [
        "before True 2 None",
        "child's loop: the client belongs to the process that opened it; open one after the fork",
        "child True 2 None",
        "parent True 2 None",
        "parent's loop: answered",
    ], done.stderr
