"""Catalog changes judged by what the model was shown, on the emulator and on the real binary."""

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kdskills.remote.catalog import rollout
from kdskills.remote.client import AsyncAppServerClient
from kdskills.remote.journal import SqlJournal
from kdskills.remote.names import tools_digest
from kdskills.remote.ports import CatalogChange, CatalogError, ServerProfile
from kdskills.testing import AppServerEmulator, FakeResponses
from kdskills.testing.app_server import listening

REAL = pytest.param("codex", marks=[pytest.mark.needs("codex"), pytest.mark.codex_real])
PROVEN = ServerProfile(
    name="0.169.0", reload=True, materialise=("name_set",), rewind="revert", context=True, probed=True
)


@pytest.fixture(params=["emulator", REAL])
def binary(request):
    """Return the program: emulated or real."""
    if request.param == "codex":
        folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
        yield folder / "node_modules" / ".bin" / "codex"
        return
    with AppServerEmulator("0.169") as emulator:
        yield emulator.binary


@pytest.fixture
def model():
    """Return a fake model."""
    with FakeResponses() as one:
        yield one


@pytest.fixture
async def spawn(binary, model, tmp_path):
    """Return how to spawn a client that answers each call with `done`; all are closed afterwards."""
    opened = []

    async def one(**opts):
        opts.setdefault("profile", PROVEN)
        client = await AsyncAppServerClient.spawn(
            home=tmp_path / "home", binary=str(binary), config=model.config, **opts
        )
        client.on_call = answering(client)
        opened.append(client)
        return client

    yield one
    for client in opened:
        await client.close()


def answering(client):
    """Return a handler that answers every call at once."""

    async def on_call(signal):
        response = {"contentItems": [{"type": "inputText", "text": f"done {signal.params['tool']}"}], "success": True}
        return await client.tool_calls.respond(request_id=signal.request_id, response=response)

    return on_call


def tool(name, size=1, **more):
    """Return a flat tool with a description of that size."""
    return {"name": name, "description": "d" * size, "inputSchema": {"type": "object", "properties": {}}, **more}


def change(session_id, *tools, wait=True, timeout_s=60.0):
    """Return a wanted catalog."""
    text = "catalog: " + " ".join(sorted(one["name"] for one in tools)) if tools else ""
    return CatalogChange(session_id, tools, text, wait=wait, timeout_s=timeout_s)


async def start(client, tmp_path, *tools, **keywords):
    """Start a thread with these tools."""
    created = await client.sessions.create(cwd=str(tmp_path), dynamic_tools=list(tools), **keywords)
    return created["session"]["sessionId"]


async def turn(client, session_id, text, **keywords):
    """Run a turn to its end and return its reply."""
    sent = await client.sessions.send_message(session_id, text, **keywords)
    reply = await client.wait.assistant_reply(session_id, sent["turnId"], timeout_seconds=60)
    assert reply["status"] == "complete", reply
    return reply["text"]


def shown(model):
    """Return our tools in the newest model request."""
    ours = {"alpha", "beta", "gamma", "delta", "kdskills_call"}
    return sorted(name for name in model.visible_tools() if name.rpartition(".")[2] in ours)


def users(model):
    """Return the user texts in the newest model request, short ones only."""
    texts = []
    for item in model.requests[-1]["input"]:
        if item.get("role") == "user":
            texts += [part["text"] for part in item["content"] if part["text"].startswith("!")]
    return texts


def contexts(model):
    """Return our context texts in the newest model request, oldest first."""
    found = []
    for item in model.requests[-1]["input"]:
        if item.get("role") == "developer":
            found += [part["text"] for part in item["content"] if part["text"].startswith("<kdskills>")]
    return found


