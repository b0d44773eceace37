"""Answers made from the heads of tasks and jobs, and bytes of output as text: nothing here asks the database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kdskills.app.operations.work_outputs import (
    Artifact,
    ExposedEndpoint,
    JobRow,
    JobSnapshot,
    LostOutput,
    QueryOutput,
    RunOutput,
    RunStatus,
    StepSnapshot,
    TaskRow,
    TaskSnapshot,
    Timing,
)
from kdskills.execution.streams import LogPiece
from kdskills.jobs.attempts.order import OutputError
from kdskills.jobs.heads import ArtifactRef, JobHead, StepHead, TaskHead

_LONGEST: Final = 4


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of output as text.

    Attributes:
        text: The characters; bytes that are no UTF-8 are U+FFFD.
        skipped: Bytes left out at the front: the rest of a character that began before.
        incomplete: Bytes left out at the end: the beginning of a character that is not there yet.
    """

    text: str
    skipped: int = 0
    incomplete: int = 0


def text_of(data: bytes, *, cut_before: bool, more_after: bool) -> Text:
    """Return *data* as text.

    Args:
        data: Bytes of the output.
        cut_before: Whether there are bytes before them, so that they may begin within a character.
        more_after: Whether bytes may follow, so that a character at the end may be incomplete.
    """
    skipped = _rest_of_character(data) if cut_before else 0
    incomplete = _begun_character(data[skipped:]) if more_after else 0
    complete = data[skipped : len(data) - incomplete]
    return Text(complete.decode("utf-8", "replace"), skipped, incomplete)


