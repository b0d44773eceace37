"""Operations for authors: run a script behind the wall as a model's call would, and tell which scripts of a bundle start."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import Field

from kdskills.app.operations.environments import chosen_skills
from kdskills.app.operations.models import Input, Output
from kdskills.environments.script_report import StartVerdict, judge_start
from kdskills.errors import BadRequest, ToolCallRefused
from kdskills.execution import InputFile
from kdskills.execution.terminal import TerminalEngine
from kdskills.session import SkillRuntime
from kdskills.session.config import MIB, RuntimeLimits
from kdskills.session.receipts import ProducedFile
from kdskills.session.scope import TurnScope
from kdskills.session.workspace import Collected, media_type, suffix_of
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import walk_tree

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.execution import Artifact, Executor
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem

MAX_S: Final = 600.0
SESSION: Final = "author"
EVERYTHING: Final = "**"
"""What a run brings back."""


class SkillScriptsInput(Input):
    """Whose scripts, and who is asked for: a consumer sees what the bundle's policy lets it see."""

    bundle: Path = Field(description="The bundle's folder.")
    consumer: str | None = Field(None, description="Whose view of the skills holds; the solver's own when omitted.")
    executor: str | None = Field(None, description="Engine to run in; that of the settings when omitted.")


class ScriptRunInput(SkillScriptsInput):
    """One script, its arguments and files."""

    skill: str = Field(description="The skill, by id.")
    path: str = Field(description="The script, such as scripts/report.py.")
    args: tuple[str, ...] = Field((), description="Arguments of the script.")
    files: tuple[Path, ...] = Field((), description="Files the script gets a copy of in its folder /work.")
    out: Path | None = Field(None, description="Folder that gets the files the script makes; none: they are only told.")
    timeout_s: float = Field(60.0, gt=0, le=MAX_S, allow_inf_nan=False, description="Seconds the script may take.")


class ScriptFile(Output):
    """A file that a script made; `saved` is where it was written."""

    path: str
    size: int
    saved: str = ""


class ScriptRunOutput(Output):
    """What came of a script, as `skills.run_script` tells it; `dropped` are files that were not brought back, and why."""

    skill: str
    path: str
    status: str
    exit_code: int | None
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    duration_ms: int
    engine: str
    level: str
    files: tuple[ScriptFile, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    note: str = ""


class StartsInput(SkillScriptsInput):
    """Which scripts to start, and how."""

    skills: tuple[str, ...] = Field((), description="Skills by id; all when none is given.")
    timeout_s: float = Field(20.0, gt=0, le=MAX_S, allow_inf_nan=False, description="Seconds each script may take.")
    at_once: int = Field(2, ge=1, le=16, description="How many run at a time.")
    at_least: float = Field(0.0, ge=0, le=100, allow_inf_nan=False, description="Fail when fewer per cent start.")


class StartRow(Output):
    """Whether one script started with `--help`; `missing` names what it lacks, `code` is that of a refusal to run it."""

    skill: str
    path: str
    started: bool
    missing: tuple[str, ...] = ()
    reason: str = ""
    code: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


class StartsOutput(Output):
    """Scripts in their order; `ok` means that at least the demanded share of them started."""

    YES: ClassVar[str] = "ok"
    ok: bool
    bundle: str
    scripts: int
    started: int
    percent: float
    rows: tuple[StartRow, ...]


class CallFiles:
    """The files of one call: copies of files of this machine go in, what is new or changed comes back into a folder.

    A file keeps its relative path; one from elsewhere its name alone. Raises BadRequest: `path_missing`, `path_exists`.
    """

    def __init__(self, files: Sequence[Path], out: Path | None) -> None:
        self._out = out
        self._files: dict[str, Path] = {}
        self.saved: dict[str, Path] = {}
        for file in files:
            if not file.is_file():
                raise BadRequest(f"there is no file {file}", code="path_missing", path=str(file))
            outside = file.is_absolute() or ".." in file.parts
            path = file.name if outside else file.as_posix()
            if path in self._files:
                raise BadRequest(f"two files would be {path!r} for the script", code="path_exists", path=path)
            self._files[path] = file

    def inputs(self) -> tuple[InputFile, ...]:
        """Return the copies to make."""
        return tuple(InputFile(path, file.absolute()) for path, file in self._files.items())

    def has_folder(self, path: str) -> bool:
        """Whether a file lies in the folder *path*."""
        return path in {"", "."} or any(name.startswith(f"{path}/") for name in self._files)

    def collect(self, artifacts: Sequence[Artifact]) -> Collected:
        """Write what is new or changed into the folder, never through a link that leads out of it, nor over what is there."""
        produced, dropped = [], []
        for item in artifacts:
            if self._is_unchanged(item):
                continue
            try:
                self._save(item)
            except OSError as error:
                dropped.append((item.path, error.strerror or "the system refused"))
                continue
            produced.append(ProducedFile(item.path, item.size, item.sha256, media_type(item.path)))
        return Collected(tuple(produced), tuple(dropped))

    def _is_unchanged(self, item: Artifact) -> bool:
        if item.path not in self._files:
            return False
        with self._files[item.path].open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == item.sha256.removeprefix("sha256:")

    def _save(self, item: Artifact) -> None:
        if self._out is None:
            return
        target, root = self._out / item.path, self._out.resolve()
        if not target.parent.resolve().is_relative_to(root):
            raise PermissionError(0, "a link leads out of the folder")
        if ".git" in item.path.casefold().split("/"):
            raise PermissionError(0, "Git would run what it says")
        given = self._files.get(item.path)
        if os.path.lexists(target) and not (given and target.absolute() == given.absolute()):
            raise FileExistsError(0, "a file is there that --file does not name")
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, item.content, mode=0o644)
        self.saved[item.path] = target


