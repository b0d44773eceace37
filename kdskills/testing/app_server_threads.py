"""Starting, loading and describing the threads of an emulated app-server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from kdskills.testing.app_server_profiles import UNSUPPORTED, JsonObject, RpcError
from kdskills.testing.app_server_rollout import Note, Rollout
from kdskills.testing.app_server_state import DEFAULT_UNLOAD_S, Connection, Thread, World
from kdskills.testing.app_server_tools import check_tools
from kdskills.testing.app_server_turns import message


def need(params: JsonObject, field: str) -> Any:
    """Return a field of a request's parameters.

    Raises:
        RpcError: It is missing.
    """
    if field not in params:
        raise RpcError(f"Invalid request: missing field `{field}`")
    return params[field]


def checked(thread_id: Any) -> str:
    """Return a thread id, refusing what is no UUID."""
    try:
        return str(uuid.UUID(str(thread_id)))
    except ValueError as error:
        raise RpcError(f"invalid thread id: {error}") from error


def _delay(params: JsonObject) -> float:
    """Return how long a thread nobody listens to stays loaded."""
    return float((params.get("config") or {}).get("thread_unload_delay_secs", DEFAULT_UNLOAD_S))


class Threads:
    """Finds threads in memory and in files, and tells what they are.

    Args:
        world: The server's state.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, connection: Connection, params: JsonObject) -> JsonObject:
        """Begin a thread; its file comes later."""
        given = params.get("dynamicTools")
        if given is not None and not connection.experimental:
            raise RpcError("thread/start.dynamicTools requires experimentalApi capability")
        world = self.world
        tools = check_tools(given, world.profile)
        thread_id, cwd = str(uuid.uuid4()), str(params.get("cwd") or Path.cwd())
        path = None if params.get("ephemeral") else world.files.new_path(thread_id)
        rollout = Rollout(path, [world.files.meta(thread_id, cwd, tools)])
        thread = Thread(thread_id, cwd, tools, rollout, world.profile.paged, unload_s=_delay(params))
        thread.history.append(message("user", f"<environment_context>\n  <cwd>{cwd}</cwd>\n</environment_context>"))
        rollout.add("response_item", thread.history[0])
        world.threads[thread_id] = thread
        thread.subscribers.append(connection)
        described = self.describe(thread)
        world.broadcast("thread/started", {"thread": described})
        return {"thread": described, "model": world.config.get("model"), "cwd": cwd}

    def describe(self, thread: Thread, *, turns: bool = False) -> JsonObject:
        """Return a thread as the wire has it."""
        path = thread.rollout.path
        return {
            "id": thread.id,
            "sessionId": thread.id,
            "path": str(path) if path else None,
            "ephemeral": path is None,
            "historyMode": ("paginated" if thread.paged else "legacy") if self.world.profile.paged else None,
            "status": thread.status,
            "name": thread.name,
            "cwd": thread.cwd,
            "cliVersion": self.world.profile.version,
            "turns": [turn.public() for turn in thread.turns] if turns else [],
        }

    def loaded(self, params: JsonObject) -> Thread:
        """Return a thread that must be in memory."""
        thread_id = checked(need(params, "threadId"))
        thread = self.world.threads.get(thread_id)
        if thread is None:
            raise RpcError(f"thread not found: {thread_id}")
        return thread

    def _bring(self, thread_id: str) -> Thread:
        """Return a thread as its file has it, not yet loaded."""
        note = self.world.files.note(thread_id)
        if note is None or not Path(note.path).exists():
            raise RpcError(f"no rollout found for thread id {thread_id}")
        if note.archived:
            hint = f"Run `codex unarchive {thread_id}` to unarchive it first."
            raise RpcError(f"session {thread_id} is archived. {hint}")
        path = Path(note.path)
        found = self.world.files.load(path)
        rollout = Rollout(path, [], written=True)
        tools = found.tools if note.tools is None else note.tools
        thread = Thread(thread_id, found.cwd, tools, rollout, found.paged, name=note.name)
        thread.history, thread.turns = found.history, found.turns
        return thread

    def resume(self, connection: Connection, params: JsonObject) -> JsonObject:
        """Subscribe to a thread, loading it first if need be."""
        thread_id = checked(need(params, "threadId"))
        thread = self.world.threads.get(thread_id)
        if thread is None:
            thread = self._bring(thread_id)
            thread.unload_s = _delay(params)
            self.world.threads[thread_id] = thread
            self.world.status_changed(thread)
        elif not thread.rollout.materialized:
            raise RpcError(f"no rollout found for thread id {thread_id}")
        self.world.subscribe(thread, connection)
        return {"thread": self.describe(thread, turns=not params.get("excludeTurns")), "cwd": thread.cwd}

    def fork(self, connection: Connection, params: JsonObject) -> JsonObject:
        """Begin a new thread with the history of another; its tools are those of the other, whatever is given."""
        origin = checked(need(params, "threadId"))
        source = self.world.threads.get(origin) or self._bring(origin)
        copy: JsonObject = self.start(connection, {"cwd": source.cwd, "config": params.get("config")})
        thread = self.world.threads[copy["thread"]["id"]]
        thread.tools = list(source.tools)
        world = self.world
        thread.rollout = Rollout(thread.rollout.path, [world.files.meta(thread.id, thread.cwd, thread.tools)])
        thread.history.clear()
        for item in source.history:
            thread.remember(item)
        self.materialize(thread)
        return copy

    def materialize(self, thread: Thread) -> None:
        """Write a thread's file, if it has none yet."""
        if thread.rollout.path is not None and not thread.rollout.materialized:
            thread.rollout.write()
            tools = None if self.world.profile.paged else thread.tools
            self.world.files.keep(thread.id, Note(str(thread.rollout.path), thread.name, tools=tools))

    def read(self, _connection: Connection, params: JsonObject) -> JsonObject:
        """Return a thread as it is, loaded or not."""
        thread_id, turns = checked(need(params, "threadId")), bool(params.get("includeTurns"))
        thread = self.world.threads.get(thread_id)
        if thread is not None:
            if turns and not thread.rollout.materialized:
                raise self._no_turns(thread_id)
            if thread.rollout.materialized and thread.rollout.path is not None:
                self.world.files.read_meta(thread.rollout.path)
            return {"thread": self.describe(thread, turns=turns)}
        note = self.world.files.note(thread_id)
        if note is None:
            raise RpcError(f"thread not loaded: {thread_id}")
        self.world.files.read_meta(Path(note.path))
        found = self.world.files.load(Path(note.path))
        cold = Thread(thread_id, found.cwd, found.tools, Rollout(Path(note.path), [], written=True), found.paged)
        cold.turns, cold.name = found.turns, note.name
        return {"thread": {**self.describe(cold, turns=turns), "status": {"type": "notLoaded"}}}

    def _no_turns(self, thread_id: str) -> RpcError:
        if self.world.profile.paged:
            return RpcError("list_turns is not supported yet", UNSUPPORTED)
        hint = "includeTurns is unavailable before first user message"
        return RpcError(f"thread {thread_id} is not materialized yet; {hint}")
