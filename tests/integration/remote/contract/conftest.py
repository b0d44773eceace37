"""The two judges' benches: the emulator and the real binary, each with a fake model and a private empty home."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kdskills.remote.labmodel import FakeResponses
from kdskills.testing import AppServerEmulator
from kdskills.testing.app_server import listening, private_env

PATIENCE_S = 60.0
CONFIG = {"thread_unload_delay_secs": 0}


def real_codex() -> Path | None:
    """Where `.ci/codex` put the launcher, else the one in PATH."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    installed = folder / "node_modules" / ".bin" / "codex"
    found = str(installed) if installed.exists() else shutil.which("codex")
    return Path(found) if found else None


class Wire:
    """A client of forty lines that knows nothing of the product: what it sees is what the server said."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.notes: list[dict] = []
        self.calls: list[dict] = []
        self._answers: dict[int, dict] = {}
        self._came = threading.Condition()
        self._count = 0
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            said = json.loads(line)
            with self._came:
                if "method" not in said:
                    self._answers[said["id"]] = said
                else:
                    (self.calls if "id" in said else self.notes).append(said)
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def send(self, message: dict | bytes) -> None:
        """Write one line."""
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.process.stdin.write(raw + b"\n")
        self.process.stdin.flush()

    def until(self, condition: Callable[[], object], what: str = "the server") -> object:
        """Wait for a condition on what was received, and return its value."""
        with self._came:
            found = self._came.wait_for(lambda: condition() or self._ended, PATIENCE_S)
            assert found, f"waited in vain for {what}"
            assert condition(), f"the server ended while waiting for {what}"
            return condition()

    def ask(self, method: str, **params: object) -> dict:
        """Send a request and return the whole answer."""
        self._count += 1
        number = self._count
        self.send({"id": number, "method": method, "params": params})
        self.until(lambda: number in self._answers, method)
        return self._answers.pop(number)

    def answered(self, number: int) -> dict | None:
        """The answer to a request that was sent by hand."""
        return self._answers.get(number)

    def get(self, method: str, **params: object) -> dict:
        """Send a request that must succeed."""
        answer = self.ask(method, **params)
        assert "result" in answer, answer
        return answer["result"]

    def refused(self, method: str, **params: object) -> tuple[int, str]:
        """Send a request that must fail; return code and message."""
        answer = self.ask(method, **params)
        assert "error" in answer, answer
        return answer["error"]["code"], answer["error"]["message"]

    def hello(self, *, experimental: bool = True) -> dict:
        """Say who we are."""
        info = {"name": "judge", "title": "Judge", "version": "1"}
        said = self.get("initialize", clientInfo=info, capabilities={"experimentalApi": experimental})
        self.send({"method": "initialized"})
        return said

    def start(self, *tools: dict, **more: object) -> dict:
        """Begin a thread in the server's home."""
        fixed = {"approvalPolicy": "never", "sandbox": "read-only", "config": CONFIG, "cwd": str(self.cwd)}
        return self.get("thread/start", dynamicTools=list(tools), **{**fixed, **more})["thread"]

    cwd: Path = Path("/")

    def told(self, method: str, thread: str | None = None) -> list[dict]:
        """The parameters of notifications of a method."""
        params = [note["params"] for note in self.notes if note["method"] == method]
        return [one for one in params if thread is None or one.get("threadId") == thread]

    def begin(self, thread: str, text: str, **more: object) -> str:
        """Begin a turn and return its id."""
        given = [{"type": "text", "text": text}]
        return self.get("turn/start", threadId=thread, input=given, **more)["turn"]["id"]

    def ended(self, thread: str, turn: str) -> dict:
        """Wait for a turn's end."""
        return self.until(
            lambda: next(
                (one["turn"] for one in self.told("turn/completed", thread) if one["turn"]["id"] == turn), None
            ),
            f"the end of turn {turn}",
        )

    def called(self, seen: int) -> dict:
        """Wait for the next call after *seen* ones."""
        self.until(lambda: len(self.calls) > seen, "a call")
        return self.calls[seen]

    def answer(self, call: dict, text: str = "pong", *, success: bool = True) -> None:
        """Answer a call with a text."""
        items = [{"type": "inputText", "text": text}]
        self.send({"id": call["id"], "result": {"contentItems": items, "success": success}})

    def turn(self, thread: str, text: str, reply: Callable[[dict], dict] | None = None, **more: object) -> dict:
        """Run a turn to its end, answering its calls; returns the turn."""
        seen = len(self.calls)
        turn = self.begin(thread, text, **more)

        def done() -> dict | None:
            return next((one["turn"] for one in self.told("turn/completed", thread) if one["turn"]["id"] == turn), None)

        while True:
            self.until(lambda known=seen: done() or len(self.calls) > known, "a call or the turn's end")
            for call in self.calls[seen:]:
                seen += 1
                if reply is None:
                    self.answer(call)
                else:
                    self.send({"id": call["id"], **reply(call)})
            if done():
                return done()

    def unload(self, thread: str) -> None:
        """Unsubscribe and wait until the thread is closed."""
        before = len(self.told("thread/closed", thread))
        assert self.get("thread/unsubscribe", threadId=thread) == {"status": "unsubscribed"}
        self.until(lambda: len(self.told("thread/closed", thread)) > before, "thread/closed")

    def resume(self, thread: str, **more: object) -> dict:
        """Subscribe again; the server tells that a thread is closed a moment before it can be loaded again."""
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self.ask("thread/resume", threadId=thread, excludeTurns=True, config=CONFIG, **more)
            if "is closing; retry" not in str(answer.get("error")) or time.monotonic() > end:
                assert "result" in answer, answer
                return answer["result"]["thread"]
            time.sleep(0.02)

    def close(self) -> None:
        """End the server by closing its input; after some time, by force."""
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()
        if not self.process.stdin.closed:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


