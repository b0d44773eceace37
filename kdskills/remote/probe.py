"""The probe: finds out what a server does from the requests its model gets, and caches the result by the program's fingerprint.

It runs the binary with an empty private home against the fake model: no login, no tokens, nothing of the user's. Answers of the
server prove nothing here; a way of changing the catalog is proven when the next model request has the new tool and not the
old one, a call of the new tool arrives, history remains, and a restarted server still shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from kdskills.remote.calls import AppServerSignal
from kdskills.remote.catalog.changes import START_ALONE, Changes, NotApplied
from kdskills.remote.client.base import AsyncAppServerClient, unknown_method
from kdskills.remote.client.server import ENDED
from kdskills.remote.client.wire import StdioTransport
from kdskills.remote.labmodel import FakeResponses, texts_of
from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject, ServerProfile, WaitTimeoutError
from kdskills.skills.private_files import private_folder, replace_file

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer


_NATIVE: Final = "node_modules/@openai/*/vendor/**/codex"


def _digest(path: Path, folder: Path) -> str:
    """Return the SHA-256 of a file, computed only when size, times or inode changed: executables have hundreds of megabytes."""
    status, known_digests = path.stat(), folder / "digests.json"
    mark = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    entries = read_object(known_digests) or {}
    entry = entries.get(str(path))
    if isinstance(entry, dict) and entry.get("mark") == mark and isinstance(entry.get("sha256"), str):
        return str(entry["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_object(known_digests, {**entries, str(path): {"mark": mark, "sha256": digest}})
    return digest


def fingerprint(server: AppServer, program: Path, state: Path) -> str:
    """Return the fingerprint of a program, of which a server runs now; blocks.

    It covers the launcher and every executable of the process group: npm's `codex` only launches a native child, whose updates
    do not change the launcher.
    """
    folder, real = probes_dir(state), program.resolve()
    programs = {real}
    for parent in real.parents:
        if parent.name == "node_modules":  # where npm puts the native programs its launcher may start
            programs.update(path for path in parent.parent.glob(_NATIVE) if path.is_file())
    group = server.transport.pid if isinstance(server.transport, StdioTransport) else None
    for entry in Path("/proc").glob("[0-9]*") if group is not None else ():
        with contextlib.suppress(OSError, ValueError):  # a process that has ended, or belongs to another user
            if os.getpgid(int(entry.name)) == group:
                programs.add((entry / "exe").resolve(strict=True))
    program_digests = sorted(_digest(path, folder) for path in programs)
    return hashlib.sha256(json.dumps([program_digests, server.user_agent]).encode()).hexdigest()


def read_object(path: Path) -> JsonObject | None:
    """Return the JSON object in a file; None when there is none, or the file is damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_object(path: Path, value: JsonObject) -> None:
    """Write a JSON object so that readers see the old file or the new one, never half of one."""
    private_folder(path.parent)
    replace_file(path, json.dumps(value, indent=1, sort_keys=True).encode())


