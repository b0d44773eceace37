"""Facades: sessions come, go and are shared, sync and async alike."""

from __future__ import annotations

import asyncio
import gc
import inspect

import pytest

from kdskills.remote import AsyncRemoteSkillsFacade, CatalogNotApplied, RemoteSkillsFacade
from kdskills.remote.calls import TOOL_CALL_EVENT, AppServerSignal


def silent():
    return None


def test_one_id_is_one_registry_whatever_the_handle(duo):
    """Handles share skills, diagnostics and reports."""
    one, two = duo.session("t"), duo.session("t")
    one.register("a", silent)
    assert [skill.name for skill in two.list()] == ["a"]
    duo.do(two.prepare_catalog())
    assert one.last_catalog == two.last_catalog
    assert duo.session("other").list() == []


def test_a_registry_outlives_its_handles(duo):
    """Nobody needs to keep a handle."""
    duo.session("t").register("a", silent)
    gc.collect()
    assert [skill.name for skill in duo.session("t").list()] == ["a"]


def test_a_handle_of_a_closed_session_still_shares(duo):
    """After closing, an old handle and a new one are one registry again."""
    old = duo.session("t")
    duo.do(duo.facade.close_session("t"))
    old.register("a", silent)
    assert [skill.name for skill in duo.session("t").list()] == ["a"]


@pytest.mark.parametrize("session_id", ["", "  ", None, 5])
def test_a_session_has_an_id(duo, session_id):
    """Blank ids would mix sessions up."""
    with pytest.raises(ValueError, match="session_id"):
        duo.session(session_id)


def test_create_session_binds_the_draft(duo):
    """`register` fills a draft, its tools go along, the session has its skills."""
    seen = []

    def register(draft):
        seen.append(draft.session_id)
        draft.register("a", silent)
        draft.register("b", silent, namespace="n")

    created, session = duo.do(duo.facade.create_session(register=register, cwd="/x"))
    assert seen == ["draft"]
    assert created["session"]["sessionId"] == session.session_id == "thread-1"
    assert [skill.qualified_name for skill in session.list()] == ["a", "n.b"]
    assert duo.client.calls == [("create", {"cwd": "/x", "dynamic_tools": session.dynamic_tools()})]
    assert duo.session("thread-1").dynamic_tools() == session.dynamic_tools()


def test_without_skills_nothing_joins(duo):
    """An empty catalog is not sent."""
    _, session = duo.do(duo.facade.create_session(cwd="/x"))
    assert duo.client.calls == [("create", {"cwd": "/x"})]
    assert duo.do(session.prepare_catalog()) == {"status": "noop", "sessionId": "thread-1"}


@pytest.mark.parametrize("theirs", [[], None, [{"name": "mine"}]], ids=["empty", "none", "own"])
def test_tools_of_the_caller_pass_untouched(duo, theirs):
    """Whatever the caller gives as `dynamic_tools` is what is sent."""
    duo.do(duo.facade.create_session(register=lambda draft: draft.register("a", silent) and None, dynamic_tools=theirs))
    sent = duo.client.named("create")[0]["dynamic_tools"]
    assert sent is theirs


@pytest.mark.parametrize("theirs", [5, "x", [None, 5, {"name": "a"}]], ids=["number", "text", "odd"])
def test_odd_tools_of_the_caller_are_the_clients_business(duo, theirs):
    """Whatever they are, in either spelling, a session the client created is bound."""
    for name in ("dynamic_tools", "dynamicTools"):
        _, session = duo.do(duo.facade.create_session(**{name: theirs}))
        assert duo.client.named("create")[-1] == {name: theirs}
        duo.do(session.send("Hi", **{name: theirs}))
        assert duo.client.named("send_message")[-1] == {"session_id": session.session_id, "text": "Hi", name: theirs}


@pytest.mark.parametrize(
    "answer",
    [None, {}, {"session": {}}, {"session": {"sessionId": ""}}, {"session": {"sessionId": 5}}, {"session": "x"}, "ok"],
    ids=["none", "empty", "no_id", "blank", "number", "text", "word"],
)
def test_an_answer_without_a_session_is_refused(duo, answer):
    """In these words, and no session is bound."""
    duo.client.script["create"] = [answer]
    with pytest.raises(ValueError, match=r"^sessions\.create response missing session\.sessionId$"):
        duo.do(duo.facade.create_session())


def test_a_failing_register_creates_nothing(duo):
    """Its error is what the caller sees."""

    def register(draft):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        duo.do(duo.facade.create_session(register=register))
    assert duo.client.calls == []


def test_a_sync_facade_closes_an_awaitable_register(facade, client):
    """`TypeError`, the coroutine is closed, nothing is created."""
    made = []

    async def register(draft):
        raise AssertionError("must not run")

    def call(draft):
        made.append(register(draft))
        return made[0]

    with pytest.raises(TypeError, match="AsyncRemoteSkillsFacade"):
        facade.create_session(register=call)
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED
    assert client.calls == []