async def until(condition):
    """Wait for an async condition."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - what is asked tells nobody when it changes
            await asyncio.sleep(0.01)


async def pushed(client, session_id, *names):
    """Return whether these tools are in force."""
    return (await client.catalog.facts(session_id))["tools"] == list(names)


async def begun(client, session_id, changing):
    """Return whether a change is under way, or over."""
    return client.catalog._sessions[session_id].lock.locked() or changing.done()


async def test_additions_and_removals_reach_the_model(spawn, model, tmp_path):
    """After each change the model sees the new catalog and nothing of the old one, before and after the first turn."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    report = await client.catalog.apply(change(session_id, tool("beta")))
    digest, duration = report.pop("digest"), report.pop("duration_ms")
    assert report == {
        "status": "ok",
        "sessionId": session_id,
        "strategy": "reload",
        "verified": True,
        "added": ["beta"],
        "removed": ["alpha"],
        "materialized_now": True,
    }
    assert len(digest) == 16
    assert duration > 0
    await turn(client, session_id, "!call beta {}")
    assert shown(model) == ["beta"]
    again = await client.catalog.apply(change(session_id, tool("gamma"), tool("delta", namespace="ns")))
    assert (again["added"], again["removed"], again["materialized_now"]) == (["gamma", "ns.delta"], ["beta"], False)
    await turn(client, session_id, "!call ns.delta {}")
    assert shown(model) == ["gamma", "ns.delta"]
    assert (await client.catalog.apply(change(session_id)))["status"] == "ok"
    await turn(client, session_id, "!say nothing left")
    assert shown(model) == []
    assert users(model) == ["!call beta {}", "!call ns.delta {}", "!say nothing left"]


async def test_what_is_in_force_is_not_pushed_again(spawn, tmp_path):
    """An equal catalog is a `noop` without calls; an empty one never pushed is the bare `noop`."""
    client = await spawn()
    session_id = await start(client, tmp_path)
    assert await client.catalog.apply(change(session_id)) == {"status": "noop", "sessionId": session_id}
    first = await client.catalog.apply(change(session_id, tool("alpha")))
    closings = client.server.threads.get(session_id).closings
    second = await client.catalog.apply(change(session_id, tool("alpha")))
    assert (second["status"], second["digest"], second["added"]) == ("noop", first["digest"], [])
    assert client.server.threads.get(session_id).closings == closings


async def test_forty_changes_leave_id_turns_and_history(spawn, model, tmp_path):
    """Forty reloads later the thread has its id, its turns and its history, and no helper files."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say first")
    for number in range(40):
        report = await client.catalog.apply(
            change(session_id, tool(("beta", "alpha")[number % 2], size=1 + number * 37))
        )
        assert report["status"] == "ok", report
    await turn(client, session_id, "!say last")
    assert shown(model) == ["alpha"]
    assert users(model) == ["!say first", "!say last"]
    found = await client.sessions.get(session_id)
    assert [entry["text"] for entry in found["transcript"]] == ["!say first", "first", "!say last", "last"]
    folder = Path(found["session"]["path"]).parent
    assert [one.name for one in folder.iterdir() if one.name.endswith((".bak", ".tmp"))] == []


@pytest.mark.parametrize(("before", "after"), [(10, 30_000), (30_000, 10)], ids=["grows", "shrinks"])
async def test_history_survives_catalogs_of_any_size(spawn, model, tmp_path, before, after):
    """However the size of line 1 changes, turns from before and after can be listed and taken back."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha", before))
    for words in ("!say a", "!say b", "!say c"):
        await turn(client, session_id, words)
    report = await client.catalog.apply(change(session_id, tool("beta", after)))
    assert report["status"] == "ok", report
    for words in ("!say d", "!say e"):
        await turn(client, session_id, words)
    transcript = [one["text"] for one in (await client.sessions.get(session_id))["transcript"] if one["role"] == "user"]
    assert transcript == ["!say a", "!say b", "!say c", "!say d", "!say e"]
    await client.sessions.rollback(session_id, 1)
    await turn(client, session_id, "!say f")
    assert users(model) == ["!say a", "!say b", "!say c", "!say d", "!say f"]
    report = await client.catalog.apply(change(session_id, tool("gamma", before)))
    assert report["status"] == "ok", report
    await client.sessions.rollback(session_id, 4)
    await turn(client, session_id, "!say g")
    assert users(model) == ["!say a", "!say g"]
    assert shown(model) == ["gamma"]


