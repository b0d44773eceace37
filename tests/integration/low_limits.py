"""Program of `test_low_limits.py`: runs each engine in a process that may open few files, and prints what came of it."""

import asyncio
import importlib
import json
import resource
import sys
from pathlib import Path

from kdskills.execution import ExecRequest
from kdskills.execution.protocol import ExecutionOptions

LEAST = 64
SEE = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


async def main(module: str, name: str, state: str, profile: str) -> None:
    """Run a plain program and generated code."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST, LEAST))
    options = ExecutionOptions(
        best_effort=frozenset({"work", "tmp", "memory", "pids"}), state_dir=Path(state), allow_unisolated=True
    )
    engine = getattr(importlib.import_module(module), name)(options)
    chosen = {"profile": profile} if profile else {}
    seen = []
    for request in ({"argv": ("python3", "-I", "-c", SEE)}, {"code": SEE}):
        result = await engine.run(ExecRequest(**request, **chosen))
        seen.append([result.status, result.stdout.text, result.error.message if result.error else None])
    json.dump(seen, sys.stdout)


asyncio.run(main(*sys.argv[1:]))
