"""Sessions, answers, waits and signals over a server in memory."""

import asyncio

import pytest

from kdskills.errors import BadRequest
from kdskills.remote.calls import RemoteSkillDispatch
from kdskills.remote.catalog.backend import MemoryCatalogStore
from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import AppServer, ClientOptions, unwrapped
from kdskills.remote.ports import AppServerError, AppServerGone, CatalogBackend, ServerProfile, WaitTimeoutError

THREAD = "thread-1"
PAYLOAD = {"contentItems": [{"type": "inputText", "text": "ok"}], "success": True}
TOOL = {"name": "a", "description": "d", "inputSchema": {"type": "object"}}
RELOAD = ServerProfile(reload=True, context=True, probed=True)


async def test_hello(far, open_client):
    """`initialize` asks for the experimental interface, then `initialized` goes without params."""
    client = await open_client()
    assert far.asked[0][1]["capabilities"] == {"experimentalApi": True}
    assert set(far.asked[0][1]["clientInfo"]) == {"name", "title", "version"}
    await far.until(lambda: far.heard == [{"method": "initialized"}])
    assert client.user_agent == "kdskills/0.169.0 (test)"
    assert isinstance(client.catalog, CatalogBackend)


async def test_create_has_safe_defaults_and_the_unload_delay(far, open_client):
    """A thread starts read-only, without approvals, unloading at once; the caller's keywords win and become camelCase."""
    client = await open_client(profile=RELOAD)
    created = await client.sessions.create(
        dynamic_tools=[TOOL], sandbox="workspace-write", base_instructions="x", config={"k": 1}
    )
    assert far.params("thread/start") == {
        "approvalPolicy": "never",
        "sandbox": "workspace-write",
        "baseInstructions": "x",
        "config": {"thread_unload_delay_secs": 0, "k": 1},
        "dynamicTools": [{"type": "function", **TOOL}],
    }
    assert created["session"] == {"sessionId": THREAD, "materialized": False, "status": "idle", "path": None}
    assert created["thread"]["id"] == THREAD


async def test_a_message_starts_or_steers(far, open_client):
    """`accepted` for a new turn, `steered` when the running one is answered; `dynamic_tools` are compared, never sent."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create(dynamic_tools=[TOOL])
    sent = await client.sessions.send_message(THREAD, "hi", dynamic_tools=[TOOL], model="m")
    assert sent == {"status": "accepted", "sessionId": THREAD, "turnId": "turn-1", "catalog": "current"}
    assert far.params("turn/start") == {"threadId": THREAD, "input": [{"type": "text", "text": "hi"}], "model": "m"}
    steered = await client.sessions.send_message(THREAD, "more", dynamic_tools=[])
    assert (steered["status"], steered["catalog"]) == ("steered", "stale")
    far.note("turn/completed", turn={"id": "turn-1", "status": "completed"})
    far.answers["turn/start"] = {"turn": {"id": "turn-2", "status": "inProgress"}}
    await far.until(lambda: client.server.threads.get(THREAD).active_turn is None)
    assert (await client.sessions.send_message(THREAD, "again"))["status"] == "accepted"


async def test_further_input_items_follow_the_text(far, open_client):
    """`input` adds items, as a skill's, behind the text."""
    client = await open_client()
    await client.sessions.send_message(THREAD, "hi", input=[{"type": "skill", "name": "n", "path": "/p"}])
    assert far.params("turn/start")["input"] == [
        {"type": "text", "text": "hi"},
        {"type": "skill", "name": "n", "path": "/p"},
    ]


async def test_a_session_of_elsewhere_is_resumed_first(far, open_client):
    """A message to a thread this connection does not hear resumes it, with the unload delay and without its turns."""
    client = await open_client()
    await client.sessions.send_message("old", "hi")
    assert far.methods() == ["thread/resume", "turn/start"]
    assert far.params("thread/resume") == {
        "threadId": "old",
        "excludeTurns": True,
        "config": {"thread_unload_delay_secs": 0},
    }


