"""Upload archives one after the other until killed; each that is done is a line of output."""

import asyncio
import sys
from pathlib import Path

from kdskills.app import Host, Settings


async def main() -> None:
    """Upload and activate, round and round."""
    state, url, *places = sys.argv[1:]
    host = Host(Settings(state_dir=Path(state), database_url=url or None, bundle=None), entry_points=False)
    while True:
        for place in places:
            report = await host.projects.upload("acme", Path(place), who="killed")
            sys.stdout.write(report.version + "\n")
            sys.stdout.flush()
            await host.projects.collect(keep_days=-1, keep_versions=0)


asyncio.run(main())
