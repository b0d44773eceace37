"""Honest clients in memory, sync and async, and a way to put both facades through one test."""

from __future__ import annotations

import asyncio
import copy
import inspect

import pytest

from kdskills.remote import AsyncRemoteSkillsFacade, RemoteSkillsFacade
from kdskills.remote.ports import CatalogContext


class Sessions:
    """The `sessions` of a client that keeps threads in memory and writes down every call."""

    def __init__(self, client):
        self._client = client

    def create(self, **keywords):
        self._client.log("create", keywords)
        made = self._client.new_thread()
        return self._client.take("create", {"session": {"sessionId": made}, "thread": {"id": made}})

    def get(self, session_id):
        self._client.log("get", {"session_id": session_id})
        session = {"sessionId": session_id, "materialized": self._client.materialized}
        return self._client.take("get", {"session": session, "transcript": copy.deepcopy(self._client.transcript)})

    def send_message(self, session_id, text, **keywords):
        self._client.log("send_message", {"session_id": session_id, "text": text, **keywords})
        turn = f"turn-{self._client.count('send_message')}"
        self._client.materialized = True
        return self._client.take("send_message", {"status": "accepted", "sessionId": session_id, "turnId": turn})

    def resume(self, session_id, dynamic_tools):
        self._client.log("resume", {"session_id": session_id, "dynamic_tools": copy.deepcopy(dynamic_tools)})
        if not self._client.materialized:
            raise RuntimeError(f"no rollout found for thread id {session_id}")
        return self._client.take("resume", {"thread": {"id": session_id}})

    def rollback(self, session_id, num_turns):
        self._client.log("rollback", {"session_id": session_id, "num_turns": num_turns})
        return self._client.take("rollback", {"status": "ok"})

    def tool_calls(self, session_id):
        self._client.log("tool_calls", {"session_id": session_id})
        return self._client.take("tool_calls", {"data": self._client.pop_rows()})

    def delete(self, session_id):
        self._client.log("delete", {"session_id": session_id})
        return self._client.take("delete", {"status": "deleted"})


class ToolCalls:
    """The `tool_calls` of the client in memory."""

    def __init__(self, client):
        self._client = client

    def respond(self, request_id, response):
        self._client.log("respond", {"request_id": request_id, "response": copy.deepcopy(response)})
        return self._client.take("respond", {"status": "ok"})


class Wait:
    """The `wait` of the client in memory."""

    def __init__(self, client):
        self._client = client

    def assistant_reply(self, session_id, turn_id, timeout_seconds, interval_seconds):
        named = {"session_id": session_id, "turn_id": turn_id, "timeout_seconds": timeout_seconds}
        self._client.log("assistant_reply", {**named, "interval_seconds": interval_seconds})
        return self._client.take("assistant_reply", {"status": "complete", "text": "ready", "turnId": turn_id})

    def turn_status(self, session_id, turn_id):
        self._client.log("turn_status", {"session_id": session_id, "turn_id": turn_id})
        return self._client.take("turn_status", {"status": "completed", "turnId": turn_id})


class MemoryClient:
    """A duck-typed client without a backend.

    `calls` is what was called, in order. `script[name]` holds answers given instead of the usual ones, in order; an exception
    in it is raised, a callable is asked.
    """

    def __init__(self):
        self.calls = []
        self.script = {}
        self.rows = []
        self.transcript = []
        self.materialized = True
        self.sessions = Sessions(self)
        self.tool_calls = ToolCalls(self)
        self.wait = Wait(self)

    def log(self, name, keywords):
        self.calls.append((name, keywords))

    def take(self, name, usual):
        answers = self.script.get(name)
        if not answers:
            return usual
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer

    def new_thread(self):
        return f"thread-{self.count('create')}"

    def pop_rows(self):
        rows, self.rows = self.rows, []
        return rows

    def count(self, name):
        return len(self.named(name))

    def named(self, name):
        return [keywords for called, keywords in self.calls if called == name]

    def names(self):
        return [called for called, _ in self.calls]


