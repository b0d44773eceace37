"""From an engine's result to the verdict, with declared outputs as files beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kdskills.errors import ExecFailed, KdskillsError
from kdskills.execution.request import Artifact, ArtifactError, ExecResult
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.asking import EVERYTHING, shows
from kdskills.jobs.attempts.order import AttemptOrder, OutFile, OutputBounds, OutputError, Verdict, VerdictStatus

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
