"""The launcher: imports every engine once, then forks a shim per order in milliseconds.

``python -m kdskills.app.worker.launcher [--reap ENGINE]``. Standard input: one line of settings, then one order a line,
`{"start": FOLDER}`; each is answered by one line, `{"shim": PID}`, `{"held": true}` or `{"error": WORDS}`. It ends with
its standard input. It has one thread and never runs an engine itself, so a fork of it is a clean beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from kdskills.app.host import Host
from kdskills.app.logs import be_called
from kdskills.app.settings import Settings
from kdskills.app.spawning import settings_line
from kdskills.app.worker.runner import run_order
from kdskills.errors import ExecRefused
from kdskills.execution.protocol import Preparable
from kdskills.jobs.attempts import WarmStarter, shim

MODULE: Final = "kdskills.app.worker.launcher"
_LIBRARIES: Final = {"docker": ("docker",), "e2b": ("e2b",)}


def warm_starter(settings: Settings) -> WarmStarter:
    """Return what starts attempts for a worker with these settings."""
    return WarmStarter((sys.executable, "-m", MODULE), settings_line(settings))


def main(arguments: list[str] | None = None) -> int:
    """Be the launcher, or reap one engine and say what was ended."""
    words = sys.argv[1:] if arguments is None else arguments
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the worker was killed before it said anything
    host = Host(Settings(**json.loads(line)))
    if words[:1] == ["--reap"]:
        return asyncio.run(_reap(host, words[1]))
    return _serve(host)


def _serve(host: Host) -> int:
    """Answer orders until nobody can send any."""
    be_called("launcher")
    host.engines()
    loaded: set[str] = set()
    gc.collect()
    gc.freeze()  # what is here now is shared with every fork for as long as nobody writes to it
    _heed_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # shims are nobody's business once they are started
    for line in sys.stdin.buffer:
        folder = Path(json.loads(line)["start"])
        try:
            _load(folder, host, loaded)
            answer = _start(folder, host)
        except (OSError, ValueError, KeyError, ImportError, ExecRefused) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        try:
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:  # the worker was killed while it waited; the next one finds the attempt by its folder
            return 0
    return 0


def _heed_signals() -> None:
    """Ignore nothing a worker in the background was told to ignore: programs would inherit it and not hear the signal."""
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # the interpreter's own, not handed on
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _load(folder: Path, host: Host, loaded: set[str]) -> None:
    """Do once what the order's engine would do in every fork."""
    name = _engine_of(folder)
    if name in loaded:
        return
    for library in _LIBRARIES.get(name, ()):
        importlib.import_module(library)
    for engine in host.engines():
        if engine.name == name and isinstance(engine, Preparable):
            with contextlib.suppress(ExecRefused):  # every runner finds out for itself, and says so
                engine.prepare()
                loaded.add(name)
            return
    loaded.add(name)


def _engine_of(folder: Path) -> str:
    order = shim.read_json(folder / shim.ORDER) or {}
    return str(order["order"]["spec"]["placement"]["engine"])


def _start(folder: Path, host: Host) -> dict[str, Any]:
    """Take the attempt's lock and fork its shim, unless somebody has it or it began before."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only how many
    if threads != 1:
        raise ExecRefused(f"the launcher has {threads} threads and cannot fork safely", code="launcher_failed")
    lock = shim.take_lock(folder)
    if lock is None:
        return {"held": True}
    try:
        if (folder / shim.EXIT).exists() or shim.read_identity(folder) is not None:
            return {"held": True}
        pid = os.fork()
        if pid == 0:
            _become_shim(folder, lock, host)
    finally:
        os.close(lock)
    return {"shim": pid}


def _become_shim(folder: Path, lock: int, host: Host) -> None:
    """Leave everything of the launcher behind but the lock, and be the shim. Never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir("/")
        os.umask(0o022)  # programs inherit it, whoever started the launcher; our own files name their modes
        _own_descriptors(folder, lock)
        be_called(f"shim {folder.parent.name}/{folder.name}")
        shim.watch(folder, lock, lambda: _be_runner(folder, host), lambda: _reap_for(folder, host))
        code = 0
    except BaseException:  # noqa: BLE001 - the end of this process: what went wrong is in its log
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_runner(folder: Path, host: Host) -> int:
    be_called(f"runner {folder.parent.name}/{folder.name}")
    return run_order(folder, host)


def _own_descriptors(folder: Path, lock: int) -> None:
    """Keep the lock alone; standard streams lead nowhere but into the shim's log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / shim.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for stream, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, stream)
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(3, lock)
    os.closerange(lock + 1, limit)


def _reap_for(folder: Path, host: Host) -> int:
    """Reap after the runner of the attempt in *folder*."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    return asyncio.run(_reap(host, _engine_of(folder)))


async def _reap(host: Host, name: str) -> int:
    engine = next((engine for engine in host.engines() if engine.name == name), None)
    if engine is None:
        return 1
    report = await engine.reap()
    for line in (*report.ended, *report.failed):
        sys.stderr.write(f"{name}: {line}\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