async def test_a_restarted_server_still_shows_the_catalog(spawn, model, tmp_path):
    """The change is in the thread's file: a new server process shows it."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await client.catalog.apply(change(session_id, tool("beta")))
    await client.reconnect()
    await turn(client, session_id, "!call beta {}")
    assert shown(model) == ["beta"]


async def test_a_running_turn_defers_and_its_end_applies(spawn, model, tmp_path):
    """During a turn `sync` is `deferred/turn_active` with `pending`, and is applied unasked at the turn's end."""
    client = await spawn(dispatch="manual")
    session_id = await start(client, tmp_path, tool("alpha"))
    sent = await client.sessions.send_message(session_id, "!call alpha {}")
    row = await a_call(client, session_id)
    report = await client.catalog.apply(change(session_id, tool("beta"), wait=False))
    assert report.pop("duration_ms") >= 0
    assert report == {
        "status": "deferred",
        "sessionId": session_id,
        "strategy": "reload",
        "digest": tools_digest([tool("alpha")]),
        "verified": True,
        "added": [],
        "removed": [],
        "materialized_now": False,
        "reason": "turn_active",
        "pending": True,
    }
    late = await client.catalog.apply(change(session_id, tool("beta"), timeout_s=0.05))
    assert (late["status"], late["reason"]) == ("deferred", "turn_active")
    report = await client.catalog.apply(change(session_id, tool("beta"), wait=False))
    assert report["pending"] is True
    response = {"contentItems": [{"type": "inputText", "text": "ok"}], "success": True}
    await client.tool_calls.respond(row["requestId"], response)
    await client.wait.assistant_reply(session_id, sent["turnId"])
    waited = await client.catalog.apply(change(session_id, tool("beta")))
    assert waited["status"] in ("ok", "noop")
    await turn(client, session_id, "!say after")
    assert shown(model) == ["beta"]


async def test_a_deferred_change_is_applied_without_being_asked_again(spawn, model, tmp_path):
    """Nobody waits: the change is made when the turn has ended."""
    client = await spawn(dispatch="manual")
    session_id = await start(client, tmp_path, tool("alpha"))
    sent = await client.sessions.send_message(session_id, "!call alpha {}")
    row = await a_call(client, session_id)
    wanted = change(session_id, tool("beta"), wait=False)
    assert (await client.catalog.apply(wanted))["pending"] is True
    await client.tool_calls.respond(row["requestId"], {"contentItems": [], "success": True})
    await client.wait.assistant_reply(session_id, sent["turnId"])
    await until(lambda: pushed(client, session_id, "beta"))
    await turn(client, session_id, "!say after")
    assert shown(model) == ["beta"]


async def a_call(client, session_id):
    """Wait for a call of the session."""
    async with asyncio.timeout(60):
        while not (rows := (await client.sessions.tool_calls(session_id))["data"]):  # noqa: ASYNC110 - the store is polled
            await asyncio.sleep(0.01)
    return rows[0]


async def test_a_message_waits_for_a_change_under_way(spawn, model, tmp_path):
    """A message sent while a catalog is changed goes out with the new one."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    changing = asyncio.ensure_future(client.catalog.apply(change(session_id, tool("beta"))))
    await until(lambda: begun(client, session_id, changing))
    await turn(client, session_id, "!say x")
    assert (await changing)["status"] == "ok"
    assert shown(model) == ["beta"]


async def test_a_caller_that_gives_up_leaves_no_half_change(spawn, model, tmp_path):
    """Cancelling the caller lets the change end; the thread works with the new catalog."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    changing = asyncio.ensure_future(client.catalog.apply(change(session_id, tool("beta"))))
    await until(lambda: begun(client, session_id, changing))
    changing.cancel()
    await asyncio.gather(changing, return_exceptions=True)
    await turn(client, session_id, "!say x")
    assert shown(model) == ["beta"]


async def test_a_thread_without_a_proven_way_takes_the_dispatcher(spawn, model, tmp_path):
    """Unprobed and ephemeral threads start with one tool; the catalog travels as text and calls are unwrapped."""
    client = await spawn(profile=ServerProfile(context=True, probed=True))
    seen = []
    inner = answering(client)

    def on_call(signal):
        seen.append((signal.params["tool"], signal.params["namespace"], signal.params["arguments"]))
        return inner(signal)

    client.on_call = on_call
    session_id = await start(client, tmp_path, tool("alpha"), ephemeral=True)
    report = await client.catalog.apply(change(session_id, tool("beta", namespace="ns")))
    assert (report["status"], report["strategy"]) == ("ok", "dispatcher")
    context = await client.catalog.context_for(session_id, [tool("beta", namespace="ns")], "the beta catalog")
    await turn(client, session_id, '!call kdskills_call {"skill": "ns.beta", "arguments": {"x": 1}}', **context.send)
    assert shown(model) == ["kdskills_call"]
    assert contexts(model) == ["<kdskills>the beta catalog</kdskills>"]
    assert seen == [("beta", "ns", {"x": 1})]


