"""DBOS inside the worker: its set-up, and the two workflows, which only lead to the worker's own event loop (spec work §3)."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kdskills.jobs.queues import (
    APP,
    JOB,
    POOL,
    POOL_STEPS,
    SCHEMA,
    TASK,
    VERSION,
    host_queue,
    load,
    steps_queue,
)

if TYPE_CHECKING:
    from kdskills.jobs.opening import Work

Run = Callable[[str], Awaitable[None]]

_FAR_S: Final = 30.0


class Engine:
    """DBOS, of which a process has one.

    Args:
        work: The opened place.
        executor: Name of this process; never the default, which every process would share.
        run_task: Sees a task through; called on *loop*.
        run_job: Sees a job through; called on *loop*.
        preempted: Called on *loop* with `task` or `job` and the id of a workflow that was cancelled.
        loop: The worker's event loop.
    """

    def __init__(
        self,
        work: Work,
        executor: str,
        *,
        run_task: Run,
        run_job: Run,
        preempted: Callable[[str, str], Awaitable[None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._work = work
        self._executor = executor
        self._run_task = run_task
        self._run_job = run_job
        self._preempted = preempted
        self._loop = loop
        self._carried: set[asyncio.Task[None]] = set()

    def launch(self) -> None:
        """Begin to take work. Blocks."""
        load()
        from dbos import DBOS, DBOSPortableJSONSerializer

        queues = self._register()
        DBOS(
            config={
                "name": APP,
                "system_database_engine": self._work.queue_engine,
                "dbos_system_schema": SCHEMA,
                "application_version": VERSION,
                "executor_id": self._executor,
                "serializer": DBOSPortableJSONSerializer(),
                "use_listen_notify": False,
                "run_migrations": False,
                "enable_otlp": False,
                "log_level": "WARNING",
                "scheduler_polling_interval_sec": _FAR_S,
                "notification_listener_polling_interval_sec": _FAR_S,
            }
        )
        self._describe(DBOS)
        DBOS.listen_queues(queues)
        DBOS.launch()

    def _register(self) -> list[str]:
        """Describe the queues this worker listens to, and return their names."""
        settings, host = self._work.settings, self._work.host
        own = (host_queue(host), steps_queue(host))
        names = (*own, POOL, POOL_STEPS) if self._work.pooled else own
        for name in names:
            steps = name in (steps_queue(host), POOL_STEPS)
            poll_s = settings.steps_poll_s if steps else settings.poll_s
            pool = name in (POOL, POOL_STEPS)  # what one host takes and cannot run, another could
            held = min(settings.held, 2 * settings.slots + settings.services) if pool else settings.held
            self._work.queues.register(name, poll_s=poll_s, held=held, partitioned=not steps)
        return list(names)

    def _describe(self, dbos: Any) -> None:
        """Register the two workflows: one preemptible step each, and nothing but an id in and out."""
        for name, kind, run in ((TASK, "task", self._run_task), (JOB, "job", self._run_job)):
            step = dbos.step(name=f"{name}_step", preemptible=True)(self._leading(kind, run))
            dbos.workflow(name=name, max_recovery_attempts=None)(_flow(name, step))

    def _leading(self, kind: str, run: Run) -> Callable[[str], Awaitable[str]]:
        async def step(item: str) -> str:
            try:
                await self._lead(run, item)
            except asyncio.CancelledError:  # the workflow was cancelled, perhaps by the queue's own tools
                await self._lead(partial(self._preempted, kind), item)
                raise
            return item

        return step

    async def _lead(self, run: Run, item: str) -> None:
        """Run on the worker's loop, outside DBOS's context, and wait; being cancelled here ends only the waiting."""
        done: Future[None] = Future()

        def begin() -> None:
            task = self._loop.create_task(_carry(run, item, done), context=contextvars.Context())
            self._carried.add(task)
            task.add_done_callback(self._carried.discard)

        self._loop.call_soon_threadsafe(begin, context=contextvars.Context())
        await asyncio.wrap_future(done)


def _flow(name: str, step: Callable[[str], Awaitable[str]]) -> Callable[[str], Awaitable[str]]:
    async def flow(item: str) -> str:
        return await step(item)

    flow.__qualname__ = name
    return flow


async def _carry(run: Run, item: str, done: Future[None]) -> None:
    """Run and put the outcome where the other thread waits for it, if it still does."""
    try:
        await run(item)
    except Exception as error:  # noqa: BLE001 - it is raised again where it is waited for
        if not done.cancelled():
            done.set_exception(error)
    else:
        if not done.cancelled():
            done.set_result(None)