async def test_a_session_that_is_still_closing_is_resumed_when_it_is_closed(far, open_client):
    """The server tells of a close before it is over, and refuses until then: the message waits for it."""
    answers = [ValueError("thread old is closing; retry thread/resume after the thread is closed")] * 2
    thread = {"thread": far.thread("old")}
    far.answers["thread/resume"] = lambda params: answers.pop() if answers else thread
    client = await open_client()
    await client.sessions.send_message("old", "hi")
    assert far.methods() == ["thread/resume", "thread/resume", "thread/resume", "turn/start"]


async def test_get_has_the_transcript_in_order(far, open_client):
    """Turns come newest first and in pages; the transcript is oldest first, completed by what was watched."""
    pages = {
        None: {"data": [{"id": "3", "status": "inProgress", "items": []}], "nextCursor": "c"},
        "c": {
            "data": [
                {"id": "2", "status": "completed", "items": [{"type": "agentMessage", "text": "two"}]},
                {"id": "1", "status": "failed", "items": [{"type": "agentMessage", "text": "one"}]},
            ],
            "nextCursor": None,
        },
    }
    far.answers["thread/turns/list"] = lambda params: pages[params.get("cursor")]
    client = await open_client()
    far.note("item/completed", turnId="3", item={"type": "agentMessage", "text": "three"})
    far.note("turn/completed", turn={"id": "3", "status": "completed"})
    await far.until(lambda: "completed" in {turn.status for turn in client.server.threads.get(THREAD).turns.values()})
    found = await client.sessions.get(THREAD)
    assert [(entry["text"], entry["status"]) for entry in found["transcript"]] == [
        ("one", "failed"),
        ("two", "complete"),
        ("three", "complete"),
    ]


async def test_get_of_a_thread_without_history(far, open_client):
    """A thread nothing was said in has an empty transcript; an old server's turns come with `thread/read`."""
    client = await open_client()
    far.answers["thread/turns/list"] = ValueError(
        "thread x is not materialized yet; unavailable before first user message"
    )
    assert (await client.sessions.get(THREAD))["transcript"] == []
    del far.answers["thread/turns/list"]
    turns = [{"id": "1", "status": "completed", "items": [{"type": "agentMessage", "text": "one"}]}]
    far.answers["thread/read"] = lambda params: {
        "thread": far.thread(turns=turns if params.get("includeTurns") else [])
    }
    assert [entry["text"] for entry in (await client.sessions.get(THREAD))["transcript"]] == ["one"]
    far.answers["thread/read"] = ValueError("the disk is on fire")
    with pytest.raises(AppServerError, match="on fire"):
        await client.sessions.get(THREAD)


@pytest.mark.parametrize("mode", ["paginated", "legacy", "paginated without revert"])
async def test_rollback_takes_back_the_newest_turns(far, open_client, mode):
    """N turns back is a revert before the n-th newest; threads and servers without it get a rollback."""
    turns = [{"id": name, "status": "completed", "items": []} for name in ("3", "2", "1")]
    far.answers["thread/turns/list"] = {"data": turns, "nextCursor": None}
    history = mode.split()[0]
    far.answers["thread/resume"] = {"thread": far.thread(historyMode=history)}
    far.answers["thread/rollback"] = {}
    if mode == "paginated":
        far.answers["thread/revert"] = {}
    client = await open_client()
    assert (await client.sessions.rollback(THREAD, 2))["status"] == "ok"
    if mode == "paginated":
        assert far.params("thread/revert") == {"threadId": THREAD, "beforeTurnId": "2"}
        assert "thread/rollback" not in far.methods()
    else:
        assert far.params("thread/rollback") == {"threadId": THREAD, "numTurns": 2}
    assert far.methods()[-1] == "thread/read"
    for number in (0, 4):
        with pytest.raises(AppServerError, match="cannot be taken back"):
            await client.sessions.rollback(THREAD, number)


