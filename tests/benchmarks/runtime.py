"""What sessions, tools, prompt and solver cost, in units of U.

    python tests/benchmarks/runtime.py [--rounds 60] [--only catalog] [--json]

U is `json.loads(json.dumps(rows))` of 100 rows `{name, description of 200 characters}`. Each sample stands beside a U of its
own, in one process; the ratio of the medians counts. Ratios are for 100 skills of 5 KB. What depends on their number is
measured for 1,000 too, and may cost at most 12 times as much.

Time is that of the processor, the kernel's share and all threads included: on a busy machine the clock would mostly measure
what else runs, for work of some milliseconds is interrupted and a U hardly ever. `--wall` goes by the clock, for quiet
machines; what a row took by the clock is always shown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from kdskills.bundle import load_bundle
from kdskills.execution import ExecRequest, ExecResult, Executor, IsolationLevel, Stream
from kdskills.models import Redactor
from kdskills.session import RuntimeLimits, SkillRuntime
from kdskills.session.core import Call
from kdskills.session.scope import NO_TURN
from kdskills.session.tools import INPUTS, specs
from kdskills.skills import SkillRoot
from kdskills.solver import PlainWiring, ReactSolver, SolverSettings, SolverSystem
from kdskills.solver.bus import EventBus
from kdskills.solver.events import ModelReplied
from kdskills.testing.models import ScriptedModel, say
from kdskills.turn import SkillsSubsystem

CONSUMER = "solver.react.decision"
MANY, GROWTH = 1000, 12.0
BLOCK = 10
QUIET_S = 2.2
ROWS = [{"name": f"skill-{n:03}", "description": f"{n:03} " + "what it is for " * 13 + "."} for n in range(100)]
ROWS = [{**row, "description": row["description"][:200]} for row in ROWS]


class Took(NamedTuple):
    """What a piece of work took, in seconds by the clock and of the processor."""

    wall: float
    cpu: float


Sample = Callable[[], Awaitable[Took]]
"""Does the work once and returns what it took, preparations left out."""


def watch() -> Callable[[], Took]:
    """Return what tells the time since now."""
    wall, cpu = time.perf_counter(), time.process_time()
    return lambda: Took(time.perf_counter() - wall, time.process_time() - cpu)


def unit() -> Took:
    """Return what one U takes."""
    since = watch()
    json.loads(json.dumps(ROWS))
    return since()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: what is measured, its bound in U, and whether it depends on the number of skills."""

    what: str
    bound: float
    measure: Callable[[Ground], AsyncIterator[Sample]]
    grows: bool = True
    floor: str = "U"


@dataclass(frozen=True, slots=True)
class Line:
    """What came of a row. `growth` is how much more 1,000 skills cost, None where their number does not matter."""

    what: str
    ratio: float
    bound: float
    unit: str
    micros: float
    growth: float | None

    @property
    def held(self) -> bool:
        """Whether both bounds hold."""
        return self.ratio <= self.bound and (self.growth is None or self.growth <= GROWTH)


class Ground:
    """A bundle of *count* skills of 5 KB, quietly old, in a folder of its own."""

    def __init__(self, folder: Path, count: int) -> None:
        self.root = folder / f"bundle-{count}"
        self.index = folder / f"index-{count}"
        self.turns = folder / f"turns-{count}"
        self.count = count
        self.edits = 0
        body = "".join(
            f"{n}. Look at the figures, say what they mean, and cite where they are from.\n" for n in range(90)
        )
        for number in range(count):
            place = self.root / "skills" / "team" / f"skill-{number:04}"
            (place / "references").mkdir(parents=True)
            row = ROWS[number % 100]
            head = f"---\nname: skill-{number:04}\ndescription: {row['description']}\n---\n"
            (place / "SKILL.md").write_text((head + body)[:5000])
            (place / "references" / "guide.md").write_text(body[:5000])
        scripts = self.file("scripts")
        scripts.mkdir()
        (scripts / "go.py").write_text("print(1)\n")
        self.large.write_bytes(b"0123456789abcde\n" * (1 << 20))
        (self.root / "skills_descriptor.py").write_text('CUSTOM_SKILLS_ROOT = "skills"\nAGENTS_CONFIG = {}\n')

    def file(self, name: str) -> Path:
        """Return a path in the first skill."""
        return self.root / "skills" / "team" / "skill-0000" / name

    @property
    def large(self) -> Path:
        """A file of 16 MiB in the second skill."""
        return self.root / "skills" / "team" / "skill-0001" / "references" / "large.txt"

    def subsystem(self, auto_refresh: float | None = 1.0) -> SkillsSubsystem:
        """Return a subsystem over the bundle that has looked through it."""
        bundle = load_bundle(self.root)
        made = SkillsSubsystem(
            bundle.descriptor, bundle_root=bundle.root, roots=(), index_dir=self.index, auto_refresh=auto_refresh
        )
        if len(made.registry) != self.count:
            raise SystemExit(f"{len(made.registry)} of {self.count} skills were found: {made.diagnostics[:3]}")
        return made

    def edit(self) -> None:
        """Change one skill."""
        self.edits += 1
        target = self.root / "skills" / "team" / f"skill-{self.count - 1:04}" / "SKILL.md"
        text = target.read_text()
        target.write_text(text.partition("\nRound ")[0] + f"\nRound {self.edits}.\n")


