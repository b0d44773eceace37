"""Sessions of the facade over whole servers that were probed: what programs do, judged by what the model was shown."""

import asyncio
import os
from pathlib import Path

import pytest

from kdskills.remote import AsyncCodexClient, CatalogBusy, CodexClient
from kdskills.testing import AppServerEmulator, FakeResponses

REAL = pytest.param("codex", marks=[pytest.mark.needs("codex"), pytest.mark.codex_real])


@pytest.fixture(params=["0.169", "0.105", REAL])
def binary(request):
    """Return the program: emulated, new and old, or real."""
    if request.param == "codex":
        folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
        yield folder / "node_modules" / ".bin" / "codex"
        return
    with AppServerEmulator(request.param) as emulator:
        yield emulator.binary


@pytest.fixture
def model():
    """Return a fake model."""
    with FakeResponses() as one:
        yield one


def shown(model):
    """Return our tools in the newest model request."""
    return sorted(set(model.visible_tools()) & {"ship", "cancel", "ns.track", "kdskills_call"})


def ship(order: str) -> str:
    """Book a parcel."""
    return f"parcel {order}"


def cancel(order: str) -> str:
    """Cancel a parcel."""
    return f"no parcel {order}"


def commands(model, tool, arguments):
    """Return the text that makes the model call a skill, directly or by the dispatcher."""
    direct = f"!call {tool} {arguments}"
    wrapped = f'!call kdskills_call {{"skill": "{tool}", "arguments": {arguments}}}'
    return wrapped if "kdskills_call" in shown(model) else direct


def test_windows_of_a_blocking_session(binary, model, tmp_path):
    """A probed server gets the registry's catalog: windows come and go, and late calls find none."""
    with CodexClient.spawn(
        home=tmp_path / "home", binary=str(binary), config=model.config, state=tmp_path / "state"
    ) as client:
        facade = client.remote_skills
        with facade.lifecycle(register=lambda draft: draft.register("ship", ship), cwd=str(tmp_path)) as life:
            session = life.skills
            session.send_and_handle("!say hello")
            assert shown(model) in (["ship"], ["kdskills_call"])
            result = session.send_and_handle(commands(model, "ship", '{"order": "1"}'), inject_skills=False)
            assert "parcel 1" in str(model.requests[-1]["input"])
            assert [one.handled for one in result.dispatches] == [True]
            with session.using("cancel", cancel):
                session.send_and_handle("!say in the window")
                assert shown(model) in (["cancel", "ship"], ["kdskills_call"])
                session.send_and_handle(commands(model, "cancel", '{"order": "2"}'), inject_skills=False)
                assert "no parcel 2" in str(model.requests[-1]["input"])
                assert session.last_catalog["status"] in ("ok", "noop")
            assert session.last_catalog["status"] == "ok"
            assert session.last_catalog["removed"] == ["cancel"]
            late = session.send_and_handle(commands(model, "cancel", '{"order": "3"}'), inject_skills=False)
            assert shown(model) in (["ship"], ["kdskills_call"])
            assert "no parcel 3" not in str(model.requests[-1]["input"])
            assert late.status == "completed"
            receipt = session.receipt(late.turn_id)
            assert receipt.catalog_digest == client.catalog.facts(session.session_id)["digest"]
            assert receipt.strategy in ("reload", "dispatcher")


async def test_a_busy_session_refuses_to_send_prepared(binary, model, tmp_path):
    """During a turn `sync_runtime` is deferred, `send_prepared` raises, and the turn's end applies the change."""
    async with await AsyncCodexClient.spawn(
        home=tmp_path / "home", binary=str(binary), config=model.config, state=tmp_path / "state"
    ) as client:
        going, free = asyncio.Event(), asyncio.Event()

        async def slow() -> str:
            going.set()
            await free.wait()
            return "done at last"

        _, session = await client.remote_skills.create_session(
            register=lambda draft: draft.register("ship", slow), cwd=str(tmp_path)
        )
        await session.send_and_handle("!say hello")
        sent = await session.send(commands(model, "ship", "{}"), inject_skills=False)
        await going.wait()
        session.register("cancel", cancel)
        report = await session.sync_runtime()
        assert (report["status"], report["reason"], report["pending"]) == ("deferred", "turn_active", True)
        with pytest.raises(CatalogBusy) as caught:
            await session.send_prepared("!say too early", prepare_timeout_seconds=0.2)
        assert caught.value.report["reason"] == "turn_active"
        await session.sync_runtime()
        free.set()
        await client.wait.assistant_reply(session.session_id, sent["turnId"], timeout_seconds=60)
        waited = await session.wait_catalog(timeout_seconds=60)
        assert waited["status"] in ("ok", "noop")
        await session.send_and_handle("!say after")
        assert shown(model) in (["cancel", "ship"], ["kdskills_call"])
        assert "too early" not in str(model.requests[-1]["input"])
