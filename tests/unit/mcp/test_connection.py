"""One kept connection: what it answers, when it ends, and what is asked again."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kdskills.builtin.roots.mcp import wire
from kdskills.builtin.roots.mcp.wire import AT_ONCE, Connection, ConnectionLost, SdkServer, ServerFailed, parse_address
from kdskills.errors import MissingExtra

WAIT_S = 60


class Broken(Exception):
    """What a connection fails with."""


class Line:
    """Stands for the far side: counts connections, and answers as a test wants."""

    def __init__(self):
        self.opened = 0
        self.closed = 0
        self.at_once = 0
        self.most = 0
        self.answers = {}
        self.refusals = []
        self.ended = threading.Semaphore(0)
        self.loops = set()

    async def connect(self, stack):
        if self.refusals:
            raise self.refusals.pop(0)
        self.opened += 1
        self.loops.add(threading.get_ident())
        number = self.opened
        stack.callback(self._close)

        async def ask(method, params):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                found = self.answers.get(method, {"skills": [], "connection": number, **params})
                found = found(number) if callable(found) else found
                if asyncio.iscoroutine(found):
                    found = await found
            finally:
                self.at_once -= 1
            if isinstance(found, Exception):
                raise found
            return found

        return ask

    def _close(self):
        self.closed += 1
        self.ended.release()


@pytest.fixture
def line(monkeypatch):
    made = Line()

    async def connect(address, stack):
        return await made.connect(stack)

    monkeypatch.setattr(wire, "_connect", connect)
    return made


def server(**options):
    return SdkServer(parse_address("mcp+https://far.example/mcp#far"), **{"timeout_s": WAIT_S, **options})


def entry(found):
    """Return the question for one skill, and what it answers."""
    return {"skill": {"found": found}}


def test_questions_share_a_connection(line):
    """Any number of questions, from any thread, use one connection and one thread for it."""
    line.answers["skills/get"] = entry(1)
    far = server()
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda number: far.entry(f"skill://{number}"), range(200)))
    assert found == [{"found": 1}] * 200
    assert (line.opened, line.closed, len(line.loops)) == (1, 0, 1)
    assert line.most <= AT_ONCE


def test_questions_from_a_busy_loop(line):
    """A caller whose own event loop is running is answered all the same."""
    line.answers["skills/get"] = entry(1)
    far = server()

    async def inside():
        return [far.entry("skill://a"), far.entry("skill://b")]

    assert asyncio.run(inside()) == [{"found": 1}, {"found": 1}]
    assert line.opened == 1


def test_a_quiet_connection_is_closed_and_opened_again(line):
    """After a while without questions nothing stays open; the next one opens another connection."""
    far = server(idle_s=0.01)
    assert far.entries() == []
    assert line.ended.acquire(timeout=WAIT_S)
    assert far.entries() == []
    assert line.opened == 2


def test_many_questions_while_it_closes(line):
    """Questions that come in the moment a quiet connection ends are answered, by it or by the next."""
    line.answers["skills/get"] = entry(1)
    far = server(idle_s=0.0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: far.entry(str(number)), range(300))) == [{"found": 1}] * 300


def test_nobody_left_to_ask(line):
    """A server that nobody refers to any more gives its connection back without waiting for quiet."""
    far = server(idle_s=3600)
    far.entries()
    del far
    gc.collect()
    assert line.ended.acquire(timeout=WAIT_S)
    assert line.closed == 1


def test_what_a_kept_connection_fails_at_is_asked_again(line):
    """A server that was restarted costs nobody a question: one new connection answers it."""
    far = server()
    far.entries()
    line.answers["skills/get"] = lambda number: Broken("gone") if number == 1 else entry(number)
    assert far.entry("skill://a") == {"found": 2}
    assert far.entry("skill://a") == {"found": 2}
    assert line.opened == 2
    assert line.ended.acquire(timeout=WAIT_S)


def test_a_second_failure_is_told(line):
    """What fails on the new connection, too, is told in one sentence with the label; nothing is asked a third time."""
    far = server()
    far.entries()
    line.answers["skills/get"] = Broken("always\nand more")
    with pytest.raises(ServerFailed) as caught:
        far.entry("skill://a")
    assert caught.value.message == "the MCP server 'far' failed: always"
    assert caught.value.details["label"] == "far"
    assert line.opened == 2
    del line.answers["skills/get"]
    assert far.entries() == []
    assert line.opened == 3


def test_a_first_failure_is_told_at_once(line):
    """A server that cannot be reached is not tried twice for one question, and again for the next."""
    far = server()
    line.refusals = [Broken("refused")]
    with pytest.raises(ServerFailed, match="refused"):
        far.entries()
    assert far.entries() == []
    assert line.opened == 1


def test_everybody_who_waits_learns_of_a_failure(line):
    """All who asked while a connection could not be opened are told; none waits for ever."""
    line.refusals = [Broken("refused")] * 20
    far = server()
    met = threading.Barrier(20)

    def asked(number):
        met.wait(WAIT_S)
        with pytest.raises(ServerFailed, match="refused"):
            far.entry(str(number))
        return True

    with ThreadPoolExecutor(20) as pool:
        assert all(pool.map(asked, range(20)))
    assert line.opened == 0


def test_a_question_without_an_answer(line):
    """A question ends in its time and is told so; its connection takes no more, and answers the others it has."""
    go = asyncio.Event()

    async def connect(stack):
        loop = asyncio.get_running_loop()
        line.go = lambda: loop.call_soon_threadsafe(go.set)

        async def ask(method, params):
            await (asyncio.Event() if method == "hang" else go).wait()
            return {"method": method}

        return ask

    connection = Connection(connect, "hanging", lambda error: False)
    other = connection.ask(lambda ask: ask("other", {}), WAIT_S)
    hanging = connection.ask(lambda ask: ask("hang", {}), 0.01)
    with pytest.raises(TimeoutError):
        hanging.result(WAIT_S)
    assert connection.ask(lambda ask: ask("late", {}), WAIT_S) is None
    line.go()
    assert other.result(WAIT_S) == {"method": "other"}


def test_a_question_that_timed_out_is_not_asked_twice(line):
    """A server that hangs costs one waiting time, on a proven connection, too."""
    asked = []
    line.answers["skills/get"] = lambda number: asked.append(number) or asyncio.Event().wait()
    far = server(timeout_s=2)
    line.answers["skills/list"] = {"skills": []}
    while not far._connection or not far._connection.proven:
        try:
            far.entries()
        except ServerFailed:  # a machine so busy that two seconds were too few
            continue
    with pytest.raises(ServerFailed, match=r"no answer within 2 s"):
        far.entry("skill://a")
    assert len(asked) <= 1


def test_a_connection_that_takes_too_long(line):
    """Connecting has its time, too."""

    async def never(stack):
        await asyncio.Event().wait()

    line.connect = never
    with pytest.raises(ServerFailed, match=r"no answer within 0\.1 s"):
        server(timeout_s=0.1).entries()


def test_an_answer_that_cannot_be_used_keeps_the_connection(line):
    """A server that answers nonsense answered: it is told, and the connection stays."""
    far = server()
    far.entries()
    line.answers["skills/list"] = {"skills": 7}
    with pytest.raises(ServerFailed, match="no list of skills"):
        far.entries()
    del line.answers["skills/list"]
    far.entries()
    assert line.opened == 1


def test_the_servers_own_refusals_keep_the_connection(line):
    """`-32602` is an answer; what the SDK says of a lost connection or session is not."""
    from mcp.shared.exceptions import MCPError

    far = server()
    far.entries()
    line.answers["skills/get"] = MCPError(-32602, "no such skill")
    with pytest.raises(ServerFailed, match="no such skill"):
        far.entry("skill://a")
    assert line.opened == 1
    line.answers["skills/get"] = lambda number: MCPError(-32000, "Connection closed") if number == 1 else entry(2)
    assert far.entry("skill://a") == {"found": 2}
    assert line.opened == 2


def test_a_missing_package_is_said_as_such(line):
    """Without the extra the sentence names it, at each question."""
    line.refusals = [MissingExtra("MCP roots", "mcp"), MissingExtra("MCP roots", "mcp")]
    far = server()
    for _ in range(2):
        with pytest.raises(MissingExtra):
            far.entries()


def test_a_connection_that_is_cancelled_cancels_nobody(line):
    """When the far side ends a connection's own task, whoever asked gets a failure, not a cancellation."""

    async def connect(stack):
        task = asyncio.current_task()

        async def ask(method, params):
            task.cancel()
            await asyncio.Event().wait()

        return ask

    connection = Connection(connect, "cancelled", lambda error: False)
    with pytest.raises(ConnectionLost):
        connection.ask(lambda ask: ask("x", {}), WAIT_S).result(WAIT_S)
    connection.close()
    connection.close()
    assert connection.ask(lambda ask: ask("x", {}), WAIT_S) is None


def test_a_closed_connection_answers_what_is_under_way(line):
    """Closing takes nothing away from those who wait."""
    going, go = threading.Event(), threading.Event()

    async def connect(stack):
        async def ask(method, params):
            going.set()
            await asyncio.to_thread(go.wait, WAIT_S)
            return {"ok": True}

        return ask

    connection = Connection(connect, "closing", lambda error: False)
    answer = connection.ask(lambda ask: ask("x", {}), WAIT_S)
    assert going.wait(WAIT_S)
    connection.close()
    assert connection.ask(lambda ask: ask("y", {}), WAIT_S) is None
    go.set()
    assert answer.result(WAIT_S) == {"ok": True}
