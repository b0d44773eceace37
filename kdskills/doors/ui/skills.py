"""Skills: which there are, who may use each, why, and what is in one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute
from kdskills.doors.ui.drawing import import_graph
from kdskills.errors import KdskillsError, NotFound

if TYPE_CHECKING:
    from fastapi.responses import Response

ROWS: Final = 50
"""Skills on one page."""
FILES: Final = 500
PIECE: Final = 100_000
"""Bytes of a file that a page shows."""


async def skills(call: ConsoleCall) -> Response:
    """Show every skill beside every consumer, filtered and a page at a time."""
    query = call.query
    offset = call.number("offset") or 0
    ranked = query.get("by") == "meaning"
    words = {"query" if ranked else "filter": query.get("q")}
    answer = await call.ask(
        "skills.matrix",
        namespace=query.get("namespace"),
        state=query.get("state"),
        consumer=query.get("consumer"),
        findings=query.get("findings"),
        min_tokens=call.number("min_tokens"),
        max_tokens=call.number("max_tokens"),
        sort=query.get("sort"),
        limit=ROWS,
        offset=offset,
        **words,
    )
    return call.page("skills.html.j2", "Skills", answer=answer, offset=offset, limit=ROWS)


async def skill(call: ConsoleCall) -> Response:
    """Show one skill: its text, files, scripts, sources, imports, findings, and who may use it."""
    ref, consumer = call.segment("ref"), call.query.get("consumer")
    row, columns = await _standing(call, ref)
    full_id = row.full_id
    if consumer is None:  # shown as somebody sees it who may use it, if there is anybody
        granting = (column for column, cell in zip(columns, row.cells, strict=True) if cell.state not in REFUSED)
        consumer = next((column.consumer for column in granting), None)
    facts, refusal = None, None
    try:
        facts = await call.ask("skills.show", ref=full_id, consumer=consumer, **EVERYTHING)
    except KdskillsError as error:
        refusal = error
    tab = call.query.get("tab", "text")
    values: dict[str, Any] = {"row": row, "columns": columns, "consumer": consumer, "facts": facts, "refusal": refusal}
    values |= {"tab": tab, "graph": None, "files": None, "findings": None, "versions": None}
    if tab == "imports" and facts is not None:
        values["graph"] = import_graph(full_id, await _edges(call, facts))
    elif tab == "files":
        values["files"] = await call.ask(
            "skills.files", ref=full_id, **EVERYTHING, limit=FILES, offset=call.number("offset")
        )
    elif tab == "findings":
        values["findings"] = await call.ask("skills.findings", ref=full_id)
    return call.page("skill.html.j2", full_id, **values)


REFUSED: Final = frozenset({"refused", "invalid"})
EVERYTHING: Final = {"by": "code", "include_internal": True}
"""How a person who looks after skills asks for one: whoever it is for."""


async def _standing(call: ConsoleCall, ref: str) -> tuple[Any, Any]:
    """Return the row of one skill and the columns it has cells for. Raises NotFound."""
    answer = await call.ask("skills.matrix", filter=ref, limit=500)
    for row in answer.skills:
        if row.full_id == ref:
            return row, answer.consumers
    raise NotFound(f"there is no skill {ref!r} here any more, or this consumer may not see it", ref=ref)


async def _edges(call: ConsoleCall, facts: Any) -> dict[str, tuple[str, ...]]:
    """Return what each skill of the closure imports, of those that can be shown, by full ids."""
    edges = {facts.full_id: _full_ids(facts, facts.closure)}

    async def imports(full_id: str) -> None:
        try:
            member = await call.ask("skills.show", ref=full_id, **EVERYTHING)
        except KdskillsError:
            edges[full_id] = ()
        else:
            edges[full_id] = _full_ids(member, facts.closure)

    await asyncio.gather(*(imports(each) for each in facts.closure[:40] if each != facts.full_id))
    return edges


def _full_ids(facts: Any, closure: Sequence[str]) -> tuple[str, ...]:
    """Return the full ids of what a skill imports, which may be written as bare ids of its own namespace."""
    own = facts.full_id.rpartition(".")[0]
    return tuple(each if each in closure else f"{own}.{each}" for each in facts.imports)


async def why(call: ConsoleCall) -> Response:
    """Explain, rule by rule, what one consumer may do with a skill."""
    ref, consumer = call.segment("ref"), call.query.get("consumer")
    answer = await call.ask("skills.why", ref=ref, consumer=consumer, by=call.query.get("by"))
    return call.page("why.html.j2", f"Why {ref}", answer=answer, ref=ref, consumer=consumer)


async def file(call: ConsoleCall) -> Response:
    """Show one file of a skill, as text or, where it is none, by its facts."""
    ref, path = call.segment("ref"), call.request.path_params["path"]
    consumer = call.query.get("consumer")
    words = {"offset": call.number("offset"), "limit": PIECE, "consumer": consumer, **EVERYTHING}
    answer = await call.ask("skills.file", ref=ref, path=path, **words)
    return call.page("file.html.j2", f"{path} of {ref}", answer=answer, ref=ref, file_path=path, offset=answer.offset)


ROUTES = (
    ConsoleRoute("/skills", skills),
    ConsoleRoute("/skills/{ref}", skill),
    ConsoleRoute("/skills/{ref}/why", why),
    ConsoleRoute("/skills/{ref}/files/{path:path}", file),
)