async def clocked(work: Awaitable[object]) -> Took:
    """Return what *work* takes."""
    since = watch()
    await work
    return since()


def sync(work: Callable[[], object]) -> Sample:
    """Return a sample of blocking *work*."""

    async def once() -> Took:
        since = watch()
        work()
        return since()

    return once


# ---- rows ---------------------------------------------------------------------------------------------------------


async def activate(ground: Ground) -> AsyncIterator[Sample]:
    """Activate and reset, nothing changed."""
    subsystem = ground.subsystem()

    def work() -> None:
        with subsystem.activate(CONSUMER):
            pass

    yield sync(work)


async def overlay(ground: Ground) -> AsyncIterator[Sample]:
    """Lay five skills of a user that nobody has seen over a subsystem, and take a view."""
    subsystem, folder = ground.subsystem(), ground.root.with_name(f"{ground.root.name}-user")
    for number in range(5):
        target = folder / f"own-{number}" / "SKILL.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"---\nname: own-{number}\ndescription: Own skill {number}.\n---\nText {number}.\n")
    root = SkillRoot("own://", folder, "own", "user")
    yield sync(lambda: subsystem.overlay([root], {"disabled": ["user.old"]}).view(CONSUMER))


async def revalidate(ground: Ground) -> AsyncIterator[Sample]:
    """Look at every file of unchanged skills."""
    yield sync(ground.subsystem().refresh)


async def catalog_cold(ground: Ground) -> AsyncIterator[Sample]:
    """A view nobody has seen, and its catalog, of skills nobody has listed."""
    subsystem, rounds = ground.subsystem(None), iter(range(10**9))
    state = subsystem.view(CONSUMER).state

    async def once() -> Took:
        state.entries.clear()
        since = watch()
        subsystem.view(CONSUMER, tools=[f"tool{next(rounds)}"]).catalog("xml")
        return since()

    yield once


async def catalog_unchanged(ground: Ground) -> AsyncIterator[Sample]:
    """The catalog again, as a session's prompt asks for it."""
    runtime = SkillRuntime(subsystem=ground.subsystem(None), locations="logical")
    session = await runtime.create_session()
    core, call = runtime._core, Call(session.id, NO_TURN)
    yield sync(lambda: runtime._catalogs.whole(core, call, core.gate_of(CONSUMER)))
    await runtime.aclose()


async def schemas_cold(ground: Ground) -> AsyncIterator[Sample]:
    """The specs of all four tools, with the names as enum."""
    names = tuple(sorted(ground.subsystem(None).view(CONSUMER).names))
    yield sync(lambda: specs(tuple(INPUTS), names))


async def schemas_unchanged(ground: Ground) -> AsyncIterator[Sample]:
    """The specs a session offers, again."""
    runtime = SkillRuntime(subsystem=ground.subsystem(None))
    session = await runtime.create_session()
    yield sync(session.tool_specs)
    await runtime.aclose()


async def model_call(ground: Ground, *, edited: bool) -> AsyncIterator[Sample]:
    """Everything before a model call: look at all files, activate, gate, catalog, active skills, text, tool specs."""
    subsystem = ground.subsystem(None)
    runtime = SkillRuntime(subsystem=subsystem, locations="logical")
    session = await runtime.create_session(initial=["skill-0000"])

    async def work() -> None:
        subsystem.refresh()
        with subsystem.activate(CONSUMER):
            await session.instructions()
            session.tool_specs()

    async def once() -> Took:
        if edited:
            ground.edit()
            unit()  # writing leaves cold caches behind, which are no part of the call
        return await clocked(work())

    yield once
    await runtime.aclose()


def model_call_unchanged(ground: Ground) -> AsyncIterator[Sample]:
    """Nothing changed since the call before."""
    return model_call(ground, edited=False)


