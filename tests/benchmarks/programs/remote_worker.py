"""A worker that dies on purpose: python remote_worker.py URL SESSION STATE EFFECTS MODE

It subscribes to a thread and answers its calls by the skill `ship`, whose effect is one line in a file. MODE `inside` kills the
worker by SIGKILL in the handler, after the effect; `stored` kills it after the result was stored and before it is answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from kdskills.remote import AsyncCodexClient, SqlJournal
from kdskills.remote.journal import journal_url


def die() -> NoReturn:
    """End as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


class DyingAnswers:
    """Answers calls by dying."""

    async def respond(self, request_id: str, response: dict[str, Any]) -> NoReturn:
        """Die in place of the answer."""
        die()


def effect(path: str) -> None:
    """Leave one line, whole, whoever else writes."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, b"shipped\n")
    finally:
        os.close(handle)


async def main(url: str, session_id: str, state: str, effects: str, mode: str) -> None:
    """Serve until death."""

    def ship() -> str:
        """Ship a parcel."""
        effect(effects)
        if mode.startswith("inside"):
            die()
        return "shipped"

    journal = SqlJournal(journal_url(Path(state)))
    async with await AsyncCodexClient.connect(url, journal=journal) as client:
        if mode == "stored":
            client.tool_calls = DyingAnswers()  # type: ignore[assignment]
        idempotent = mode == "inside-idempotent"
        client.remote_skills.session(session_id).register("ship", ship, idempotent=idempotent)
        await client.sessions.resume(session_id)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