class Backend:
    """A catalog backend in memory: applies every change unless `reports` holds another report."""

    def __init__(self, client):
        self._client = client
        self.changes = []
        self.forgotten = []
        self.reports = []
        self.inject = False
        self.extra = {"additional_context": {"kdskills": {"kind": "application", "value": "catalog"}}}
        self.current = True

    def apply(self, change):
        self._client.log("apply", {"tools": [tool["name"] for tool in change.tools], "wait": change.wait})
        self.changes.append(change)
        if self.reports:
            report = self.reports.pop(0)
            if isinstance(report, BaseException):
                raise report
            return {"sessionId": change.session_id, **report}
        return {"status": "ok", "sessionId": change.session_id, "strategy": "reload", "verified": True}

    def context_for(self, session_id, tools, instruction_text):
        self._client.log("context_for", {"tools": [tool["name"] for tool in tools]})
        return CatalogContext({} if self.inject else copy.deepcopy(self.extra), self.inject, self.current)

    def forget(self, session_id):
        self.forgotten.append(session_id)


class Awaited:
    """Makes coroutines of an object's methods: the async client is the sync one, answered later."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return found

        async def later(*arguments, **keywords):
            await asyncio.sleep(0)
            return found(*arguments, **keywords)

        return later


class AsyncMemoryClient:
    """The async client: the methods of a `MemoryClient`, as coroutines."""

    def __init__(self, inner):
        self.inner = inner
        self.sessions = Awaited(inner.sessions)
        self.tool_calls = Awaited(inner.tool_calls)
        self.wait = Awaited(inner.wait)

    @property
    def catalog(self):
        return AsyncBackend(self.inner.catalog) if hasattr(self.inner, "catalog") else None

    @property
    def profile(self):
        return getattr(self.inner, "profile", None)

    @property
    def connection(self):
        return getattr(self.inner, "connection", None)


class AsyncBackend:
    """The backend of the async client."""

    def __init__(self, inner):
        self._inner = inner

    async def apply(self, change):
        await asyncio.sleep(0)
        return self._inner.apply(change)

    async def context_for(self, session_id, tools, instruction_text):
        await asyncio.sleep(0)
        return self._inner.context_for(session_id, tools, instruction_text)

    async def forget(self, session_id):
        self._inner.forget(session_id)


class Duo:
    """Puts one test through a facade, sync or async, over the same client in memory.

    `do` finishes what a method returned, `within` runs a body inside a context manager of either kind.
    """

    def __init__(self, kind):
        self.asynchronous = kind == "async"
        self.client = MemoryClient()
        self.loop = asyncio.new_event_loop() if self.asynchronous else None
        self.facade = self.make()

    def make(self, **options):
        if self.asynchronous:
            return AsyncRemoteSkillsFacade(AsyncMemoryClient(self.client), **options)
        return RemoteSkillsFacade(self.client, **options)

    def with_backend(self):
        """Give the client a backend and return it."""
        self.client.catalog = Backend(self.client)
        self.facade = self.make()
        return self.client.catalog

    def session(self, session_id="thread-1"):
        return self.facade.session(session_id)

    def do(self, answer):
        return self.loop.run_until_complete(_finish(answer)) if inspect.isawaitable(answer) else answer

    def within(self, manager, body):
        """Enter a context manager, call *body* with what it yields, leave it; returns the body's value."""
        if not self.asynchronous:
            with manager as entered:
                return body(entered)
        entered = self.do(manager.__aenter__())
        try:
            value = body(entered)
        except BaseException as error:
            if not self.do(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
            return None
        self.do(manager.__aexit__(None, None, None))
        return value

    def close(self):
        self.facade.close()
        if self.loop is not None:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


async def _finish(awaitable):
    return await awaitable


@pytest.fixture(params=["sync", "async"])
def duo(request):
    """Both facades in turn, over an honest client in memory."""
    made = Duo(request.param)
    yield made
    made.close()


@pytest.fixture
def client():
    """An honest sync client without a backend."""
    return MemoryClient()


@pytest.fixture
def facade(client):
    """A sync facade over the client in memory."""
    made = RemoteSkillsFacade(client)
    yield made
    made.close()


@pytest.fixture
def session(facade):
    """A session of the sync facade."""
    return facade.session("thread-1")


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    """No test keeps calls in the state folder of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