def model_call_edited(ground: Ground) -> AsyncIterator[Sample]:
    """One file was edited since the call before."""
    return model_call(ground, edited=True)


async def load_cold(ground: Ground) -> AsyncIterator[Sample]:
    """Load a skill whose text was never read by this runtime."""
    subsystem = ground.subsystem()

    async def once() -> Took:
        runtime = SkillRuntime(subsystem=subsystem)
        session = await runtime.create_session()
        taken = await clocked(session.call("skills_load", {"names": ["skill-0000"]}))
        await runtime.aclose()
        return taken

    yield once


async def load_warm(ground: Ground) -> AsyncIterator[Sample]:
    """Load a skill whose text is known."""
    runtime = SkillRuntime(subsystem=ground.subsystem())
    session = await runtime.create_session(initial=["skill-0000"])

    async def once() -> Took:
        await session.unload(all=True)
        return await clocked(session.call("skills_load", {"names": ["skill-0000"]}))

    yield once
    await runtime.aclose()


async def read_small(ground: Ground) -> AsyncIterator[Sample]:
    """Read a file of 5 KB."""
    runtime = SkillRuntime(subsystem=ground.subsystem())
    session = await runtime.create_session(initial=["skill-0000"])
    yield lambda: clocked(session.call("skills_read", {"path": "references/guide.md"}))
    await runtime.aclose()


async def read_large(ground: Ground) -> AsyncIterator[Sample]:
    """Read a file of 16 MiB."""
    runtime = SkillRuntime(subsystem=ground.subsystem(), limits=RuntimeLimits(max_read_bytes=16 << 20))
    session = await runtime.create_session(initial=["skill-0001"])
    yield lambda: clocked(session.read("references/large.txt"))
    await runtime.aclose()


async def event(ground: Ground) -> AsyncIterator[Sample]:
    """Tell one event to one sink."""
    heard = asyncio.Event()
    bus = EventBus("turn", "session", redactor=Redactor(["a-secret-value"]), sinks=[lambda _: heard.set()])
    bus.open()

    async def once() -> Took:
        heard.clear()
        since = watch()
        bus.emit(ModelReplied, role=CONSUMER, model="scripted", text="Up 4 %.")
        await heard.wait()
        return since()

    yield once
    await bus.aclose()


class Timed:
    """Answers a run at once, and keeps how long that took."""

    name = "timed"
    level = IsolationLevel.NAMESPACE
    own = Took(0.0, 0.0)

    async def run(self, request: ExecRequest) -> ExecResult:
        """Answer."""
        since = watch()
        made = ExecResult(
            status="ok", exit_code=0, signal=None, stdout=Stream(b"1\n", 2), stderr=Stream(), duration_s=0.0,
            engine=self.name, level=self.level, limits_enforced=frozenset({"wall"}),
        )  # fmt: skip
        self.own = since()
        return made


async def script(ground: Ground) -> AsyncIterator[Sample]:
    """What `skills.run_script` adds to the executor's own run, less the 10 % it may."""
    executor = Timed()
    runtime = SkillRuntime(subsystem=ground.subsystem(), run_scripts=True, executor=_executor(executor))
    session = await runtime.create_session(initial=["skill-0000"])

    async def once() -> Took:
        whole = await clocked(session.call("skills_run_script", {"path": "scripts/go.py"}))
        return Took(whole.wall - 1.1 * executor.own.wall, whole.cpu - 1.1 * executor.own.cpu)

    yield once
    await runtime.aclose()


def _executor(timed: Timed) -> Executor:
    return timed  # type: ignore[return-value]  # a runtime only ever calls `run`


async def solver_step(ground: Ground) -> AsyncIterator[Sample]:
    """A turn of one step: folder, session, prompt, model, result."""
    model = ScriptedModel([say("Up 4 %.") for _ in range(400)])
    system = SolverSystem(
        bundle=load_bundle(ground.root),
        model=model,
        executor=None,
        wiring=PlainWiring(),
        settings=SolverSettings(work_dir=ground.turns),
    )
    async with _open(system):
        solver = ReactSolver(system)
        yield lambda: clocked(solver.run("Which region grew?"))


@asynccontextmanager
async def _open(system: SolverSystem) -> AsyncIterator[None]:
    await system.__aenter__()
    try:
        yield
    finally:
        system._opened.clear()  # replies left over are no fault here
        await system.__aexit__(None, None, None)


