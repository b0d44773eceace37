"""From an order to what an engine is asked to run, as pure decisions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from kdskills.errors import BadRequest
from kdskills.execution.choose import UNSAFE_PROFILE
from kdskills.execution.globs import compile_glob
from kdskills.execution.request import MAX_BACKGROUND_S, ExecRequest, InputFile, LogFiles, Owner
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.order import AttemptOrder
from kdskills.jobs.model import Inline

EVERYTHING: Final = "**"
MARKER: Final = ".kdskills-looked"
"""An output no program is told of: that it is named missing shows that the workdir was looked at."""
_SPARE_FILES: Final = 128


def to_request(order: AttemptOrder, folder: Path, session: Mapping[str, tuple[Path, int]]) -> ExecRequest:
    """Return what the engine is asked to run.

    Args:
        order: What the attempt was told.
        folder: Its folder.
        session: Files the session has so far and their modes, by path; an input of the same path takes a file's place.

    Raises:
        BadRequest: An input's content is no base64, or it has neither content nor a file on this host.
    """
    spec = order.spec
    command, placement = spec.command, spec.placement
    inputs = {path: InputFile(path, file, bool(mode & 0o100)) for path, (file, mode) in session.items()}
    inputs |= {item.path: item for item in _inputs(order)}
    limits = placement.limits
    bounds = replace(
        limits,
        wall_s=MAX_BACKGROUND_S if command.timeout_s is None else command.timeout_s,
        nofile=max(limits.nofile, len(inputs) + _SPARE_FILES if len(inputs) > _SPARE_FILES else 0),
        output_files=max(order.session_files if keeps(order) else 0, limits.output_files),
        output_size=max(limits.work_size if keeps(order) else 0, limits.output_size),
    )
    scope = spec.scope
    return ExecRequest(
        argv=command.argv,
        env=command.env,
        skills=placement.skills,
        inputs=tuple(inputs.values()),
        outputs=(*command.outputs, *((EVERYTHING, MARKER) if keeps(order) else ())),
        workdir=command.cwd,
        limits=bounds,
        profile=UNSAFE_PROFILE if placement.unsafe_local else None,
        request_id=f"{order.task_id}.{order.attempt}",
        owner=Owner(scope.tenant, scope.project, scope.agent, spec.session_id or order.task_id),
        logs=LogFiles(folder / shim.STDOUT, folder / shim.STDERR, order.log_limit),
        background=True,
    )


def keeps(order: AttemptOrder) -> bool:
    """Whether the session's files are stored again once the program is dead."""
    return order.session_dir is not None


def shows(order: AttemptOrder, path: str) -> bool:
    """Whether *path* was declared an output, rather than only kept by the session or looked for by us."""
    if path == MARKER:
        return False
    parts = tuple(path.split("/"))
    return any(compile_glob(pattern).matches(parts) or pattern == path for pattern in order.spec.command.outputs)


def _inputs(order: AttemptOrder) -> list[InputFile]:
    artifact_files = {item.path: item.file for item in order.inputs}
    result: list[InputFile] = []
    for item in order.spec.command.inputs:
        if isinstance(item, Inline):
            try:
                result.append(InputFile(item.path, base64.b64decode(item.content_base64, validate=True)))
            except ValueError as error:
                raise BadRequest(f"input {item.path!r} is no base64: {error}", errors=[item.path]) from error
        elif item.path in artifact_files:
            result.append(InputFile(item.path, artifact_files[item.path]))
        else:
            raise BadRequest(f"input {item.path!r} was not found on this host", errors=[item.path])
    return result
