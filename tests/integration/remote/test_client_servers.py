"""The client against whole servers: the emulator, and the real binary where it is installed."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kdskills.remote import AsyncCodexClient, CodexClient
from kdskills.remote.client import AsyncAppServerClient
from kdskills.remote.ports import AppServerError, AppServerGone
from kdskills.testing import AppServerEmulator, FakeResponses
from kdskills.testing.app_server import listening

REAL = pytest.param("codex", marks=[pytest.mark.needs("codex"), pytest.mark.codex_real])
TOOL = {"name": "ship", "description": "Ship", "inputSchema": {"type": "object"}}


@pytest.fixture(params=["emulator", REAL])
def binary(request, codex_binary):
    """Return the program: emulated or real."""
    if request.param == "codex":
        yield codex_binary
        return
    with AppServerEmulator("0.169") as emulator:
        yield emulator.binary


@pytest.fixture
def codex_binary():
    """Return the launcher of the real binary; tests with its mark run only where it is."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    return folder / "node_modules" / ".bin" / "codex"


@pytest.fixture
def model():
    """Return a fake model."""
    with FakeResponses() as one:
        yield one


@pytest.fixture
async def client(binary, model, tmp_path):
    """Return a client of a spawned server that answers no call by itself."""
    async with await AsyncAppServerClient.spawn(
        home=tmp_path / "home", binary=str(binary), config=model.config, strategy="dispatcher", dispatch="manual"
    ) as one:
        yield one


def alive(group):
    """Return whether anybody is in a process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def environment_of(pid):
    """Return what a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


async def start(client, tmp_path, **keywords):
    """Start a thread with one tool, in wire shape so that it stays as it is."""
    created = await client.sessions.create(cwd=str(tmp_path), dynamic_tools=[{"type": "function", **TOOL}], **keywords)
    return created["session"]["sessionId"]


async def a_call(client, session_id):
    """Wait for a call of the session."""
    async with asyncio.timeout(60):
        while not (rows := (await client.sessions.tool_calls(session_id))["data"]):  # noqa: ASYNC110 - the store is polled
            await asyncio.sleep(0.01)
    return rows[0]


def text(words, success=True):
    """Return an answer's payload."""
    return {"contentItems": [{"type": "inputText", "text": words}], "success": success}


async def test_a_call_goes_through_the_whole_server(client, model, tmp_path):
    """The model calls, the row waits, the answer reaches the model, the reply the transcript."""
    session_id = await start(client, tmp_path)
    sent = await client.sessions.send_message(session_id, '!call ship {"order": "7"}')
    row = await a_call(client, session_id)
    assert (row["tool"], row["arguments"], row["turnId"]) == ("ship", {"order": "7"}, sent["turnId"])
    assert (await client.tool_calls.respond(row["requestId"], text("parcel 1")))["status"] == "ok"
    reply = await client.wait.assistant_reply(session_id, sent["turnId"])
    assert reply["status"] == "complete"
    assert "ship" in model.visible_tools(0)
    assert "parcel 1" in str(model.requests[-1]["input"])
    found = await client.sessions.get(session_id)
    assert found["session"]["materialized"] is True
    assert [(one["role"], one["status"]) for one in found["transcript"]] == [
        ("user", "complete"),
        ("assistant", "complete"),
    ]


async def test_megabytes_pass_in_both_directions(client, tmp_path):
    """A message and an answer of more than a megabyte each are one line each."""
    session_id = await start(client, tmp_path)
    sent = await client.sessions.send_message(
        session_id, "!call ship {}", additional_context={"big": {"kind": "application", "value": "y" * 1_500_000}}
    )
    row = await a_call(client, session_id)
    assert (await client.tool_calls.respond(row["requestId"], text("x" * 2_000_000)))["status"] == "ok"
    assert (await client.wait.assistant_reply(session_id, sent["turnId"]))["status"] == "complete"