async def test_the_context_is_sent_once_per_change(spawn, model, tmp_path):
    """The catalog's text goes with the first message, again when it changed, and not in between or after a reload."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))

    async def say(words, *tools, text):
        context = await client.catalog.context_for(session_id, tools, text)
        assert context.current
        await turn(client, session_id, f"!say {words}", **context.send)
        return contexts(model)

    first = "<kdskills>one <\\/kdskills></kdskills>"
    assert await say("a", tool("alpha"), text="one </kdskills>") == [first]
    assert await say("b", tool("alpha"), text="one </kdskills>") == [first]
    await client.catalog.apply(change(session_id, tool("beta")))
    changed = "<kdskills>This catalog replaces every earlier one.\ntwo</kdskills>"
    assert await say("c", tool("beta"), text="two") == [first, changed]
    await client.catalog.apply(change(session_id, tool("alpha")))
    await client.catalog.apply(change(session_id, tool("beta")))
    assert await say("d", tool("beta"), text="two") == [first, changed]
    await client.catalog.apply(change(session_id))
    empty = "<kdskills>This catalog replaces every earlier one.</kdskills>"
    assert await say("e", text="") == [first, changed, empty]


async def test_a_catalog_that_is_not_in_force_is_not_described(spawn, tmp_path):
    """Before the change was made the context is empty and the catalog stale."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    context = await client.catalog.context_for(session_id, [tool("beta")], "beta")
    assert (context.send, context.inject, context.current) == ({}, False, False)


async def test_taken_back_turns_take_their_context_along(spawn, model, tmp_path):
    """After a rollback of the turn that carried it the context is sent again."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say a")
    for _ in range(2):
        context = await client.catalog.context_for(session_id, [tool("alpha")], "one")
        await turn(client, session_id, "!say b", **context.send)
        assert "<kdskills>one</kdskills>" in contexts(model)
        await client.sessions.rollback(session_id, 1)


async def test_an_entry_the_server_chokes_on_is_taken_back(spawn, model, tmp_path):
    """A rejected catalog leaves the old one in force, and tells the server's words."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say a")
    bad = {"name": "beta", "description": 7, "inputSchema": {"type": "object"}}
    report = await client.catalog.apply(change(session_id, bad))
    assert (report["status"], report["reason"]) == ("failed", "rejected")
    assert report["error"]
    await turn(client, session_id, "!call alpha {}")
    assert shown(model) == ["alpha"]
    assert users(model) == ["!say a", "!call alpha {}"]


async def test_names_the_server_would_drop_are_refused_first(spawn, tmp_path):
    """A catalog with a built-in's name, or two names that fold into one, raises before anything is asked."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    for tools in ([tool("exec_command")], [tool("a-b"), tool("a_b")], [tool("b", namespace="a"), tool("a__b")]):
        with pytest.raises(CatalogError):
            await client.catalog.apply(change(session_id, *tools))


def content(path):
    """Return a file's bytes."""
    return path.read_bytes()


def garbage(path):
    """Make line 1 unreadable."""
    path.write_bytes(b"garbage" + path.read_bytes()[7:])


def other_thread(path):
    """Make line 1 another thread's."""
    head, rest = path.read_bytes().split(b"\n", 1)
    record = json.loads(head)
    record["payload"]["id"] = "00000000-0000-7000-8000-000000000000"
    path.write_bytes(json.dumps(record).encode() + b"\n" + rest)


@pytest.mark.parametrize("event", ["appended", "replaced"])
@pytest.mark.parametrize("step", ["stage", "swap"])
async def test_a_file_changed_underneath_stays(spawn, model, tmp_path, monkeypatch, event, step):
    """Whoever writes to the file during the reload wins: `deferred/changed_underneath`, and the old catalog is in force."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say a")
    real = getattr(rollout, step)

    def meddling(head, *more):
        if event == "appended":
            with head.path.open("ab") as file:
                file.write(b"\n")
        else:
            copy = head.path.with_name("copy")
            copy.write_bytes(head.path.read_bytes())
            copy.replace(head.path)
        return real(head, *more)

    monkeypatch.setattr(rollout, step, meddling)
    report = await client.catalog.apply(change(session_id, tool("beta"), wait=False))
    assert (report["status"], report["reason"], report["pending"]) == ("deferred", "changed_underneath", False)
    monkeypatch.undo()
    await turn(client, session_id, "!call alpha {}")
    assert shown(model) == ["alpha"]
    assert (await client.catalog.apply(change(session_id, tool("beta"))))["status"] == "ok"


@pytest.mark.parametrize("event", [garbage, other_thread], ids=lambda event: event.__name__)
async def test_a_file_nobody_understands_is_left_alone(spawn, tmp_path, event):
    """An unreadable first line, or another thread's, is `failed/unknown_format` and stays as it is."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say a")
    path = Path((await client.sessions.get(session_id))["session"]["path"])
    event(path)
    left = content(path)
    report = await client.catalog.apply(change(session_id, tool("beta")))
    assert (report["status"], report["reason"]) == ("failed", "unknown_format")
    assert content(path) == left