@asynccontextmanager
async def script_runtime(
    subsystem: SkillsSubsystem, wiring: HostWiring, settings: Settings, arguments: SkillScriptsInput, engine: Executor
) -> AsyncIterator[SkillRuntime]:
    """Give a runtime that runs scripts of *subsystem* on *engine* by the settings, with the checks that hold for models."""
    async with SkillRuntime(
        subsystem=subsystem,
        executor=engine,
        run_scripts=True,
        max_active=None,
        interpreters=wiring.interpreters,
        limits=RuntimeLimits(script_timeout_s=MAX_S, max_output_bytes=4 * MIB),
        deny=wiring.deny,
        network=settings.network,
        packages=wiring.packages(subsystem),
    ) as runtime:
        yield runtime


async def run(
    bundles: BundleLoader, wiring: HostWiring, settings: Settings, arguments: ScriptRunInput, context: Context
) -> ScriptRunOutput:
    """Run one script, with nothing that a call of a model would not have."""
    skills = await bundles.skills(arguments.bundle, context)
    engine = await wiring.executor(arguments.executor)
    return await _outcome(skills.subsystem, wiring, settings, arguments, engine)


async def open_shell(
    host: Host, arguments: ScriptRunInput, context: Context, screen: tuple[int, int]
) -> ScriptRunOutput:
    """Open a shell where `run` would run a script, on the terminal that *screen* reads from and writes to.

    Without a path it is the skill's first script. Raises as `run`, also where the engine gives no terminals, and BadRequest,
    `path_missing`, for a skill without scripts.
    """
    skills = await host.bundles.skills(arguments.bundle, context)
    if not arguments.path:
        (skill,) = chosen_skills(dict(skills.subsystem.registry), (arguments.skill,))
        scripts = await asyncio.to_thread(scripts_of, skill, host.interpreters())
        if not scripts:
            raise BadRequest(f"{skill.full_id} has no scripts", code="path_missing", path="scripts")
        arguments = arguments.model_copy(update={"path": scripts[0]})
    engine = TerminalEngine(await host.wiring.executor(arguments.executor), screen)
    env = {"TERM": os.environ.get("TERM", "dumb"), "PS1": r"\w$ ", "HISTFILE": "/dev/null"}
    return await _outcome(skills.subsystem, host.wiring, host.settings, arguments, engine, env)


