"""What packages of a skill cost: to plan, lock and build them once, and at every start with them in place.

Run as `kdskills bench env [rounds]`. The wheels are made here and served on loopback, so that it runs anywhere; where this
machine's own index answers, pypdf and pandas follow. Starts alternate with bare ones, so that a busy machine slows both. A start
with packages in place may take `START_S` more than one without; one that imports them `IMPORTING` times a bare one beside what
the imports themselves cost the same Python outside of the wall, its end included. Then each wheel is the environment of a skill
of its own, all of them used at once, and `CROWD` processes ask for one environment that nobody built.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import io
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import write_lock
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment
from kdskills.environments.resolve import PackageIndex, configured_indexes, platform_name, resolve
from kdskills.environments.store import EnvironmentStore
from kdskills.execution import EnvironmentMount, ExecRequest, ExecutionOptions, Limits
from kdskills.execution.rootfs import base_python

WHEELS, MODULES, CROWD = 20, 40, 50
START_S = 0.010
IMPORTING = 1.3
MIB = 1024 * 1024
PROGRAM = """\
{imports}
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, bytes on disk, and of a warm start its median seconds, what imports cost outside, and its peak in KiB."""

    plan: float
    lock: float
    build: float
    disk: int
    bare: float
    idle: float
    start: float
    imports: float
    peak: int
    bare_peak: int

    @property
    def held(self) -> bool:
        """Whether both bounds are held."""
        return self.idle - self.bare <= START_S and self.start <= IMPORTING * self.bare + self.imports


def wheel(name: str) -> bytes:
    """Return a wheel with a package of many modules, which imports them all."""
    files = {f"{name}/m{number}.py": f"VALUES = {list(range(200))}\n" * 5 for number in range(MODULES)}
    files[f"{name}/__init__.py"] = "".join(f"from . import m{number}\n" for number in range(MODULES))
    info = f"{name}-1.0.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return out.getvalue()


@contextmanager
def loopback_index(folder: Path) -> Iterator[tuple[PackageIndex, ...]]:
    """Serve the wheels of this bench on loopback."""
    for number in range(WHEELS):
        name, data = f"pack{number}", wheel(f"pack{number}")
        page = folder / "simple" / name
        page.mkdir(parents=True)
        file = f"{name}-1.0-py3-none-any.whl"
        (page / file).write_bytes(data)
        (page / "index.html").write_text(f'<a href="{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield (PackageIndex("loop", f"http://127.0.0.1:{server.server_port}/simple"),)
        server.shutdown()


def clock(work: Callable[[], object]) -> float:
    """Return the seconds *work* takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def outside(program: str, environment: EnvironmentMount | None) -> float:
    """Return the seconds that the same Python takes for *program* outside of the wall."""
    variables = {} if environment is None else {"PYTHONPATH": f"{environment.root}/python"}
    command = [base_python(), "-c", program]
    return clock(lambda: subprocess.run(command, check=True, capture_output=True, env=variables))


async def starts(mount: EnvironmentMount, imports: str, rounds: int) -> dict[str, tuple[float, int]]:
    """Return medians of a start, seconds and peak in KiB.

    `bare`, `idle` with packages, `importing`; outside of the wall `bare outside` and `importing outside`.
    """
    engine = BubblewrapExecutor(ExecutionOptions(best_effort=frozenset({"memory", "pids"})))
    programs = {"bare": (None, "pass"), "idle": (mount, "pass"), "importing": (mount, f"import {imports}")}
    samples: dict[str, list[tuple[float, int]]] = {}
    for turn in range(-1, rounds):
        for name, (environment, line) in programs.items():
            program = PROGRAM.format(imports=line)
            began = time.perf_counter()
            result = await engine.run(
                ExecRequest(argv=("python3", "-c", program), environment=environment, limits=Limits(memory=1024 * MIB))
            )
            seconds = time.perf_counter() - began
            if result.status != "ok":
                raise SystemExit(f"{name}: {result.status} {result.stderr.text}")
            if turn >= 0:  # the first round only warms up
                samples.setdefault(name, []).append((seconds, int(result.stdout.text)))
                samples.setdefault(f"{name} outside", []).append((outside(program, environment), 0))
    engine.close()
    return {
        name: (statistics.median(row[0] for row in rows), int(statistics.median(row[1] for row in rows)))
        for name, rows in samples.items()
    }


async def side_by_side(environments: list[tuple[str, EnvironmentMount]]) -> tuple[float, float, int]:
    """Return the seconds that a program of each environment takes, one after the other and at once, and how many of them had
    their own package and no other.
    """
    engine = BubblewrapExecutor(ExecutionOptions(best_effort=frozenset({"memory", "pids"})))
    program = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n)))"
    names = [name for name, _ in environments]
    requests = [ExecRequest(argv=("python3", "-c", program, *names), environment=mount) for _, mount in environments]
    began = time.perf_counter()
    for request in requests:
        await engine.run(request)
    between = time.perf_counter()
    results = await asyncio.gather(*map(engine.run, requests))
    ended = time.perf_counter()
    engine.close()
    right = sum(result.stdout.text == f"{name}\n" for name, result in zip(names, results, strict=True))
    return between - began, ended - between, right


