"""`turns.show`: what happened in a turn, read from its transcript."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, SerializeAsAny

from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.solver.events import Event, SourcesMerged, TurnFinished
from kdskills.solver.result import TurnResult
from kdskills.solver.transcript import Transcript, read_transcript
from kdskills.sources import render_citations

if TYPE_CHECKING:
    from kdskills.app.host import Host


class ShowTurnInput(Input):
    """Which turn."""

    transcript: Path = Field(description="The turn's transcript, `<turn id>.jsonl`.")


class CitedSource(Output):
    """A number the answer cites, and the source it resolves to.

    Attributes:
        sid: The number.
        known: Whether there is such a source.
        title: The source's title.
        place: Its URL or path.
        skills: Full ids of the skills that brought it along.
    """

    sid: int
    known: bool
    title: str = ""
    place: str = ""
    skills: tuple[str, ...] = ()


class ShowTurnOutput(Output):
    """A turn from its request to its end.

    Attributes:
        transcript: The file read.
        turn_id: Id of the turn.
        ended: Whether the turn ended; one that broke off has no result.
        events: What happened, in order, but for the last event, whose result stands in `result`.
        result: What came of the turn.
        footnoted: The answer with `[1]` for citations and its sources below.
        citations: What the answer cites: sources in order of first appearance, then numbers that name none.
        diagnostics: What is odd about the file.
    """

    transcript: str
    turn_id: str
    ended: bool
    events: tuple[SerializeAsAny[Event], ...]
    result: TurnResult | None
    footnoted: str = ""
    citations: tuple[CitedSource, ...] = ()
    diagnostics: tuple[Finding, ...] = ()


def _citations(read: Transcript, result: TurnResult) -> tuple[CitedSource, ...]:
    skills_of_source: dict[int, list[str]] = {}
    for event in read.events:
        if isinstance(event, SourcesMerged):
            for sid in (*event.added, *event.merged_sids):
                skills_of_source.setdefault(sid, []).append(event.skill)
    rows = {row.get("sid"): row for row in result.sources}
    citations = []
    for sid in result.cited:
        row = rows.get(sid, {})
        location = str(row.get("url") or row.get("physical_path") or "")
        skills = tuple(dict.fromkeys(skills_of_source.get(sid, ())))
        citations.append(
            CitedSource(sid=sid, known=True, title=str(row.get("title", "")), place=location, skills=skills)
        )
    unknown = dict.fromkeys(issue.sid for issue in result.citation_issues)
    return (*citations, *(CitedSource(sid=sid, known=False) for sid in unknown))


async def show_turn(host: Host, arguments: ShowTurnInput, context: Context) -> ShowTurnOutput:
    """Read the transcript of a turn."""
    read = await asyncio.to_thread(read_transcript, arguments.transcript)
    result = read.result
    return ShowTurnOutput(
        transcript=str(arguments.transcript),
        turn_id=read.events[0].turn_id if read.events else "",
        ended=result is not None,
        events=tuple(event for event in read.events if not isinstance(event, TurnFinished)),
        result=result,
        footnoted="" if result is None else footnoted(result),
        citations=() if result is None else _citations(read, result),
        diagnostics=tuple(Finding.of(finding) for finding in read.diagnostics),
    )


def footnoted(result: TurnResult) -> str:
    """Return the answer with `[1]` for citations and the list of sources below, for readers without links."""
    return render_citations(result.text, {row["sid"]: row for row in result.sources}, mode="footnotes")


SHOW_TURN = Implementation(ShowTurnInput, ShowTurnOutput, ("transcript_missing", "transcript_invalid"), show_turn)