async def test_delete(far, open_client):
    """Deleting expires the thread's calls; a server that cannot delete archives, and says so."""
    client = await open_client(dispatch="manual")
    far.answers["thread/archive"] = {}
    assert await client.sessions.delete(THREAD) == {"status": "archived", "sessionId": THREAD}
    far.answers["thread/delete"] = {}
    far.call()
    await far.until(lambda: client.server.pending.rows(THREAD))
    assert await client.sessions.delete(THREAD) == {"status": "deleted", "sessionId": THREAD}
    assert await client.sessions.tool_calls(THREAD) == {"data": []}


async def test_calls_wait_in_the_store_until_they_are_answered(far, open_client):
    """Rows carry a handle; the answer goes out under the raw id, once."""
    client = await open_client(dispatch="manual")
    far.call(0, tool="x", arguments=[1], namespace="n")
    far.call("0", callId="d")
    await far.until(lambda: len(client.server.pending.rows(THREAD)) == 2)
    first, second = (await client.sessions.tool_calls(THREAD))["data"]
    assert first == {
        "requestId": f"{client.connection}:0",
        "tool": "x",
        "arguments": [1],
        "callId": "c",
        "threadId": THREAD,
        "turnId": "turn-1",
        "namespace": "n",
    }
    assert (await client.tool_calls.respond(first["requestId"], PAYLOAD))["status"] == "ok"
    assert (await client.tool_calls.respond(second["requestId"], PAYLOAD))["status"] == "ok"
    assert (await client.tool_calls.respond(first["requestId"], PAYLOAD))["status"] == "not_found"
    assert far.heard[1:] == [{"id": 0, "result": PAYLOAD}, {"id": "0", "result": PAYLOAD}]


async def test_an_answer_that_is_no_json_may_be_given_again(far, open_client):
    """What cannot be written is an `error`, and the call stays pending."""
    client = await open_client(dispatch="manual")
    far.call()
    await far.until(lambda: client.server.pending.rows(THREAD))
    handle = client.server.pending.rows(THREAD)[0]["requestId"]
    bad = await client.tool_calls.respond(handle, {"x": object()})
    assert (bad["status"], bad["code"]) == ("error", "not_json")
    assert (await client.tool_calls.respond(handle, PAYLOAD))["status"] == "ok"


async def test_the_turns_end_expires_its_calls(far, open_client):
    """After `turn/completed` a call's handle is not found."""
    client = await open_client(dispatch="manual")
    far.call()
    await far.until(lambda: client.server.pending.rows(THREAD))
    handle = client.server.pending.rows(THREAD)[0]["requestId"]
    far.note("turn/completed", turn={"id": "turn-1", "status": "interrupted"})
    await far.until(lambda: not client.server.pending.rows(THREAD))
    assert (await client.tool_calls.respond(handle, PAYLOAD))["status"] == "not_found"


async def test_a_new_connection_has_new_handles(far, open_client):
    """Reconnecting expires handles, resumes the watched threads, and the same raw id is another call."""
    client = await open_client(dispatch="manual")
    await client.sessions.create()
    far.call(0)
    await far.until(lambda: client.server.pending.rows(THREAD))
    old, epoch = client.server.pending.rows(THREAD)[0]["requestId"], client.connection
    await client.reconnect()
    assert client.connection != epoch
    assert far.methods()[-1] == "thread/resume"
    assert (await client.tool_calls.respond(old, PAYLOAD))["status"] == "not_found"
    far.call(0)
    await far.until(lambda: client.server.pending.rows(THREAD))
    assert client.server.pending.rows(THREAD)[0]["requestId"] != old


async def test_other_requests_of_the_server_are_refused(far, open_client):
    """Approvals and the like get the error -32601."""
    await open_client()
    far.say({"id": 4, "method": "item/commandExecution/requestApproval", "params": {"threadId": THREAD}})
    await far.until(lambda: len(far.heard) > 1)
    assert (far.heard[-1]["id"], far.heard[-1]["error"]["code"]) == (4, -32601)


