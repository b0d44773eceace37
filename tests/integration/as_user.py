"""Program of `test_bubblewrap_user.py`: runs the engine as whoever starts it and prints what it saw as JSON."""

import asyncio
import json
import sys

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution import ExecRequest, InputFile, Limits
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.conformance.environments import PROMISES

BOMB = "import os,time\nn=0\ntry:\n while n < 500:\n  if os.fork()==0: time.sleep(30)\n  n+=1\nexcept OSError as e: print(n)"

REFUSED = """
import kdskills_runtime, urllib.request, urllib.error
try:
    urllib.request.urlopen("http://other.invalid/", timeout=20)
except urllib.error.HTTPError as error:
    kdskills_runtime.report(error.code)
"""


async def main() -> None:
    """Probe, then run one program of each kind."""
    engine = BubblewrapExecutor(ExecutionOptions())
    report = await engine.probe()
    plain = await engine.run(
        ExecRequest(argv=("sh", "-c", "cat in/a; echo out > o"), inputs=(InputFile("in/a", b"data"),), outputs=("o",))
    )
    code = await engine.run(ExecRequest(code="raise ValueError('boom')"))
    memory = await engine.run(ExecRequest(argv=("python3", "-c", "bytearray(900 << 20)")))
    bomb = await engine.run(ExecRequest(argv=("python3", "-c", BOMB), limits=Limits(pids=10)))
    hang = await engine.run(ExecRequest(argv=("sh", "-c", "trap '' TERM; sleep 60"), limits=Limits(wall_s=0.5)))
    packages = []
    for promise in PROMISES:
        try:
            await promise.check(engine)
        except AssertionError as error:
            packages.append(f"{promise.name}: {error}")
    refused = await engine.run(ExecRequest(code=REFUSED, network=("granted.invalid",)))
    seen = {
        "probe": report.ok,
        "cure": report.cure,
        "failed": [check.name for check in report.checks if not check.ok],
        "limits": sorted(report.limits),
        "plain": [plain.status, plain.stdout.text, [item.content.decode() for item in plain.artifacts]],
        "code": [code.status, code.error.message if code.error else None],
        "memory": [memory.status, "MemoryError" in memory.stderr.text],
        "bomb": bomb.stdout.text,
        "hang": hang.status,
        "network": [refused.value, [row.outcome for row in refused.connections]],
        "packages": packages,
    }
    json.dump(seen, sys.stdout)


asyncio.run(main())
