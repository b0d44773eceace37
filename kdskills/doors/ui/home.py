"""The first page: what this is, how it is, what was done last, and what needs somebody's decision."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute
from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from fastapi.responses import Response

LATEST: Final = 6
"""Rows of each list that the first page shows."""


async def home(call: ConsoleCall) -> Response:
    """Show what there is and what needs a decision; a part that cannot be told says why, and the others stand."""
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        "matrix": ("skills.matrix", {"limit": 1}),
        "broken": ("skills.matrix", {"findings": "error", "limit": LATEST}),
        "turns": ("turns.list", {"limit": LATEST}),
        "tasks": ("tasks.list", {"limit": LATEST, "steps": False}),
        "waiting": ("project_skills.list", {"limit": LATEST}),
    }
    answers = await asyncio.gather(*(_part(call, name, **words) for name, words in questions.values()))
    parts = dict(zip(questions, answers, strict=True))
    return call.page("home.html.j2", "Home", **cast("Any", parts))


async def health(call: ConsoleCall) -> Response:
    """Show how the parts of this machine are: a piece of the first page, loaded after it, since it tries each of them."""
    return call.page("health.html.j2", "Health", doctor=await call.ask("doctor"))


async def live(call: ConsoleCall) -> Response:
    """Have a page loaded again once its skills or rules are others; it asks each second, where a folder is shown."""
    digest = (await call.ask("skills.matrix", limit=1)).digest
    seen = call.query.get("seen")
    if seen == digest:
        return call.unchanged()
    return call.fragment("live.html.j2", digest=digest) if seen is None else call.reload()


async def _part(call: ConsoleCall, name: str, **words: Any) -> dict[str, Any]:
    """Return what a part of the page shows: an answer, or an error, or neither for what the caller may not ask."""
    if not call.may(name):
        return {"answer": None, "error": None}
    try:
        return {"answer": await call.ask(name, **words), "error": None}
    except KdskillsError as error:
        return {"answer": None, "error": error}


ROUTES = (ConsoleRoute("/", home), ConsoleRoute("/health", health), ConsoleRoute("/live", live))
