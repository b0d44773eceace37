"""What a solver would send first, part by part: a real turn is begun, and its first request is kept instead of sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from html import unescape
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from kdskills.errors import Diagnostic, ExecRefused
from kdskills.session.config import Budget
from kdskills.skills.model import estimate_tokens
from kdskills.solver.parts import SolverSettings
from kdskills.solver.react import PreviewWiring, PromptProbe, ReactSolver
from kdskills.solver.system import SolverSystem
from kdskills.solver.tools import ToolTable

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.models import ModelRequest
    from kdskills.session.receipts import PromptParts
    from kdskills.solver.parts import Wiring
    from kdskills.solver.turn import Turn

REQUEST: Final = "(the user's request)"
_SKILL_END: Final = "]]></skill>\n"  # no body holds it: what would end its section is written otherwise there
_SKILL_NAME: Final = re.compile(r'<skill name="([^"]*)"')


@runtime_checkable
class CountingProvider(Protocol):
    """A model provider that counts tokens by itself; others are estimated for."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens *text* takes."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of what is sent, in its order.

    `name` is `instructions`, `catalog`, `skill:NAME`, `tools`, `history` or `request`; of tools `text` is the JSON that
    servers make of them. `estimated` tells that nobody counted, `cut` what was left out and why.
    """

    name: str
    text: str
    tokens: int
    estimated: bool
    cut: str = ""


@dataclass(frozen=True, slots=True)
class PromptPreview:
    """The first request of a solver: as it would be sent, in parts, and what would be otherwise here."""

    request: ModelRequest
    parts: tuple[PromptPart, ...]
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptChoices:
    """What a prompt is made with.

    Attributes:
        consumer: Who decides.
        request: What the user asks.
        skills: Skills loaded before.
        model: Model string; it says the window that bounds the catalog, and counts tokens where it can.
        executor: Engine whose tools are offered.
        tools: Ids of the solver's tools that are offered, None for all.
        budget: Tokens the catalog may take, None for its share of the window.
    """

    consumer: str
    model: str
    executor: str
    request: str = REQUEST
    skills: Sequence[str] = ()
    tools: Sequence[str] | None = None
    budget: int | None = None


async def preview(wiring: Wiring, bundle: Bundle, choices: PromptChoices) -> PromptPreview:
    """Return what a solver over *bundle* would send first, and what is not as it would be; its `tools.py` runs.

    Raises as opening a `SolverSystem`, and for skills that cannot be loaded.
    """
    silent = cast("Wiring", PreviewWiring(wiring))
    findings: tuple[Diagnostic, ...] = ()
    engine: Executor | None = None
    try:
        engine = await silent.executor(choices.executor)
    except ExecRefused as error:
        message = f"scripts and generated code are left out, and a turn would not begin: {error.message}"
        findings = (Diagnostic(error.code, "warning", message),)
    if choices.model.partition(":")[0] == "replay":  # recordings have no window, and count nothing
        return await _previewed(silent, bundle, engine, choices, findings, PromptProbe(None), None)
    async with aclosing(wiring.model(choices.model)) as provider:
        counting = provider if isinstance(provider, CountingProvider) else None
        probe = PromptProbe(provider.context_window)
        return await _previewed(silent, bundle, engine, choices, findings, probe, counting)


async def _previewed(
    wiring: Wiring,
    bundle: Bundle,
    engine: Executor | None,
    choices: PromptChoices,
    findings: tuple[Diagnostic, ...],
    probe: PromptProbe,
    counting: CountingProvider | None,
) -> PromptPreview:
    settings = SolverSettings(catalog_tokens=choices.budget)
    system = SolverSystem(bundle=bundle, model=probe, executor=engine, settings=settings, wiring=wiring)
    async with system:
        if choices.tools is not None:
            unknown = sorted(set(choices.tools) - set(system.tool_ids))
            message = f"the solver has no {', '.join(unknown)}: skills that need it are refused"
            findings += (Diagnostic("tool_unknown", "warning", message),) if unknown else ()
            system.tools = ToolTable([tool for tool in system.tools.all if tool.id in choices.tools])
            system.scripts = "skills.run_script" in choices.tools
        solver = ReactSolver(system, consumer=choices.consumer)
        async with solver.prepare_session(choices.request, skills=choices.skills) as turn:
            prompt = await turn.session.instructions()
            await solver.work(turn)
            assert probe.request is not None
            parts = tuple(_counted(_parts(turn, prompt, probe.request), counting))
    return PromptPreview(probe.request, parts, findings)


def offered_tools(request: ModelRequest) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request as servers are told of them."""
    return tuple(
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.input_schema)}
        for tool in request.tools
    )


def _parts(turn: Turn, prompt: PromptParts, request: ModelRequest) -> Iterator[tuple[str, str, str]]:
    """Give name, text, and what was cut of each part; the texts before the tools make the instructions."""
    few_words = f"in few words: the model's window has {turn.parts.window()} tokens" if turn.brief else ""
    texts = [("instructions", prompt.rules, few_words), ("base", prompt.base, "")]
    texts += [("catalog", prompt.available, _catalog_cut(turn, prompt))]
    blocks = list(_blocks(prompt.active))
    if prompt.text != request.instructions:  # it is told whole rather than in parts that are not it
        texts, blocks = [("instructions", request.instructions, few_words)], []
    gap = ""
    for name, text, cut in texts:
        if text or cut:  # a catalog may have no room at all, and is told of nevertheless
            yield name, gap + text if text else "", cut
        gap = "\n\n" if text else gap
    for name, text in blocks:
        yield name, gap + text, ""
        gap = ""
    tools = offered_tools(request)
    if tools:
        yield "tools", json.dumps(tools, ensure_ascii=False), few_words
    *history, last = request.messages
    if history:
        yield "history", "".join(message.text for message in history), ""
    yield "request", last.text, ""


def _blocks(active: str) -> Iterator[tuple[str, str]]:
    """Give name and text of each active skill; the first has the beginning of them all, the last the end."""
    *blocks, end = active.split(_SKILL_END)
    for number, block in enumerate(blocks, 1):
        match = _SKILL_NAME.search(block)
        name = "" if match is None else unescape(match.group(1))
        yield f"skill:{name}", block + _SKILL_END + (end if number == len(blocks) else "")


def _catalog_cut(turn: Turn, prompt: PromptParts) -> str:
    """Say what the catalog leaves out, and why."""
    listed = len(prompt.listed)
    if listed == prompt.total and not prompt.level:
        return ""
    settings, window = turn.parts.settings, turn.parts.window()
    budget = Budget.of(window).catalog if settings.catalog_tokens is None else settings.catalog_tokens
    shorter = f", descriptions shortened to level {prompt.level}" if prompt.level else ""
    return f"lists {listed:,} of {prompt.total:,} skills{shorter}: it may take {budget:,} tokens"


def _counted(parts: Iterator[tuple[str, str, str]], counting: CountingProvider | None) -> Iterator[PromptPart]:
    for name, text, cut in parts:
        tokens = estimate_tokens(text) if counting is None else counting.count_tokens(text)
        yield PromptPart(name, text, tokens, counting is None, cut)
