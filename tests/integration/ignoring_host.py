"""A host that ignores and blocks signals, as one under `nohup` does: runs a program by the engine named, and shows what it got."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.landlock import LandlockExecutor
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.request import ExecRequest

IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGRTMIN,
)
ENGINES = {
    "bubblewrap": (BubblewrapExecutor, 0),
    "bubblewrap-pool": (BubblewrapExecutor, 1),
    "landlock": (LandlockExecutor, 0),
    "subprocess": (SubprocessExecutor, 0),
}


async def main():
    """Run `grep` over its own status, and print the masks it finds there."""
    kind, pool = ENGINES[sys.argv[1]]
    options = ExecutionOptions(allow_unisolated=True, pool=pool, state_dir=Path(sys.argv[2]), best_effort=LIMIT_NAMES)
    profile = "unsafe-local" if kind is SubprocessExecutor else "default"
    result = await kind(options).run(ExecRequest(argv=("grep", "^Sig[BI]", "/proc/self/status"), profile=profile))
    sys.stdout.write(json.dumps([result.status, result.stdout.data.decode(), str(result.error)]) + "\n")


for number in IGNORED:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGALRM})
asyncio.run(main())