FIRST: Final = "kdskills_probe_a"
SECOND: Final = "kdskills_probe_b"
SPACE: Final = "kdskills_probe_ns"
_TURN_S: Final = 15.0
_NOBODY: Final = "00000000-0000-7000-8000-000000000000"
_VERSION: Final = re.compile(r"/(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One answer of the probe: the question's name, whether the ability is proven, and what was seen."""

    name: str
    proven: bool
    seen: str = ""


def a_tool(name: str) -> JsonObject:
    """Return a harmless tool."""
    schema = {"type": "object", "properties": {}, "additionalProperties": True}
    return {"type": "function", "name": name, "description": f"Probe {name}.", "inputSchema": schema}


class Lab:
    """A server with a private, empty home, its fake model, the calls that reached this client, and what was found out."""

    client: AsyncAppServerClient

    def __init__(self, binary: str, home: Path, model: FakeResponses) -> None:
        self._binary = binary
        self.home = home
        self.model = model
        self.calls: list[str] = []
        self.findings: list[ServerFinding] = []
        self.profile = ServerProfile(unsubscribe=False)  # a question that is not asked proves nothing

    def find(self, name: str, proven: bool, seen: str = "", **facts: Any) -> None:
        """Add a finding, with what follows from it for the profile."""
        self.findings.append(ServerFinding(name, proven, seen))
        self.profile = replace(self.profile, **facts)

    async def open(self) -> None:
        """Start the server; one that runs is stopped before, and started again on the same home."""
        await self.aclose()
        self.client = await AsyncAppServerClient.spawn(
            home=self.home, binary=self._binary, cwd=self.home, config=self.model.config, request_timeout_s=_TURN_S
        )
        self.client.on_call = self._answer

    async def aclose(self) -> None:
        """Stop the server, if it was ever started."""
        if hasattr(self, "client"):
            await self.client.close()

    async def ask(self, method: str, **params: Any) -> JsonObject:
        """Send a request."""
        answer = await self.client.request(method, **params)
        return answer if isinstance(answer, dict) else {}

    async def begin(self, *more_tools: JsonObject) -> str:
        """Begin a thread with the first tool and perhaps more, and return its id."""
        tools = [a_tool(FIRST), *more_tools]
        answer = await self.ask("thread/start", dynamicTools=tools, cwd=str(self.home), **START_ALONE)
        match answer:
            case {"thread": {"id": str(thread_id)} as thread}:
                self.client.server.threads.learn(thread, subscribed=True)
                return thread_id
        raise AppServerError("the app-server answered thread/start without a thread", method="thread/start")

    async def turn(self, thread_id: str, text: str, **params: Any) -> JsonObject:
        """Run a turn to its end and return the newest request the model got."""
        threads = self.client.server.threads
        answer = await self.ask("turn/start", threadId=thread_id, input=[{"type": "text", "text": text}], **params)
        turn = threads.begin_turn(thread_id, answer.get("turn") or {})
        if not await threads.until(lambda: turn.status in ENDED, _TURN_S):
            raise WaitTimeoutError("the probe's turn did not end", turn_id=turn.id)
        return self.model.requests[-1] if self.model.requests else {}

    async def _answer(self, signal: AppServerSignal) -> object:
        self.calls.append(str(signal.params.get("tool")))
        response = {"contentItems": [{"type": "inputText", "text": "probed"}], "success": True}
        return await self.client.tool_calls.respond(request_id=str(signal.request_id), response=response)


async def ask_words(lab: Lab) -> None:
    """Which methods there are: a server may know one and refuse this call of it."""
    supported = True
    try:
        await lab.ask("thread/unsubscribe", threadId=_NOBODY)
    except AppServerError as error:
        supported = not unknown_method(error)
    lab.find("unsubscribe", supported, unsubscribe=supported)


async def ask_namespaces(lab: Lab) -> None:
    """Whether namespaces are understood, and which tools the server shows by itself."""
    inside = {"type": "namespace", "name": SPACE, "description": "Probe.", "tools": [a_tool(SECOND)]}
    try:
        thread_id = await lab.begin(inside)
    except AppServerError:
        thread_id = await lab.begin()
    visible = set(lab.model.visible_tools(await lab.turn(thread_id, "!say probed")))
    spaced = bool(visible & {f"{SPACE}.{SECOND}", f"{SPACE}__{SECOND}"})
    server_tools = {name for name in visible if "." not in name and not name.startswith("kdskills_probe")}
    lab.find("namespaces", spaced, namespaces=spaced)
    listed = lab.profile.built_ins | server_tools
    lab.find("built_ins", FIRST in visible, ", ".join(sorted(server_tools)), built_ins=frozenset(listed))


async def ask_materialising(lab: Lab) -> None:
    """What writes a thread's file without a model call, and whether a turn does."""
    item = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "probe"}]}
    writers: list[tuple[str, Callable[[str], Awaitable[object]]]] = [
        ("name_set", lambda thread: lab.ask("thread/name/set", threadId=thread, name="probe")),
        ("inject_items", lambda thread: lab.ask("thread/inject_items", threadId=thread, items=[item])),
        ("bootstrap", lambda thread: lab.turn(thread, "!say probed")),
    ]
    proven: list[str] = []
    for name, write in writers:
        thread_id = await lab.begin()
        try:
            await write(thread_id)
        except AppServerError:
            continue
        path = lab.client.server.threads.get(thread_id).path
        if isinstance(path, str) and await asyncio.to_thread(Path(path).exists):
            proven.append(name)
    lab.find("materialise", bool(proven), ", ".join(proven), materialise=tuple(proven))