async def _outcome(
    subsystem: SkillsSubsystem,
    wiring: HostWiring,
    settings: Settings,
    arguments: ScriptRunInput,
    engine: Executor,
    env: Mapping[str, str] | None = None,
) -> ScriptRunOutput:
    files = await asyncio.to_thread(CallFiles, arguments.files, arguments.out)
    async with script_runtime(subsystem, wiring, settings, arguments, engine) as runtime:
        await runtime.create_session(SESSION, consumer=arguments.consumer)
        await runtime.load(SESSION, [arguments.skill], by="user")
        result = await runtime.run_script(
            *(SESSION, arguments.path),
            skill=arguments.skill,
            args=arguments.args,
            env=env,
            workdir="turn:.",
            timeout_s=arguments.timeout_s,
            scope=TurnScope(workspace=files),
        )
    made = [
        ScriptFile(path=file.path, size=file.size, saved=str(files.saved.get(file.path, "")))
        for file in result.artifacts
    ]
    dropped = tuple(row for row in result.dropped if row[0] != EVERYTHING)  # which only says that it made no file
    return ScriptRunOutput.of(result, files=tuple(made), dropped=dropped)


async def probe(
    bundles: BundleLoader, wiring: HostWiring, settings: Settings, arguments: StartsInput, context: Context
) -> StartsOutput:
    """Start every script with `--help`, a few at a time, and tell which did not start and what they lack."""
    project = await bundles.skills(arguments.bundle, context)
    chosen = list(chosen_skills(dict(project.subsystem.registry), arguments.skills))
    engine = await wiring.executor(arguments.executor)
    async with script_runtime(project.subsystem, wiring, settings, arguments, engine) as runtime:
        starter = _Starter(runtime, arguments)
        rows = await asyncio.gather(*(starter.rows(skill) for skill in chosen))
    every = tuple(row for skill_rows in rows for row in skill_rows)
    started = sum(row.started for row in every)
    percent = 100 * started / len(every) if every else 100.0
    return StartsOutput(
        ok=percent >= arguments.at_least,
        bundle=project.name,
        scripts=len(every),
        started=started,
        percent=round(percent, 1),
        rows=every,
    )


def scripts_of(skill: Skill, interpreters: Collection[str]) -> list[str]:
    """Return the paths of a skill's scripts with one of these suffixes; blocks. Raises FileRefused."""
    if skill.folder is None or not (skill.folder / "scripts").is_dir():
        return []
    paths = [f"scripts/{entry.path}" for entry in walk_tree(skill.folder, "scripts") if entry.kind == "file"]
    return [path for path in paths if suffix_of(path) in interpreters]


class _Starter:
    """Starts scripts of skills, each skill in a session of its own."""

    def __init__(self, runtime: SkillRuntime, arguments: StartsInput) -> None:
        self._runtime, self._arguments = runtime, arguments
        self._turns = asyncio.Semaphore(arguments.at_once)

    async def rows(self, skill: Skill) -> list[StartRow]:
        """Return a row for each script that an interpreter is known for."""
        scripts = await asyncio.to_thread(scripts_of, skill, self._runtime.config.interpreters)
        if not scripts:
            return []
        session = hashlib.sha256(skill.full_id.encode()).hexdigest()
        try:
            await self._runtime.create_session(session, consumer=self._arguments.consumer)
            await self._runtime.load(session, [skill.full_id], by="user")
        except ToolCallRefused as error:
            return [self._refused(skill, path, error) for path in scripts]
        return list(await asyncio.gather(*(self._row(session, skill, path) for path in scripts)))

    async def _row(self, session: str, skill: Skill, path: str) -> StartRow:
        files = TurnScope(workspace=CallFiles((), None))
        async with self._turns:
            try:
                result = await self._runtime.run_script(
                    *(session, path),
                    skill=skill.full_id,
                    args=["--help"],
                    timeout_s=self._arguments.timeout_s,
                    scope=files,
                )
            except ToolCallRefused as error:
                return self._refused(skill, path, error)
        verdict = judge_start(result.status, result.exit_code, result.stdout, result.stderr)
        seconds = round(result.duration_ms / 1000, 2)
        facts = {"skill": skill.full_id, "path": path, "exit_code": result.exit_code, "seconds": seconds}
        return StartRow(**facts, **verdict._asdict())

    def _refused(self, skill: Skill, path: str, error: ToolCallRefused) -> StartRow:
        program = self._runtime.config.interpreters[suffix_of(path)][0]
        missing = (program,) if error.code == "interpreter_missing" else ()
        verdict = StartVerdict(started=False, missing=missing, reason=error.message)
        return StartRow(skill=skill.full_id, path=path, code=error.code, **verdict._asdict())