async def test_a_crash_in_the_change_is_mended_at_the_next_start(spawn, model, tmp_path):
    """A backup beside an unreadable first line is put back when the home is used again."""
    client = await spawn()
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!say a")
    path = Path((await client.sessions.get(session_id))["session"]["path"])
    await client.close()
    rollout.back_up(rollout.read_head(path, session_id))
    garbage(path)
    client = await spawn()
    await turn(client, session_id, "!call alpha {}")
    assert shown(model) == ["alpha"]
    assert not rollout.backup_of(path).exists()


@asynccontextmanager
async def connected(url, **opts):
    """Connect, answer calls, and close."""
    async with await AsyncAppServerClient.connect(url, profile=PROVEN, **opts) as client:
        client.on_call = answering(client)
        yield client


@pytest.fixture
def url(binary, model, tmp_path):
    """Return the address of a listening server."""
    home = tmp_path / "home"
    home.mkdir()
    with listening(Path(binary), home, model.config_args) as address:
        yield address


async def test_a_thread_somebody_else_holds_is_held_open(url, model, tmp_path):
    """Another subscriber keeps the thread loaded: `deferred/held_open`, the old catalog in force, nobody is cut off."""
    async with connected(url) as one, connected(url) as two:
        session_id = await start(one, tmp_path, tool("alpha"))
        await turn(one, session_id, "!say a")
        await two.sessions.resume(session_id)
        report = await one.catalog.apply(change(session_id, tool("beta"), wait=False))
        assert (report["status"], report["reason"]) == ("deferred", "held_open")
        await turn(two, session_id, "!call alpha {}")
        assert shown(model) == ["alpha"]
        assert two.server.threads.get(session_id).subscribed
        await two.close()
        report = await one.catalog.apply(change(session_id, tool("beta")))
        assert report["status"] == "ok", report
        await turn(one, session_id, "!call beta {}")
        assert shown(model) == ["beta"]


async def test_archiving_is_only_done_when_asked_for(url, model, tmp_path):
    """With `unload="archive"` the thread is taken from other subscribers, and changes."""
    async with connected(url, unload="archive") as one, connected(url) as two:
        session_id = await start(one, tmp_path, tool("alpha"))
        await turn(one, session_id, "!say a")
        await two.sessions.resume(session_id)
        report = await one.catalog.apply(change(session_id, tool("beta")))
        assert report["status"] == "ok", report
        await turn(one, session_id, "!call beta {}")
        assert shown(model) == ["beta"]


async def test_workers_that_share_a_journal_free_the_thread(url, model, tmp_path):
    """Two workers on one journal: the idle one lets go, resumes when the change is made, and both go on."""
    journals = [SqlJournal(f"sqlite:///{tmp_path / 'calls.sqlite3'}") for _ in range(2)]
    try:
        async with connected(url, journal=journals[0]) as one, connected(url, journal=journals[1]) as two:
            session_id = await start(one, tmp_path, tool("alpha"))
            await turn(one, session_id, "!say a")
            await two.sessions.resume(session_id)
            report = await one.catalog.apply(change(session_id, tool("beta")))
            assert report["status"] == "ok", report
            async with asyncio.timeout(60):
                await two.server.threads.until(lambda: two.server.threads.get(session_id).subscribed, None)
            await turn(two, session_id, "!call beta {}")
            assert shown(model) == ["beta"]
            assert (await two.catalog.apply(change(session_id, tool("beta"))))["status"] == "noop"
    finally:
        for journal in journals:
            journal.close()