async def test_an_async_facade_takes_both_kinds_of_register():
    """A plain function or a coroutine function."""

    class Client:
        def __init__(self):
            self.sessions = self

        async def create(self, **keywords):
            return {"session": {"sessionId": f"t{len(keywords['dynamic_tools'])}"}}

    async def register(draft):
        await asyncio.sleep(0)
        draft.register("a", silent)
        draft.register("b", silent)

    facade = AsyncRemoteSkillsFacade(Client())
    _, two = await facade.create_session(register=register)
    _, one = await facade.create_session(register=lambda draft: draft.register("a", silent) and None)
    assert (two.session_id, one.session_id) == ("t2", "t1")


def test_a_draft_runs_nothing(duo):
    """Every runtime call on it is a `RuntimeError`, during and after creation, and reaches no client."""
    drafts = []
    row = {"requestId": 1, "tool": "a"}
    signal = AppServerSignal(TOOL_CALL_EVENT, params={"tool": "a"})

    def register(draft):
        draft.register("a", silent)
        drafts.append(draft)

    duo.do(duo.facade.create_session(register=register))
    before = list(duo.client.calls)
    calls = [
        lambda draft: draft.sync_runtime(),
        lambda draft: draft.prepare_catalog(),
        lambda draft: draft.wait_catalog(),
        lambda draft: draft.send("x"),
        lambda draft: draft.send_prepared("x"),
        lambda draft: draft.send_and_handle("x"),
        lambda draft: draft.dispatch_tool_call(tool="a"),
        lambda draft: draft.respond_to_signal(signal),
        lambda draft: draft.respond_to_pending_call(row),
        lambda draft: draft.drain_pending_calls(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="draft"):
            duo.do(call(drafts[0]))
    assert duo.client.calls == before
    assert drafts[0].session_id == "draft"


def test_drafts_share_nothing(duo):
    """Two sessions made one after the other have their own skills."""
    _, one = duo.do(duo.facade.create_session(register=lambda draft: draft.register("a", silent) and None))
    _, two = duo.do(duo.facade.create_session(register=lambda draft: draft.register("b", silent) and None))
    assert [[skill.name for skill in session.list()] for session in (one, two)] == [["a"], ["b"]]


def test_close_session_clears_and_says_so(duo):
    """The promised dict, nothing deleted unless asked for."""
    session = duo.session("t")
    session.register("a", silent)
    session.register("b", silent)
    assert duo.do(duo.facade.close_session("t")) == {"sessionId": "t", "cleared": 2, "deleted": False}
    assert session.list() == []
    assert duo.client.calls == []


@pytest.mark.parametrize(
    ("answer", "deleted"),
    [({"status": "ok"}, True), ({"status": "deleted"}, True), ({"status": "error"}, False), ({}, False), (None, False)],
    ids=["ok", "deleted", "error", "empty", "none"],
)
def test_deleted_only_for_ok_and_deleted(duo, answer, deleted):
    """The server's own word decides; its answer is passed on."""
    duo.client.script["delete"] = [answer]
    report = duo.do(duo.facade.close_session("t", delete_session=True))
    assert report == {"sessionId": "t", "cleared": 0, "deleted": deleted, "deleteResponse": answer}


def test_cleanup_errors_are_diagnostics_or_raised(duo):
    """As asked; the registry is cleared either way."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["delete"] = [OSError("gone"), OSError("gone")]
    report = duo.do(duo.facade.close_session("t", delete_session=True))
    assert report == {"sessionId": "t", "cleared": 1, "deleted": False}
    assert [(d.code, "gone" in d.message) for d in session.diagnostics] == [("session_cleanup_failed", True)]
    session.register("a", silent)
    with pytest.raises(OSError, match="gone"):
        duo.do(duo.facade.close_session("t", delete_session=True, ignore_cleanup_errors=False))
    assert session.list() == []


def test_a_kept_session_is_emptied_only_with_a_backend(duo):
    """Without one, nothing is resumed; with one, the model's tools go, unless that is not wanted."""
    duo.session("t").register("a", silent)
    duo.do(duo.session("t").prepare_catalog())
    duo.do(duo.facade.close_session("t"))
    assert duo.client.count("resume") == 1
    backend = duo.with_backend()
    for wanted in (True, False):
        duo.session("t").register("a", silent)
        duo.do(duo.session("t").prepare_catalog())
        duo.do(duo.facade.close_session("t", sync_runtime_on_cleanup=wanted))
    assert [[tool["name"] for tool in change.tools] for change in backend.changes] == [["a"], [], ["a"]]


def test_a_failed_emptying_is_told(duo):
    """A `failed` report of the backend is a diagnostic, not a silent OK."""
    backend = duo.with_backend()
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.prepare_catalog())
    backend.reports = [{"status": "failed", "reason": "rejected", "error": "no"}]
    duo.do(duo.facade.close_session("t"))
    assert [d.code for d in session.diagnostics] == ["session_cleanup_failed"]


