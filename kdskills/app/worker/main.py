"""The worker's process: composition, signals and exit codes.

``python -m kdskills.app.worker.main [--slot N]`` is the embedded worker: it reads its settings from standard input, one
line, and ends when it is idle. `kdskills worker` calls `run` with the operator's settings and stays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

from kdskills.app.logs import Sparingly, be_called, json_logs
from kdskills.app.settings import Settings
from kdskills.app.telemetry import Telemetry
from kdskills.app.work import spawn
from kdskills.app.worker.launcher import warm_starter
from kdskills.errors import KdskillsError
from kdskills.jobs.artifacts import ArtifactKeeper, open_artifacts
from kdskills.jobs.queue import Work
from kdskills.jobs.runs import AboutWork
from kdskills.jobs.stream import HostStream
from kdskills.jobs.worker import Worker

LOG: Final = logging.getLogger("kdskills.jobs")
THREADS: Final = 24
REFUSED: Final = 78
"""Exit code of a worker that could not begin: its database or its set-up."""
BROKEN: Final = 70
"""Exit code of a worker that failed at something nobody foresaw."""


def run(settings: Settings, *, slot: int = 0, idle_s: float | None = None) -> NoReturn:
    """Be the worker *slot* of this host, until *idle_s* without work, and end the process with its exit code.

    The codes are 0, 70 for one that broke, 75 for one whose state folder was taken away and 78 for one that cannot
    begin; the reason is the last line of the log.
    """
    be_called(f"worker {slot}")
    complaints = Sparingly(10.0)  # a database that is away is complained of many times a second
    LOG.addFilter(lambda record: record.levelno != logging.WARNING or complaints.due(record.getMessage()[:60]))
    with json_logs():
        for handler in logging.getLogger().handlers:
            handler.addFilter(AboutWork())
        try:
            code, reason, left_work = asyncio.run(_serve(settings, slot, idle_s))
            if left_work:
                spawn(settings)
        except KdskillsError as error:
            code, reason = REFUSED, error.message
        except Exception as error:
            LOG.exception("the worker broke")
            code, reason = BROKEN, f"{type(error).__name__}: {error}"
        LOG.log(logging.ERROR if code else logging.INFO, "the worker ends with %d: %s", code, reason)
        logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a database that does not answer


async def _serve(settings: Settings, slot: int, idle_s: float | None) -> tuple[int, str, bool]:
    """Return the exit code, why the worker ended, and whether work was left."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="worker"))
    starter = warm_starter(settings)
    work = await asyncio.to_thread(Work, settings.work_database, settings.state_dir, settings.jobs, starter=starter)
    store = open_artifacts(settings.artifacts or str(settings.state_dir))
    host = work.host if work.pooled and settings.artifacts is None else None
    keeper = ArtifactKeeper(store, work.database, work.tables, settings.state_dir / "inputs", host=host)
    stream = HostStream(work, store, settings.fleet)
    worker = Worker(work, keeper, slot=slot, idle_s=idle_s, stream=stream, span=Telemetry().span)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    warming = loop.run_in_executor(None, starter.warm)
    try:
        code = await worker.serve()
    finally:
        await asyncio.gather(warming, return_exceptions=True)
        await asyncio.to_thread(starter.close)
    return code, worker.end_reason, worker.left_work


def main() -> NoReturn:
    """Be the embedded worker whose settings come over standard input."""
    words = sys.argv[1:]
    slot = int(words[1]) if words[:1] == ["--slot"] else 0
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit("the worker ends with 1: whoever started it was gone before its settings came")
    settings = Settings(**json.loads(line))
    # one that others ask for its host's files stays when there is no work
    run(settings, slot=slot, idle_s=settings.jobs.idle_s if settings.fleet.listen is None else None)


if __name__ == "__main__":
    main()
