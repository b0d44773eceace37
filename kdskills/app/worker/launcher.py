"""The launcher: imports every engine once, then forks a shim per order in milliseconds; the shim forks the runner.

``python -m kdskills.app.worker.launcher [--reap ENGINE]``. Standard input: one line of settings, then one order a line,
`{"start": FOLDER}`; each is answered by one line, `{"shim": PID}`, `{"held": true}` or `{"error": WORDS, "errno": NUMBER}`. It ends with
its standard input. It has one thread and never runs an engine itself, so a fork of it is a clean beginning.

The runner is one attempt's engine, from the order to the result, in a process of its own below the shim. TERM means cancel:
the engine ends the whole tree and the result says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kdskills.app.host import Host
from kdskills.app.logs import be_called
from kdskills.app.settings import Settings, settings_line
from kdskills.errors import ExecRefused, KdskillsError
from kdskills.execution import ExecResult, Executor, SkillMount
from kdskills.execution.egress import require_granted
from kdskills.execution.protocol import Handle, Preparable
from kdskills.execution.run import require_consent
from kdskills.jobs import shim
from kdskills.jobs.attempts import AttemptFacts, AttemptOrder, OutputBounds, ProcessIdentity, Verdict, WarmStarter
from kdskills.jobs.exchange import SessionFolder, refusal, supervise, to_request, to_verdict, workdir_files
from kdskills.jobs.model import OutputError

if TYPE_CHECKING:
    from kdskills.app.worker.evals import EvalsRunner

MODULE: Final = "kdskills.app.worker.launcher"
_LIBRARIES: Final = {"docker": ("docker",), "e2b": ("e2b",), "kubernetes": ("kubernetes",)}


def warm_starter(settings: Settings) -> WarmStarter:
    """Return what starts attempts for a worker with these settings."""
    return WarmStarter((sys.executable, "-m", MODULE), settings_line(settings))


def main(arguments: list[str] | None = None) -> int:
    """Be the launcher, or reap or probe one engine and say what was ended, or why it does not work."""
    words = sys.argv[1:] if arguments is None else arguments
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the worker was killed before it said anything
    host = Host(Settings(**json.loads(line)))
    launcher = Launcher(host.engines(), host.settings)
    apart = {"--reap": launcher.reap, "--probe": launcher.probe}.get(words[0]) if words else None
    return launcher.serve() if apart is None else asyncio.run(apart(words[1]))


class Launcher:
    """Starts attempts; the settings say which hosts are granted to skills, and whether an engine without a wall may be used."""

    def __init__(self, engines: tuple[Executor, ...], settings: Settings) -> None:
        self._engines = {engine.name: engine for engine in reversed(engines)}
        self._settings = settings
        self._loaded: set[str] = set()

    def serve(self) -> int:
        """Answer orders until nobody can send any."""
        be_called("launcher")
        gc.collect()
        gc.freeze()  # what is here now is shared with every fork for as long as nobody writes to it
        # Ignore nothing a worker in the background was told to ignore: programs would inherit it and not hear the signal.
        for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # the interpreter's own, not handed on
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # shims are nobody's business once they are started
        for line in sys.stdin.buffer:
            folder = Path(json.loads(line)["start"])
            try:
                self._load(_engine_of(folder))
                answer = self._start(folder)
            except (OSError, ValueError, KeyError, ImportError, ExecRefused) as error:
                answer = {"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)}
            try:
                os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
            except BrokenPipeError:
                return 0  # the worker was killed while it waited; the next one finds the attempt by its folder
        return 0

    def _load(self, name: str) -> None:
        """Do once what an engine would do in every fork."""
        if name in self._loaded:
            return
        for library in _LIBRARIES.get(name, ()):
            importlib.import_module(library)
        engine: object = self._engines.get(name)
        with contextlib.suppress(ExecRefused):  # every runner finds out for itself, and says so
            if isinstance(engine, Preparable):
                engine.prepare()
            self._loaded.add(name)

    def _start(self, folder: Path) -> dict[str, Any]:
        """Take the attempt's lock and fork its shim, unless somebody has it or it began before."""
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only how many
        if threads != 1:
            raise ExecRefused(f"the launcher has {threads} threads and cannot fork safely", code="launcher_failed")
        lock = shim.take_lock(folder)
        if lock is None:
            return {"held": True}
        try:
            # a late order may be for an attempt that was judged not to have begun: the next one is there then
            judged = folder.name.isdigit() and folder.with_name(str(int(folder.name) + 1)).exists()
            if judged or (folder / shim.EXIT).exists() or shim.read_identity(folder) is not None:
                return {"held": True}
            pid = os.fork()
            if pid == 0:
                self._become_shim(folder, lock)
        finally:
            os.close(lock)
        return {"shim": pid}

    def _become_shim(self, folder: Path, lock: int) -> NoReturn:
        """Leave everything of the launcher behind but the lock, and be the shim."""
        code = 70
        try:
            os.setsid()
            os.chdir("/")
            os.umask(0o022)  # programs inherit it, whoever started the launcher; our own files name their modes
            _own_descriptors(folder, lock)
            be_called(f"shim {folder.parent.name}/{folder.name}")
            shim.watch(folder, lock, lambda: self._run(folder), lambda: self._reap_after(folder))
            code = 0
        except BaseException:  # noqa: BLE001 - the end of this process: what went wrong is in its log
            traceback.print_exc()
        finally:
            os._exit(code)

    def _run(self, folder: Path) -> int:
        """Be the runner: run the order in *folder* and write `result.json`; return the process's exit code."""
        be_called(f"runner {folder.parent.name}/{folder.name}")
        logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
        order = AttemptOrder.from_json(shim.read_json(folder / shim.ORDER) or {})
        runner = self._runner(folder, order)
        try:
            verdict = asyncio.run(runner.main())
            shim.write_in_room(folder / shim.RESULT, verdict.model_dump(mode="json"))
        except OSError as error:
            if error.errno not in shim.FULL:
                raise
            return shim.DISK_FULL if runner.began else shim.NO_ROOM
        return 0

    def _runner(self, folder: Path, order: AttemptOrder) -> AttemptRunner | EvalsRunner:
        if order.spec.placement.evals:
            from kdskills.app.worker.evals import EvalsRunner

            return EvalsRunner(folder, order, self._settings)
        return AttemptRunner(folder, order, self._engines.get(order.spec.placement.engine), self._settings)

    def _reap_after(self, folder: Path) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        return asyncio.run(self.reap(_engine_of(folder)))

    async def reap(self, name: str) -> int:
        """End what dead owners left of one engine and say what it was; return the process's exit code."""
        engine = self._engines.get(name)
        if engine is None:
            return 1 if name else 0  # evaluations that ran no script had none
        report = await engine.reap()
        for line in (*report.ended, *report.failed):
            sys.stderr.write(f"{name}: {line}\n")
        return 1 if report.failed else 0

    async def probe(self, name: str) -> int:
        """Say why an engine does not work here, if so; return the process's exit code."""
        engine = self._engines.get(name)
        report = None if engine is None else await engine.probe()
        if report is None or not report.ok:
            sys.stderr.write(f"no engine is named {name!r}" if report is None else report.cure or "its probe failed")
        return 0 if report is not None and report.ok else 1


