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


def probed(probe: Any) -> int:
    """Print a probe; 1 when it was not finished."""
    out = console()
    when = "an earlier probe" if probe.cached else f"probed in {probe.seconds:.1f} s"
    out.print(f"{disarmed(probe.facts.user_agent)} ({when})", markup=False, soft_wrap=True)
    out.print(f"  {disarmed(probe.binary)}", markup=False, soft_wrap=True)
    for finding in probe.findings:
        observation = f": {disarmed(finding.seen)}" if finding.seen else ""
        word = "yes" if finding.proven else "no "
        meaning = MEANINGS.get(finding.name, finding.name)
        out.print(f"  {word}  {meaning}{observation}", markup=False, soft_wrap=True)
    out.print(f"strategy: {probe.strategy}", markup=False)
    return EXIT_OK if probe.ok else EXIT_NEGATIVE


def receipts(answer: Any) -> int:
    """Print a session's receipts; 1 when there are none."""
    out = console()
    if not answer.receipts:
        out.print(f"no receipt is kept of session {disarmed(answer.session)}", markup=False, soft_wrap=True)
        return EXIT_NEGATIVE
    for receipt in answer.receipts:
        refused = receipt.strategy != receipt.strategy_asked and receipt.strategy_asked not in {None, "auto"}
        strategy = (
            f"{receipt.strategy or '-'} ({receipt.strategy_asked} was asked for)"
            if refused
            else receipt.strategy or "-"
        )
        catalog = f"catalog {receipt.catalog_digest or '-'} by {strategy}, context {receipt.context_digest or '-'}"
        out.print(f"turn {disarmed(receipt.turn_id)}: {catalog}", markup=False, soft_wrap=True)
        if receipt.visible_tools:
            out.print(f"  tools: {disarmed(', '.join(receipt.visible_tools))}", markup=False, soft_wrap=True)
        for skill in receipt.skills:
            out.print(f"  skill {disarmed(skill.ref)} {skill.body_digest}", markup=False, soft_wrap=True)
        for call in receipt.calls:
            response = call.response_digest or "no answer"
            out.print(f"  call {disarmed(call.tool)} {call.state} {response}", markup=False, soft_wrap=True)
    return EXIT_OK
