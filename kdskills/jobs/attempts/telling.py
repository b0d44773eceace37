"""From an engine's result to the verdict, with declared outputs as files beside it (spec work §3)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kdskills.execution.request import Artifact, ArtifactError, ExecResult
from kdskills.jobs.attempts import shim
from kdskills.jobs.attempts.asking import EVERYTHING, declared
from kdskills.jobs.attempts.order import AttemptOrder, OutFile, OutputBounds, OutputError, Verdict, VerdictStatus

_CODES: Final = {"cancelled": "canceled", "nonzero": None, "ok": None}


def to_verdict(
    order: AttemptOrder,
    folder: Path,
    result: ExecResult,
    *,
    started_at: float,
    not_put_back: Sequence[OutputError] = (),
    status: VerdictStatus | None = None,
) -> Verdict:
    """Write the declared outputs below *folder* and return the verdict on *result*.

    Args:
        order: What the attempt was told.
        folder: The attempt's folder.
        result: What the engine says.
        started_at: When the program was started, in seconds since the epoch.
        not_put_back: Files the session could not take back.
        status: What we know better than the engine, such as `startup_timeout`.
    """
    kept, refused = keep_outputs(
        folder, [item for item in result.artifacts if declared(order, item.path)], order.outputs
    )
    errors = [*_errors(order, result.artifact_errors), *refused, *not_put_back]
    said = result.status if status is None else status
    error = result.error
    code = _CODES.get(said, said)
    if said in {"refused", "infra_error", "limit"} and error is not None:
        code = error.code
    return Verdict(
        status=said,
        exit_code=result.exit_code,
        signal=result.signal,
        error_code=code,
        error_message=None if error is None else error.message[:4000],
        started_at=started_at,
        finished_at=time.time(),
        duration_ms=round(result.duration_s * 1000),
        stdout_total=result.stdout.total,
        stderr_total=result.stderr.total,
        artifacts=tuple(kept),
        output_errors=tuple(errors),
        enforced=tuple(sorted(result.limits_enforced)),
    )


def refusal(status: VerdictStatus, code: str, message: str) -> Verdict:
    """Return the verdict on an attempt whose program was never started."""
    now = time.time()
    return Verdict(status=status, error_code=code, error_message=message[:4000], started_at=None, finished_at=now)


def keep_outputs(
    folder: Path, artifacts: Iterable[Artifact], bounds: OutputBounds
) -> tuple[list[OutFile], list[OutputError]]:
    """Write *artifacts* as files below *folder* within *bounds*; what does not fit is named."""
    kept: list[OutFile] = []
    refused: list[OutputError] = []
    room = bounds.total
    for item in artifacts:
        if len(kept) >= bounds.files:
            refused.append(OutputError(path=item.path, code="too_many", message=f"more than {bounds.files} outputs"))
            continue
        if item.size > min(bounds.each, room):
            what = f"{item.size} bytes; an output may have {bounds.each}, all together {bounds.total}"
            refused.append(OutputError(path=item.path, code="too_large", message=what))
            continue
        name = f"{shim.OUT}/{len(kept):04d}"
        (folder / shim.OUT).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as sink:
            sink.write(item.content)
        room -= item.size
        kept.append(OutFile(path=item.path, size=item.size, sha256=item.sha256, mode=item.mode, file=name))
    return kept, refused


def _errors(order: AttemptOrder, errors: Iterable[ArtifactError]) -> Iterable[OutputError]:
    for error in errors:
        if error.path != EVERYTHING and declared(order, error.path):
            yield OutputError(path=error.path, code=error.code, message=error.message)
