"""Turns of the emulated app-server: asks the model over HTTP, calls tools at the client, until the model is done."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kdskills.testing.app_server_profiles import BUILT_INS, JsonObject
from kdskills.testing.app_server_rollout import Turn
from kdskills.testing.app_server_state import Thread, World
from kdskills.testing.app_server_tools import model_tools, offers, read_answer

CANCELLED = "dynamic tool call was cancelled before receiving a response"
INTERRUPTED = "<turn_aborted>\nThe user interrupted the previous turn on purpose.\n</turn_aborted>"
_FIELD = re.compile(r"^(name|description):\s*(.+?)\s*$", re.MULTILINE)


class ModelError(Exception):
    """The model answered with an error, or not at all."""


def message(role: str, text: str) -> JsonObject:
    """Return a message as the model reads it."""
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


async def ask_model(world: World, thread: Thread) -> list[JsonObject]:
    """Ask the configured model for the next items.

    Raises:
        ModelError: It answers with an error, or not at all.
    """
    config = world.config
    provider = config.get("model_providers", {}).get(config.get("model_provider"), {})
    url = urlsplit(f"{provider.get('base_url', '')}/responses")
    body = {"model": config.get("model"), "stream": True, "store": False, "tool_choice": "auto"}
    body |= {"input": thread.history, "tools": model_tools(thread.tools), "parallel_tool_calls": True}
    packed = json.dumps(body).encode()
    head = (
        f"POST {url.path} HTTP/1.0\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(packed)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
    except (OSError, ValueError) as error:
        raise ModelError(f"the model cannot be reached: {error}") from error
    try:
        writer.write(head.encode() + packed)
        await writer.drain()
        raw = await reader.read()
    except OSError as error:
        raise ModelError(f"the model hung up: {error}") from error
    finally:
        writer.close()
    top, _, events = raw.partition(b"\r\n\r\n")
    if b" 200 " not in top.split(b"\r\n", 1)[0] + b" ":
        raise ModelError("We're currently experiencing high demand, which may cause temporary errors.")
    return list(_items(events.decode()))


def _items(events: str) -> Iterator[JsonObject]:
    """Give the items of an answer; one that breaks off is an error."""
    done = False
    for line in events.split("\n"):
        if line.startswith("data: "):
            event = json.loads(line[len("data: ") :])
            done = done or event.get("type") == "response.completed"
            if event.get("type") == "response.output_item.done":
                yield event["item"]
    if not done:
        raise ModelError("stream disconnected before completion")


class TurnRun:
    """One turn at work.

    Args:
        world: The server.
        thread: The thread, whose `turn` this is.
        given: The input it begins with.
    """

    def __init__(self, world: World, thread: Thread, turn: Turn, given: list[JsonObject]) -> None:
        self._world = world
        self._thread = thread
        self._turn = turn
        self._given = given

    async def run(self) -> None:
        """Run it to its end; every end is told."""
        world, thread, turn = self._world, self._thread, self._turn
        world.status_changed(thread)
        world.notify(thread, "turn/started", turn=turn.public(items=False))
        try:
            self._hear(self._given)
            await self._loop()
            turn.status = "completed"
        except asyncio.CancelledError:
            turn.status = "interrupted"
            if thread.turn is turn:
                self._interrupted()
        except ModelError as error:
            turn.status, turn.error = "failed", {"message": str(error)}
            thread.failed = True
            world.notify(thread, "error", turnId=turn.id, willRetry=False, error=turn.error)
        if turn.status != "interrupted":
            thread.mark("task_complete", turn_id=turn.id, error=turn.error)
        thread.turn = thread.task = None
        world.status_changed(thread)
        world.notify(thread, "turn/completed", turn=turn.public())
        world.left(thread)

    def _interrupted(self) -> None:
        thread = self._thread
        answered = {item.get("call_id") for item in thread.history if item.get("type") == "function_call_output"}
        for item in [one for one in thread.history if one.get("type") == "function_call"]:
            if item["call_id"] not in answered:
                self._output(item["call_id"], CANCELLED)
        thread.remember(message("user", INTERRUPTED))
        thread.mark("turn_aborted", turn_id=self._turn.id)

    async def _loop(self) -> None:
        while True:
            while self._thread.steered:
                self._hear(self._thread.steered.pop(0))
            items = await ask_model(self._world, self._thread)
            calls = [item for item in items if item.get("type") == "function_call"]
            for item in items:
                self._thread.remember(item)
                if item.get("type") == "message":
                    self._said(item)
            outputs = await asyncio.gather(*(self._call(item) for item in calls))
            for item, output in zip(calls, outputs, strict=True):
                self._output(item["call_id"], output)
            if not calls and not self._thread.steered:
                return

    def _hear(self, given: list[JsonObject]) -> None:
        """Put the user's input into the history."""
        texts = [part["text"] for part in given if part.get("type") == "text"]
        for part in given:
            if part.get("type") == "skill":
                body = Path(part["path"]).read_text("utf-8")
                block = f"<skill>\n<name>{part['name']}</name>\n<path>{part['path']}</path>\n{body}\n</skill>"
                self._thread.remember(message("user", block))
        for text in texts:
            self._thread.remember(message("user", text))
        self._item({"type": "userMessage", "content": [part for part in given if part.get("type") == "text"]})

    def _said(self, item: JsonObject) -> None:
        text = "".join(part.get("text", "") for part in item.get("content") or [])
        self._item({"type": "agentMessage", "id": item.get("id", ""), "text": text})

    def _item(self, item: JsonObject) -> None:
        """Tell an item, and keep it for history when it is a message."""
        self._world.notify(self._thread, "item/started", turnId=self._turn.id, item=item)
        self._done(item)

    def _done(self, item: JsonObject) -> None:
        self._world.notify(self._thread, "item/completed", turnId=self._turn.id, item=item)
        if item["type"] != "dynamicToolCall":
            self._turn.items.append(item)
            self._thread.mark("item_completed", turn_id=self._turn.id, item=item)

    def _output(self, call_id: str, output: object) -> None:
        shown = output
        if isinstance(output, str) and not self._world.profile.paged:
            shown = [{"type": "input_text", "text": output}]
        self._thread.remember({"type": "function_call_output", "call_id": call_id, "output": shown})

    async def _call(self, item: JsonObject) -> object:
        """Return what the model reads of one call."""
        namespace, name = item.get("namespace"), item["name"]
        if not offers(self._thread.tools, namespace, name):
            known = namespace is None and name in BUILT_INS
            return f"{name} is not run by the emulator" if known else f"unsupported call: {name}"
        try:
            arguments = json.loads(item["arguments"])
        except ValueError as error:
            return f"failed to parse function arguments: {error}"
        asked = {"turnId": self._turn.id, "callId": item["call_id"], "tool": name, "arguments": arguments}
        told = {"type": "dynamicToolCall", "id": item["call_id"], "tool": name, "arguments": arguments}
        if self._world.profile.namespaces:
            asked["namespace"] = told["namespace"] = namespace
        started = {**told, "status": "inProgress", "success": None, "contentItems": None}
        self._world.notify(self._thread, "item/started", turnId=self._turn.id, item=started)
        answer = await self._world.ask(self._thread, "item/tool/call", {"threadId": self._thread.id, **asked})
        output, success, items = read_answer(answer)
        status = "completed" if success else "failed"
        self._done({**told, "status": status, "success": success, "contentItems": items})
        return output


def show_context(world: World, thread: Thread, given: object) -> None:
    """Put the client's context and the listed skills into the history, each only when it changed."""
    if not world.profile.context:
        return
    for key, entry in given.items() if isinstance(given, dict) else ():
        value = str(entry.get("value", ""))
        if entry.get("kind") == "application" and thread.context.get(key) != value:
            thread.context[key] = value
            thread.remember(message("developer", f"<{key}>{value}</{key}>"))
    listed = "\n".join(f"- {line}" for root in world.extra_roots for line in _skills_in(Path(root)))
    if listed != thread.skills_shown:
        thread.skills_shown = listed
        text = f"<skills_instructions>\n## Skills\n### Available skills\n{listed}\n</skills_instructions>"
        thread.remember(message("developer", text))


def _skills_in(root: Path) -> Iterator[str]:
    for path in sorted(root.glob("*/SKILL.md")):
        fields = dict(_FIELD.findall(path.read_text("utf-8")))
        yield f"{fields.get('name', path.parent.name)}: {fields.get('description', '')} (file: {path})"
