"""The probe's questions to a server, each answered by the requests that its model gets."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kdskills.remote.catalog.changes import Changes
from kdskills.remote.catalog.reports import NotApplied
from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.threads import ENDED
from kdskills.remote.labmodel import FakeResponses, texts_of
from kdskills.remote.ports import AppServerError, JsonObject, ServerProfile, WaitTimeoutError
from kdskills.remote.signals import AppServerSignal

FIRST: Final = "kdskills_probe_a"
SECOND: Final = "kdskills_probe_b"
THIRD: Final = "kdskills_probe_c"
SPACE: Final = "kdskills_probe_ns"
_TURN_S: Final = 15.0
_NOBODY: Final = "00000000-0000-7000-8000-000000000000"
_VERSION: Final = re.compile(r"/(\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One answer of the probe: the question's name, whether the ability is proven, and the evidence."""

    name: str
    proven: bool
    evidence: str = ""


@dataclass(slots=True)
class ServerFindings:
    """The findings so far; a question that is not asked proves nothing."""

    profile: ServerProfile
    list: list[ServerFinding] = field(default_factory=list)

    def add(self, name: str, proven: bool, evidence: str = "", **facts: Any) -> None:
        """Add a finding, with what follows from it for the profile."""
        self.list.append(ServerFinding(name, proven, evidence))
        self.profile = replace(self.profile, **facts)


def version_of(user_agent: str) -> str:
    """Return `0.169` of `name/0.169.0 (…)`; the whole text where it is something else."""
    match = _VERSION.search(user_agent)
    return match.group(1) if match else user_agent


def a_tool(name: str) -> JsonObject:
    """Return a harmless tool."""
    schema = {"type": "object", "properties": {}, "additionalProperties": True}
    return {"type": "function", "name": name, "description": f"Probe {name}.", "inputSchema": schema}


class Lab:
    """A server that is probed, its fake model, and the calls that reached this client.

    Args:
        binary: The program.
        home: Its private, empty home.
        model: The fake model that the server uses.
    """

    def __init__(self, binary: str, home: Path, model: FakeResponses) -> None:
        self._binary = binary
        self._home = home
        self.model = model
        self.calls: list[str] = []
        self._client: AsyncAppServerClient | None = None

    @property
    def client(self) -> AsyncAppServerClient:
        """The client; the lab is open."""
        assert self._client is not None
        return self._client

    async def open(self) -> None:
        """Start the server."""
        self._client = await AsyncAppServerClient.spawn(
            home=self._home, binary=self._binary, cwd=self._home, config=self.model.config, request_timeout_s=_TURN_S
        )
        self._client.on_call = self._answer

    async def close(self) -> None:
        """Stop the server."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def reopen(self) -> None:
        """Stop the server and start it again on the same home."""
        await self.close()
        await self.open()

    async def ask(self, method: str, **params: Any) -> JsonObject:
        """Send a request."""
        answer = await self.client.server.request(method, **params)
        return answer if isinstance(answer, dict) else {}

    async def begin(self, *tools: JsonObject) -> JsonObject:
        """Begin a thread with tools and return the server's description of it."""
        answer = await self.ask(
            "thread/start",
            dynamicTools=list(tools),
            cwd=str(self._home),
            approvalPolicy="never",
            sandbox="read-only",
            config={"thread_unload_delay_secs": 0},
        )
        thread = answer.get("thread")
        if not isinstance(thread, dict) or not isinstance(thread.get("id"), str):
            raise AppServerError("the app-server answered thread/start without a thread", method="thread/start")
        self.client.server.threads.learn(thread, subscribed=True)
        return thread

    async def turn(self, thread_id: str, text: str, **params: Any) -> JsonObject:
        """Run a turn to its end and return the newest request the model got.

        Raises:
            WaitTimeoutError: It did not end.
        """
        threads = self.client.server.threads
        items = [{"type": "text", "text": text}]
        answer = await self.ask("turn/start", threadId=thread_id, input=items, **params)
        turn_id = str((answer.get("turn") or {}).get("id"))

        def ended() -> bool:
            turn = threads.get(thread_id).turns.get(turn_id)
            return turn is not None and turn.status in ENDED

        if not await threads.until(ended, _TURN_S):
            raise WaitTimeoutError("the probe's turn did not end", turn_id=turn_id)
        return self.model.requests[-1] if self.model.requests else {}

    async def _answer(self, signal: AppServerSignal) -> object:
        self.calls.append(str(signal.params.get("tool")))
        response = {"contentItems": [{"type": "inputText", "text": "probed"}], "success": True}
        return await self.client.tool_calls.respond(request_id=str(signal.request_id), response=response)


async def _understood(lab: Lab, method: str, **params: Any) -> bool:
    """Return whether the server knows a method, even if it refuses this call of it."""
    try:
        await lab.ask(method, **params)
    except AppServerError as error:
        return "unknown variant" not in str(error) and error.details.get("rpc_code") != -32601
    return True


async def ask_words(lab: Lab, findings: ServerFindings) -> None:
    """Which methods there are."""
    supported = await _understood(lab, "thread/unsubscribe", threadId=_NOBODY)
    findings.add("unsubscribe", supported, unsubscribe=supported)


