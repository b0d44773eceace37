"""Skills: which there are, who may use each, why, and what is in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute
from kdskills.doors.ui.drawing import import_graph
from kdskills.errors import KdskillsError, NotFound

if TYPE_CHECKING:
    from fastapi.responses import Response

TABS: Final = ("text", "source", "files", "scripts", "sources", "imports", "findings", "facts")
ROWS: Final = 50
"""Skills on one page."""
FILES: Final = 100
ITERATIONS: Final = 5
LISTED: Final = 100
"""Rows of other lists of a skill, such as its scripts."""
PIECE: Final = 32 * 1024
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
    tab = call.query.get("tab", "")
    tab = tab if tab in TABS else TABS[0]
    values: dict[str, Any] = {"row": row, "columns": columns, "consumer": consumer, "facts": facts, "refusal": refusal}
    values |= {
        "tab": tab,
        "graph": None,
        "files": None,
        "evaluated": [],
        "findings": None,
        "limit": FILES,
        "most": LISTED,
    }
    if tab in {"imports", "findings", "facts", "scripts"} and facts is not None:
        values["findings"] = await call.ask("skills.findings", ref=full_id, consumer=consumer, **EVERYTHING)
        values["graph"] = import_graph(full_id, [(edge.importer, edge.imported) for edge in values["findings"].edges])
    elif tab == "files":
        values["files"] = await call.ask(
            "skills.files", ref=full_id, **EVERYTHING, limit=FILES, offset=call.number("offset")
        )
    elif tab == "evals" and call.may("evals.list"):
        values["evaluated"] = await _evaluated(call, full_id)
    return call.page("skill.html.j2", full_id, **values)


REFUSED: Final = frozenset({"refused", "invalid"})
EVERYTHING: Final = {"by": "code", "include_internal": True}
"""How a person who looks after skills asks for one: whoever it is for."""


async def _standing(call: ConsoleCall, ref: str) -> tuple[Any, Any]:
    """Return the row of one skill and the columns it has cells for. Raises NotFound."""
    offset, answer = 0, None
    while answer is None or offset < answer.total:
        answer = await call.ask("skills.matrix", filter=ref, limit=500, offset=offset)
        for row in answer.skills:
            if row.full_id == ref:
                return row, answer.consumers
        offset += 500
    raise NotFound(f"there is no skill {ref!r} here any more, or this consumer may not see it", ref=ref)


async def _evaluated(call: ConsoleCall, full_id: str) -> list[tuple[Any, list[Any]]]:
    """Return the newest iterations of evaluations, each with its rows about one skill; those without any are left out."""
    listed = await call.ask("evals.list", bundle=call.folder, limit=ITERATIONS)
    pairs = []
    for each in listed.iterations:
        iteration = await call.ask("evals.get", bundle=call.folder, number=each.number)
        rows = [row for row in iteration.rows if row.skill == full_id or full_id in row.picked]
        pairs += [(each, rows)] if rows else []
    return pairs


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
