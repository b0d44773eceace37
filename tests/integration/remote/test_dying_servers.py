"""A server that dies at each step of the protocol: the client says so, and what comes after finds everything in order."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from kdskills.remote import AsyncCodexClient
from kdskills.remote.labmodel import FakeResponses
from kdskills.remote.ports import AppServerGone, ServerProfile
from kdskills.testing import AppServerEmulator

PATIENCE_S = 60.0
PROVEN = ServerProfile(
    name="0.169", reload=True, materialise=("name_set",), rewind="revert", context=True, extra_roots=True, probed=True
)
STEPS = [
    *[(method, moment) for method in ("initialize", "thread/start") for moment in ("asked", "done")],
    *[("turn/start", moment) for moment in ("asked", "done", "told")],
    ("item/tool/call", "asked"),
    ("answer", "asked"),
    ("answer", "done"),
    *[("thread/unsubscribe", moment) for moment in ("asked", "done", "told")],
    *[("thread/resume", moment) for moment in ("asked", "done", "told")],
    ("thread/delete", "done"),
]


@pytest.fixture
def model():
    """A fake model."""
    with FakeResponses() as one:
        yield one


@pytest.fixture
def emulator():
    """The program behind the dying one."""
    with AppServerEmulator() as one:
        yield one.binary


@pytest.fixture
def dying(emulator, tmp_path):
    """Makes a program that dies at a step."""

    def make(method, moment):
        script = str(Path(__file__).with_name("dying_server.py"))
        command = shlex.join([sys.executable, "-I", script, method, moment, str(emulator)])
        program = tmp_path / "dying-codex"
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        return program

    return make


class Shop:
    """Two functions of a program, and how often they ran."""

    def __init__(self):
        self.effects = []
        self.threads = []

    def ship(self) -> str:
        """Ship a parcel."""
        self.effects.append("ship")
        return "shipped"

    def cancel(self) -> str:
        """Cancel a parcel."""
        self.effects.append("cancel")
        return "cancelled"

    async def open(self, client, home):
        """Use the client for everything a session goes through."""
        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", self.ship), cwd=str(home)
        )
        self.threads.append(session.session_id)
        await session.send_and_handle("!call ship {}", timeout_seconds=PATIENCE_S)
        session.register("cancel", self.cancel)
        session.unregister("ship")
        report = await session.prepare_catalog()
        assert report["status"] == "ok", report
        await session.send_and_handle("!say end", timeout_seconds=PATIENCE_S)
        await client.remote_skills.close_session(session.session_id, delete_session=True, ignore_cleanup_errors=False)


def rollouts(home):
    """Return the files of threads below a home, and whatever else lies beside them."""
    files = [path for path in (home / "sessions").rglob("*") if path.is_file()]
    return [path for path in files if path.suffix == ".jsonl"], [path for path in files if path.suffix != ".jsonl"]


@pytest.mark.parametrize(("method", "moment"), STEPS, ids=[f"{method}-{moment}" for method, moment in STEPS])
async def test_a_server_that_dies(method, moment, dying, emulator, model, tmp_path):
    """The one who asked gets `AppServerGone`; the next server goes on with the same thread, and no effect is repeated."""
    home, shop = tmp_path / "home", Shop()
    how = {"home": home, "state": tmp_path / "state", "config": model.config, "profile": PROVEN}
    with pytest.raises(AppServerGone):
        async with await AsyncCodexClient.spawn(binary=str(dying(method, moment)), **how) as client:
            await shop.open(client, tmp_path)
    shipped = shop.effects.count("ship")
    assert shipped == (0 if method in ("initialize", "thread/start", "turn/start", "item/tool/call") else 1)
    files, _ = rollouts(home)
    async with await AsyncCodexClient.spawn(binary=str(emulator), **how) as client:
        if not files:  # the thread died with its server, as the server's own threads without a turn do
            await shop.open(client, tmp_path)
            return
        session = client.remote_skills.session(shop.threads[0])
        session.register("cancel", shop.cancel)
        assert (await session.prepare_catalog())["status"] in ("ok", "noop")
        done = await session.send_and_handle("!call cancel {}", timeout_seconds=PATIENCE_S)
        assert (done.status, done.assistant_reply["text"]) == ("completed", "cancelled")
    assert shop.effects == ["ship"] * shipped + ["cancel"]
    assert {"cancel", "ship"} & set(model.visible_tools()) == {"cancel"}
    [file], beside = rollouts(home)
    head = json.loads(file.read_text().splitlines()[0])["payload"]
    assert [tool["name"] for tool in head["dynamic_tools"]] == ["cancel"]
    assert [path.name for path in beside if not path.name.endswith(".lock")] == []