async def ask_namespaces(lab: Lab, findings: ServerFindings) -> None:
    """Whether namespaces are understood, and which tools the server shows by itself."""
    inside = {"type": "namespace", "name": SPACE, "description": "Probe.", "tools": [a_tool(SECOND)]}
    try:
        thread = await lab.begin(a_tool(FIRST), inside)
    except AppServerError:
        thread = await lab.begin(a_tool(FIRST))
    request = await lab.turn(thread["id"], "!say probed")
    visible = set(lab.model.visible_tools(request))
    spaced = bool(visible & {f"{SPACE}.{SECOND}", f"{SPACE}__{SECOND}"})
    server_tools = {name for name in visible if "." not in name and not name.startswith("kdskills_probe")}
    findings.add("namespaces", spaced, namespaces=spaced)
    listed = findings.profile.built_ins | server_tools
    findings.add("built_ins", FIRST in visible, ", ".join(sorted(server_tools)), built_ins=frozenset(listed))


async def ask_materialising(lab: Lab, findings: ServerFindings) -> None:
    """What writes a thread's file without a model call, and whether a turn does."""
    item = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "probe"}]}
    writers: list[tuple[str, Callable[[str], Awaitable[object]]]] = [
        ("name_set", lambda thread: lab.ask("thread/name/set", threadId=thread, name="probe")),
        ("inject_items", lambda thread: lab.ask("thread/inject_items", threadId=thread, items=[item])),
        ("bootstrap", lambda thread: lab.turn(thread, "!say probed")),
    ]
    proven: list[str] = []
    for name, write in writers:
        thread = await lab.begin(a_tool(FIRST))
        try:
            await write(thread["id"])
        except AppServerError:
            continue
        if isinstance(thread.get("path"), str) and await asyncio.to_thread(Path(thread["path"]).exists):
            proven.append(name)
    findings.add("materialise", bool(proven), ", ".join(proven), materialise=tuple(proven))


async def ask_context(lab: Lab, findings: ServerFindings) -> None:
    """Whether context reaches the model."""
    thread = await lab.begin(a_tool(FIRST))
    context = {"kdskills": {"kind": "application", "value": "kdskills probe context"}}
    request = await lab.turn(thread["id"], "!say probed", additionalContext=context)
    reached = any("kdskills probe context" in text for text in texts_of(request, "developer"))
    findings.add("context", reached, context=reached)


async def ask_rewind(lab: Lab, findings: ServerFindings) -> None:
    """Which method rolls a turn back."""
    thread = await lab.begin(a_tool(FIRST))
    await lab.turn(thread["id"], "!say kept")
    await lab.turn(thread["id"], "!say dropped")
    method = None
    try:
        turns = await lab.ask("thread/turns/list", threadId=thread["id"])
        newest = turns["data"][0]["id"]
        await lab.ask("thread/revert", threadId=thread["id"], beforeTurnId=newest)
        method = "revert"
    except (AppServerError, KeyError, IndexError, TypeError):
        try:
            await lab.ask("thread/rollback", threadId=thread["id"], numTurns=1)
            method = "rollback"
        except AppServerError as error:
            findings.add("rewind", False, str(error.details.get("server_message") or error))
            return
    request = await lab.turn(thread["id"], "!say after")
    texts = texts_of(request, "user")
    rewound = "!say dropped" not in texts and "!say kept" in texts
    findings.add("rewind", rewound, method, rewind=method if rewound else None)


async def ask_roots(lab: Lab, findings: ServerFindings, folder: Path) -> None:
    """Whether extra skill roots reach a thread that is open."""
    thread = await lab.begin(a_tool(FIRST))
    await lab.turn(thread["id"], "!say before")
    skill = folder / "kdskills-probe" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: kdskills-probe\ndescription: Only a probe of kdskills.\n---\nNothing.\n", "utf-8")
    try:
        await lab.ask("skills/extraRoots/set", extraRoots=[str(folder)])
        request = await lab.turn(thread["id"], "!say after")
        await lab.ask("skills/extraRoots/set", extraRoots=[])
    except AppServerError:
        request = {}
    finally:
        shutil.rmtree(folder)
    texts = texts_of(request, "developer") + texts_of(request, "user")
    reached = any("Only a probe of kdskills." in text for text in texts)
    findings.add("extra_roots", reached, extra_roots=reached)


async def ask_change(lab: Lab, findings: ServerFindings, strategy: str) -> None:
    """Whether replacing tool A by tool B by one strategy reaches the model, keeps history, and survives a restart."""
    thread = (await lab.begin(a_tool(FIRST)))["id"]
    await lab.turn(thread, f"!call {FIRST} {{}}")
    trial = replace(findings.profile, native=strategy == "native", reload=strategy == "reload")
    changes = Changes(lab.client.server, trial, bootstrap=_no_bootstrap)
    flat = {key: value for key, value in a_tool(SECOND).items() if key != "type"}
    try:
        await changes.make(strategy, thread, [flat])
    except (NotApplied, AppServerError) as problem:
        findings.add(strategy, False, f"not applied: {problem}")
        return
    before = len(lab.calls)
    request = await lab.turn(thread, f"!call {SECOND} {{}}")
    fault = _fault(lab, request) or (
        None if lab.calls[before:] == [SECOND] else "a call of the new tool did not arrive"
    )
    if fault is None and f"!call {FIRST} {{}}" not in texts_of(request, "user"):
        fault = "the history is gone"
    if fault is None:
        await lab.reopen()
        await lab.client.server.resume(thread)
        fault = _fault(lab, await lab.turn(thread, "!say again"), after=" after a restart")
    findings.add(strategy, fault is None, fault or "", **{strategy: fault is None})


def _fault(lab: Lab, request: JsonObject, *, after: str = "") -> str | None:
    visible = lab.model.visible_tools(request)
    if SECOND not in visible:
        return f"the new tool does not reach the model{after}"
    return f"the old tool still reaches the model{after}" if FIRST in visible else None


async def _no_bootstrap(_session_id: str) -> None:
    """The probe's threads have their files already."""