def _rest_of_character(data: bytes) -> int:
    """Return how many bytes at the front continue a character; four or more in a row are no UTF-8 and stay."""
    count = 0
    while count < min(_LONGEST, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count if count < _LONGEST else 0


def _begun_character(data: bytes) -> int:
    """Return how many bytes at the end begin a character that needs more of them."""
    for back in range(1, min(_LONGEST, len(data) + 1)):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 1
        return back if needed > back else 0
    return 0


Tails = tuple[LogPiece, LogPiece]


def artifacts_of(refs: Iterable[ArtifactRef]) -> tuple[Artifact, ...]:
    """Return kept outputs as an answer has them."""
    return tuple(
        Artifact(artifact_id=r.artifact_id, path=r.path, size=r.size, sha256=r.sha256, mime=r.mime) for r in refs
    )


def lost_of(errors: Iterable[OutputError]) -> tuple[LostOutput, ...]:
    """Return outputs that were not kept as an answer has them."""
    return tuple(LostOutput(path=e.path, code=e.code, message=e.message) for e in errors)


def workdir_of(cwd: str) -> str:
    """Return a command's folder in the words of the arguments: `skill`, `session`, or a folder inside that one."""
    return "skill" if cwd.startswith("/skills/") else "session" if cwd == "." else cwd


def endpoints_of(head: TaskHead) -> tuple[ExposedEndpoint, ...]:
    """Return a service's ports, with their addresses when it runs."""
    running = {item.port: item for item in head.endpoints} if head.status == "running" else {}
    ports = head.spec.service.expose_ports if head.spec.service is not None else ()
    return tuple(
        ExposedEndpoint(port=port, host_port=running[port].host_port, url=running[port].url)
        if port in running
        else ExposedEndpoint(port=port)
        for port in ports
    )


def duration_of(head: TaskHead) -> int | None:
    """Return the milliseconds a task ran, or None."""
    if head.started_at is None or head.finished_at is None:
        return None
    return max(0, round((head.finished_at - head.started_at).total_seconds() * 1000))


def tail_of(piece: LogPiece, *, more_after: bool) -> tuple[Text, int]:
    """Return the end of an output as text, and the offset that text begins at."""
    text = text_of(piece.data, cut_before=piece.offset > 0, more_after=more_after)
    return text, piece.offset + text.skipped


def run_status(head: TaskHead) -> RunStatus:
    """Return how a finished command ended, with a timeout told apart."""
    if head.status == "failed" and head.error_code == "timeout":
        return "timeout"
    return "succeeded" if head.status == "succeeded" else "canceled" if head.status == "canceled" else "failed"


def step_of(step: StepHead, tails: tuple[LogPiece, LogPiece] | None = None) -> StepSnapshot:
    """Return a step, with the ends of its output when they were read."""
    task = step.task
    if task is None:
        return StepSnapshot(index=step.index, name=step.name, status=step.status, task_id=None, tries=step.tries)
    texts = ("", "") if tails is None else tuple(tail_of(p, more_after=not task.terminal)[0].text for p in tails)
    totals = (task.stdout_total or 0, task.stderr_total or 0) if tails is None else tuple(p.total for p in tails)
    return StepSnapshot(
        index=step.index,
        name=step.name,
        status=step.status,
        task_id=task.id,
        tries=step.tries,
        started_at=task.started_at,
        finished_at=task.finished_at,
        exit_code=task.exit_code,
        error_code=task.error_code,
        error_message=task.error_message,
        stdout_tail=texts[0],
        stderr_tail=texts[1],
        stdout_total=totals[0],
        stderr_total=totals[1],
        artifacts=artifacts_of(task.artifacts),
        output_errors=lost_of(task.output_errors),
    )


def task_row(head: TaskHead) -> TaskRow:
    """Return a task as a list shows it."""
    return TaskRow(
        task_id=head.id,
        status=head.status,
        mode=head.mode,
        skill_name=head.spec.placement.skill_name,
        session_id=head.spec.session_id,
        job_id=head.job_id,
        command=head.spec.command.argv,
        created_at=head.created_at,
        started_at=head.started_at,
        finished_at=head.finished_at,
        exit_code=head.exit_code,
        error_code=head.error_code,
        agent=head.scope.agent,
    )


def job_row(head: JobHead) -> JobRow:
    """Return a job as a list shows it."""
    return JobRow(
        job_id=head.id,
        status=head.status,
        skill_name=head.spec.placement.skill_name,
        session_id=head.spec.session_id,
        current_step_index=head.current_step_index,
        steps=len(head.steps),
        created_at=head.created_at,
        started_at=head.started_at,
        finished_at=head.finished_at,
        error_code=head.error_code,
        agent=head.scope.agent,
    )


def task_snapshot(head: TaskHead, tails: Tails, *, active: bool) -> TaskSnapshot:
    """Return a task as it is now.

    Args:
        head: The task.
        tails: The ends of its two streams.
        active: Whether the addresses of its ports can be reached.
    """
    (out, out_at), (err, err_at) = (tail_of(piece, more_after=not head.terminal) for piece in tails)
    return TaskSnapshot(
        task_id=head.id,
        status=head.status,
        mode=head.mode,
        skill_name=head.spec.placement.skill_name,
        version_hash=head.spec.placement.version_hash,
        tree_digest=head.spec.placement.tree_digest,
        session_id=head.spec.session_id,
        job_id=head.job_id,
        workdir=workdir_of(head.spec.command.cwd),
        startup_ready=None if head.mode == "batch" else head.ready_at is not None,
        created_at=head.created_at,
        started_at=head.started_at,
        ready_at=head.ready_at,
        finished_at=head.finished_at,
        exit_code=head.exit_code,
        signal=head.signal,
        error_code=head.error_code,
        error_message=head.error_message,
        cancel_requested=head.cancel_at is not None,
        stdout_tail=out.text,
        stderr_tail=err.text,
        stdout_offset=out_at,
        stderr_offset=err_at,
        stdout_total=tails[0].total,
        stderr_total=tails[1].total,
        stdout_truncated=out_at > 0,
        stderr_truncated=err_at > 0,
        artifacts=artifacts_of(head.artifacts),
        output_errors=lost_of(head.output_errors),
        exposed_endpoints=endpoints_of(head),
        exposed_endpoints_active=active,
        attempt=head.attempt,
        host=head.host,
        engine=head.spec.placement.engine,
    )


def job_snapshot(head: JobHead, tails: dict[int, Tails]) -> JobSnapshot:
    """Return a job as it is now, with the ends of its steps' output by index."""
    return JobSnapshot(
        job_id=head.id,
        status=head.status,
        skill_name=head.spec.placement.skill_name,
        version_hash=head.spec.placement.version_hash,
        tree_digest=head.spec.placement.tree_digest,
        session_id=head.spec.session_id,
        current_step_index=head.current_step_index,
        steps=tuple(step_of(step, tails.get(step.index)) for step in head.steps),
        created_at=head.created_at,
        started_at=head.started_at,
        finished_at=head.finished_at,
        error_code=head.error_code,
        error_message=head.error_message,
        cancel_requested=head.cancel_at is not None,
    )


def run_output(head: TaskHead, tails: Tails) -> RunOutput:
    """Return what a finished command did."""
    (out, out_at), (err, err_at) = (tail_of(piece, more_after=False) for piece in tails)
    return RunOutput(
        status=run_status(head),
        stdout=out.text,
        stderr=err.text,
        stdout_truncated=out_at > 0,
        stderr_truncated=err_at > 0,
        exit_code=head.exit_code,
        created_artifacts=artifacts_of(head.artifacts),
        output_errors=lost_of(head.output_errors),
        timing=Timing(duration_ms=duration_of(head)),
        version_hash=head.spec.placement.version_hash,
        tree_digest=head.spec.placement.tree_digest,
        workdir=workdir_of(head.spec.command.cwd),
        session_id=head.spec.session_id,
        signal=head.signal,
        stdout_total=tails[0].total,
        stderr_total=tails[1].total,
        error_code=head.error_code,
        error_message=head.error_message,
    )


def query_output(head: TaskHead, tails: Tails) -> QueryOutput:
    """Return what a status query printed."""
    ran = run_output(head, tails)
    return QueryOutput(
        status=ran.status,
        exit_code=ran.exit_code,
        stdout=ran.stdout,
        stderr=ran.stderr,
        stdout_truncated=ran.stdout_truncated,
        stderr_truncated=ran.stderr_truncated,
        duration_ms=ran.timing.duration_ms,
    )
