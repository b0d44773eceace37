"""What the catalog backend refuses, and how it says so, over a server in memory."""

import json

import pytest

from kdskills.remote.ports import AppServerGone, CatalogChange, ServerProfile

THREAD = "thread-1"
TOOL = {"name": "a", "description": "d", "inputSchema": {"type": "object"}}
RELOAD = ServerProfile(reload=True, context=True, probed=True, materialise=("name_set", "inject_items"))


def change(*tools, wait=True, timeout_s=60.0):
    """Return a wanted catalog."""
    return CatalogChange(THREAD, tools, "text" if tools else "", wait=wait, timeout_s=timeout_s)


@pytest.fixture
def rollout(tmp_path, far):
    """Give the thread a file, and let the server describe it."""
    path = tmp_path / "rollout-x-thread-1.jsonl"
    record = {"type": "session_meta", "payload": {"id": THREAD, "dynamic_tools": []}}
    path.write_text(json.dumps(record) + "\n")

    def described(params):
        return {"thread": far.thread(path=str(path), name="mine", status={"type": far.status})}

    far.status = "notLoaded"
    far.answers["thread/read"] = far.answers["thread/resume"] = described
    far.answers["thread/start"] = lambda params: {"thread": far.thread(path=str(path))}
    far.answers["thread/unsubscribe"] = {"status": "notLoaded"}
    return path


async def applied(client, *tools, **more):
    """Apply a catalog and return status and reason."""
    report = await client.catalog.apply(change(*tools, **more))
    return report["status"], report.get("reason")


async def test_a_reload_asks_in_the_specs_order(far, open_client, rollout):
    """Read, queue, unsubscribe, read again, resume: nothing else is asked, and the file holds the catalog."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    assert await applied(client, TOOL) == ("ok", None)
    assert far.methods() == [
        "thread/start",
        "thread/read",
        "thread/queue/list",
        "thread/unsubscribe",
        "thread/read",
        "thread/read",
        "thread/resume",
    ]
    assert far.params("thread/resume")["config"] == {"thread_unload_delay_secs": 0}
    assert "dynamicTools" not in far.params("thread/resume")
    assert json.loads(rollout.read_text())["payload"]["dynamic_tools"] == [{"type": "function", **TOOL}]


async def test_ephemeral_active_and_queued_threads_are_refused(far, open_client, rollout):
    """An ephemeral thread fails, an active or queued one is deferred; the file stays."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    left = rollout.read_bytes()
    far.status = "active"
    assert await applied(client, TOOL, wait=False) == ("deferred", "turn_active")
    far.status = "notLoaded"
    far.answers["thread/queue/list"] = {"data": [{"id": "q"}]}
    assert await applied(client, TOOL, wait=False) == ("deferred", "queued_turns")
    far.answers["thread/read"] = lambda params: {"thread": far.thread(ephemeral=True)}
    assert await applied(client, TOOL) == ("failed", "ephemeral")
    assert rollout.read_bytes() == left


async def test_a_thread_without_a_file_gets_one_by_the_first_way_that_works(far, open_client, rollout):
    """A name is kept; where naming writes nothing, injected items do; the model is never called for it."""
    hidden = rollout.with_name("hidden")
    rollout.rename(hidden)
    far.answers["thread/name/set"] = {}

    def inject(params):
        hidden.rename(rollout)
        return {}

    far.answers["thread/inject_items"] = inject
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    report = await client.catalog.apply(change(TOOL))
    assert (report["status"], report["materialized_now"]) == ("ok", True)
    assert far.params("thread/name/set") == {"threadId": THREAD, "name": "mine"}
    assert "turn/start" not in far.methods()


async def test_no_file_at_all_is_not_local(far, open_client, rollout):
    """A server whose files are elsewhere cannot be reloaded."""
    rollout.unlink()
    far.answers["thread/name/set"] = far.answers["thread/inject_items"] = {}
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    assert await applied(client, TOOL) == ("failed", "not_local")


async def test_a_thread_loaded_meanwhile_is_changed_underneath(far, open_client, rollout):
    """When somebody loads the thread before the rename, the file stays as it was."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    left = rollout.read_bytes()
    far.status = "idle"
    assert await applied(client, TOOL, wait=False) == ("deferred", "changed_underneath")
    assert [one for one in rollout.parent.iterdir() if one.name.endswith((".bak", ".tmp"))] == []
    assert rollout.read_bytes() == left


async def test_a_resume_that_fails_puts_the_line_back(far, open_client, rollout):
    """The server's words are told, line 1 is the old one, and the thread is resumed with it."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    left = rollout.read_bytes()
    far.answers["thread/resume"] = ValueError("bad entry 0")
    report = await client.catalog.apply(change(TOOL))
    assert (report["status"], report["reason"], report["error"]) == ("failed", "rejected", "bad entry 0")
    assert rollout.read_bytes() == left
    assert far.methods()[-2:] == ["thread/resume", "thread/resume"]