def test_the_backend_forgets_a_deleted_session(duo):
    """What it keeps goes with the session, and only then."""
    backend = duo.with_backend()
    duo.do(duo.facade.close_session("kept"))
    duo.do(duo.facade.close_session("gone", delete_session=True))
    assert backend.forgotten == ["gone"]


def test_lifecycle_ends_in_close_session(duo):
    """It yields id, answer and session, and deletes afterwards."""
    manager = duo.facade.lifecycle(register=lambda draft: draft.register("a", silent) and None, cwd="/x")

    def body(life):
        assert life.session_id == life.skills.session_id == life.created["session"]["sessionId"] == "thread-1"
        assert [skill.name for skill in life.skills.list()] == ["a"]
        assert duo.client.names() == ["create"]
        return life

    life = duo.within(manager, body)
    assert duo.client.names() == ["create", "delete"]
    assert life.skills.list() == []


def test_lifecycle_may_keep_the_session(duo):
    """`keep_session` deletes nothing."""
    duo.within(duo.facade.lifecycle(keep_session=True), lambda life: None)
    assert duo.client.names() == ["create"]


def test_cleanup_never_hides_the_bodys_error(duo):
    """Even when cleanup errors are to be raised, the body's own comes out; without one, cleanup's does."""
    duo.client.script["delete"] = [OSError("cleanup"), OSError("cleanup")]

    def body(life):
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        duo.within(duo.facade.lifecycle(ignore_cleanup_errors=False), body)
    with pytest.raises(OSError, match="cleanup"):
        duo.within(duo.facade.lifecycle(ignore_cleanup_errors=False), lambda life: None)


def test_using_of_the_facade_yields_the_session(duo):
    """The window is of that session, and gone afterwards."""

    def body(session):
        assert session.session_id == "t"
        return [skill.qualified_name for skill in duo.session("t").list()]

    assert duo.within(duo.facade.using("t", "a", silent, namespace="n"), body) == ["n.a"]
    assert duo.session("t").list() == []


def test_a_stream_reaches_its_session_only(duo):
    """A fan-out answers by the session a signal names, and drops signals that name none."""
    duo.session("t").register("a", lambda: "mine")
    params = {"tool": "a", "callId": "c", "turnId": "u"}
    fan_out = duo.facade.on_call
    assert duo.do(fan_out(AppServerSignal(TOOL_CALL_EVENT, params=params, request_id=0))) is None
    assert duo.client.calls == []
    signal = AppServerSignal(TOOL_CALL_EVENT, params={**params, "threadId": "t"}, request_id=0)
    assert duo.do(fan_out(signal)).response_payload["contentItems"][0]["text"] == "mine"
    other = AppServerSignal(TOOL_CALL_EVENT, params={**params, "threadId": "unknown"}, request_id=1)
    assert duo.do(fan_out(other)).error == "no remote skill registered for a"


def test_a_client_of_the_other_kind_is_named(client):
    """A sync facade over an async client says what to use, and leaves no coroutine behind."""

    class Client:
        def __init__(self):
            self.sessions = self

        async def send_message(self, **keywords):
            raise AssertionError("must not run")

    with pytest.raises(TypeError, match="AsyncRemoteSkillsFacade"):
        RemoteSkillsFacade(Client()).session("t").send("x")


async def test_a_sync_facade_works_inside_a_running_loop(client):
    """Handlers and clients of a sync session never meet a loop of ours, nor need one."""
    facade = RemoteSkillsFacade(client)
    facade.session("t").register("a", lambda: "x")
    assert facade.session("t").dispatch_tool_call(tool="a").result == "x"
    facade.close()


def test_every_listed_name_is_exported():
    """The classes and errors the spec names are at `kdskills.remote`."""
    import kdskills.remote as room

    named = [
        "RemoteSkillsFacade",
        "AsyncRemoteSkillsFacade",
        "RemoteSkillSession",
        "RemoteSkill",
        "RemoteSkillDispatch",
        "AppServerSignal",
        "RemoteSkillSendResult",
        "CatalogError",
        "CatalogNotApplied",
        "CatalogBusy",
        "WaitTimeoutError",
        "CatalogBackend",
        "ServerProfile",
        "RemoteCall",
        "CallJournal",
        "MemoryJournal",
        "SqlJournal",
        "Receipt",
        "CodexClient",
        "AsyncCodexClient",
        "PublishReport",
    ]
    assert [name for name in named if name not in room.__all__] == []
    assert room.__all__ == sorted(room.__all__)
    assert issubclass(room.CatalogBusy, CatalogNotApplied)
    with pytest.raises(AttributeError, match="nothing_here"):
        room.nothing_here  # noqa: B018 - asking is the point