async def ask_context(lab: Lab) -> None:
    """Whether context reaches the model."""
    thread_id = await lab.begin()
    context = {"kdskills": {"kind": "application", "value": "kdskills probe context"}}
    request = await lab.turn(thread_id, "!say probed", additionalContext=context)
    reached = any("kdskills probe context" in text for text in texts_of(request, "developer"))
    lab.find("context", reached, context=reached)


async def ask_rewind(lab: Lab) -> None:
    """Which method rolls a turn back."""
    thread_id = await lab.begin()
    await lab.turn(thread_id, "!say kept")
    await lab.turn(thread_id, "!say dropped")
    method: Literal["revert", "rollback"] = "revert"
    try:
        newest = (await lab.ask("thread/turns/list", threadId=thread_id))["data"][0]["id"]
        await lab.ask("thread/revert", threadId=thread_id, beforeTurnId=newest)
    except (AppServerError, KeyError, IndexError, TypeError):
        method = "rollback"
        await lab.ask("thread/rollback", threadId=thread_id, numTurns=1)
    texts = texts_of(await lab.turn(thread_id, "!say after"), "user")
    rewound = "!say dropped" not in texts and "!say kept" in texts
    lab.find("rewind", rewound, method, rewind=method if rewound else None)


async def ask_roots(lab: Lab) -> None:
    """Whether extra skill roots reach a thread that is open."""
    thread_id = await lab.begin()
    await lab.turn(thread_id, "!say before")
    folder = lab.home / "kdskills-probe-roots"
    skill = folder / "kdskills-probe" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: kdskills-probe\ndescription: Only a probe of kdskills.\n---\nNothing.\n", "utf-8")
    try:
        await lab.ask("skills/extraRoots/set", extraRoots=[str(folder)])
        request = await lab.turn(thread_id, "!say after")
        await lab.ask("skills/extraRoots/set", extraRoots=[])
    except AppServerError:
        request = {}
    finally:
        shutil.rmtree(folder)
    texts = texts_of(request, "developer") + texts_of(request, "user")
    reached = any("Only a probe of kdskills." in text for text in texts)
    lab.find("extra_roots", reached, extra_roots=reached)


async def ask_change(lab: Lab, *, strategy: str) -> None:
    """Whether replacing tool A by tool B by one strategy reaches the model, keeps history, and survives a restart."""
    thread_id = await lab.begin()
    await lab.turn(thread_id, f"!call {FIRST} {{}}")
    trial = replace(lab.profile, native=strategy == "native", reload=strategy == "reload")
    changes = Changes(lab.client.server, trial, _no_bootstrap)
    flat = {key: value for key, value in a_tool(SECOND).items() if key != "type"}
    try:
        await changes.make(strategy, thread_id, [flat])
    except (NotApplied, AppServerError) as problem:
        lab.find(strategy, False, f"not applied: {problem}")
        return
    before = len(lab.calls)
    request = await lab.turn(thread_id, f"!call {SECOND} {{}}")
    fault = _fault(lab, request)
    if fault is None and lab.calls[before:] != [SECOND]:
        fault = "a call of the new tool did not arrive"
    if fault is None and f"!call {FIRST} {{}}" not in texts_of(request, "user"):
        fault = "the history is gone"
    if fault is None:
        await lab.open()
        await lab.client.server.resume(thread_id)
        fault = _fault(lab, await lab.turn(thread_id, "!say again"), after=" after a restart")
    lab.find(strategy, fault is None, fault or "", **{strategy: fault is None})


def _fault(lab: Lab, request: JsonObject, *, after: str = "") -> str | None:
    visible = lab.model.visible_tools(request)
    if SECOND not in visible:
        return f"the new tool does not reach the model{after}"
    return f"the old tool still reaches the model{after}" if FIRST in visible else None


async def _no_bootstrap(_session_id: str) -> None:
    """The probe's threads have their files already."""


_QUESTIONS: Final[tuple[tuple[str, Callable[[Lab], Awaitable[None]]], ...]] = (
    ("unsubscribe", ask_words),
    ("namespaces", ask_namespaces),
    ("materialise", ask_materialising),
    ("context", ask_context),
    ("rewind", ask_rewind),
    ("extra_roots", ask_roots),
    ("native", partial(ask_change, strategy="native")),
    ("reload", partial(ask_change, strategy="reload")),
)

