"""Program of `test_services_user.py`: runs a service and kills an attempt as whoever starts it; prints what it saw."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

from kdskills.app.settings import Settings
from kdskills.app.worker.launcher import warm_starter
from kdskills.jobs import shim
from kdskills.jobs.attempts import AttemptOrder, Attempts
from kdskills.jobs.model import Command, OnHttp, Placement, Scope, ServiceSpec, TaskSpec

WEB = ("python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1")


def order(number: int, argv: tuple[str, ...], service: ServiceSpec | None = None) -> AttemptOrder:
    """Return an order for bubblewrap."""
    spec = TaskSpec(
        scope=Scope(),
        session_id=None,
        command=Command(argv=argv, timeout_s=None if service else 300.0),
        placement=Placement(engine="bubblewrap", skill_name="x", version_hash="0"),
        mode="service" if service else "batch",
        service=service,
    )
    return AttemptOrder(task_id=f"task_{number}", attempt=1, spec=spec)


async def main(state: Path) -> None:
    """Reach a web server in a sandbox; then kill a shim and its runner and see what is left."""
    starter = warm_starter(Settings())
    attempts = Attempts(state, starter)
    web = await attempts.start(order(1, WEB, ServiceSpec(ready=OnHttp(port=8000), expose_ports=(8000,))))
    facts = await web.until_running()
    seen: dict[str, object] = {"log": (web.folder / shim.LOG).read_text()}
    if facts is not None:
        url = facts.endpoints[0].url
        seen["answer"] = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).status)
    web.cancel()
    seen["cancelled"] = (await web.wait()).status
    victim = await attempts.start(order(2, ("sh", "-c", "echo begun; sleep 600")))
    await victim.until_running()
    known = shim.read_identity(victim.folder)
    tree = [int(known["pid"]) if known else 0]
    for pid in tree:
        tree += shim.children(pid)
    alive = {pid: shim.identity(pid) for pid in tree}
    os.kill(tree[0], signal.SIGKILL)
    seen["killed"] = (await victim.wait()).status
    seen["left"] = [pid for pid, identity in alive.items() if shim.lives(identity)]
    starter.close()
    json.dump(seen, sys.stdout)


asyncio.run(main(Path(sys.argv[1])))