async def test_a_call_that_still_runs_makes_the_thread_busy(spawn, tmp_path):
    """A journalled call of any worker holds the change back."""
    journal = SqlJournal(f"sqlite:///{tmp_path / 'calls.sqlite3'}")
    try:
        client = await spawn(journal=journal)
        session_id = await start(client, tmp_path, tool("alpha"))
        running = [True]
        client.catalog._calls_running = lambda asked: asked == session_id and running[0]
        report = await client.catalog.apply(change(session_id, tool("beta"), wait=False))
        assert (report["reason"], report["pending"]) == ("turn_active", True)
        running[0] = False
        await until(lambda: pushed(client, session_id, "beta"))
    finally:
        journal.close()


async def test_a_remote_server_has_no_reload(url, tmp_path, model):
    """Without the server's files new threads take the dispatcher, and old ones have no way."""
    async with connected(url) as one:
        session_id = await start(one, tmp_path, tool("alpha"))
        async with connected(url) as far:
            far.server.local = False
            report = await far.catalog.apply(change(session_id, tool("beta")))
            assert (report["status"], report["reason"]) == ("failed", "no_strategy")
            assert (await far.catalog.facts(await start(far, tmp_path, tool("alpha"))))["strategy"] == "dispatcher"


async def test_a_successor_takes_the_history_along(spawn, model, tmp_path):
    """Where allowed, a new thread with the new catalog and the old items takes over."""
    client = await spawn(profile=ServerProfile(context=True, probed=True), strategy="successor", allow_successor=True)
    session_id = await start(client, tmp_path, tool("alpha"))
    await turn(client, session_id, "!call alpha {}")
    report = await client.catalog.apply(change(session_id, tool("beta")))
    assert (report["status"], report["strategy"]) == ("ok", "successor")
    successor = report["new_session_id"]
    assert successor != session_id
    await turn(client, successor, "!call beta {}")
    assert shown(model) == ["beta"]
    assert users(model) == ["!call alpha {}", "!call beta {}"]


@pytest.fixture
async def real(model, tmp_path):
    """Return a client of the real binary."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    async with await AsyncAppServerClient.spawn(
        home=tmp_path / "home",
        binary=str(folder / "node_modules" / ".bin" / "codex"),
        config=model.config,
        profile=PROVEN,
    ) as client:
        yield client


@pytest.mark.needs("codex")
@pytest.mark.codex_real
@pytest.mark.parametrize(("size", "expected"), [(1, "ok"), (60_000, "failed")], ids=["fits", "does-not-fit"])
async def test_a_fork_keeps_its_history(real, model, tmp_path, size, expected):
    """A fork shares its parent's file by byte: a catalog that fits changes, one that would move the turns is refused."""
    session_id = await start(real, tmp_path, tool("alpha", 10))
    for words in ("!say a", "!say b"):
        await turn(real, session_id, words)
    forked = (await real.request("thread/fork", threadId=session_id))["thread"]
    fork = real.server.threads.learn(forked, subscribed=True).id
    await turn(real, fork, "!say c")
    report = await real.catalog.apply(change(session_id, tool("beta", size)))
    assert report["status"] == expected, report
    if expected == "failed":
        assert report["reason"] == "unknown_format"
    await turn(real, session_id, "!say d")
    assert shown(model) == (["beta"] if expected == "ok" else ["alpha"])
    await real.reconnect()
    await turn(real, fork, "!say e")
    assert users(model) == ["!say a", "!say b", "!say c", "!say e"]


@pytest.mark.needs("codex")
@pytest.mark.codex_real
async def test_a_rejected_catalog_that_moved_the_turns_moves_them_back(real, model, tmp_path):
    """After a rejection of a longer line the turns are where the server expects them: they can be taken back."""
    session_id = await start(real, tmp_path, tool("alpha"))
    for words in ("!say a", "!say b", "!say c"):
        await turn(real, session_id, words)
    bad = {"name": "beta", "description": ["x" * 40_000], "inputSchema": {"type": "object"}}
    report = await real.catalog.apply(change(session_id, bad))
    assert (report["status"], report["reason"]) == ("failed", "rejected")
    await turn(real, session_id, "!say d")
    await real.sessions.rollback(session_id, 2)
    await turn(real, session_id, "!say e")
    assert users(model) == ["!say a", "!say b", "!say e"]
    assert shown(model) == ["alpha"]
