"""Numbers of states: every change of a task or job that the tables of states allow makes them grow."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app.work import job_revision, task_revision
from kdskills.jobs.model import (
    JOBS,
    TASKS,
    TERMINAL,
    Command,
    JobHead,
    JobSpec,
    Placement,
    Scope,
    StepHead,
    StepSpec,
    TaskHead,
    TaskSpec,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
COMMAND = Command(argv=("true",))
PLACEMENT = Placement(engine="bubblewrap", skill_name="public.x", version_hash="sha256:0")
SPEC = TaskSpec(scope=Scope(), session_id="s", command=COMMAND, placement=PLACEMENT)
TASK = TaskHead(id="task_1", spec=SPEC, status="queued", mode="batch", session_key="k", created_at=NOW)
JOB = JobHead(
    id="job_1",
    spec=JobSpec(scope=Scope(), session_id="s", steps=(StepSpec(name="a", command=COMMAND),), placement=PLACEMENT),
    status="queued",
    session_key="k",
    created_at=NOW,
)


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a, following in TASKS.items() for b in sorted(following) if a != b], ids=str
)
@pytest.mark.parametrize("attempt", [0, 1, 7])
def test_every_move_of_a_task_grows(before: str, after: str, attempt: int) -> None:
    """A task that moves on has a greater number; going back to starting takes a new attempt."""
    first = replace(TASK, status=before, attempt=attempt)
    again = after == "starting" and before in {"starting", "running"}
    second = replace(TASK, status=after, attempt=attempt + again)
    assert task_revision(second) > task_revision(first)


@pytest.mark.parametrize("status", ["queued", "starting", "running"])
def test_asking_for_a_cancel_is_a_change(status: str) -> None:
    """Who watches sees that somebody wants the end, before the end and as another number than the end."""
    plain = replace(TASK, status=status, attempt=1)
    asked = replace(plain, cancel_at=NOW)
    over = replace(asked, status="canceled")
    assert task_revision(plain) < task_revision(asked) < task_revision(over)


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a, following in JOBS.items() for b in sorted(following) if a != b], ids=str
)
def test_every_move_of_a_job_grows(before: str, after: str) -> None:
    """A job that moves on has a greater number."""
    assert job_revision(replace(JOB, status=after)) > job_revision(replace(JOB, status=before))


def step(index: int, tries: int, status: str, attempt: int = 1) -> StepHead:
    """A step in its latest try."""
    if tries == 0:
        return StepHead(index=index, name=str(index), status=status)
    task = replace(TASK, status=status, attempt=0 if status == "queued" else attempt)
    return StepHead(index=index, name=str(index), status=status, tries=tries, task=task)


PATHS = st.lists(
    st.tuples(st.integers(1, 11), st.lists(st.sampled_from(["queued", "starting", "running"]), max_size=3)),
    min_size=1,
    max_size=3,
)


@given(others=st.lists(st.integers(0, 3), max_size=4), tries=st.integers(1, 11))
def test_steps_make_a_job_grow(others: list[int], tries: int) -> None:
    """Every state of every try of a step makes the job's number greater, whatever the other steps are at."""
    fixed = tuple(step(index + 1, number, "failed" if number else "queued") for index, number in enumerate(others))
    seen = [job_revision(replace(JOB, status="running", steps=(step(0, 0, "queued"), *fixed)))]
    for number in range(1, tries + 1):
        for status in ("queued", "starting", "running", "failed"):
            seen.append(job_revision(replace(JOB, status="running", steps=(step(0, number, status), *fixed))))
    assert seen == sorted(set(seen))


def test_a_skipped_step_is_a_change() -> None:
    """A step that will never run makes the number greater than one that may."""
    waiting = replace(JOB, status="running", steps=(step(0, 0, "queued"),))
    assert job_revision(replace(waiting, steps=(step(0, 0, "skipped"),))) > job_revision(waiting)


@given(revision=st.integers(1, 11 * 256 * 10_000))
def test_numbers_of_events_stay_exact_in_json(revision: int) -> None:
    """The largest number of an event is below what every JSON reader keeps exactly."""
    assert (revision << 20) < 2**53 - 2**20
    assert set(TERMINAL) == {"succeeded", "failed", "canceled", "skipped"}