async def test_auto_dispatch_answers_by_on_call(far, open_client):
    """`on_call` gets the signal; what it answered is not answered again."""
    client = await open_client()
    seen = []

    async def on_call(signal):
        seen.append(signal)
        assert await client.sessions.tool_calls(THREAD) == {"data": []}  # nobody else is to drain it
        return await client.tool_calls.respond(signal.request_id, PAYLOAD)

    client.on_call = on_call
    far.call(7)
    await far.until(lambda: len(far.heard) > 1)
    assert far.heard[1:] == [{"id": 7, "result": PAYLOAD}]
    signal = seen[0]
    assert (signal.event_type, signal.method) == ("app_server.request.item.tool.call", "item/tool/call")
    assert (signal.signal_type, signal.session, signal.request_id) == (
        "request",
        {"id": THREAD},
        f"{client.connection}:7",
    )
    assert signal.context == {"threadId": THREAD, "turnId": "turn-1"}


@pytest.mark.parametrize("how", ["nobody", "none", "raises"])
async def test_a_call_nobody_answers_is_answered_all_the_same(far, open_client, how, caplog):
    """Without a handler, with one that has nothing to say, or that raises, the model is told instead of waiting."""
    client = await open_client()

    def on_call(signal):
        if how == "raises":
            raise LookupError("secret words")

    client.on_call = None if how == "nobody" else on_call
    far.call(0)
    await far.until(lambda: len(far.heard) > 1)
    result = far.heard[1]["result"]
    expected = "remote skill x failed: LookupError" if how == "raises" else "no remote skill registered for x"
    assert result == {"contentItems": [{"type": "inputText", "text": expected}], "success": False}


async def test_a_second_delivery_under_another_id_gets_the_same_answer(far, open_client):
    """What was answered under its first id is answered alike under the second: never with a refusal."""
    client = await open_client()
    client.on_call = lambda signal: RemoteSkillDispatch(
        True, "x", response_payload=PAYLOAD, submission_status="local_duplicate"
    )
    far.call(8)
    await far.until(lambda: len(far.heard) > 1)
    assert far.heard[1:] == [{"id": 8, "result": PAYLOAD}]


async def test_an_answer_that_cannot_be_sent_is_told(far, open_client):
    """An answer that is no JSON leaves the model with words about it, not waiting."""
    client = await open_client()
    odd = {"contentItems": [{"type": "inputText", "text": object()}], "success": True}
    client.on_call = lambda signal: RemoteSkillDispatch(False, "x", response_payload=odd, submission_status="error")
    far.call(9)
    await far.until(lambda: len(far.heard) > 1)
    [told] = far.heard[1]["result"]["contentItems"]
    assert told["text"] == "remote skill x failed: the answer could not be sent"


async def test_manual_dispatch_leaves_calls_alone(far, open_client):
    """With `manual` nothing is answered; the call is a signal and a row."""
    client = await open_client(dispatch="manual")
    reader, other = client.stream.signals(THREAD), client.stream.signals("another")
    far.call()
    far.note("turn/started", turn={"id": "turn-1"})
    first, second = await reader.next(60), await reader.next(60)
    assert first.event_type == "app_server.request.item.tool.call"
    assert (second.event_type, second.signal_type) == ("app_server.notification.turn.started", "notification")
    assert len(far.heard) == 1
    assert await other.next(0.01) is None
    await client.close()
    assert [signal async for signal in reader] == []


async def test_a_slow_reader_costs_bounded_memory(open_client, monkeypatch):
    """Signals nobody reads are dropped, oldest first, and counted."""
    from kdskills.remote.client import base

    monkeypatch.setattr(base, "MAX_WAITING", 3)
    client = await open_client()
    reader = client.stream.signals()
    for number in range(5):
        client.stream.publish(base.signal_of("m", {"n": number}))
    assert reader.dropped == 2
    assert [(await reader.next(1)).params["n"] for _ in range(3)] == [2, 3, 4]


