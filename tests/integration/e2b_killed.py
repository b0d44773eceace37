"""Program of `test_e2b.py`: starts a run and waits to be killed."""

import asyncio
import sys
from pathlib import Path

from pydantic import SecretStr

from kdskills.builtin.executors.e2b import E2bExecutor
from kdskills.execution import ExecRequest
from kdskills.execution.protocol import E2bOptions, ExecutionOptions


async def main(url: str, key: str, state: str) -> None:
    """Start a run, say so, and wait for its end, which is not to come."""
    options = E2bOptions(api_key=SecretStr(key), api_url=url, sandbox_url=url)
    engine = E2bExecutor(ExecutionOptions(e2b=options, state_dir=Path(state)))
    handle = await engine.start(ExecRequest(argv=("sh", "-c", "echo begun; sleep 600.75")))
    while b"begun" not in handle.tail()[0]:  # noqa: ASYNC110 - a handle can only be looked at
        await asyncio.sleep(0.02)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await handle.wait()


asyncio.run(main(*sys.argv[1:]))
