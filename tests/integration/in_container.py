"""Program of `test_landlock.py`: probes both engines where it is started and runs one program, and prints JSON."""

import asyncio
import json
import sys

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.landlock import LandlockExecutor
from kdskills.execution import ExecRequest, InputFile
from kdskills.execution.protocol import ExecutionOptions


async def main() -> None:
    """Say what works here."""
    # Processes of a uid are counted over all containers of a host: the tests beside this one have the default uids.
    options = ExecutionOptions(best_effort=frozenset({"work", "tmp", "memory"}), sandbox_uid=20_001)
    engine = LandlockExecutor(options)
    report = await engine.probe()
    seen = {"probe": report.ok, "cure": report.cure, "bubblewrap": (await BubblewrapExecutor(options).probe()).ok}
    if report.ok:
        request = ExecRequest(
            argv=("sh", "-c", "cat in; id -u; echo out > o"), inputs=(InputFile("in", b"data\n"),), outputs=("o",)
        )
        result = await engine.run(request)
        code = await engine.run(ExecRequest(code="raise ValueError('boom')"))
        seen |= {
            "plain": [result.status, result.stdout.text, [item.content.decode() for item in result.artifacts]],
            "code": [code.status, code.error.message if code.error else None],
            "limits": sorted(result.limits_enforced),
        }
    json.dump(seen, sys.stdout)


asyncio.run(main())