@dataclass
class Bench:
    """A server kind, a fake model, and a home."""

    kind: str
    binary: Path
    home: Path
    model: FakeResponses
    wires: list[Wire] = field(default_factory=list)

    def wire(self, *, hello: bool = True, args: tuple[str, ...] = ()) -> Wire:
        """Start the server over stdio."""
        process = subprocess.Popen(
            [self.binary, "app-server", *self.model.config_args, *args],
            env=private_env(self.home, self.binary),
            cwd=self.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wire = Wire(process)
        wire.cwd = self.home
        self.wires.append(wire)
        if hello:
            wire.hello()
        return wire

    @contextmanager
    def socket(self, token: str | None = None) -> Iterator[str]:
        """Run the server on a websocket and give its address."""
        with listening(self.binary, self.home, self.model.config_args, token=token) as url:
            yield url

    def shown(self, at: int = -1, *, among: frozenset[str] | None = None) -> list[str]:
        """The tools the model saw in a request; only those of ours, if names are given."""
        tools = self.model.visible_tools(at)
        return [name for name in tools if among is None or name in among]


@pytest.fixture
def tool() -> Callable[..., dict]:
    """Makes a tool for `thread/start`."""

    def make(name: str, description: str = "A tool", schema: dict | None = None, **more: object) -> dict:
        fitting = schema or {"type": "object", "properties": {}, "additionalProperties": True}
        return {"type": "function", "name": name, "description": description, "inputSchema": fitting, **more}

    return make


@pytest.fixture(
    params=[
        "emulator",
        pytest.param("codex", marks=[pytest.mark.needs("codex"), pytest.mark.codex_real]),
    ]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """The emulator, and the real binary: what is promised holds on both."""
    with AppServerEmulator() as emulator:
        binary = emulator.binary if request.param == "emulator" else real_codex()
        assert binary is not None
        with benched(request.param, binary, tmp_path) as made:
            yield made


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Bench]:
    """The emulated old version."""
    with AppServerEmulator("0.105") as emulator, benched("emulator", emulator.binary, tmp_path) as made:
        yield made


@contextmanager
def benched(kind: str, binary: Path, top: Path) -> Iterator[Bench]:
    """A bench with a home of its own; what it started is ended."""
    home = top / "home"
    home.mkdir()
    with FakeResponses() as model:
        made = Bench(kind, binary, home, model)
        try:
            yield made
        finally:
            for wire in made.wires:
                wire.kill()
