"""The requests an emulated app-server answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from kdskills.testing.app_server_profiles import JsonObject, RpcError, unknown_variant
from kdskills.testing.app_server_rollout import Note, Rollout, Turn, cut_before, fresh_suffix
from kdskills.testing.app_server_state import Connection, Thread, World
from kdskills.testing.app_server_threads import Threads, checked, need
from kdskills.testing.app_server_turns import TurnRun, message, show_context

Handler = Callable[[Connection, JsonObject], JsonObject]


class Methods:
    """Answers requests on one world.

    Args:
        world: The server's state.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._threads = Threads(world)
        self._table: dict[str, Handler] = {
            "thread/start": self._threads.start,
            "thread/resume": self._threads.resume,
            "thread/fork": self._threads.fork,
            "thread/read": self._threads.read,
            "thread/turns/list": self._list_turns,
            "thread/loaded/list": lambda _connection, _params: {"data": sorted(world.threads), "nextCursor": None},
            "thread/name/set": self._set_name,
            "thread/inject_items": self._inject,
            "thread/settings/update": self._settings,
            "thread/unsubscribe": self._unsubscribe,
            "thread/revert": self._revert,
            "thread/rollback": self._rollback,
            "thread/archive": self._archive,
            "thread/unarchive": self._unarchive,
            "thread/delete": self._delete,
            "thread/compact/start": self._compact,
            "turn/start": self._start_turn,
            "turn/interrupt": self._interrupt,
            "skills/extraRoots/set": self._set_roots,
        }

    def answer(self, connection: Connection, asked: JsonObject) -> JsonObject:
        """Return the answer to a request."""
        try:
            return {"id": asked["id"], "result": self._dispatch(connection, asked)}
        except RpcError as error:
            return {"error": {"code": error.code, "message": str(error)}, "id": asked["id"]}

    def _dispatch(self, connection: Connection, asked: JsonObject) -> JsonObject:
        method = str(asked["method"])
        params = asked.get("params") or {}
        if not isinstance(params, dict):
            raise RpcError("Invalid request: invalid type: expected a map")
        if method == "initialize":
            return self._initialize(connection, params)
        if not connection.initialized:
            raise RpcError("Not initialized")
        if method not in self.world.profile.methods:
            raise unknown_variant(method, self.world.profile)
        return self._table[method](connection, params)

    def _initialize(self, connection: Connection, params: JsonObject) -> JsonObject:
        if connection.initialized:
            raise RpcError("Already initialized")
        connection.initialized = True
        connection.experimental = bool((params.get("capabilities") or {}).get("experimentalApi"))
        name = (params.get("clientInfo") or {}).get("name", "unknown")
        agent = f"{name}/{self.world.profile.version} (kdskills emulator)"
        return {"userAgent": agent, "codexHome": str(self.world.files.home)}

    # threads

    def _list_turns(self, connection: Connection, params: JsonObject) -> JsonObject:
        read = self._threads.read(connection, {"threadId": need(params, "threadId"), "includeTurns": True})
        newest = read["thread"]["turns"][::-1]
        first = int(params.get("cursor") or 0)
        last = first + int(params.get("limit") or len(newest) or 1)
        return {"data": newest[first:last], "nextCursor": str(last) if last < len(newest) else None}

    def _set_name(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread_id, name = checked(need(params, "threadId")), str(need(params, "name"))
        thread = self.world.threads.get(thread_id)
        if thread is not None:
            thread.name = name
            if self.world.profile.name_materialises:
                self._threads.materialize(thread)
        note = self.world.files.note(thread_id)
        if note is not None:
            self.world.files.keep(thread_id, Note(note.path, name, note.archived, note.tools))
        elif thread is None:
            raise RpcError(f"thread not found: {thread_id}")
        self.world.broadcast("thread/name/updated", {"threadId": thread_id, "threadName": name})
        return {}

    def _inject(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread, items = self._threads.loaded(params), need(params, "items")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise RpcError("Invalid request: invalid type: expected a sequence of items")
        if not items:
            raise RpcError("items must not be empty")
        for item in items:
            thread.remember(item)
        self._threads.materialize(thread)
        return {}

    def _settings(self, _connection: Connection, params: JsonObject) -> JsonObject:
        """Say yes, and change nothing, `dynamicTools` least of all."""
        self._threads.loaded(params)
        return {}

    def _unsubscribe(self, connection: Connection, params: JsonObject) -> JsonObject:
        thread = self.world.threads.get(checked(need(params, "threadId")))
        if thread is None:
            return {"status": "notLoaded"}
        if connection not in thread.subscribers:
            return {"status": "notSubscribed"}
        thread.subscribers.remove(connection)
        self.world.left(thread)
        return {"status": "unsubscribed"}

    def _revert(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread, turn_id = self._threads.loaded(params), str(need(params, "beforeTurnId"))
        if not thread.paged or thread.rollout.path is None:
            raise RpcError("thread/revert requires a paginated thread")
        if not thread.rollout.materialized:
            raise RpcError(f"turn not found: {turn_id}")
        kept = cut_before(thread.rollout.path, turn_id)
        abandon(thread)
        old = thread.rollout.path
        path = old.with_name(self.world.files.new_path(thread.id, fresh_suffix()).name)
        path.write_text("\n".join(kept) + "\n", "utf-8")
        self.world.files.keep(thread.id, Note(str(path), thread.name))
        found = self.world.files.load(path)
        thread.rollout = Rollout(path, [], written=True)
        thread.history, thread.turns, thread.context = found.history, found.turns, {}
        self.world.notify(thread, "thread/reverted")
        return {"thread": self._threads.describe(thread)}

    def _rollback(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread, count = self._threads.loaded(params), need(params, "numTurns")
        if type(count) is not int:
            raise RpcError("Invalid request: invalid type: expected u32")
        if count < 1:
            raise RpcError("numTurns must be >= 1")
        if thread.turn is not None:
            raise RpcError("cannot roll back while a turn is in progress")
        thread.mark("thread_rolled_back", num_turns=count)
        if thread.rollout.path is not None and thread.rollout.materialized:
            found = self.world.files.load(thread.rollout.path)
            thread.history, thread.turns = found.history, found.turns
        return {"thread": self._threads.describe(thread, turns=True)}

    def _archive(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread_id = checked(need(params, "threadId"))
        note = self.world.files.note(thread_id)
        if note is None or note.archived:
            raise RpcError(f"no rollout found for thread id {thread_id}")
        thread = self.world.threads.get(thread_id)
        if thread is not None:
            abandon(thread)
            self.world.unload(thread)
        self.world.files.move(thread_id, note, archived=True)
        self.world.broadcast("thread/archived", {"threadId": thread_id})
        return {}

    def _unarchive(self, connection: Connection, params: JsonObject) -> JsonObject:
        thread_id = checked(need(params, "threadId"))
        note = self.world.files.note(thread_id)
        if note is None or not note.archived:
            raise RpcError(f"no archived rollout found for thread id {thread_id}")
        self.world.files.move(thread_id, note, archived=False)
        self.world.broadcast("thread/unarchived", {"threadId": thread_id})
        return self._threads.read(connection, params)

    def _delete(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread_id = checked(need(params, "threadId"))
        thread = self.world.threads.get(thread_id)
        if thread is not None:
            abandon(thread)
            self.world.unload(thread)
        self.world.files.forget(thread_id)
        self.world.broadcast("thread/deleted", {"threadId": thread_id})
        return {}

    # turns

    def _start_turn(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread, given = self._threads.loaded(params), need(params, "input")
        if not isinstance(given, list) or not all(isinstance(part, dict) and "type" in part for part in given):
            raise RpcError("Invalid request: invalid type: expected a sequence of user inputs")
        for part in given:
            for field in {"text": ("text",), "skill": ("name", "path")}.get(str(part["type"]), ()):
                if not isinstance(need(part, field), str):
                    raise RpcError("Invalid request: invalid type: expected a string")
        if thread.turn is not None:
            thread.steered.append(given)
            return {"turn": thread.turn.public(items=False)}
        turn = Turn(str(uuid.uuid4()))
        thread.turn, thread.failed = turn, False
        thread.turns.append(turn)
        thread.mark("task_started", turn_id=turn.id)
        show_context(self.world, thread, params.get("additionalContext"))
        self._threads.materialize(thread)
        thread.task = asyncio.get_running_loop().create_task(TurnRun(self.world, thread, turn, given).run())
        return {"turn": turn.public(items=False)}

    def _interrupt(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread = self._threads.loaded(params)
        if thread.task is None or thread.turn is None or thread.turn.id != need(params, "turnId"):
            raise RpcError("no active turn to interrupt")
        thread.task.cancel()
        return {}

    def _compact(self, _connection: Connection, params: JsonObject) -> JsonObject:
        thread = self._threads.loaded(params)
        kept = [item for item in thread.history if item.get("type") == "message" and item.get("role") == "user"]
        thread.history = [*kept, message("user", "Another language model produced a summary: (emulated).")]
        thread.rollout.add("compacted", {"message": "(emulated)", "replacement": list(thread.history)})
        turn = {"turnId": str(uuid.uuid4())}
        if self.world.profile.paged:
            self.world.notify(
                thread, "item/completed", **turn, item={"type": "contextCompaction", "id": turn["turnId"]}
            )
        else:
            self.world.notify(thread, "thread/compacted", **turn)
        return {}

    def _set_roots(self, _connection: Connection, params: JsonObject) -> JsonObject:
        self.world.extra_roots = [str(root) for root in need(params, "extraRoots")]
        self.world.broadcast("skills/changed", {})
        return {}


def abandon(thread: Thread) -> None:
    """End a thread's turn at once; it writes nothing more into a file that is about to move."""
    if thread.task is not None:
        thread.turn = None
        thread.task.cancel()
