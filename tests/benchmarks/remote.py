"""What remote skills cost, and what is left of an effect under faults.

    python tests/benchmarks/remote.py [--binary PATH | --emulator 0.169] [--changes 40]

Counts must be exact; times may be three times what is promised before this fails, because machines differ. The binary is the one
`.ci/codex` installed, else the one in PATH, else the emulator. Everything is private to the run: homes, journal, loopback ports.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kdskills.remote import AppServerSignal, AsyncCodexClient, AsyncRemoteSkillsFacade, MemoryJournal, SqlJournal
from kdskills.remote.journal import journal_url
from kdskills.remote.labmodel import FakeResponses, call, say, texts_of, tool_outputs
from kdskills.testing.app_server import AppServerEmulator, listening

WORKER = Path(__file__).parent / "programs" / "remote_worker.py"
SLACK = 3.0
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    figure: str
    found: str
    promise: str
    held: bool


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    binary: str
    version: str
    top: Path
    changes: int

    def folder(self, name: str) -> Path:
        """Return a fresh folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.top))


def fast(name: str, seconds: float, promise_ms: float) -> Row:
    """Judge a time."""
    return Row(name, f"{seconds * 1000:.1f} ms", f"<= {promise_ms:g} ms", seconds * 1000 <= promise_ms * SLACK)


def exact(name: str, found: object, promise: object) -> Row:
    """Judge a count."""
    return Row(name, str(found), str(promise), found == promise)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def ping(n: int = 0) -> str:
    """Answer."""
    return f"pong {n}"


async def begun(client: AsyncCodexClient, home: Path, **skills: Callable[..., Any]) -> Any:
    """Return a session with these skills."""

    def register(draft: Any) -> None:
        for name, handler in skills.items():
            draft.register(name, handler)

    return (await client.remote_skills.create_session(register=register, cwd=str(home)))[1]


async def reloads(bench: Bench) -> list[Row]:
    """Time catalog changes, and see that nothing else changed."""
    home = bench.folder("home")
    times = []
    with FakeResponses() as model:
        async with await AsyncCodexClient.spawn(
            home=home, binary=bench.binary, config=model.config, state=bench.top / "state"
        ) as client:
            session = await begun(client, home, keep=ping)
            await session.send_and_handle("!say the beginning", interval_seconds=0.01)
            before = await client.sessions.get(session.session_id)
            for number in range(bench.changes):
                session.clear()
                session.register(f"tool_{number}", ping)
                began = time.perf_counter()
                report = await session.sync_runtime(timeout_seconds=PATIENCE_S)
                times.append(time.perf_counter() - began)
                if report["status"] != "ok":
                    raise SystemExit(f"change {number} was not applied: {report}")
            after = await client.sessions.get(session.session_id)
            await session.send_and_handle(f"!call tool_{bench.changes - 1} {{}}", interval_seconds=0.01)
        kept = "!say the beginning" in texts_of(model.requests[-1], "user")
        shown = [name for name in model.visible_tools() if name.startswith(("tool_", "keep"))]
    same = before["session"]["sessionId"] == after["session"]["sessionId"]
    figure = f"reload, stdio, {bench.changes} changes:"
    return [
        fast(f"{figure} median", statistics.median(times), 60),
        fast(f"{figure} p90", percentile(times, 0.9), 120),
        exact(
            f"{figure} same id, turns, history", (same, before["transcript"] == after["transcript"], kept), (True,) * 3
        ),
        exact(f"{figure} tools at the model", shown, [f"tool_{bench.changes - 1}"]),
    ]


def _signal(number: int) -> AppServerSignal:
    params = {"threadId": "t", "turnId": "u", "callId": f"c{number}", "tool": "ping", "arguments": {"n": number}}
    event = "app_server.request.item.tool.call"
    return AppServerSignal(event, "item/tool/call", "request", time.time(), {}, params, {"id": "t"}, str(number))


