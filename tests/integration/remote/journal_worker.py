"""A worker in a process of its own, for tests that kill workers: told by JSON on its command line, tells by JSON lines.

Every effect is one line appended to a file by O_APPEND, so that effects of all workers are counted where nobody can lose one.
"""

import asyncio
import json
import os
import sys
import time

from kdskills.remote.dispatch import RemoteDispatcher
from kdskills.remote.dispatch.dispatcher import CallLeases
from kdskills.remote.journal import MemoryJournal, SqlJournal, arguments_digest
from kdskills.remote.ports import CallIdentity
from kdskills.remote.registry import RemoteSkill

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tell(**facts):
    """Say one line to the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def effect(path, line):
    """Leave one line in the file of effects."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


class Stalled(SqlJournal):
    """A journal whose worker stops between claiming and starting, until it is told to go on."""

    def start(self, key, owner):
        """Say that the call is claimed, and wait."""
        tell(event="claimed")
        sys.stdin.readline()
        return super().start(key, owner)


def handler_of(order):
    """Return the skill's function."""

    def ship(n):
        effect(order["effects"], f"{order['name']} {n}")
        if order.get("hang"):
            tell(event="inside")
            time.sleep(3600)
        return f"parcel {n} by {order['name']}"

    return ship


async def main():
    """Answer the calls that were ordered, all at once, and wait to be killed when told so."""
    order = json.loads(sys.argv[1])
    kind = Stalled if order.get("stall") else SqlJournal
    journal = kind(order["url"]) if order.get("url") else MemoryJournal()
    leases = CallLeases(order.get("lease", 6.0), order.get("lease", 6.0) / 3)
    dispatcher = RemoteDispatcher(journal, leases=leases, no_skill_s=order.get("no_skill", 1.0))
    skill = RemoteSkill(
        "ship",
        handler_of(order),
        "Book a parcel",
        SCHEMA,
        idempotent=order.get("idempotent", False),
        deadline_seconds=None,
    )
    tell(event="ready")
    sys.stdin.readline()

    async def call(n):
        arguments = {"n": n}
        identity = CallIdentity(
            "s", "ship", arguments_digest(arguments), "s", order.get("turn", "t"), f"c{n}", None, "0"
        )
        outcome = await dispatcher.call(None if order.get("ignorant") else skill, identity, arguments)
        text = outcome.response_payload["contentItems"][0]["text"]
        tell(
            event="answer",
            n=n,
            text=text,
            replayed=outcome.replayed,
            state=outcome.state,
            success=outcome.response_payload["success"],
        )

    numbers = list(range(order.get("calls", 1)))
    if order.get("backwards"):
        numbers.reverse()
    await asyncio.gather(*(call(n) for n in numbers))
    tell(event="end")
    if order.get("wait"):
        sys.stdin.readline()


if __name__ == "__main__":
    asyncio.run(main())
