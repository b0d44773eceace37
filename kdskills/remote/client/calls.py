"""`client.tool_calls`, `client.wait`, and the turn that makes the server write a thread's file."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kdskills.remote.client.threads import ENDED, WatchedTurn
from kdskills.remote.ports import AppServerGone, JsonObject, WaitTimeoutError

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer
    from kdskills.remote.client.sessions import Sessions

_BOOTSTRAP_SECONDS = 60.0


class ToolCalls:
    """Answers the server's calls.

    Args:
        server: The server.
    """

    def __init__(self, server: AppServer) -> None:
        self._server = server

    async def respond(self, request_id: str, response: JsonObject) -> JsonObject:
        """Answer a call under its handle.

        Args:
            request_id: The handle of a signal or row.
            response: `{"contentItems": [..], "success": bool}`.

        Returns:
            `{"status": "ok"}`; `conflict` with code `in_flight` while another answer is on its way; `not_found` when the
            call is answered, its turn ended, or its connection is gone; `error` when the answer cannot be written.
        """
        pending = self._server.pending
        call = pending.begin(request_id)
        if isinstance(call, dict):
            return call
        sent = False
        try:
            await self._server.answer_call(call, response)
            sent = True
        except AppServerGone as problem:
            return {"status": "error", "code": problem.code, "message": problem.message, "requestId": request_id}
        except (TypeError, ValueError) as problem:
            return {"status": "error", "code": "not_json", "message": str(problem), "requestId": request_id}
        finally:
            pending.end(call, sent=sent)
        return {"status": "ok", "requestId": request_id}


class Waits:
    """Waits for turns.

    Args:
        server: The server.
        sessions: Lists turns that this connection did not watch.
    """

    def __init__(self, server: AppServer, sessions: Sessions) -> None:
        self._server = server
        self._sessions = sessions

    async def turn_status(self, session_id: str, turn_id: str) -> JsonObject:
        """Return `{"status", "turnId", "error"}` of a turn; `unknown` for a turn the server does not list."""
        turn = await self._turn(session_id, turn_id)
        if turn is None:
            return {"status": "unknown", "turnId": turn_id, "error": None}
        return {"status": turn.status, "turnId": turn_id, "error": turn.error}

    async def assistant_reply(
        self, session_id: str, turn_id: str, timeout_seconds: float = 60.0, interval_seconds: float = 0.25
    ) -> JsonObject:
        """Wait for a turn's end and return its last message.

        Args:
            session_id: The thread.
            turn_id: The turn.
            timeout_seconds: Longest wait.
            interval_seconds: Pause between two queries about a turn that this connection does not watch.

        Returns:
            `{"status": "complete" | "failed" | "interrupted", "turnId", "text", "error"}`; `text` is None without a message.

        Raises:
            WaitTimeoutError: The turn did not end in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while True:
            turn = await self._turn(session_id, turn_id)
            if turn is not None and turn.status in ENDED:
                replies = [entry["text"] for entry in turn.transcript() if entry["role"] == "assistant"]
                status = "complete" if turn.status == "completed" else turn.status
                return {
                    "status": status,
                    "turnId": turn_id,
                    "text": replies[-1] if replies else None,
                    "error": turn.error,
                }
            seconds_left = end - loop.time()
            if seconds_left <= 0:
                raise WaitTimeoutError(f"the turn did not end within {timeout_seconds:g} s", turn_id=turn_id)
            await self._ended_within(session_id, turn_id, min(seconds_left, max(interval_seconds, 0.01)))

    async def _turn(self, session_id: str, turn_id: str) -> WatchedTurn | None:
        watched = self._server.threads.get(session_id).turns.get(turn_id)
        if watched is not None:
            if watched.status not in ENDED and self._server.disconnected:
                raise AppServerGone("the app-server is gone: the turn's end cannot be seen", turn_id=turn_id)
            return watched
        turns = await self._sessions.turns(session_id)
        return next((turn for turn in turns if turn.id == turn_id), None)

    async def _ended_within(self, session_id: str, turn_id: str, seconds: float) -> None:
        watched = self._server.threads.get(session_id).turns.get(turn_id)
        if watched is None:
            await asyncio.sleep(seconds)
            return
        await self._server.threads.until(lambda: watched.status in ENDED or self._server.disconnected, seconds)


async def answer_at_last(calls: ToolCalls, handle: str, payload: JsonObject | None, text: str) -> None:
    """Answer a call that is still open: with the payload if it can be sent, else with a text, so that the server stops waiting."""
    plain: JsonObject = {"contentItems": [{"type": "inputText", "text": text}], "success": False}
    with contextlib.suppress(AppServerGone):
        for response in (plain,) if payload is None else (payload, plain):
            if (await calls.respond(request_id=handle, response=response))["status"] != "error":
                return


async def bootstrap(server: AppServer, sessions: Sessions, session_id: str) -> None:
    """Make the server write a thread's rollout file, by one short turn that is rolled back.

    Raises:
        AppServerError: The server refused the turn.
    """
    item = {"type": "text", "text": "Reply with OK."}
    answer = await server.request("turn/start", threadId=session_id, input=[item])
    turn = server.threads.begin_turn(session_id, answer["turn"])
    await server.threads.until(lambda: turn.status in ENDED or server.disconnected, _BOOTSTRAP_SECONDS)
    await sessions.rollback(session_id, 1)
