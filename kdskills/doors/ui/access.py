"""Access: who may call, with which limits, and who did what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kdskills.app.identity import SCOPES
from kdskills.doors.ui.calls import ConsoleCall, ConsoleRoute, form_text
from kdskills.errors import BadRequest

if TYPE_CHECKING:
    from fastapi.responses import Response
    from starlette.datastructures import FormData

ROWS: Final = 100


async def tokens(call: ConsoleCall) -> Response:
    """List tokens, and offer to make one."""
    answer = await call.ask("tokens.list", cursor=call.query.get("cursor"), limit=ROWS)
    return call.page("access.html.j2", "Access", answer=answer, scopes=sorted(SCOPES))


async def create(call: ConsoleCall) -> Response:
    """Make a token; its text stands on the page that answers, and nowhere else."""
    form = await call.form()
    answer = await call.ask(
        "tokens.create",
        agent=form_text(form, "agent").strip(),
        label=form_text(form, "label").strip(),
        scopes=[str(scope) for scope in form.getlist("scopes")],
        person=form_text(form, "person") == "yes",
        **_bounds(form),
    )
    return call.page("token_made.html.j2", "A new token", token=answer)


def _bounds(form: FormData) -> dict[str, Any]:
    """Return the limits that a form states, and when a token ends; what is left empty is not said."""
    names = ("expires_in_days", "requests_per_minute", "concurrent_work")
    facts: dict[str, Any] = {}
    for name in names:
        text = form_text(form, name).strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadRequest(f"{name} is a whole number", errors=[{"path": f"/{name}", "problem": "no number"}])
        facts[name] = int(text)
    return facts


async def token(call: ConsoleCall) -> Response:
    """Show one token, and offer to narrow or end it."""
    return call.page("token.html.j2", f"Token {call.segment('id')}", token=await _token(call), scopes=sorted(SCOPES))


async def _token(call: ConsoleCall) -> Any:
    token_id, cursor = call.segment("id"), None
    while True:
        answer = await call.ask("tokens.list", cursor=cursor, limit=500)
        for each in answer.tokens:
            if each.id == token_id:
                return each
        cursor = answer.next_cursor
        if cursor is None:
            raise BadRequest(f"there is no token {token_id!r}", code="not_found")


async def change(call: ConsoleCall) -> Response:
    """Narrow a token, have it end earlier, or end it."""
    token_id, form = call.segment("id"), await call.form()
    here = f"/ui/access/tokens/{quote(token_id, safe='')}"
    if form_text(form, "action") == "revoke":
        await call.ask("tokens.revoke", id=token_id)
        return call.redirect("/ui/access", f"Token {token_id} opens nothing any more.")
    await call.ask(
        "tokens.change", id=token_id, scopes=[str(each) for each in form.getlist("scopes")] or None, **_bounds(form)
    )
    return call.redirect(here, "It is narrower now.")


async def audit(call: ConsoleCall) -> Response:
    """Show who did what, the newest first."""
    query = call.query
    words = {name: query.get(name) for name in ("who", "action", "skill", "cursor")}
    return call.page("audit.html.j2", "Audit log", answer=await call.ask("audit_log.list", limit=ROWS, **words))


ROUTES = (
    ConsoleRoute("/access", tokens),
    ConsoleRoute("/access", create, "POST"),
    ConsoleRoute("/access/audit", audit),
    ConsoleRoute("/access/tokens/{id}", token),
    ConsoleRoute("/access/tokens/{id}", change, "POST"),
)
