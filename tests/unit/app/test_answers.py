"""Answers made of what they tell of, and functions that get what their parameters name."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from kdskills.app import Host, Settings
from kdskills.app.operations import Context, Finding, Input, Output
from kdskills.app.operations.table import OperationFunction
from kdskills.errors import Diagnostic


@dataclass(frozen=True)
class Thing:
    """Something an answer tells of."""

    name: str
    size: int = 1


class ThingOutput(Output):
    """An answer about a thing; empty ones are a no."""

    YES: ClassVar[str] = "size"

    name: str
    size: int
    note: str | None = None
    diagnostics: tuple[Finding, ...] = ()


def test_facts_come_first_then_the_sources_in_order() -> None:
    """A fact that is said wins; of two sources the first that has a field gives it; defaults fill the rest."""
    answer = ThingOutput.of(Thing("a"), Thing("b", 7), None, size=3)
    assert answer == ThingOutput(name="a", size=3)


def test_values_inside_are_made_alike() -> None:
    """A finding in an answer is made of a diagnostic."""
    finding = Diagnostic("odd", "warning", "It is odd.", path="SKILL.md", line=2)
    answer = ThingOutput.of(Thing("a"), diagnostics=[finding])
    assert answer.diagnostics == (
        Finding(code="odd", severity="warning", message="It is odd.", path="SKILL.md", line=2),
    )


def test_a_field_that_nobody_has_is_missing() -> None:
    """Nothing is made up."""
    with pytest.raises(ValidationError, match="size"):
        ThingOutput.of(object(), name="a")


@pytest.mark.parametrize(("size", "negative"), [(0, True), (1, False)])
def test_the_field_of_a_yes_decides(size: int, negative: bool) -> None:
    """An answer is a no when the field it names is empty; one that names none never is."""
    assert ThingOutput(name="a", size=size).negative is negative
    assert not Output().negative


async def test_a_function_that_blocks_runs_in_a_thread(tmp_path: Any) -> None:
    """It gets the parts its parameters name, as a coroutine function does, and does not hold up the loop."""

    def blocking(settings: Settings, arguments: Input, context: Context) -> Any:
        return settings, arguments, context, threading.current_thread()

    async def waiting(settings: Settings, context: Context) -> Any:
        return settings, context, threading.current_thread()

    host, arguments, context = Host(Settings(state_dir=tmp_path), entry_points=False), Input(), Context()
    *parts, thread = await OperationFunction(blocking)(host, arguments, context)  # type: ignore[misc]
    assert (parts, thread is threading.main_thread()) == ([host.settings, arguments, context], False)
    *parts, thread = await OperationFunction(waiting)(host, arguments, context)  # type: ignore[misc]
    assert (parts, thread is threading.main_thread()) == ([host.settings, context], True)
