"""What arguments of the work operations are made of: names, files, programs and their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kdskills.app.operations.models import Input
from kdskills.execution.check import MAX_ARGS, MAX_GLOBS, MAX_INPUTS, path_problem
from kdskills.jobs.model import SESSION_ID
from kdskills.session.environment import call_env_problems

MAX_ENV: Final = 256
MAX_TAIL: Final = 1024 * 1024
DAY: Final = 86_400.0

SessionId = Annotated[
    str,
    StringConstraints(pattern=f"^{SESSION_ID.pattern}$"),
    Field(description="Commands of one session share a folder and never overlap; letters, digits and . _ : -"),
]
TaskId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a task.")]
JobId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a job.")]
StepName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
SkillName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=255),
    Field(description="The skill the command belongs to: full id, bare id or short id."),
]
Seconds = Annotated[float, Field(gt=0, le=DAY, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Tail = Annotated[int, Field(ge=0, le=MAX_TAIL, description="Bytes of the end of each stream to show.")]

CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Arguments(Input):
    """Arguments of a work operation; the content of a file that is given as text may be any text."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/inputs/*/text", "/steps/*/inputs/*/text")


class Part(BaseModel):
    """A value inside arguments; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InputFile(Part):
    """A file put into the session's folder before the command starts; exactly one way to say its content."""

    path: str = Field(description="Relative to the session's folder.")
    text: str | None = Field(None, description="Content as text, in UTF-8.")
    content_base64: str | None = Field(None, description="Content as bytes, in base64.")
    artifact_id: str | None = Field(None, description="An artifact of the same project.")

    @field_validator("path")
    @classmethod
    def _path(cls, value: str) -> str:
        return _clean(value)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        sources = [name for name in ("text", "content_base64", "artifact_id") if getattr(self, name) is not None]
        if len(sources) != 1:
            listed = " and ".join(sources) or "none of them"
            raise problem(f"exactly one of text, content_base64 and artifact_id must be given, not {listed}")
        return self


class HttpReady(Part):
    """A GET of this path on this port answers below 500."""

    port: Port
    path: str = Field("/", max_length=1024)

    @field_validator("path")
    @classmethod
    def _path(cls, value: str) -> str:
        if not value.startswith("/") or CONTROL.search(value) or " " in value:
            raise problem("must begin with / and hold no blanks or control characters")
        return value


class Ready(Part):
    """How to tell that a service is ready; exactly one of the three."""

    pattern: str | None = Field(
        None, min_length=1, max_length=1024, description="A regular expression of RE2 that an output line matches."
    )
    tcp_port: Port | None = Field(None, description="A port something listens on.")
    http: HttpReady | None = Field(None, description="An address that answers.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                from kdskills.jobs.services.companion import line_pattern
            except ModuleNotFoundError:  # without background work nothing will match it, and the operation says so
                return value
            try:
                line_pattern(value)
            except ValueError as error:
                raise problem(f"is no regular expression that is matched in linear time: {error}") from None
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.pattern, self.tcp_port, self.http)) != 1:
            raise problem("exactly one of pattern, tcp_port and http must be given")
        return self


Words = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_ARGS)]
CommandWords = Annotated[
    str | Words,
    Field(description="Text is run by /bin/sh -c inside the sandbox; a list is program and arguments, with no shell."),
]
Workdir = Annotated[
    str,
    Field(
        description="`skill`: the skill's own folder; `session`: the session's folder; else a folder inside that one."
    ),
]
Env = Annotated[dict[str, str], Field(description="Environment variables, byte-exact; nothing expands them.")]
Globs = Annotated[
    tuple[str, ...],
    Field(max_length=MAX_GLOBS, description="Paths or globs in the session's folder to keep as artifacts."),
]
Files = Annotated[
    tuple[InputFile, ...], Field(max_length=MAX_INPUTS, description="Files put into the session's folder first.")
]


class Program(BaseModel):
    """The rules every command obeys, wherever it stands."""

    @field_validator("command", "query_command", check_fields=False)
    @classmethod
    def _command(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and not (value if isinstance(value, str) else value[0]).strip():
            raise problem("is empty")
        return value

    @field_validator("env", check_fields=False)
    @classmethod
    def _env(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for path, text in call_env_problems(value or {}, MAX_ENV):
            raise problem(f"{path.removeprefix('/env').lstrip('/') or 'it'} {text}")
        return value

    @field_validator("workdir", check_fields=False)
    @classmethod
    def _workdir(cls, value: str | None) -> str | None:
        return value if value is None or value in {"skill", "session", "."} else _clean(value)

    @field_validator("outputs", check_fields=False)
    @classmethod
    def _outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            _clean(pattern)
        return value

    @field_validator("inputs", check_fields=False)
    @classmethod
    def _inputs(cls, value: tuple[InputFile, ...]) -> tuple[InputFile, ...]:
        for text in _clashes([item.path for item in value]):
            raise problem(text)
        return value


def problem(text: str) -> PydanticCustomError:
    """Return a finding about an argument whose text holds nothing but *text*."""
    return PydanticCustomError("work", "{text}", {"text": text})


def _clean(path: str) -> str:
    text = path_problem(path)
    if text:
        raise problem(f"{path[:80]!r} {text}")
    return path


def _clashes(paths: list[str]) -> Iterator[str]:
    unique = set(paths)
    if len(unique) != len(paths):
        yield f"a path is given twice: {next(path for path in paths if paths.count(path) > 1)!r}"
    for path in sorted(unique):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in unique:
                yield f"{above!r} is both a file and a folder"