async def dispatching(bench: Bench) -> list[Row]:
    """Time the answering of calls, with a journal whose every commit is on the disk."""

    async def respond(request_id: str, response: object) -> dict[str, str]:
        return {"status": "ok"}

    client = SimpleNamespace(tool_calls=SimpleNamespace(respond=respond))
    journal = SqlJournal(journal_url(bench.folder("journal")))
    try:
        session = AsyncRemoteSkillsFacade(client, journal=journal, max_concurrency=8).session("t")
        session.register("ping", ping)
        single = []
        for number in range(100):
            began = time.perf_counter()
            await session.respond_to_signal(_signal(number))
            single.append(time.perf_counter() - began)
        numbers = iter(range(1000, 1400))

        async def worker() -> None:
            for number in numbers:
                await session.respond_to_signal(_signal(number))

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(8)))
        rate = 400 / (time.perf_counter() - began)
    finally:
        journal.close()
    parallel = Row("calls: per second, 8 parallel", f"{rate:.0f}", ">= 200", rate >= 200 / SLACK)
    return [fast("calls: dispatch overhead, median", statistics.median(single), 5), parallel]


async def loop(bench: Bench) -> list[Row]:
    """Time the whole loop: model, server, call, answer, model."""
    home, count = bench.folder("home"), 40
    with FakeResponses() as model:
        async with await AsyncCodexClient.spawn(
            home=home, binary=bench.binary, config=model.config, state=bench.top / "state"
        ) as client:
            session = await begun(client, home, ping=ping)
            await session.send_and_handle("!call ping {}", interval_seconds=0.01)
            lines = "\n".join(f'!call ping {{"n": {number}}}' for number in range(count))
            began = time.perf_counter()
            await session.send_and_handle(lines, timeout_seconds=PATIENCE_S, interval_seconds=0.05)
            took = time.perf_counter() - began
        answered = len(tool_outputs(model.requests[-1]))
    return [
        fast("calls: whole loop, per call and model step", took / count, 60),
        exact("calls: answers the model read", answered, count + 1),
    ]


