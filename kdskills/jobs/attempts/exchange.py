"""Between an attempt and its engine: from the order to the engine's request, and from its result to the verdict."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kdskills.errors import BadRequest, ExecFailed, KdskillsError
from kdskills.execution.check import compile_glob
from kdskills.execution.probing import UNSAFE_PROFILE
from kdskills.execution.request import (
    MAX_BACKGROUND_S,
    Artifact,
    ArtifactError,
    ExecRequest,
    ExecResult,
    InputFile,
    LogFiles,
    Owner,
)
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.order import AttemptOrder, OutFile, OutputBounds, Verdict, VerdictStatus
from kdskills.jobs.model import Inline, OutputError

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


_CODES: Final = {"cancelled": "canceled", "nonzero": None, "ok": None}


def to_verdict(
    order: AttemptOrder,
    folder: Path,
    result: ExecResult,
    *,
    started_at: float,
    session_errors: Sequence[OutputError] = (),
    override: KdskillsError | None = None,
) -> Verdict:
    """Write the declared outputs below *folder* and return the verdict on *result*.

    Args:
        order: What the attempt was told.
        folder: The attempt's folder.
        result: What the engine says.
        started_at: When the program was started, in seconds since the epoch.
        session_errors: Files the session could not store.
        override: Why we ended it; it takes the place of what the engine says.
    """
    outputs, refused = keep_outputs(
        folder, [item for item in result.artifacts if shows(order, item.path)], order.outputs
    )
    errors = [*_errors(order, result.artifact_errors), *refused, *session_errors]
    status: VerdictStatus = result.status
    code, error = _CODES.get(status, status), result.error
    if status in {"refused", "infra_error", "limit"} and error is not None:
        code = error.code
    words = None if error is None else error.message
    if override is not None:
        status, code, words = status_of_error(override), override.code, override.message
    return Verdict(
        status=status,
        exit_code=result.exit_code,
        signal=result.signal,
        error_code=code,
        error_message=None if words is None else words[:4000],
        started_at=started_at,
        finished_at=time.time(),
        duration_ms=round(result.duration_s * 1000),
        stdout_total=result.stdout.total,
        stderr_total=result.stderr.total,
        artifacts=tuple(outputs),
        output_errors=tuple(errors),
        enforced=tuple(sorted(result.limits_enforced)),
    )


def refusal(error: KdskillsError) -> Verdict:
    """Return the verdict on an attempt whose program was never started."""
    return Verdict(
        status=status_of_error(error),
        error_code=error.code,
        error_message=error.message[:4000],
        finished_at=time.time(),
    )


def status_of_error(error: KdskillsError) -> VerdictStatus:
    """Return the status of an attempt that ended for *error*."""
    if error.code == "startup_timeout":
        return "startup_timeout"
    return "infra_error" if isinstance(error, ExecFailed) else "refused"


def keep_outputs(
    folder: Path, artifacts: Iterable[Artifact], bounds: OutputBounds
) -> tuple[list[OutFile], list[OutputError]]:
    """Write *artifacts* as files below *folder* within *bounds*; what does not fit is named."""
    outputs: list[OutFile] = []
    refused: list[OutputError] = []
    room = bounds.total
    for item in artifacts:
        if len(outputs) >= bounds.files:
            refused.append(OutputError(path=item.path, code="too_many", message=f"more than {bounds.files} outputs"))
            continue
        if item.size > min(bounds.each, room):
            message = f"{item.size} bytes; an output may have {bounds.each}, all together {bounds.total}"
            refused.append(OutputError(path=item.path, code="too_large", message=message))
            continue
        name = f"{shim.OUT}/{len(outputs):04d}"
        (folder / shim.OUT).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as sink:
            sink.write(item.content)
        room -= item.size
        outputs.append(OutFile(path=item.path, size=item.size, sha256=item.sha256, mode=item.mode, file=name))
    return outputs, refused


def _errors(order: AttemptOrder, errors: Iterable[ArtifactError]) -> Iterable[OutputError]:
    for error in errors:
        if error.path != EVERYTHING and shows(order, error.path):
            yield OutputError(path=error.path, code=error.code, message=error.message)