TABLE = [
    Row("activate + reset", 0.2, activate),
    Row("overlay of a user with five skills", 10, overlay),
    Row("re-validate unchanged skills", 10, revalidate),
    Row("catalog text, cold", 8, catalog_cold),
    Row("catalog text, unchanged", 0.1, catalog_unchanged),
    Row("tool schemas with enum, cold", 8, schemas_cold),
    Row("tool schemas with enum, unchanged", 0.2, schemas_unchanged),
    Row("overhead of a model call, unchanged", 14, model_call_unchanged),
    Row("overhead of a model call, one edit", 20, model_call_edited),
    Row("skills.load, one skill, cold", 12, load_cold),
    Row("skills.load, one skill, warm", 3, load_warm),
    Row("skills.read of 5 KB", 5, read_small),
    Row("skills.read of 16 MiB", 2, read_large, grows=False, floor="read, sha256, decode"),
    Row("one event to one sink", 0.5, event, grows=False),
    Row("run_script beyond 110 % of the run", 20, script, grows=False),
    Row("solver turn of one step, no tools", 60, solver_step),
]


# ---- measuring ----------------------------------------------------------------------------------------------------


def plain_read(path: Path) -> Took:
    """Return what reading, hashing and decoding a file takes."""
    since = watch()
    data = path.read_bytes()
    hashlib.sha256(data).hexdigest()
    data.decode()
    return since()


async def block(row: Row, ground: Ground, sample: Sample) -> tuple[list[Took], list[Took]]:
    """Return what a few samples and their floors took; the first, with cold caches, is left out."""
    taken, floors = [], []
    gc.collect()
    for number in range(BLOCK + 1):
        floor = unit() if row.floor == "U" else plain_read(ground.large)
        took = await sample()
        if number:
            taken.append(took)
            floors.append(floor)
    return taken, floors


def median(taken: Sequence[Took]) -> Took:
    """Return the medians, each by itself."""
    return Took(statistics.median(took.wall for took in taken), statistics.median(took.cpu for took in taken))


async def measured(row: Row, grounds: Sequence[Ground], rounds: int) -> list[tuple[Took, Took]]:
    """Return, for each ground, the medians of the floor and of the row.

    Grounds take turns, block by block, so that a busy moment slows all; one block is done first to warm up.
    """
    async with AsyncExitStack() as stack:
        samples = [await stack.enter_async_context(asynccontextmanager(row.measure)(ground)) for ground in grounds]
        taken: list[list[Took]] = [[] for _ in grounds]
        floors: list[list[Took]] = [[] for _ in grounds]
        for turn in range(1 + -(-rounds // BLOCK)):
            for number, (ground, sample) in enumerate(zip(grounds, samples, strict=True)):
                took, floor = await block(row, ground, sample)
                if turn:
                    taken[number] += took
                    floors[number] += floor
    return [(median(floor), median(took)) for floor, took in zip(floors, taken, strict=True)]


async def lines(rounds: int, only: str, folder: Path, *, wall: bool) -> list[Line]:
    """Measure the rows whose name holds *only*."""
    grounds = [Ground(folder, 100), Ground(folder, MANY)]
    await asyncio.sleep(QUIET_S)  # a stamp younger than two seconds proves nothing, and is always looked at again
    found = []
    for row in TABLE:
        if only not in row.what:
            continue
        (floor, few), *many = await measured(row, grounds if row.grows else grounds[:1], rounds)
        ratio = few.wall / floor.wall if wall else few.cpu / floor.cpu
        growth = many[0][1].cpu / few.cpu if many else None
        found.append(Line(row.what, ratio, row.bound, row.floor, few.wall * 1e6, growth))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def show(found: list[Line]) -> None:
    """Print the table."""
    print(f"{'what':36} {'ratio':>8} {'bound':>6}  {'x1,000':>7}  {'takes':>9}")
    for line in found:
        growth = "" if line.growth is None else f"{line.growth:.1f}x"
        unit_name = "" if line.unit == "U" else f"  (x {line.unit})"
        said = "held" if line.held else "MISSED"
        print(
            f"{line.what:36} {line.ratio:8.2f} {line.bound:6g}  {growth:>7}  {line.micros:6.0f} us  {said}{unit_name}"
        )


def main() -> int:
    """Print the table; 1 when a bound is not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60, help="samples a row, at least 50 for figures to quote")
    parser.add_argument("--only", default="", help="measure rows whose name holds this")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--wall", action="store_true", help="go by the clock instead of the processor's time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as folder:
        found = asyncio.run(lines(given.rounds, given.only, Path(os.path.realpath(folder)), wall=given.wall))
    if given.json:
        for line in found:
            print(json.dumps({**asdict(line), "held": line.held}))
    else:
        show(found)
    return 0 if all(line.held for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