def test_dispatcher_calls_are_unwrapped():
    """`kdskills_call` becomes the call it holds; one without a skill stays what it is."""
    call = {
        "tool": "kdskills_call",
        "namespace": None,
        "threadId": "t",
        "arguments": {"skill": "n.s", "arguments": {"x": 1}},
    }
    assert unwrapped(call) == {**call, "tool": "s", "namespace": "n", "arguments": {"x": 1}}
    assert unwrapped({**call, "arguments": {"skill": " s "}}) == {**call, "tool": "s", "arguments": None}
    for arguments in ({}, {"skill": 5}, {"skill": " "}, [], None):
        assert unwrapped({**call, "arguments": arguments})["tool"] == "kdskills_call"
    assert unwrapped({**call, "namespace": "own"})["tool"] == "kdskills_call"


async def test_waiting_for_a_reply(far, open_client):
    """The reply comes with the turn's end; a turn that does not end in time is a `WaitTimeoutError`."""
    client = await open_client()
    sent = await client.sessions.send_message(THREAD, "hi")
    assert (await client.wait.turn_status(THREAD, "turn-1"))["status"] == "inProgress"
    with pytest.raises(WaitTimeoutError):
        await client.wait.assistant_reply(THREAD, "turn-1", timeout_seconds=0.02)
    waiting = asyncio.ensure_future(client.wait.assistant_reply(THREAD, sent["turnId"], timeout_seconds=60))
    await asyncio.sleep(0)
    far.note("item/completed", turnId="turn-1", item={"type": "agentMessage", "text": "hello"})
    far.note("turn/completed", turn={"id": "turn-1", "status": "completed"})
    assert await waiting == {"status": "complete", "turnId": "turn-1", "text": "hello", "error": None}
    assert (await client.wait.turn_status(THREAD, "nobody's"))["status"] == "unknown"


async def test_the_servers_end_ends_waiting(far, open_client):
    """When the server dies in a turn, waiting says so instead of going on."""
    client = await open_client()
    await client.sessions.send_message(THREAD, "hi")
    waiting = asyncio.ensure_future(client.wait.assistant_reply(THREAD, "turn-1", timeout_seconds=60))
    await asyncio.sleep(0)
    await far.close()
    with pytest.raises(AppServerGone):
        await waiting
    with pytest.raises(AppServerGone):
        await client.sessions.create()


async def test_a_refused_hello_closes_the_connection(far):
    """A server that refuses `initialize` is let go."""
    far.answers["initialize"] = ValueError("Not today")
    options = ClientOptions()
    server = AppServer(far.connect, options, local=True, owned=True)
    AsyncAppServerClient(server, options, MemoryCatalogStore())
    with pytest.raises(AppServerError, match="Not today"):
        await server.open()
    assert server.disconnected


async def test_nobody_there(nobody):
    """A connection that cannot be opened is `AppServerGone`, and so is every request before one."""
    server = AppServer(nobody, ClientOptions(), local=True, owned=True)
    with pytest.raises(AppServerGone, match="nobody is there"):
        await server.open()
    with pytest.raises(AppServerGone, match="was not sent"):
        await server.request("x")


async def test_spawn_refuses_unknown_words(tmp_path):
    """Options are checked before anything is started."""
    with pytest.raises(BadRequest):
        await AsyncAppServerClient.spawn(home=tmp_path / "home", strategy="magic")
    assert not (tmp_path / "home").exists()


async def test_a_home_that_cannot_be_made(tmp_path):
    """A home the disk does not have is told as one, before anything is started."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AppServerGone, match="cannot be a home: Not a directory") as told:
        await AsyncAppServerClient.spawn(home=tmp_path / "file" / "home", binary="/bin/false")
    assert told.value.details["home"] == str(tmp_path / "file" / "home")
    with pytest.raises(AppServerGone, match="cannot be a home"):
        await AsyncAppServerClient.spawn(home=tmp_path / "file", binary="/bin/false")
