"""Handing over: a consumer offered as a tool, whose call is a turn of its own.

That turn sees the task and the files it is given, nothing else of the turn above it, and may do what its own rules and
those of every turn above it allow. What it answers comes back in the numbers of the caller's sources, once the calls beside
it are done and in their order, so that numbers do not depend on which agent is done first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, Field

from kdskills.errors import Diagnostic, FileRefused, KdskillsError, ReplayError, ToolCallRefused
from kdskills.session.codes import invalid
from kdskills.session.core import uuid7
from kdskills.session.workspace import MAX_FILE
from kdskills.solver.events import AgentEvent, AgentRun, FileWritten, SourcesMerged
from kdskills.solver.output import map_texts, output_form, texts_of
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext, ToolError
from kdskills.solver.turn import Handover
from kdskills.solver.turn_tools import ToolArguments, turn_bytes, turn_path
from kdskills.sources import SourcesPool, find_citations, rewrite_citations

if TYPE_CHECKING:
    from kdskills.solver.events import TurnResult
    from kdskills.solver.parts import AgentSpec
    from kdskills.solver.turn import Turn


END_S: Final = 60.0
"""How long after its own bound the turn of an agent may take to end."""
ENDS: Final[Mapping[str, tuple[str, str]]] = {
    "budget": ("agent_budget", "the agent spent its budget"),
    "partial": ("agent_budget", "the agent spent its budget"),
    "stuck": ("agent_stuck", "the agent went round in circles"),
    "failed": ("agent_failed", "the agent failed"),
    "cancelled": ("agent_cancelled", "the agent was ended"),
}
"""What is answered to a call whose agent came to no answer: the code and the message, by how its turn ended."""


class HandoverInput(ToolArguments):
    """Arguments of an agent's tool."""

    task: str = Field(
        pattern=r"\S",
        max_length=100_000,
        description="What is to be done, with all that must be known: the agent sees nothing else of this conversation.",
    )
    files: list[str] = Field(
        default_factory=list,
        max_length=32,
        description="Files of this turn that the agent gets copies of, such as notes.md.",
    )


def agent_tool(tool_id: str, spec: AgentSpec, wall_s: float) -> SolverTool:
    """Return the tool whose calls are turns of an agent, each of at most *wall_s* seconds.

    Raises BadRequest `output_type_invalid`.
    """
    if spec.output_type is not None:
        output_form(spec.output_type)
    body = partial(_hand_over, tool_id, spec)
    return SolverTool(tool_id, spec.description, HandoverInput, body, timeout_s=wall_s + END_S)


def tell_above(handover: Handover, consumer: str, row: dict[str, Any]) -> None:
    """Emit an event of an agent's turn, as JSON, as one of the turn that handed over."""
    handover.turn.bus.emit(AgentEvent, call_id=handover.call_id, tool=handover.tool, consumer=consumer, event=row)


def own_numbers(text: str, pool: SourcesPool) -> dict[int, int]:
    """Return the sids of *pool* that *text* cites, each with the one of its row."""
    cited = {sid for citation in find_citations(text, known=pool) for sid in citation.sids}
    rows = {sid: pool.get(sid) for sid in cited}
    return {sid: row.sid for sid, row in rows.items() if row is not None and row.sid is not None}