def _engine_of(folder: Path) -> str:
    order = shim.read_json(folder / shim.ORDER) or {}
    return str(order["order"]["spec"]["placement"]["engine"])


def _own_descriptors(folder: Path, lock: int) -> None:
    """Keep the lock alone; standard streams lead nowhere but into the shim's log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / shim.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, stream)
    os.closerange(3, lock)
    os.closerange(lock + 1, os.sysconf("SC_OPEN_MAX"))


@dataclass(eq=False)
class AttemptRunner:
    """One attempt; `engine` is None when there is none of the name in its order, `began` tells whether the program did."""

    folder: Path
    order: AttemptOrder
    engine: Executor | None
    settings: Settings
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    began: bool = False

    async def main(self) -> Verdict:
        """Run it to its verdict; what cannot be run is a verdict too."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.cancelled.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # programs inherit the mask
        try:
            return await self._run()
        except KdskillsError as error:
            full = None if self.began else shim.full_disk_of(error)
            if full is not None:
                raise full from error
            return refusal(error)

    async def _run(self) -> Verdict:
        order, engine = self.order, self.engine
        if engine is None:
            name = order.spec.placement.engine
            raise ExecRefused(f"no engine is named {name!r}", engine=name)
        require_granted(self.settings.network, order.spec.placement.skill_name, order.spec.placement.network)
        session = None if order.session_dir is None else SessionFolder(order.session_dir)
        with contextlib.nullcontext() if session is None else session.reading() as snapshot:
            request = to_request(order, self.folder, {} if snapshot is None else snapshot.files)
            request = replace(request, skills=await self.at_hand(request.skills))
            require_consent(engine, request, allow_unisolated=self.settings.allow_unisolated)
            handle = await engine.start(request)
        self.began = True
        started_at = time.time()
        result, instead = await self._over(handle, engine, started_at)
        files = None if session is None else workdir_files(result)
        errors: list[OutputError] = []
        if session is not None and files is not None and snapshot is not None:
            limits = order.spec.placement.limits
            errors = session.commit(snapshot, files, OutputBounds(files=order.session_files, total=limits.work_size))
        return to_verdict(order, self.folder, result, started_at=started_at, session_errors=errors, override=instead)

    async def at_hand(self, mounts: tuple[SkillMount, ...]) -> tuple[SkillMount, ...]:
        """Return *mounts* with folders of this machine for uploaded skills: a door elsewhere named its own.

        What is not here yet is fetched from the storage the machines share. Raises NotFound, VersionMissing and
        DatabaseUnavailable.
        """
        uploaded, project = self.order.spec.placement.uploaded, self.order.spec.scope.project
        here = []
        for mount in mounts:
            name, root = mount.root.name, mount.root
            if name in uploaded and not root.is_dir():
                # The same place below our own state folder; asking the database is for the first run alone.
                root = self.settings.state_dir.joinpath("projects", *root.parts[-4:])
                if not root.is_dir():
                    host = Host(self.settings)
                    try:
                        root = await host.projects.folder(project, name, uploaded[name])
                    finally:
                        await host.storage.aclose()
            here.append(replace(mount, root=root))
        return tuple(here)

    async def _over(
        self, handle: Handle, engine: Executor, started_at: float
    ) -> tuple[ExecResult, KdskillsError | None]:
        """Wait for the end, ending it when asked to or when it cannot be the service it should be."""
        service = self.order.spec.service
        me = ProcessIdentity.model_validate(shim.identity(os.getpid()))
        ready_at = started_at if service is None else None
        facts = AttemptFacts(started_at=started_at, ready_at=ready_at, engine=engine.name, runner=me)
        self._tell(facts)
        waiting = asyncio.create_task(handle.wait())
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(self.cancelled.wait())]
        if service is not None:
            logs = [self.folder / shim.STDOUT, self.folder / shim.STDERR]
            supervising = supervise(service, handle, logs, self.order.host_ports, facts, self._tell)
            ends.append(asyncio.create_task(supervising))
        await asyncio.wait({waiting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await handle.cancel()
        for end in ends:
            end.cancel()
        instead: KdskillsError | None = None
        for cause in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(cause, KdskillsError) and not self.cancelled.is_set():
                instead = cause
            elif isinstance(cause, Exception):
                raise cause
        return await waiting, instead

    def _tell(self, facts: AttemptFacts) -> None:
        shim.write_in_room(self.folder / shim.FACTS, facts.model_dump(mode="json"))


if __name__ == "__main__":
    raise SystemExit(main())
