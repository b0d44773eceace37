"""Prompts and turns: what a solver would send, a turn tried from here, and what happened in those that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute, download, form_text
from kdskills.errors import BadRequest, KdskillsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi.responses import Response

ROWS: Final = 30
PROMPT_ROOM: Final = 384 * 1024
"""Bytes of HTML for the texts of a prompt: the one page that may be long, since it shows what is sent and not a part of it."""
EVENTS: Final = 60
"""Events of a turn that a page shows."""
SETTINGS: Final = ("consumer", "loaded", "request", "tools", "budget")
"""What a prompt is asked for; the second one's words end in `2`."""


async def prompt(call: ConsoleCall) -> Response:
    """Show the exact messages a solver would send, part by part; a second setting beside it shows what differs."""
    sides = [await _prompt(call, "")]
    beside = call.query.get("beside") == "yes"
    if beside:
        sides.append(await _prompt(call, "2"))
    consumers = (await call.ask("skills.matrix", limit=1)).consumers
    names = [column.consumer for column in consumers if column.consumer]
    return call.page("prompt.html.j2", "Prompt", room=PROMPT_ROOM, sides=sides, beside=beside, consumers=names)


async def _prompt(call: ConsoleCall, mark: str) -> dict[str, Any]:
    """Return one setting, and the prompt it gives or why it gives none."""
    setting = {name: call.query.get(f"{name}{mark}", "") for name in SETTINGS}
    facts: dict[str, Any] = {"setting": setting, "mark": mark, "answer": None, "error": None}
    words = {"consumer": setting["consumer"] or None, "request": setting["request"] or None}
    try:
        facts["answer"] = await call.ask(
            "skills.render",
            form="prompt",
            bundle=call.folder,
            skills_loaded=setting["loaded"].replace(",", " ").split(),
            tools=setting["tools"].replace(",", " ").split() or None,
            budget=call.number(f"budget{mark}"),
            **words,
        )
    except KdskillsError as error:
        facts["error"] = error
    return facts


async def begin(call: ConsoleCall) -> Response:
    """Offer to try a turn."""
    call.require("turns.start")
    consumers = (await call.ask("skills.matrix", limit=1)).consumers
    names = [column.consumer for column in consumers if column.consumer]
    models = ("replay", *(name for name in call.host.settings.turns.models if name != "replay"))
    return call.page("try.html.j2", "Try a turn", consumers=names, models=models)


async def start(call: ConsoleCall) -> Response:
    """Begin a turn, and lead to where it is seen."""
    form = await call.form()
    steps = form_text(form, "max_steps").strip()
    if steps and not (steps.isascii() and steps.isdigit() and len(steps) < 6):
        raise BadRequest("steps are a whole number", errors=[{"path": "/max_steps", "problem": "no number"}])
    answer = await call.ask(
        "turns.start",
        bundle=call.folder,
        request=form_text(form, "request").strip() or None,
        model=form_text(form, "model").strip() or None,
        consumer=form_text(form, "consumer").strip() or None,
        skills=form_text(form, "skills").replace(",", " ").split(),
        max_steps=int(steps) if steps else None,
    )
    return call.redirect(f"/ui/turns/{quote(answer.turn_id, safe='')}")


async def turns(call: ConsoleCall) -> Response:
    """List the turns that are kept, the newest first."""
    query = call.query
    answer = await call.ask("turns.list", status=query.get("status"), cursor=query.get("cursor"), limit=ROWS)
    return call.page("turns.html.j2", "Turns", answer=answer)


async def turn(call: ConsoleCall) -> Response:
    """Show a turn as it goes: decisions, calls and their results, scripts and walls, sources, the cited answer, files."""
    answer = await call.ask("turns.get", turn_id=call.segment("turn"))
    sources = {} if answer.result is None else {row.get("sid"): row for row in answer.result.sources}
    title, step = f"Turn {answer.turn_id}", call.number("step")
    events = [event for event in answer.events if event.type not in HIDDEN and step in {None, event.step}]
    running = answer.row.status == "running"
    # while it goes on its end is what somebody wants to see
    offset = call.number("offset") or (max(len(events) - EVENTS, 0) if running else 0)
    return call.page(
        "turn.html.j2",
        title,
        turn=answer,
        running=running,
        sources=sources,
        steps=steps_of(answer, events[offset : offset + EVENTS]),
        offset=offset,
        most=EVENTS,
        total=len(events),
    )


def steps_of(answer: Any, events: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the model calls of a turn that *events* are of, each with those that followed it, as a page shows them."""
    facts = {step.index: step for step in answer.steps}
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        row = rows.setdefault(event.step, {"index": event.step, "step": facts.get(event.step), "events": []})
        if event.type not in SILENT:
            row["events"].append(event)
    return [rows[index] for index in sorted(rows)]


HIDDEN: Final = frozenset({"model.requested", "model.delta", "turn.started", "tool.output"})
"""Events that a page shows by what came of them."""
SILENT: Final = frozenset({"prompt.built"})
"""Events that a page shows as the head of their step."""


async def stop(call: ConsoleCall) -> Response:
    """End a turn."""
    turn_id = call.segment("turn")
    answer = await call.ask("turns.stop", turn_id=turn_id)
    words = "It is ended." if answer.stopped else "It was over already."
    return call.redirect(f"/ui/turns/{quote(turn_id, safe='')}", words)


async def file(call: ConsoleCall) -> Response:
    """Give a file that a turn made, as bytes to keep."""
    words = {"turn_id": call.segment("turn"), "path": call.request.path_params["path"]}
    return await download(call, "turns.file", **words)


async def compare(call: ConsoleCall) -> Response:
    """Show what is not alike in two turns."""
    first, second = call.query.get("first", ""), call.query.get("second", "")
    if not first or not second:
        raise BadRequest("name two turns to compare", errors=[{"path": "/second", "problem": "missing"}])
    pair = await call.ask("turns.compare", turn_id=first, second_id=second)
    return call.page("turn_pair.html.j2", "Two turns", pair=pair)


ROUTES = (
    ConsoleRoute("/prompt", prompt),
    ConsoleRoute("/try", begin),
    ConsoleRoute("/try", start, "POST"),
    ConsoleRoute("/turns", turns),
    ConsoleRoute("/turns/compare", compare),
    ConsoleRoute("/turns/{turn}", turn),
    ConsoleRoute("/turns/{turn}/files/{path:path}", file),
    ConsoleRoute("/turns/{turn}/stop", stop, "POST"),
)
