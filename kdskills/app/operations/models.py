"""What the inputs and outputs of operations have in common, and pages of lists; naming operations needs none of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kdskills.app.operations.table import Context
from kdskills.errors import BadRequest, NotFound
from kdskills.storage.database import micros, moment_of

Row = TypeVar("Row")
MAX_PAGE: Final = 500


class Input(BaseModel):
    """Arguments of an operation; unknown fields are refused.

    `MAY_HOLD_NUL` lists paths of texts, such as `/inputs/*/text`, that may hold NUL; it breaks databases and file names
    everywhere else, and is refused there before a model sees it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ()


class Output(BaseModel):
    """The answer of an operation."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    #: The field that says by its truth whether the answer is a yes; an answer without one is never a no.
    YES: ClassVar[str] = ""

    @property
    def negative(self) -> bool:
        """Whether the answer is a no, for which the command line exits with 1."""
        return bool(self.YES) and not getattr(self, self.YES)

    @classmethod
    def of(cls, *sources: object, **facts: Any) -> Self:
        """Return an answer made of *facts*; every other field is the attribute of the first of *sources* that has one.

        Values inside are made alike: a `Diagnostic` becomes a `Finding` where the field is one.
        """
        for name in cls.model_fields.keys() - facts.keys():
            source = next((source for source in sources if hasattr(source, name)), None)
            facts |= {} if source is None else {name: getattr(source, name)}
        return cls.model_validate(facts)


class Finding(Output):
    """A diagnostic in an answer; fields as `kdskills.Diagnostic`."""

    code: str
    severity: str
    message: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    ref: str | None = None
    fix: str | None = None


class ProjectInput(Input):
    """Which project; callers elsewhere have the one of their token."""

    project: str | None = Field(None, max_length=64, description="The project; none means the caller's own.")

    def project_of(self, context: Context) -> str:
        """Return the project. Raises NotFound: it is not the caller's; whether it is there stays unknown."""
        project = context.identity.project if self.project is None else self.project
        if project != context.identity.project and not context.identity.account:
            raise NotFound(f"there is no project {project!r}", project=project)
        return project


def bound_project(arguments: ProjectInput, context: Context) -> str | None:
    """Return whose rows are meant; None for all, which the machine's own account means unless it names a project."""
    everything = context.identity.account and arguments.project is None
    return None if everything else arguments.project_of(context)


# These two are here so that the help of their commands needs no solver.


class RunInput(Input):
    """One request to a solver over a bundle."""

    bundle: Path = Field(description="The bundle's folder.")
    request: str | None = Field(None, description="What the user asks; none means the one in the bundle's demo.yaml.")
    model: str | None = Field(
        None, description="`replay`, `openai:NAME`, `anthropic:NAME`, `ollama:NAME`, …; none means the setting."
    )
    executor: str | None = Field(
        None, description="`auto`, or the name of the engine that scripts run in; none means the setting."
    )
    consumer: str = Field("solver.react.decision", description="Consumer the solver acts as.")
    answer_role: str | None = Field(None, description="Generator that writes the answer, as a consumer of its own.")
    files: tuple[Path, ...] = Field((), description="Files handed in with the request.")
    skills: tuple[str, ...] = Field((), description="Skills loaded before the first decision.")
    out: Path | None = Field(
        None, description="Folder for produced files and the transcript; else the files stay where they are made."
    )
    many: Path | None = Field(
        None, description="Folder to make for the turn: the bundle with generated skills around its own."
    )
    crowd: int = Field(1000, ge=1, le=10_000, description="How many skills are generated for `many`.")
    session: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="Conversation to go on with, or to begin; it is kept in `session_store`.",
    )
    user: str | None = Field(None, max_length=200, description="Id of the user a conversation is with.")
    roles: tuple[str, ...] = Field(
        (), max_length=64, description="Roles of the user, who is then named: rules of `@role` hold."
    )
    max_steps: int | None = Field(None, ge=1, description="How often the model may decide; none means 24.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens that one reply of the model may take.")
    temperature: float | None = Field(None, ge=0, le=2, description="How freely the model chooses its words.")
    stream: bool = Field(default=False, description="Whether events tell replies piece by piece, as they are written.")


class ShowTurnInput(Input):
    """Which turn."""

    transcript: Path = Field(description="The turn's transcript, `<turn id>.jsonl`.")


# ---- pages -------------------------------------------------------------------------------------------------------


class PageInput(Input):
    """Which page of a list."""

    limit: int = Field(100, ge=1, le=MAX_PAGE, description="How many at most.")
    cursor: str | None = Field(
        None, max_length=2048, description="`next_cursor` of the page before; none means the first page."
    )


class PageOutput(Output):
    """A page of a list; `next_cursor` asks for the page after it, and is null on the last one."""

    next_cursor: str | None = None


def encode_cursor(*parts: str | int) -> str:
    """Return the cursor of a row by what the list is sorted by."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type) -> list[Any]:
    """Return what `encode_cursor` was given, for an int its time. Raises BadRequest for parts of other *kinds*."""
    problem = "is no next_cursor of this list"
    with suppress(ValueError, OverflowError, RecursionError):
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if isinstance(parts, list) and [type(part) for part in parts] == list(kinds):
            texts = [part for part in parts if isinstance(part, str)]
            "".join(texts).encode()  # half a character, as NUL, is nothing a database compares with
            if not any("\0" in text for text in texts):
                return [moment_of(part) if isinstance(part, int) else part for part in parts]
    raise BadRequest(f"/cursor: {problem}", errors=[{"path": "/cursor", "problem": problem}])


def encode_moment(moment: datetime, item: str) -> str:
    """Return the cursor of a row in a list that is sorted by time and id."""
    return encode_cursor(micros(moment), item)


def decode_moment(cursor: str) -> tuple[datetime, str]:
    """Return time and id of a row. Raises BadRequest."""
    moment, item = decode_cursor(cursor, int, str)
    return moment, item


def page_by_name(rows: Sequence[Row], arguments: PageInput, name: Callable[[Row], str]) -> tuple[list[Row], str | None]:
    """Return a page of rows that are sorted by name, and the cursor of the page after it. Raises BadRequest."""
    if arguments.cursor is not None:
        (last,) = decode_cursor(arguments.cursor, str)
        rows = [row for row in rows if name(row) > str(last)]
    page = list(rows[: arguments.limit])
    return page, encode_cursor(name(page[-1])) if len(rows) > arguments.limit else None


def page_by_time(
    rows: Sequence[Row], arguments: PageInput, key: Callable[[Row], tuple[datetime, str]]
) -> tuple[list[Row], str | None]:
    """Return a page of rows, newest first, those of one moment by id, and the next page's cursor. Raises BadRequest."""
    if arguments.cursor is not None:
        moment, item = decode_moment(arguments.cursor)
        rows = [row for row in rows if key(row)[0] < moment or (key(row)[0] == moment and key(row)[1] > item)]
    page = list(rows[: arguments.limit])
    return page, encode_moment(*key(page[-1])) if len(rows) > arguments.limit else None