async def test_ids_begin_again_with_a_new_server(client, tmp_path):
    """After a crash in a call the new server's first call has id 0 again, and the old handle answers nothing."""
    session_id = await start(client, tmp_path)
    await client.sessions.send_message(session_id, "!call ship {}")
    old = (await a_call(client, session_id))["requestId"]
    assert old.endswith(":0")
    os.killpg(client.server.transport.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await client.server.threads.until(lambda: client.server.disconnected, None)
    with pytest.raises(AppServerGone):
        await client.sessions.get(session_id)
    await client.reconnect()
    assert (await client.tool_calls.respond(old, text("late")))["status"] == "not_found"
    sent = await client.sessions.send_message(session_id, "!call ship {}")
    row = await a_call(client, session_id)
    assert row["requestId"].endswith(":0")
    assert row["requestId"] != old
    assert (await client.tool_calls.respond(row["requestId"], text("now")))["status"] == "ok"
    assert (await client.wait.assistant_reply(session_id, sent["turnId"]))["status"] == "complete"


async def test_the_death_of_the_launcher_alone_changes_nothing(client, tmp_path):
    """Npm's launcher may be killed: the server behind it goes on, and closing ends it."""
    session_id = await start(client, tmp_path)
    group = client.server.transport.pid
    os.kill(group, signal.SIGKILL)
    sent = await client.sessions.send_message(session_id, "!say hello")
    assert (await client.wait.assistant_reply(session_id, sent["turnId"]))["text"] == "hello"
    await client.close()
    async with asyncio.timeout(60):
        while alive(group):  # noqa: ASYNC110 - the kernel tells nobody of it
            await asyncio.sleep(0.01)


async def test_a_steer_is_told(client, tmp_path):
    """A message during a turn steers it: same turn, `steered`; then the turn ends."""
    session_id = await start(client, tmp_path)
    first = await client.sessions.send_message(session_id, "!call ship {}")
    row = await a_call(client, session_id)
    second = await client.sessions.send_message(session_id, "!say steered")
    assert (first["status"], second["status"]) == ("accepted", "steered")
    assert first["turnId"] == second["turnId"]
    await client.tool_calls.respond(row["requestId"], text("ok"))
    assert (await client.wait.assistant_reply(session_id, first["turnId"]))["status"] == "complete"


async def test_turns_are_taken_back(client, model, tmp_path):
    """After a rollback neither the transcript nor the model knows the turn, and the file is another one."""
    session_id = await start(client, tmp_path)
    for words in ("one", "zweites", "three"):
        sent = await client.sessions.send_message(session_id, f"!say {words}")
        await client.wait.assistant_reply(session_id, sent["turnId"])
    before = (await client.sessions.get(session_id))["session"]["path"]
    report = await client.sessions.rollback(session_id, 2)
    assert report["session"]["path"] != before
    found = await client.sessions.get(session_id)
    assert [one["text"] for one in found["transcript"]] == ["!say one", "one"]
    sent = await client.sessions.send_message(session_id, "!say four")
    await client.wait.assistant_reply(session_id, sent["turnId"])
    assert "zweites" not in str(model.requests[-1]["input"])


async def test_errors_of_the_server_have_its_words(client, tmp_path):
    """A bad tool fails the start with the server's code and words; unknown methods as well."""
    with pytest.raises(AppServerError) as caught:
        await client.sessions.create(cwd=str(tmp_path), dynamic_tools=[{"type": "function", "name": "x"}])
    assert caught.value.details["rpc_code"] == -32600
    with pytest.raises(AppServerError):
        await client.request("no/such")
    assert (await start(client, tmp_path)) != ""


async def test_nothing_of_the_user_reaches_the_server(binary, model, tmp_path, monkeypatch):
    """The child's homes are the given one, even when this process has a codex home and keys of its user."""
    trap = tmp_path / "user"
    (trap / ".codex").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(trap))
    monkeypatch.setenv("CODEX_HOME", str(trap / ".codex"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    home = tmp_path / "home"
    async with await AsyncAppServerClient.spawn(home=home, binary=str(binary), config=model.config) as client:
        assert client.server.codex_home in (None, str(home))
        sent = await client.sessions.send_message(await start(client, tmp_path), "!say hi")
        assert sent["status"] == "accepted"
        environ = environment_of(client.server.transport.pid)
        assert b"sk-of-the-user" not in environ
        assert str(trap).encode() not in environ
    assert list((trap / ".codex").iterdir()) == []


async def test_two_clients_of_one_listening_server(binary, model, tmp_path):
    """Over websockets both subscribers get the call; the answer that comes first wins, the other harms nothing."""
    home = tmp_path / "home"
    home.mkdir()
    with listening(Path(binary), home, model.config_args) as url:
        async with (
            await AsyncAppServerClient.connect(url, dispatch="manual") as one,
            await AsyncAppServerClient.connect(url, dispatch="manual") as two,
        ):
            session_id = await start(one, tmp_path)
            sent = await one.sessions.send_message(session_id, "!call ship {}")
            row = await a_call(one, session_id)
            await two.sessions.resume(session_id)
            other = await a_call(two, session_id)
            assert other["callId"] == row["callId"]
            assert other["requestId"] != row["requestId"]
            assert (await one.tool_calls.respond(row["requestId"], text("first")))["status"] == "ok"
            await two.tool_calls.respond(other["requestId"], text("second"))
            assert (await one.wait.assistant_reply(session_id, sent["turnId"]))["status"] == "complete"
            shown = str(model.requests[-1]["input"])
            assert ("first" in shown) != ("second" in shown)  # the server reads its connections side by side


async def test_the_token_of_a_listening_server(model, tmp_path):
    """With a capability token the server lets in who has it, and nobody else."""
    home = tmp_path / "home"
    home.mkdir()
    with (
        AppServerEmulator("0.169") as emulator,
        listening(emulator.binary, home, model.config_args, token="t0k") as url,
    ):
        async with await AsyncAppServerClient.connect(url, token="t0k") as client:
            assert client.user_agent
        for wrong in (None, "other"):
            with pytest.raises(AppServerGone):
                await AsyncAppServerClient.connect(url, token=wrong)


def test_a_blocking_client_answers_by_its_facade(binary, model, tmp_path):
    """`CodexClient` needs no event loop: handlers run on threads and may use the client themselves."""
    with CodexClient.spawn(home=tmp_path / "home", binary=str(binary), config=model.config, probe="never") as client:
        seen = []

        def ship(order: str) -> str:
            """Book a parcel."""
            seen.append(client.sessions.get(session.session_id)["session"]["status"])
            return f"parcel {order}"

        created, session = client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)
        )
        result = session.send_and_handle(
            '!call kdskills_call {"skill": "ship", "arguments": {"order": "7"}}', inject_skills=False
        )
        assert created["session"]["sessionId"] == session.session_id
        assert result.status == "completed"
        assert seen == ["active"]
        assert "parcel 7" in str(model.requests[-1]["input"])
    client.close()
    with pytest.raises(AppServerGone):
        client.sessions.create()