def crowd(store: EnvironmentStore, locked: LockedEnvironment, indexes: tuple[PackageIndex, ...]) -> tuple[float, int]:
    """Return the seconds until every process of a crowd has an environment that nobody built, and how many built it."""
    context = get_context("fork")
    builders = context.SimpleQueue()

    def ask() -> None:
        told: list[str] = []
        store.build(locked, indexes, tell=lambda kind, *_: told.append(kind))
        builders.put("built" in told)

    processes = [context.Process(target=ask) for _ in range(CROWD)]
    began = time.perf_counter()
    for process in processes:
        process.start()
    built = sum(builders.get() for _ in processes)
    seconds = time.perf_counter() - began
    for process in processes:
        process.join()
    return seconds, built


def measure_many(names: list[str], indexes: tuple[PackageIndex, ...]) -> bool:
    """Print how many environments do beside each other, and return whether each had its own and a crowd made one build."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)
        store = EnvironmentStore(folder / "cache")
        resolved = {name: resolve(EnvironmentSpec((name,)), indexes) for name in names}
        locks = {name: LockedEnvironment(name, (name,), "", platform_name(), files) for name, files in resolved.items()}
        building, built = crowd(store, locks[names[0]], indexes)
        rows = [(name, store.build(locked, indexes)) for name, locked in locks.items()]
        one_by_one, at_once, right = asyncio.run(side_by_side(rows))
    print(
        f"{len(rows)} skills with environments of their own: one after the other {one_by_one:.2f} s, at once {at_once:.2f} s;"
        f" {right} had their packages and no others"
    )
    print(f"{CROWD} processes that ask for one environment nobody built: {building:.2f} s, {built} build")
    return right == len(rows) and built == 1


def measure(spec: EnvironmentSpec, imports: str, indexes: tuple[PackageIndex, ...], rounds: int) -> Costs:
    """Return what *spec* costs from nothing. Raises EnvironmentFailed when it cannot be had."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)
        store = EnvironmentStore(folder / "cache")
        began = time.perf_counter()
        packages = resolve(spec, indexes)
        planned = time.perf_counter() - began
        locked = LockedEnvironment("bench", spec.requirements, "", platform_name(), packages)
        writing = clock(lambda: write_lock(folder / "kdskills.lock", {"bench": locked}))
        building = clock(lambda: store.build(locked, indexes))
        rows = asyncio.run(starts(store.mount_of(locked), imports, rounds))
        return Costs(
            plan=planned,
            lock=planned + writing,
            build=building,
            disk=store.size_of(locked),
            bare=rows["bare"][0],
            idle=rows["idle"][0],
            start=rows["importing"][0],
            imports=rows["importing outside"][0] - rows["bare outside"][0],
            peak=rows["importing"][1],
            bare_peak=rows["bare"][1],
        )


def show(title: str, costs: Costs) -> bool:
    """Print the figures of one set of packages, and return whether the bounds are held."""
    print(title)
    print(
        f"  plan {costs.plan:.2f} s, lock {costs.lock:.2f} s, build {costs.build:.2f} s, {costs.disk / MIB:.1f} MiB on disk"
    )
    print(
        f"  start bare {costs.bare * 1000:.1f} ms, with packages {(costs.idle - costs.bare) * 1000:+.1f} ms"
        f" (<= {START_S * 1000:g}), importing {costs.start * 1000:.1f} ms, imports outside {costs.imports * 1000:.1f} ms"
        f" (<= {IMPORTING:g}x bare + imports)"
    )
    print(f"  memory {(costs.peak - costs.bare_peak) / 1024:+.1f} MiB  {'held' if costs.held else 'NOT HELD'}")
    return costs.held


def main(argv: list[str]) -> int:
    """Print the figures; 1 when a bound is not held."""
    rounds = int(argv[0]) if argv else 20
    names = [f"pack{number}" for number in range(WHEELS)]
    with tempfile.TemporaryDirectory() as text, loopback_index(Path(text)) as indexes:
        made = measure(EnvironmentSpec(tuple(sorted(names))), ", ".join(names), indexes, rounds)
        held = measure_many(names, indexes)
    held &= show(f"{WHEELS} wheels of {MODULES} modules, from loopback; median of {rounds}", made)
    try:
        real = measure(EnvironmentSpec(("pandas", "pypdf")), "pandas, pypdf", configured_indexes(), rounds)
    except EnvironmentFailed as error:
        print(f"pandas and pypdf: not here: {error.message}")
        return 0 if held else 1
    return 0 if show(f"pandas and pypdf, from this machine's index; median of {rounds}", real) and held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