PROBE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ServerProbeReport:
    """The result of a probe."""

    binary: Path  # the launcher, resolved
    fingerprint: str  # SHA-256 over launcher, running executables and user agent
    profile: ServerProfile  # the lint rules and strategies that follow
    findings: tuple[ServerFinding, ...]
    cached: bool  # whether an earlier probe answered
    seconds: float
    complete: bool  # whether every question was asked; an incomplete probe is not cached

    def to_json(self) -> JsonObject:
        """Return the report as JSON."""
        report: JsonObject = _REPORT.dump_python(self, mode="json")
        report["profile"]["built_ins"].sort()
        return report


_REPORT: Final = TypeAdapter(ServerProbeReport)


def probes_dir(state: Path) -> Path:
    """Return the folder of cached probes below a state folder."""
    return state / "remote" / "probes"


def find_binary(binary: str, path: str | None = None) -> Path:
    """Return the absolute path of a program, by name or path; raises `AppServerGone` when there is none."""
    program_path = shutil.which(binary, path=path)
    if program_path is None:
        raise AppServerGone(f"there is no program {binary!r}", code="codex_missing", binary=binary)
    return Path(program_path).absolute()  # the server is started in another folder


async def probe(
    binary: str = "codex", *, state: Path, force: bool = False, timeout_s: float = PROBE_SECONDS
) -> ServerProbeReport:
    """Probe a binary, or return the cached report of an earlier probe.

    Args:
        binary: The program, by name or path.
        state: The folder of durable state.
        force: Probe again although a report is cached.
        timeout_s: Bound of the whole probe.

    Raises:
        AppServerGone: The program is missing, or does not start.
    """
    began, program = time.monotonic(), await asyncio.to_thread(find_binary, binary)
    temporary = tempfile.TemporaryDirectory(prefix="kdskills-probe-", ignore_cleanup_errors=True)
    with temporary as home, FakeResponses() as model:
        async with contextlib.aclosing(Lab(str(program), Path(home), model)) as lab:
            await lab.open()
            server = lab.client.server
            mark = await asyncio.to_thread(fingerprint, server, program, state)
            cached_report = None if force else await asyncio.to_thread(_read, state, mark)
            if cached_report is not None:
                return replace(cached_report, binary=program, cached=True, seconds=round(time.monotonic() - began, 3))
            version = _VERSION.search(server.user_agent)
            name = version[1] if version else server.user_agent
            lab.profile = replace(lab.profile, name=name, user_agent=server.user_agent)
            complete = await _ask_all(lab, timeout_s)
    seconds, profile = round(time.monotonic() - began, 3), replace(lab.profile, probed=complete)
    report = ServerProbeReport(program, mark, profile, tuple(lab.findings), False, seconds, complete)
    if complete:
        await asyncio.to_thread(write_object, probes_dir(state) / f"{mark}.json", report.to_json())
    return report


async def profile_for(server: AppServer, binary: str, *, state: Path) -> ServerProfile:
    """Return the profile of a running server that was started here, from the cache or by probing its binary."""
    program = await asyncio.to_thread(find_binary, binary)
    mark = await asyncio.to_thread(fingerprint, server, program, state)
    report = await asyncio.to_thread(_read, state, mark) or await probe(str(program), state=state)
    return report.profile


async def _ask_all(lab: Lab, timeout_s: float) -> bool:
    """Ask every question; False when the time was up, or the server went away, before the last."""
    try:
        async with asyncio.timeout(timeout_s):
            for name, question in _QUESTIONS:
                try:
                    await question(lab)
                except (AppServerError, WaitTimeoutError) as error:
                    lab.find(name, False, str(error))
                    if isinstance(error, WaitTimeoutError):
                        return False
    except TimeoutError:
        lab.find("time", False, f"not finished within {timeout_s:g} s")
        return False
    except AppServerGone as error:
        lab.find("server", False, str(error))
        return False
    return True


def _read(state: Path, mark: str) -> ServerProbeReport | None:
    """Return a cached report; None when there is none, or the file is damaged or of another version."""
    stored = read_object(probes_dir(state) / f"{mark}.json")
    try:
        report = _REPORT.validate_json(json.dumps(stored), strict=True)
    except ValidationError:
        return None
    return report if report.fingerprint == mark and report.to_json() == stored else None