async def test_an_async_client_answers_by_its_facade(binary, model, tmp_path):
    """`AsyncCodexClient` runs handlers of the session on its own loop; parallel calls at once."""
    async with await AsyncCodexClient.spawn(
        home=tmp_path / "home", binary=str(binary), config=model.config, probe="never"
    ) as client:

        async def ship(order: str) -> str:
            await asyncio.sleep(0)
            return f"parcel {order}"

        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)
        )
        result = await session.send_and_handle(
            '!call kdskills_call {"skill": "ship", "arguments": {"order": "8"}}', inject_skills=False
        )
        assert result.status == "completed"
        assert "parcel 8" in str(model.requests[-1]["input"])


async def test_a_program_that_talks_garbage(tmp_path, model):
    """Garbage, half lines and floods of a child do not disturb; its death within a line is told."""
    program = tmp_path / "odd"
    program.write_text(
        f"#!{sys.executable} -I\n"
        "import json, sys\n"
        "sys.stderr.write('noise\\n' * 200_000); sys.stderr.flush()\n"
        "for line in sys.stdin:\n"
        "    message = json.loads(line)\n"
        "    if 'id' not in message: continue\n"
        "    raw = message['id']\n"
        "    if message['method'] == 'die':\n"
        "        sys.stdout.write('{\"id\":'); sys.stdout.flush(); sys.exit(9)\n"
        "    for answer in ({'id': str(raw), 'result': 'as text'}, {'id': raw, 'result': {'userAgent': 'odd'}}, {'id': raw, 'result': 2}):\n"
        "        sys.stdout.write('garbage\\n\\n[]\\n' + json.dumps(answer) + '\\n')\n"
        "    sys.stdout.flush()\n"
    )
    program.chmod(0o755)
    async with await AsyncAppServerClient.spawn(home=tmp_path / "home", binary=str(program)) as client:
        assert client.user_agent == "odd"
        assert await client.request("anything") == {"userAgent": "odd"}
        with pytest.raises(AppServerGone, match="within a line of 6 bytes"):
            await client.request("die")
