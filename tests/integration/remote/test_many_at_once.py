"""One blocking client under many threads and many calls."""

import threading
from pathlib import Path

import pytest

from kdskills.remote import CodexClient, ServerProfile
from kdskills.testing import AppServerEmulator, FakeResponses

PROVEN = ServerProfile(
    name="0.169.0", reload=True, materialise=("name_set",), rewind="revert", context=True, probed=True
)


def ping(n: int = 0) -> str:
    """Answer with the number."""
    return f"pong {n}"


@pytest.fixture
def client(tmp_path):
    """Return a blocking client of an emulated server."""
    with (
        FakeResponses() as model,
        AppServerEmulator() as emulator,
        CodexClient.spawn(
            home=tmp_path / "home",
            state=tmp_path / "state",
            binary=str(emulator.binary),
            config=model.config,
            profile=PROVEN,
        ) as made,
    ):
        yield made


def test_eight_threads_on_one_facade(client, tmp_path):
    """Sessions, windows, calls and a shared registry do not disturb each other, whoever uses them at once."""
    facade, failures = client.remote_skills, []
    _, shared = facade.create_session(register=lambda draft: draft.register("ping", ping), cwd=str(tmp_path))

    def work(number):
        try:
            with facade.lifecycle(register=lambda draft: draft.register("ping", ping), cwd=str(tmp_path)) as life:
                for round_number in range(2):
                    name = f"own_{number}_{round_number}"
                    with life.skills.using(name, ping):
                        done = life.skills.send_and_handle(f'!call {name} {{"n": {number}}}', timeout_seconds=120)
                    texts = [one.response_payload["contentItems"][0]["text"] for one in done.dispatches]
                    assert (done.status, texts) == ("completed", [f"pong {number}"])
                    assert [skill.name for skill in life.skills.list()] == ["ping"]
                    shared.register(name, ping)
                    assert shared.dispatch_tool_call(tool=name).handled
                    assert shared.unregister(name)
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert failures == []
    assert [skill.name for skill in shared.list()] == ["ping"]


def test_a_handler_may_use_its_own_session(client, tmp_path):
    """Registering, syncing, dispatching and closing from inside a call neither hang nor lose the answer."""
    facade, seen = client.remote_skills, {}
    _, session = facade.create_session(register=lambda draft: draft.register("ping", ping), cwd=str(tmp_path))

    def busy() -> str:
        session.register("late", ping)
        seen["sync"] = session.sync_runtime()
        seen["dispatch"] = session.dispatch_tool_call(tool="ping").handled
        return "went on"

    session.register("busy", busy)
    session.register("end", lambda: facade.close_session(session.session_id)["cleared"])
    done = session.send_and_handle("!call busy {}", timeout_seconds=120)
    assert (done.status, [one.handled for one in done.dispatches]) == ("completed", [True])
    assert (seen["sync"]["reason"], seen["sync"]["pending"], seen["dispatch"]) == ("turn_active", True, True)
    assert session.wait_catalog(timeout_seconds=60)["status"] in ("ok", "noop")
    done = session.send_and_handle("!call end {}", timeout_seconds=120)
    assert [one.response_payload["contentItems"][0]["text"] for one in done.dispatches] == ["4"]
    assert session.list() == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what is open")
def test_a_thousand_calls_leave_nothing_behind(client, tmp_path):
    """Neither threads nor descriptors grow with the number of calls."""
    _, session = client.remote_skills.create_session(
        register=lambda draft: draft.register("ping", ping), cwd=str(tmp_path)
    )
    session.dispatch_tool_call(tool="ping")
    opened = len(list(Path("/proc/self/fd").iterdir()))
    others = set(threading.enumerate())  # idle threads of earlier tests may still be there
    for number in range(1000):
        assert session.dispatch_tool_call(tool="ping", arguments={"n": number}).result == f"pong {number}"
    assert len(list(Path("/proc/self/fd").iterdir())) <= opened
    handlers = [one for one in set(threading.enumerate()) - others if one.name == "kdskills-handler"]
    assert len(handlers) <= 16
