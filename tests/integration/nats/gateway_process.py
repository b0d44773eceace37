"""A gateway as a process of its own, for tests that kill it: `gateway_process.py URL < settings.json`."""

import asyncio
import sys

from kdskills.app import Host, Settings
from kdskills.doors.nats import serve


async def main() -> None:
    host = Host(Settings.model_validate_json(sys.stdin.read()), entry_points=False)
    try:
        await serve(host, sys.argv[1])
    finally:
        await host.work.aclose()
        await host.storage.aclose()


if __name__ == "__main__":
    asyncio.run(main())
