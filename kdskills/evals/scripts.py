"""Rows of a skill's `evals/scripts.yaml`: tests of its scripts without a model, each run as a call of a model would run it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kdskills.errors import Diagnostic, FileRefused, ToolCallRefused
from kdskills.evals.grading import Pattern, Sighting, invalid_fields, row_status, verdict_of
from kdskills.evals.results import RowResult
from kdskills.execution import Artifact, InputFile
from kdskills.execution.check import path_problem
from kdskills.execution.request import MAX_WALL_S
from kdskills.session import SkillRuntime
from kdskills.session.receipts import ProducedFile, ScriptResult
from kdskills.session.scope import TurnScope
from kdskills.session.workspace import MAX_FILE, Collected, media_type
from kdskills.skills.model import Skill
from kdskills.skills.safe_open import read_file
from kdskills.skills.yaml_core import Items, YamlLimits, YamlRefused, load_yaml, to_python
from kdskills.solver.file_tools import linear_pattern

SCRIPTS_FILE: Final = "evals/scripts.yaml"
YAML_LIMITS: Final = YamlLimits(depth=10, nodes=20_000, size=1024 * 1024)
STDERR_CHARS: Final = 2_000
"""Characters of standard error, the last ones, that a result tells."""


class ScriptEvalForm(BaseModel):
    """A form of `evals/scripts.yaml`; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _relative(path: str) -> str:
    problem = path_problem(path)
    if problem is not None:
        raise ValueError(f"the path {problem}")
    return path


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _by_path(value: object) -> object:
    return dict.fromkeys(value) if isinstance(value, list) and all(isinstance(path, str) for path in value) else value


class TextExpectation(ScriptEvalForm):
    """What a text must be; a plain text is the whole of it, but for line ends at its end. `absent` is of files alone."""

    equals: str | None = None
    contains: Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])] = []
    regex: Pattern | None = None
    absent: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {} if value is None else {"equals": value} if isinstance(value, str) else value

    def see(self, data: bytes) -> Sighting:
        """Return whether a text is as expected, and where not, what it is."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self == TextExpectation(), f"{len(data)} bytes that are no UTF-8 text"
        fits = self.equals is None or text.rstrip("\r\n") == self.equals.rstrip("\r\n")
        fits = fits and all(part in text for part in self.contains)
        return fits and (self.regex is None or linear_pattern(self.regex).search(text) is not None), text


class ScriptExpectation(ScriptEvalForm):
    """How a script must end; files that a list names must be there."""

    exit: int = 0
    stdout: TextExpectation = TextExpectation()
    files: Annotated[
        dict[str, TextExpectation],
        BeforeValidator(_by_path, json_schema_input_type=list[str] | dict[str, TextExpectation]),
    ] = {}


InputPath = Annotated[str, AfterValidator(_relative)]


class ScriptEval(ScriptEvalForm):
    """One row: a script, what it is called with, and what it must do.

    `files` are texts by the path the script sees, or paths of files of the skill, which it sees by their names.
    """

    id: str = ""
    script: str
    args: list[str] = []
    stdin: str = ""
    files: dict[InputPath, str] | list[InputPath] = {}
    timeout_s: Annotated[int, Field(gt=0, le=MAX_WALL_S)] = 60
    expect: ScriptExpectation = ScriptExpectation()

    def inputs(self, skill: Skill) -> dict[str, bytes]:
        """Return the contents of its files by path. Raises FileRefused."""
        if isinstance(self.files, dict):
            return {path: text.encode("utf-8", "backslashreplace") for path, text in self.files.items()}
        assert skill.folder is not None
        folder = skill.folder
        return {PurePosixPath(path).name: read_file(folder, path, limit=MAX_FILE).data for path in self.files}


def scripts_schema() -> dict[str, Any]:
    """Return the JSON Schema of `evals/scripts.yaml`, with the short forms of texts; what it refuses, `read_rows` refuses."""
    row = ScriptEval.model_json_schema()
    forms = row.pop("$defs")
    forms["TextExpectation"] = {"anyOf": [forms["TextExpectation"], {"type": ["string", "null"]}]}
    return {"title": "Tests of a skill's scripts", "type": "array", "items": row, "$defs": forms}


KEYS: Final = (*ScriptEval.model_fields, *ScriptExpectation.model_fields, *TextExpectation.model_fields)


def read_rows(skill: Skill) -> tuple[tuple[ScriptEval, ...], tuple[Diagnostic, ...]]:
    """Return the rows of a skill's file, none where it has no file, and an error for whatever cannot be used; blocks."""
    rows: list[ScriptEval] = []
    findings: list[Diagnostic] = []

    def report(message: str, line: int | None = None) -> None:
        findings.append(
            Diagnostic("script_eval_invalid", "error", message, path=SCRIPTS_FILE, line=line, ref=skill.full_id)
        )

    if skill.folder is None:
        return (), ()
    try:
        text = read_file(skill.folder, SCRIPTS_FILE, limit=YAML_LIMITS.size).data.decode("utf-8-sig")
        document = load_yaml(text.replace("\r\n", "\n").replace("\r", "\n"), YAML_LIMITS)
    except FileRefused as error:
        if error.code != "file_missing":
            report(error.message)
        return (), tuple(findings)
    except UnicodeDecodeError:
        report("it is no UTF-8 text")
        return (), tuple(findings)
    except YamlRefused as error:
        report(error.message, None if error.position is None else error.position[0] + 1)
        return (), tuple(findings)
    for key, mark in document.duplicates:
        report(f"the key {key!r} stands twice", mark.line + 1)
    if not isinstance(document.root, Items):
        report("it is no list of rows")
        return (), tuple(findings)
    ids: set[str] = set()
    for number, node in enumerate(document.root.items, 1):
        try:
            row = ScriptEval.model_validate(to_python(node))
        except ValidationError as error:
            report(f"row {number}: {invalid_fields(error, KEYS)}", node.mark.line + 1)
            continue
        row = row.model_copy(update={"id": f"{skill.full_id}/{row.id or f'{row.script}#{number}'}"})
        if row.id in ids:
            report(f"row {number}: the id {row.id!r} stands twice", node.mark.line + 1)
            continue
        ids.add(row.id)
        rows.append(row)
    return tuple(rows), tuple(findings)


