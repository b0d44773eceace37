"""`client.sessions`: threads as sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.remote.catalog.digest import tools_digest, tools_text
from kdskills.remote.client.server import UNLOAD_AT_ONCE, camel_keys
from kdskills.remote.client.threads import WatchedTurn, turn_record
from kdskills.remote.client.wire import INVALID_REQUEST, METHOD_NOT_FOUND
from kdskills.remote.ports import AppServerError, CatalogChange, JsonObject

if TYPE_CHECKING:
    from kdskills.remote.catalog.backend import CodexCatalog
    from kdskills.remote.client.server import AppServer

_START_DEFAULTS: JsonObject = {"approvalPolicy": "never", "sandbox": "read-only"}
_RESUME_SECONDS = 90.0
_PAGE = 100


class Sessions:
    """Creates, reads, continues and deletes threads.

    Args:
        server: The server.
        catalog: Decides what tools a new thread starts with, and changes them.
    """

    def __init__(self, server: AppServer, catalog: CodexCatalog) -> None:
        self._server = server
        self._catalog = catalog

    async def create(self, /, **keywords: Any) -> JsonObject:
        """Start a thread; snake_case keywords become the server's params.

        Args:
            **keywords: Of `thread/start`. `dynamic_tools` as `dynamic_tools()` writes them, or as the wire does.

        Returns:
            `{"session": {"sessionId", "materialized", "status", "path"}, "thread", "strategy", "strategyAsked"}`: the strategy in
            use, and the one the client's options name.
        """
        params = {**_START_DEFAULTS, **camel_keys(keywords)}
        params["config"] = {**UNLOAD_AT_ONCE, **(params.get("config") or {})}
        tools = params.pop("dynamicTools", None)
        plan = self._catalog.plan_start(tools, ephemeral=bool(params.get("ephemeral")))
        if plan.wire is not None:
            params["dynamicTools"] = plan.wire
        answer = await self._server.request("thread/start", **params)
        thread = answer["thread"]
        self._server.threads.learn(thread, subscribed=True)
        await self._catalog.started(str(thread["id"]), plan)
        strategies = {"strategy": plan.strategy, "strategyAsked": self._server.options.strategy}
        return {"session": self._session(thread), "thread": thread, **strategies}

    async def get(self, session_id: str) -> JsonObject:
        """Return a session as `create` does, with its `transcript`, oldest message first."""
        thread = await self._server.describe(session_id)
        turns = await self.turns(session_id)
        transcript = [entry for turn in turns for entry in turn.transcript()]
        return {"session": self._session(thread), "thread": thread, "transcript": transcript}

    async def turns(self, session_id: str) -> list[WatchedTurn]:
        """Return a session's turns, oldest first: the server's list, completed by the turns watched on this connection."""
        watched = self._server.threads.get(session_id).turns
        merged: list[WatchedTurn] = []
        for turn in await self._list_turns(session_id):
            watched_turn = watched.get(turn.id)
            has_reply = any(message["role"] == "assistant" for message in turn.messages)
            merged.append(turn if watched_turn is None or (has_reply and turn.status != "inProgress") else watched_turn)
        listed_ids = {turn.id for turn in merged}
        return merged + [turn for turn in watched.values() if turn.id not in listed_ids]

    async def send_message(self, /, session_id: str, text: str, **keywords: Any) -> JsonObject:
        """Start a turn, or steer the running one.

        Args:
            session_id: The thread.
            text: The user's text.
            **keywords: Of `turn/start`; `dynamic_tools` is compared with the catalog in force and not sent, because the
                server would take and ignore it; `input` holds further items of the input.

        Returns:
            `{"status": "accepted" | "steered", "sessionId", "turnId"}`, and `catalog` if tools were given.
        """
        params = camel_keys(keywords)
        tools = params.pop("dynamicTools", None)
        items = [{"type": "text", "text": text}, *(params.pop("input", None) or [])]
        async with self._catalog.gate(session_id):
            thread = await self._server.subscribed(session_id)
            active = thread.active_turn
            answer = await self._server.request("turn/start", threadId=session_id, input=items, **params)
            turn = self._server.threads.begin_turn(session_id, answer["turn"])
        await self._catalog.context_sent(session_id, params.get("additionalContext"))
        status = "steered" if turn.id == active else "accepted"
        report: JsonObject = {"status": status, "sessionId": session_id, "turnId": turn.id}
        if tools is not None:
            current = await self._catalog.in_force(session_id, tools_digest(tools))
            report["catalog"] = "current" if current else "stale"
        return report

    async def resume(
        self, /, session_id: str, dynamic_tools: list[JsonObject] | None = None, **keywords: Any
    ) -> JsonObject:
        """Subscribe to a session; with `dynamic_tools`, change its catalog as `prepare_catalog` does."""
        if dynamic_tools is not None:
            change = CatalogChange(
                session_id, dynamic_tools, tools_text(dynamic_tools), wait=True, timeout_s=_RESUME_SECONDS
            )
            return await self._catalog.apply(change)
        answer = await self._server.resume(session_id, **camel_keys(keywords))
        thread = answer.get("thread") or await self._server.describe(session_id)
        return {"session": self._session(thread), "thread": thread}

    async def rollback(self, session_id: str, num_turns: int) -> JsonObject:
        """Roll back the newest turns. The rollout file may move, so its path is read again."""
        await self._server.subscribed(session_id)
        turns = await self._list_turns(session_id)
        if num_turns < 1 or num_turns > len(turns):
            raise AppServerError(
                f"num_turns is {num_turns}, which cannot be taken back: the session has {len(turns)} turn(s)",
                method="thread/revert",
                turns=len(turns),
            )
        if self._server.threads.get(session_id).info.get("historyMode") == "paginated":
            try:
                await self._server.request("thread/revert", threadId=session_id, beforeTurnId=turns[-num_turns].id)
            except AppServerError as problem:
                if not unknown_method(problem):
                    raise
                await self._server.request("thread/rollback", threadId=session_id, numTurns=num_turns)
        else:
            await self._server.request("thread/rollback", threadId=session_id, numTurns=num_turns)
        record = self._server.threads.get(session_id)
        for turn in turns[-num_turns:]:
            record.turns.pop(turn.id, None)
        self._catalog.context_lost(session_id)
        thread = await self._server.describe(session_id)
        return {"status": "ok", "session": self._session(thread), "numTurns": num_turns}

    async def tool_calls(self, session_id: str) -> JsonObject:
        """Return `{"data": rows}` of the calls that wait for an answer."""
        return {"data": self._server.pending.rows(session_id)}

    async def delete(self, session_id: str) -> JsonObject:
        """Delete a session with its history."""
        try:
            await self._server.request("thread/delete", threadId=session_id)
        except AppServerError as problem:
            if not unknown_method(problem):
                raise
            await self._server.request("thread/archive", threadId=session_id)
            return {"status": "archived", "sessionId": session_id}
        self._server.pending.expire(thread_id=session_id)
        self._server.threads.drop(session_id)
        await self._catalog.forget(session_id)
        return {"status": "deleted", "sessionId": session_id}

    async def _list_turns(self, session_id: str) -> list[WatchedTurn]:
        turns: list[WatchedTurn] = []
        cursor: Any = None
        try:
            while True:
                page = {"cursor": cursor} if cursor is not None else {}
                answer = await self._server.request("thread/turns/list", threadId=session_id, limit=_PAGE, **page)
                turns.extend(turn_record(turn) for turn in answer.get("data") or [] if isinstance(turn, dict))
                cursor = answer.get("nextCursor")
                if cursor is None:
                    return turns[::-1]
        except AppServerError as problem:
            if unknown_method(problem):
                return await self._read_turns(session_id)
            if without_history(problem):
                return []
            raise

    async def _read_turns(self, session_id: str) -> list[WatchedTurn]:
        try:
            answer = await self._server.request("thread/read", threadId=session_id, includeTurns=True)
        except AppServerError as problem:
            if without_history(problem):
                return []
            raise
        return [turn_record(turn) for turn in (answer.get("thread") or {}).get("turns") or []]

    def _session(self, thread: JsonObject) -> JsonObject:
        path = thread.get("path")
        status = thread.get("status")
        return {
            "sessionId": thread.get("id"),
            "materialized": materialized(thread, local=self._server.local),
            "status": status.get("type") if isinstance(status, dict) else status,
            "path": path,
        }


def materialized(thread: JsonObject, *, local: bool) -> bool:
    """Return whether a thread has its rollout file; on another machine, whether the thread ever had a turn."""
    path = thread.get("path")
    if local and isinstance(path, str) and path:
        return Path(path).exists()
    return bool(thread.get("preview") or thread.get("turns"))


def unknown_method(problem: AppServerError) -> bool:
    """Return whether the server does not have the method: it cannot parse the request's variant."""
    code, message = problem.details.get("rpc_code"), str(problem.details.get("server_message", ""))
    return code == METHOD_NOT_FOUND or (code == INVALID_REQUEST and "unknown variant" in message)


def without_history(problem: AppServerError) -> bool:
    """Return whether the server says the thread has no history yet."""
    message = str(problem.details.get("server_message", ""))
    phrases = ("no rollout found", "not supported yet", "not materialized yet", "unavailable before", "ephemeral")
    return any(part in message for part in phrases)
