"""Program of kill tests: starts a run whose payload leaves a daemon, says its uid and its watcher, and waits to be killed."""

import asyncio
import importlib
import sys
from pathlib import Path

from kdskills.execution import ExecRequest, Limits
from kdskills.execution.protocol import ExecutionOptions

PAYLOAD = """
import os, sys, time
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(300)"], {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]})
    os._exit(0)
os.waitpid(middle, 0)
print("ready", flush=True)
time.sleep(300)
"""


async def main() -> None:
    """Start and wait."""
    module, name, state = sys.argv[1:]
    engine = getattr(importlib.import_module(module), name)(
        ExecutionOptions(best_effort=frozenset({"work", "tmp", "memory"}), state_dir=Path(state))
    )
    handle = await engine.start(ExecRequest(code=PAYLOAD, limits=Limits(wall_s=300)))
    while b"ready" not in handle.tail()[0]:  # noqa: ASYNC110 - a program's output is no event of ours
        await asyncio.sleep(0.02)
    uid = next(Path(state).glob("*-runs/*/uid")).read_text(encoding="ascii")  # noqa: ASYNC240 - once
    sys.stdout.write(f"{uid} {handle.launcher_pid}\n")
    sys.stdout.flush()
    await handle.wait()


asyncio.run(main())