@dataclass
class RowFiles:
    """The files of one row, in memory: `inputs` go in, `outputs` are what is there afterwards."""

    contents: Mapping[str, bytes]
    outputs: dict[str, bytes] = field(default_factory=dict)

    def inputs(self) -> tuple[InputFile, ...]:
        """Return the copies to make."""
        return tuple(InputFile(path, content) for path, content in self.contents.items())

    def has_folder(self, path: str) -> bool:
        """Whether it is the top, where scripts start."""
        return path in {"", "."}

    def collect(self, artifacts: Sequence[Artifact]) -> Collected:
        """Take what is there afterwards."""
        self.outputs = {item.path: item.content for item in artifacts}
        return Collected(tuple(ProducedFile(i.path, i.size, i.sha256, media_type(i.path)) for i in artifacts))


async def run_rows(
    runtime: SkillRuntime,
    skill: Skill,
    rows: Sequence[ScriptEval],
    *,
    consumer: str | None,
    turns: asyncio.Semaphore,
    tell: Callable[[RowResult], None] = lambda row: None,
) -> list[RowResult]:
    """Run rows of one skill, as many at a time as *turns* lets, and return their results in order; *tell* has each as it ends."""
    session = hashlib.sha256(skill.full_id.encode()).hexdigest()
    loading: ToolCallRefused | None = None
    try:
        await runtime.create_session(session, consumer=consumer)
        await runtime.load(session, [skill.full_id], by="user")
    except ToolCallRefused as error:
        loading = error

    async def told(row: ScriptEval) -> RowResult:
        ended = await result(row)
        tell(ended)
        return ended

    async def result(row: ScriptEval) -> RowResult:
        if loading is not None:
            return _refused(skill, row, loading)
        async with turns:
            try:
                files = RowFiles(await asyncio.to_thread(row.inputs, skill))
                ended = await runtime.run_script(
                    *(session, row.script),
                    skill=skill.full_id,
                    args=row.args,
                    workdir="turn:.",
                    timeout_s=row.timeout_s,
                    stdin=row.stdin.encode("utf-8", "backslashreplace"),
                    scope=TurnScope(workspace=files),
                )
            except (ToolCallRefused, FileRefused) as error:
                return _refused(skill, row, error)
        return await asyncio.to_thread(_result, skill, row, ended, files.outputs)

    return list(await asyncio.gather(*map(told, rows)))


def _refused(skill: Skill, row: ScriptEval, error: ToolCallRefused | FileRefused) -> RowResult:
    """Return the result of a row that did not run: the machine's fault is an error, the author's a failure."""
    facts: dict[str, Any] = {"eval": row.id, "skill": skill.full_id, "facts": {"script": row.script}}
    if error.who == "operator":
        return RowResult(status="error", error=(error.code, error.message), **facts)
    return RowResult(status="failed", verdicts=(verdict_of("the script runs", False, error.message),), **facts)


def _result(skill: Skill, row: ScriptEval, ended: ScriptResult, outputs: Mapping[str, bytes]) -> RowResult:
    expect = row.expect
    exits = "it took too long" if ended.timed_out else f"{ended.status}, exit code {ended.exit_code}"
    verdicts = [verdict_of(f"exit {expect.exit}", ended.exit_code == expect.exit and not ended.timed_out, exits)]
    if expect.stdout != TextExpectation():
        verdicts.append(verdict_of("stdout", *expect.stdout.see(ended.stdout.encode("utf-8", "replace"))))
    for path, expectation in expect.files.items():
        content = outputs.get(path)
        if expectation.absent or content is None:
            passed = expectation.absent and content is None
            sight = f"files: {', '.join(sorted(outputs)) or 'none'}"
        else:
            passed, sight = expectation.see(content)
        verdicts.append(verdict_of(f"file {path}", passed, sight))
    return RowResult(
        eval=row.id,
        skill=skill.full_id,
        status=row_status(verdicts),
        verdicts=tuple(verdicts),
        duration_ms=ended.duration_ms,
        facts={"script": row.script, "engine": ended.engine, "stderr": ended.stderr[-STDERR_CHARS:]},
    )
