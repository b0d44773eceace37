"""`codex.probe` and `codex.receipts`: what an app-server really does, and what turns on it were run with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation

if TYPE_CHECKING:
    from kdskills.app.host import Host


class ProbeInput(Input):
    """Which program, and whether to ask again."""

    binary: str | None = Field(
        None, description="Program to probe; the configured one otherwise. Callers elsewhere cannot choose it."
    )
    force: bool = Field(default=False, description="Ask again although an answer is kept.")


class ProbeFinding(Output):
    """One question of the probe."""

    name: str
    proven: bool
    seen: str


class ServerFacts(Output):
    """What follows from a probe for names and strategies."""

    name: str
    user_agent: str
    built_ins: tuple[str, ...]
    native: bool
    reload: bool
    namespaces: bool
    materialise: tuple[str, ...]
    rewind: str | None
    context: bool
    extra_roots: bool
    unsubscribe: bool
    probed: bool


class ProbeOutput(Output):
    """What the program does.

    Attributes:
        ok: Whether every question was asked.
        strategy: How catalogs will reach the model: the first proven way.
        binary: The program.
        fingerprint: SHA-256 over launcher, running executables and user agent.
        cached: Whether an earlier probe answered.
        seconds: How long it took.
        facts: What follows for names and strategies.
        findings: Each question and what was seen.
    """

    ok: bool
    strategy: str
    binary: str
    fingerprint: str
    cached: bool
    seconds: float
    facts: ServerFacts
    findings: tuple[ProbeFinding, ...]


class ReceiptsInput(Input):
    """Whose receipts."""

    session: str = Field(description="The session: the server's thread id.")


class ReceiptSkill(Output):
    """A published skill, by ref, with SHA-256 of the body the model could read."""

    ref: str
    body_digest: str


class ReceiptCall(Output):
    """A call of the turn."""

    key: str
    tool: str
    state: str
    response_digest: str | None


class TurnReceipt(Output):
    """What one turn was run with."""

    turn_id: str
    catalog_digest: str | None
    context_digest: str | None
    strategy: str | None
    strategy_asked: str | None
    visible_tools: tuple[str, ...]
    skills: tuple[ReceiptSkill, ...]
    calls: tuple[ReceiptCall, ...]


class ReceiptsOutput(Output):
    """The receipts kept of a session, oldest first."""

    session: str
    receipts: tuple[TurnReceipt, ...]


async def probe_codex(host: Host, arguments: ProbeInput, context: Context) -> ProbeOutput:
    """Probe a program with an empty home and a fake model."""
    from kdskills.remote.probe import probe

    binary = arguments.binary or host.settings.codex_binary
    report = await probe(binary, state=host.settings.state_dir, force=arguments.force)
    strategy = next(
        (strategy_name for strategy_name in ("native", "reload") if getattr(report.profile, strategy_name)),
        "dispatcher",
    )
    facts = report.to_json()
    return ProbeOutput(
        ok=report.complete,
        strategy=strategy,
        binary=facts["binary"],
        fingerprint=report.fingerprint,
        cached=report.cached,
        seconds=facts["seconds"],
        facts=ServerFacts.model_validate(facts["profile"]),
        findings=tuple(ProbeFinding.model_validate(finding) for finding in facts["findings"]),
    )


async def show_receipts(host: Host, arguments: ReceiptsInput, context: Context) -> ReceiptsOutput:
    """Read a session's receipts from the journal of this state folder."""
    receipts = await asyncio.to_thread(_read, host.settings.state_dir, arguments.session)
    return ReceiptsOutput(session=arguments.session, receipts=receipts)


def _read(state: Path, session: str) -> tuple[TurnReceipt, ...]:
    from kdskills.remote.journal import SqlJournal, journal_url
    from kdskills.remote.receipts import Receipts

    if not (state / "remote" / "calls.sqlite3").exists():
        return ()  # reading makes no database
    journal = SqlJournal(journal_url(state))
    try:
        return tuple(TurnReceipt.model_validate(receipt.to_json()) for receipt in Receipts(journal).receipts(session))
    finally:
        journal.close()


CODEX_PROBE = Implementation(
    ProbeInput, ProbeOutput, ("not_yours_to_say", "codex_missing", "app_server_gone"), probe_codex
)
CODEX_RECEIPTS = Implementation(ReceiptsInput, ReceiptsOutput, ("journal_unavailable", "missing_extra"), show_receipts)
