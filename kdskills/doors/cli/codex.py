"""`codex probe` and `codex receipts`, as people read them."""

from __future__ import annotations

from typing import Any

from kdskills.doors.cli.output import EXIT_NEGATIVE, EXIT_OK, console, disarmed

MEANINGS = {
    "unsubscribe": "threads can be released",
    "namespaces": "namespaces are understood",
    "built_ins": "tools of the server itself",
    "materialise": "a thread's file can be written without a model call",
    "context": "context reaches the model",
    "rewind": "turns can be taken back",
    "extra_roots": "skill folders reach open threads",
    "native": "a resume changes the tools",
    "reload": "a guarded reload changes the tools",
}


def probed(found: Any) -> int:
    """Print a probe; 1 when it was not finished."""
    out = console()
    when = "an earlier probe" if found.cached else f"probed in {found.seconds:.1f} s"
    out.print(f"{disarmed(found.facts.user_agent)} ({when})", markup=False, soft_wrap=True)
    out.print(f"  {disarmed(found.binary)}", markup=False, soft_wrap=True)
    for one in found.findings:
        seen = f": {disarmed(one.seen)}" if one.seen else ""
        word = "yes" if one.proven else "no "
        meaning = MEANINGS.get(one.name, one.name)
        out.print(f"  {word}  {meaning}{seen}", markup=False, soft_wrap=True)
    out.print(f"strategy: {found.strategy}", markup=False)
    return EXIT_OK if found.ok else EXIT_NEGATIVE


def receipts(found: Any) -> int:
    """Print a session's receipts; 1 when there are none."""
    out = console()
    if not found.receipts:
        out.print(f"no receipt is kept of session {disarmed(found.session)}", markup=False, soft_wrap=True)
        return EXIT_NEGATIVE
    for one in found.receipts:
        refused = one.strategy != one.strategy_asked and one.strategy_asked not in {None, "auto"}
        way = f"{one.strategy or '-'} ({one.strategy_asked} was asked for)" if refused else one.strategy or "-"
        catalog = f"catalog {one.catalog_digest or '-'} by {way}, context {one.context_digest or '-'}"
        out.print(f"turn {disarmed(one.turn_id)}: {catalog}", markup=False, soft_wrap=True)
        if one.visible_tools:
            out.print(f"  tools: {disarmed(', '.join(one.visible_tools))}", markup=False, soft_wrap=True)
        for skill in one.skills:
            out.print(f"  skill {disarmed(skill.ref)} {skill.body_digest}", markup=False, soft_wrap=True)
        for call in one.calls:
            answer = call.response_digest or "no answer"
            out.print(f"  call {disarmed(call.tool)} {call.state} {answer}", markup=False, soft_wrap=True)
    return EXIT_OK