async def test_a_server_that_dies_in_the_change_leaves_the_old_line(far, open_client, rollout):
    """What was not confirmed does not stay: the line is put back, and the caller learns that the server is gone."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    left = rollout.read_bytes()

    def die(params):
        far._incoming.put_nowait(None)

    far.answers["thread/resume"] = die
    with pytest.raises(AppServerGone):
        await client.catalog.apply(change(TOOL))
    assert rollout.read_bytes() == left
    assert not await client.catalog.in_force(THREAD, "x")


async def test_a_paginated_thread_without_an_index_does_not_move(far, open_client, rollout):
    """Turns the server points to by byte do not move where its pointers cannot be found."""
    far.answers["thread/read"] = lambda params: {
        "thread": far.thread(path=str(rollout), preview="hi", historyMode="paginated", status={"type": "notLoaded"})
    }
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    left = rollout.read_bytes()
    report = await client.catalog.apply(change(TOOL))
    assert (report["reason"], "index was not found" in report["error"]) == ("unknown_format", True)
    assert rollout.read_bytes() == left


async def test_a_change_that_takes_too_long_goes_on(far, open_client, rollout):
    """A caller whose time is up is told `deferred`; the change ends by itself."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    answers = []
    described = far.answers["thread/resume"]

    def silent(params):
        answers.append(params)

    far.answers["thread/resume"] = silent
    report = await client.catalog.apply(change(TOOL, timeout_s=0.2))
    assert (report["status"], report["reason"], report["pending"]) == ("deferred", "held_open", True)
    assert "not finished within 0.2 s" in report["error"]
    await far.until(lambda: answers)
    raw = client.server._peer._next
    far.say({"id": raw, "result": described({"threadId": THREAD})})
    async with client.catalog.gate(THREAD):
        assert (await client.catalog.facts(THREAD))["tools"] == ["a"]


async def test_an_equal_catalog_is_a_noop_even_during_a_turn(far, open_client):
    """What is in force needs no idle thread; the return to it takes back a change that waits for one."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create(dynamic_tools=[TOOL])
    await client.sessions.send_message(THREAD, "hi")
    assert await applied(client, {**TOOL, "name": "b"}, wait=False) == ("deferred", "turn_active")
    assert await applied(client, TOOL, wait=False) == ("noop", None)
    far.note("turn/completed", turn={"id": "turn-1", "status": "completed"})
    async with client.catalog.gate(THREAD):
        assert (await client.catalog.facts(THREAD))["tools"] == ["a"]
    assert client.catalog._sessions[THREAD].pending_change is None


async def test_native_is_one_resume(far, open_client):
    """Where the probe proved it, a resume with the tools is all."""
    client = await open_client(profile=ServerProfile(native=True, probed=True))
    await client.sessions.create()
    report = await client.catalog.apply(change(TOOL))
    assert (report["status"], report["strategy"]) == ("ok", "native")
    assert far.params("thread/resume")["dynamicTools"] == [{"type": "function", **TOOL}]
    far.answers["thread/resume"] = ValueError("no")
    assert await applied(client) == ("failed", "rejected")


async def test_resume_with_tools_runs_the_same_change(far, open_client, rollout):
    """`sessions.resume(dynamic_tools=)` answers with the report; without tools it is the server's resume."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create()
    report = await client.sessions.resume(THREAD, dynamic_tools=[TOOL])
    assert (report["status"], report["added"]) == ("ok", ["a"])
    assert (await client.sessions.resume(THREAD))["session"]["sessionId"] == THREAD


async def test_an_unproven_thread_has_no_way(far, open_client):
    """A thread that was not started here has no way on an unprobed server; nothing is changed in silence."""
    client = await open_client()
    assert await applied(client, TOOL) == ("failed", "no_strategy")
    assert not {"thread/resume", "thread/unsubscribe"} & set(far.methods())


async def test_servers_without_the_channel_get_the_text_injected(open_client):
    """An old server ignores the context: the facade is told to put the text in front of the request."""
    client = await open_client()
    await client.sessions.create(dynamic_tools=[TOOL])
    context = await client.catalog.context_for(THREAD, [TOOL], "text")
    assert (context.send, context.inject, context.current) == ({}, True, True)


async def test_a_compacted_history_gets_its_context_again(far, open_client):
    """An equal text is sent again after a compaction, as it is."""
    client = await open_client(profile=RELOAD)
    await client.sessions.create(dynamic_tools=[TOOL])
    for expected in (1, 1, 2):
        context = await client.catalog.context_for(THREAD, [TOOL], "text")
        await client.sessions.send_message(THREAD, "hi", **context.send)
        sent = [params for method, params in far.asked if method == "turn/start" and "additionalContext" in params]
        assert len(sent) == expected
        if len([one for one in far.methods() if one == "turn/start"]) == 2:
            far.note("item/completed", item={"type": "contextCompaction"}, turnId="turn-1")
            await far.until(lambda: client.server.threads.get(THREAD).compactions)
    assert {params["additionalContext"]["kdskills"]["value"] for params in sent} == {"text"}
