"""Large inputs leave the record of their task: it is read many times a second while somebody waits."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Final, TypeGuard

from kdskills.jobs.artifacts import ArtifactKeeper
from kdskills.jobs.model import Command, FromArtifact, Inline, InputSpec, JobSpec, Scope, TaskSpec

MOST: Final = 64 * 1024
"""Characters of base64 that stay in the record."""

Keeper = Callable[[], Awaitable[ArtifactKeeper]]


def large(item: InputSpec) -> TypeGuard[Inline]:
    """Whether an input is too large for the record of its task."""
    return isinstance(item, Inline) and len(item.content_base64) > MOST


async def spooled_task(keeper: Keeper, spec: TaskSpec) -> TaskSpec:
    """Return *spec* with its large inputs in the store of artifacts, which is opened only for those."""
    return spec.model_copy(update={"command": await _command(keeper, spec.scope, spec.command)})


async def spooled_job(keeper: Keeper, spec: JobSpec) -> JobSpec:
    """Return *spec* with the large inputs of its steps in the store of artifacts."""
    steps = [
        step.model_copy(update={"command": await _command(keeper, spec.scope, step.command)}) for step in spec.steps
    ]
    return spec.model_copy(update={"steps": tuple(steps)})


async def _command(keeper: Keeper, scope: Scope, command: Command) -> Command:
    made: list[InputSpec] = []
    for item in command.inputs:
        if large(item):
            kept = await (await keeper()).keep_input(scope, base64.b64decode(item.content_base64))
            made.append(FromArtifact(path=item.path, artifact_id=kept))
        else:
            made.append(item)
    return command.model_copy(update={"inputs": tuple(made)})
