"""Inputs of the operations on turns; apart from running them, so that the help of a command needs no solver."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kdskills.app.operations.models import Input


class RunInput(Input):
    """One request to a solver over a bundle."""

    bundle: Path = Field(description="The bundle's folder.")
    request: str | None = Field(None, description="What the user asks; none means the one in the bundle's demo.yaml.")
    model: str | None = Field(
        None, description="`replay`, `openai:NAME`, `anthropic:NAME`, `ollama:NAME`, …; none means the setting."
    )
    executor: str | None = Field(
        None, description="`auto`, or the name of the engine that scripts run in; none means the setting."
    )
    consumer: str = Field("solver.react.decision", description="Consumer the solver acts as.")
    answer_role: str | None = Field(None, description="Generator that writes the answer, as a consumer of its own.")
    files: tuple[Path, ...] = Field((), description="Files handed in with the request.")
    skills: tuple[str, ...] = Field((), description="Skills loaded before the first decision.")
    out: Path | None = Field(
        None, description="Folder for produced files and the transcript; else the files stay where they are made."
    )


class ShowTurnInput(Input):
    """Which turn."""

    transcript: Path = Field(description="The turn's transcript, `<turn id>.jsonl`.")
