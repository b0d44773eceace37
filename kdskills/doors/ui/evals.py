"""Evaluations: iterations, their figures and rows, and what changed between two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastapi.responses import HTMLResponse

from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute
from kdskills.errors import NotFound

if TYPE_CHECKING:
    from fastapi.responses import Response

ROWS: Final = 200
"""Rows that a page shows; the report has them all."""


async def iterations(call: ConsoleCall) -> Response:
    """List the iterations of this bundle's evaluations."""
    return call.page(
        "evals.html.j2",
        "Evals",
        answer=await call.ask("evals.list", bundle=call.folder, cursor=call.query.get("cursor"), limit=50),
    )


async def iteration(call: ConsoleCall) -> Response:
    """Show one iteration beside the one before, or another that is named."""
    number = _number(call)
    answer = await call.ask("evals.get", bundle=call.folder, number=number, before=call.number("before"))
    status = call.query.get("status")
    chosen = [row for row in answer.rows if status in {None, row.status}]
    return call.page("iteration.html.j2", f"Iteration {number}", answer=answer, chosen=chosen, most=ROWS)


async def report(call: ConsoleCall) -> Response:
    """Give the report of an iteration, a page that stands for itself: its own style, nothing that runs or is loaded."""
    answer = await call.ask("evals.get", bundle=call.folder, number=_number(call))
    # The page allows its own style alone, by digest; this allows no more, and takes its origin away.
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; sandbox"
    return HTMLResponse(answer.page, headers={"Content-Security-Policy": policy})


def _number(call: ConsoleCall) -> int:
    text = call.segment("number")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise NotFound(f"there is no page at {call.request.url.path}")
    return int(text)


ROUTES = (
    ConsoleRoute("/evals", iterations),
    ConsoleRoute("/evals/{number}", iteration),
    ConsoleRoute("/evals/{number}/report", report),
)