def renumbered(data: bytes, sids: Mapping[int, int]) -> bytes:
    """Return a file with citations in other numbers; one that is no UTF-8 text stays as it is."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return rewrite_citations(text, sids).text.encode()


async def _hand_over(tool_id: str, spec: AgentSpec, arguments: BaseModel, call: ToolContext) -> ToolAnswer:
    """Run the turn of an agent. Raises ToolError when it comes to no answer, ReplayError when a recording does not fit."""
    assert isinstance(arguments, HandoverInput)
    above = call.turn
    assert above.solver is not None
    first = above.lineage[-1]
    if first.log.agent_steps >= first.parts.settings.max_agent_steps:
        raise _without_answer("budget", "max_agent_steps")
    inputs = [(turn_path(path), turn_bytes(above, turn_path(path))) for path in arguments.files]
    texts = [arguments.task, *(data.decode(errors="replace") for _, data in inputs)]
    sids = {sid: owner for text in texts for sid, owner in own_numbers(text, above.pool).items()}
    pool = SourcesPool.from_rows([row for sid, row in above.pool.rows.items() if sid in sids.values()])
    request = rewrite_citations(arguments.task, sids).text
    if not request.strip():
        raise invalid("the task says nothing", ("/task", "says nothing but citations of no known source"))
    handover = Handover(above, call.call_id, tool_id, above.log.call_ids.index(call.call_id) + 1, pool)
    session_id = uuid7()
    above.parts.handed_over[session_id] = (above.consumer, above.session_id)
    run = _AgentTurn(handover, spec)
    solver = above.solver.for_agent(spec, len(above.lineage))
    try:
        prepared = solver.prepare_session(
            request,
            session_id=session_id,
            files=[(path, renumbered(data, sids)) for path, data in inputs],
            history="none",
            user=call.user,
            deps=call.deps,
            output_type=spec.output_type,
            handover=handover,
        )
        async with prepared as run.turn:
            await solver.work(run.turn)
    except ReplayError:
        raise
    except Exception:  # a turn that began says in its result what went wrong, and `answer` tells it
        if run.turn is None:  # no turn began: what is wrong is said in its own words
            raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _without_answer("cancelled", "cancelled") from None  # by something within, of its own accord
    finally:
        run.record()
        above.parts.handed_over.pop(session_id, None)
        with suppress(KdskillsError):
            await above.parts.runtime.close_session(session_id)
    return run.answer()


def _without_answer(status: str, reason: str) -> ToolError:
    code, words = ENDS[status]
    return ToolError(f"{words} ({reason})", code=code, stop_reason=reason)


@dataclass
class _AgentTurn:
    """The turn of an agent, once it has begun, and what is made of it."""

    handover: Handover
    spec: AgentSpec
    turn: Turn | None = None

    @property
    def result(self) -> TurnResult:
        """What came of the turn, which has ended."""
        assert self.turn is not None
        assert self.turn.result is not None
        return self.turn.result

    def record(self) -> None:
        """Note the turn in the log of the one that handed over, however it ended."""
        if self.turn is None or self.turn.result is None:
            return
        handover, result = self.handover, self.turn.result
        handover.turn.log.agents[handover.number] = AgentRun(
            call_id=handover.call_id,
            tool=handover.tool,
            consumer=self.spec.consumer,
            turn_id=result.turn_id,
            status=result.status,
            stop_reason=result.stop_reason,
            steps=len(result.steps),
            usage=self.turn.log.tokens,
            duration_ms=result.duration_ms,
        )

    def answer(self) -> ToolAnswer:
        """Return what the call is answered. Raises ToolError when there is no answer."""
        result = self.result
        if result.status not in {"final", "unverified", "partial"} or not result.text.strip():
            raise _without_answer(result.status if result.status in ENDS else "failed", result.stop_reason)
        return ToolAnswer(None, later=self._in_numbers_above)

    async def _in_numbers_above(self) -> ToolAnswer:
        """Bring sources, text and files of the agent to the turn that handed over."""
        assert self.turn is not None
        above, result = self.handover.turn, self.result
        merged = above.sources.merge(self.turn.pool)
        added, known = tuple(merged.added), tuple(merged.merged)
        if added or known:
            above.bus.emit(SourcesMerged, skill=self.handover.tool, added=added, merged_sids=known)
        files, lost = await asyncio.to_thread(self._copy_files, merged.sid_map)
        typed = self.turn.log.typed
        text = rewrite_citations(result.text, merged.sid_map).text
        output = None
        if typed is not None:
            output = map_texts(result.to_json()["output"], lambda words: rewrite_citations(words, merged.sid_map).text)
            text = "\n".join(texts_of(output))
        cited = [row for sid, row in above.pool.rows.items() if sid in own_numbers(text, above.pool).values()]
        facts = {
            "status": result.status,
            "answer": text if typed is None else None,
            "output": output,
            "sources": [{"sid": row.sid, "title": row.title} for row in cited],
            "files": files,
            "files_lost": lost,
        }
        known_facts = {name: fact for name, fact in facts.items() if fact not in (None, [])}
        return ToolAnswer(known_facts, tuple(files), changed=bool(files))

    def _copy_files(self, sids: Mapping[int, int]) -> tuple[list[str], list[str]]:
        """Copy the agent's files into the folder of the turn that handed over; return their paths there, and those lost."""
        assert self.turn is not None
        above, folder = self.handover.turn, f"{self.handover.tool.partition('.')[2]}-{self.handover.number}"
        files: list[str] = []
        lost: list[str] = []
        for file in self.result.files:
            try:
                data = renumbered(self.turn.workspace.read(file.path, limit=MAX_FILE), sids)
                written = above.workspace.write(f"{folder}/{file.path}", data)
            except (FileRefused, ToolCallRefused) as error:
                lost.append(file.path)
                message = f"{file.path} of {self.handover.tool} was not kept: {error.message}"
                above.bus.diagnose(Diagnostic("files_lost", "warning", message, ref=file.path))
            else:
                files.append(written.path)
                above.bus.emit(FileWritten, path=written.path, size=written.size, tool=self.handover.tool)
        return files, lost