async def two_workers(bench: Bench, *, shared: bool) -> Row:
    """Count effects of calls that two subscribed workers both receive."""
    home, count = bench.folder("home"), 50
    effects: Counter[int] = Counter()

    async def ship(n: int) -> str:
        effects[n] += 1
        await asyncio.sleep(0.2)  # both workers have the call before the first answers
        return "shipped"

    def brain(request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["input"][-1].get("type") == "function_call_output":
            return [say("done")]
        return [call("kdskills_call", {"skill": "ship", "arguments": {"n": n}}) for n in range(count)]

    state = bench.folder("state")
    with ExitStack() as stack, FakeResponses(brain) as model:
        journals = [SqlJournal(journal_url(state)) if shared else MemoryJournal() for _ in range(2)]
        for journal in journals:
            if isinstance(journal, SqlJournal):
                stack.callback(journal.close)
        url = stack.enter_context(listening(Path(bench.binary), home, model.config_args))
        async with AsyncExitStack() as clients:
            first, second = [
                await clients.enter_async_context(await AsyncCodexClient.connect(url, journal=journal))
                for journal in journals
            ]
            session = await begun(first, home)
            session.register("ship", ship, deadline_seconds=PATIENCE_S)
            await first.request("thread/name/set", threadId=session.session_id, name="shared")
            await second.sessions.resume(session.session_id)
            other = second.remote_skills.session(session.session_id)
            other.register("ship", ship, deadline_seconds=PATIENCE_S)
            await session.send_and_handle("go", timeout_seconds=PATIENCE_S, interval_seconds=0.05)
            if not shared:
                async with asyncio.timeout(PATIENCE_S):
                    while sum(effects.values()) < 2 * count:  # noqa: ASYNC110 - handlers of two clients count here
                        await asyncio.sleep(0.05)
    name = f"{count} calls, two subscribed workers, {'one journal' if shared else 'no journal'}: effects"
    return exact(name, sum(effects.values()), count if shared else 2 * count)


@contextmanager
def dying_worker(url: str, session_id: str, state: Path, effects: Path, mode: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker that will die; it is subscribed when this yields."""
    command = [sys.executable, str(WORKER), url, session_id, str(state), str(effects), mode]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        if worker.stdout is None or worker.stdout.readline() != b"ready\n":
            raise SystemExit("the worker did not start")
        yield worker
    finally:
        worker.kill()
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()


async def killed(bench: Bench, mode: str) -> tuple[int, float, str, str]:
    """Kill a worker by SIGKILL and let another take over: effects, seconds, the turn's status, what the model read."""
    home, state = bench.folder("home"), bench.folder("state")
    effects = state / "effects.txt"
    idempotent = mode == "inside-idempotent"

    def ship() -> str:
        """Ship a parcel."""
        with effects.open("a") as file:
            file.write("shipped\n")
        return "shipped"

    journal = SqlJournal(journal_url(state))
    try:
        with FakeResponses() as model, listening(Path(bench.binary), home, model.config_args) as url:
            async with await AsyncCodexClient.connect(url, dispatch="manual", journal=MemoryJournal()) as watcher:
                session = await begun(watcher, home, ship=ship)
                thread = session.session_id
                await watcher.request("thread/name/set", threadId=thread, name="shared")
                with dying_worker(url, thread, state, effects, mode) as worker:
                    sent = await session.send('!call kdskills_call {"skill": "ship", "arguments": {}}')
                    await asyncio.to_thread(worker.wait, PATIENCE_S)
                    began = time.perf_counter()
                    async with await AsyncCodexClient.connect(url, journal=journal) as successor:
                        successor.remote_skills.session(thread).register("ship", ship, idempotent=idempotent)
                        await successor.sessions.resume(thread)
                        reply = await watcher.wait.assistant_reply(thread, sent["turnId"], timeout_seconds=PATIENCE_S)
                        took = time.perf_counter() - began
            texts = list(tool_outputs(model.requests[-1]).values())
    finally:
        journal.close()
    return effects.read_text().count("shipped"), took, str(reply["status"]), "".join(texts)


async def kills(bench: Bench) -> list[Row]:
    """Kill workers where it hurts."""
    effects, took, status, text = await killed(bench, "stored")
    rows = [
        exact(
            "kill -9 after store, before answer: effects, turn, answer",
            (effects, status, text),
            (1, "complete", "shipped"),
        ),
        fast("kill -9 after store: successor answers", took, 7000),
    ]
    effects, took, status, text = await killed(bench, "inside")
    unknown = "outcome unknown" in text
    rows.append(
        exact(
            "kill -9 inside a handler: effects, turn, says unknown", (effects, status, unknown), (1, "complete", True)
        )
    )
    rows.append(fast("kill -9 inside a handler: successor answers", took, 7000))
    effects, _, status, text = await killed(bench, "inside-idempotent")
    rows.append(exact("kill -9 inside an idempotent handler: effects, answer", (effects, text), (2, "shipped")))
    return rows


async def measure(bench: Bench) -> list[Row]:
    """Return every row of the table."""
    rows = [*await reloads(bench), *await dispatching(bench), *await loop(bench)]
    rows += [await two_workers(bench, shared=True), await two_workers(bench, shared=False)]
    return [*rows, *await kills(bench)]


def chosen(binary: str | None) -> str | None:
    """Return the real program: given, installed by `.ci/codex`, or in PATH."""
    installed = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex") / "node_modules/.bin/codex"
    return binary or (str(installed) if installed.exists() else shutil.which("codex"))


def main() -> int:
    """Measure and print; 1 when a count is wrong or a time more than three times its promise."""
    parser = argparse.ArgumentParser(description="What remote skills cost.")
    parser.add_argument("--binary", help="the app-server; the installed one otherwise")
    parser.add_argument("--emulator", choices=["0.169"], help="measure the emulator")
    parser.add_argument("--changes", type=int, default=40)
    given = parser.parse_args()
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdskills-bench-remote-")))
        binary = None if given.emulator else chosen(given.binary)
        if binary is None:
            binary = str(stack.enter_context(AppServerEmulator(given.emulator or "0.169")).binary)
        home = top / "version"
        home.mkdir()
        env = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "CODEX_HOME": str(home)}
        asked = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, env=env)
        version = asked.stdout.strip()
        kind = "emulator" if "kdskills-emulator-" in binary else "real"
        print(f"{version} ({kind}), {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        rows = asyncio.run(measure(Bench(binary, version, top, given.changes)))
    width = max(len(row.figure) for row in rows)
    for row in rows:
        print(f"{'ok  ' if row.held else 'MISS'} {row.figure:<{width}}  {row.found}  (promised: {row.promise})")
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
