"""What a job does next, decided from nothing but its steps and the tasks they have had."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.jobs.model import (
    Command,
    JobHead,
    JobSpec,
    Placement,
    Scope,
    StepSpec,
    TaskHead,
    TaskSpec,
    decide,
    graph_problem,
    needs_of,
    step_task_id,
    steps_of,
)

COMMAND = Command(argv=("/bin/true",))
PLACEMENT = Placement(engine="e", skill_name="x", version_hash="0")


def step(name, *needs, **more):
    """Return a step."""
    return StepSpec(name=name, command=COMMAND, needs=needs, **more)


def job(*steps, **more):
    """Return a job of steps, given by name or whole."""
    whole = tuple(step(one) if isinstance(one, str) else one for one in steps)
    return JobSpec(scope=Scope(), session_id="s", steps=whole, placement=PLACEMENT, **more)


def task(index, status, number=0, **more):
    """Return a step's task."""
    spec = TaskSpec(scope=Scope(), session_id="s", command=COMMAND, placement=PLACEMENT)
    return TaskHead(
        id=step_task_id("job", index, number),
        spec=spec,
        status=status,
        mode="batch",
        session_key="k",
        job_id="job",
        step=index,
        try_=number,
        created_at=datetime.now(UTC),
        **more,
    )


def states(spec, *tasks, **more):
    """Return the steps' states."""
    return [one.status for one in steps_of(spec, tasks, **more)]


def test_steps_run_in_order_by_default():
    """Without `needs` each step waits for the one before it."""
    spec = job("a", "b", "c")
    assert needs_of(spec) == ((), (0,), (1,))
    assert decide(spec, []).start == ((0, 0),)
    assert decide(spec, [task(0, "running")]).start == ()
    assert decide(spec, [task(0, "succeeded")]).start == ((1, 0),)


def test_needs_make_a_graph():
    """With `needs`, what needs nothing begins at once, as many as may."""
    spec = job(step("a"), step("b"), step("c", "a", "b"), max_concurrency=2)
    assert decide(spec, []).start == ((0, 0), (1, 0))
    assert decide(spec, [task(0, "succeeded"), task(1, "running")]).start == ()
    assert decide(spec, [task(0, "succeeded"), task(1, "succeeded")]).start == ((2, 0),)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_max_concurrency_is_honoured(width):
    """Never more steps at once than the job allows, whatever runs already."""
    spec = job(*(step(f"s{n}") for n in range(8)), step("last", "s0"), max_concurrency=width)
    for running in range(width + 1):
        tasks = [task(index, "running") for index in range(running)]
        assert len(decide(spec, tasks).start) == min(width - running, 8 - running)


def test_a_failed_step_skips_what_needs_it():
    """Everything that needs a failed step is skipped, and the job failed."""
    spec = job("a", "b", "c")
    tasks = [task(0, "failed")]
    assert states(spec, *tasks) == ["failed", "skipped", "skipped"]
    plan = decide(spec, tasks)
    assert (plan.status, plan.error_code, plan.error_message) == ("failed", "step_failed", "step 'a' did not succeed")


def test_a_failure_lets_the_rest_of_the_graph_finish():
    """Steps that do not need what failed still run; the job fails at its end."""
    spec = job(step("a"), step("b"), step("c", "a"), max_concurrency=2)
    tasks = [task(0, "failed"), task(1, "running")]
    assert decide(spec, tasks).status is None
    assert decide(spec, [task(0, "failed"), task(1, "succeeded")]).status == "failed"


def test_continue_on_error_counts_as_passed():
    """A step that may fail does not stop the job, nor fail it."""
    spec = job(step("a", continue_on_error=True), "b")
    assert decide(spec, [task(0, "failed")]).start == ((1, 0),)
    assert decide(spec, [task(0, "failed"), task(1, "succeeded")]).status == "succeeded"


def test_a_failed_step_is_tried_again():
    """`retry` gives a failed step that many tries more, each a task of its own."""
    spec = job(step("a", retry=2), "b")
    assert decide(spec, [task(0, "failed")]).start == ((0, 1),)
    assert states(spec, task(0, "failed")) == ["queued", "queued"]
    assert decide(spec, [task(0, "failed"), task(0, "failed", 1)]).start == ((0, 2),)
    done = [task(0, "failed"), task(0, "failed", 1), task(0, "failed", 2)]
    assert decide(spec, done).status == "failed"
    assert steps_of(spec, done)[0].tries == 3


def test_a_try_that_rests_holds_back_only_itself():
    """While a failed step rests the job goes on, other steps begin, and nothing is skipped or over."""
    spec = job(step("a", retry=1), step("b"), step("c", "a", "b"), max_concurrency=2)
    failed = task(0, "failed")
    assert decide(spec, [failed], resting={failed.id}).start == ((1, 0),)
    waiting = decide(spec, [failed, task(1, "succeeded")], resting={failed.id})
    assert (waiting.start, waiting.status) == ((), None)
    assert decide(spec, [failed, task(1, "succeeded")]).start == ((0, 1),)


def test_a_step_without_tries_left_does_not_rest():
    """What will not be tried again ends the job at once, however lately it failed."""
    spec = job(step("a", retry=1))
    tasks = [task(0, "failed"), task(0, "failed", 1)]
    assert decide(spec, tasks, resting={one.id for one in tasks}).status == "failed"


def test_a_cancel_and_the_wall_time_do_not_wait_for_a_rest():
    """A job ends while a step rests when it was canceled or is late."""
    spec = job(step("a", retry=1))
    failed = task(0, "failed")
    assert decide(spec, [failed], resting={failed.id}, canceled=True).status == "canceled"
    assert decide(spec, [failed], resting={failed.id}, overdue=True).error_code == "timeout"


def test_a_canceled_step_is_not_tried_again():
    """Someone who cancels a step's task means it."""
    spec = job(step("a", retry=5))
    assert decide(spec, [task(0, "canceled")]).status == "failed"


def test_a_cancel_ends_canceled_and_not_failed():
    """A job that was canceled is canceled, whatever its steps came to."""
    spec = job("a", "b")
    running = [task(0, "running")]
    assert decide(spec, running, canceled=True).cancel == (running[0].id,)
    assert decide(spec, running, canceled=True).status is None
    for end in ("canceled", "failed", "succeeded"):
        assert decide(spec, [task(0, end)], canceled=True).status == "canceled"
    plan = decide(spec, [], canceled=True)
    assert (plan.status, plan.error_code) == ("canceled", "canceled")


def test_a_cancel_is_passed_on_once():
    """A task that was asked already is not asked again, and is waited for."""
    asked = replace(task(0, "running"), cancel_at=datetime.now(UTC))
    plan = decide(job("a"), [asked], canceled=True)
    assert (plan.cancel, plan.status) == ((), None)


def test_the_wall_time_ends_a_job_with_timeout():
    """Over its time a job cancels what runs and fails with `timeout`."""
    spec = job("a", "b", max_wall_time_s=5)
    assert decide(spec, [task(0, "running")], overdue=True).cancel == (step_task_id("job", 0, 0),)
    plan = decide(spec, [task(0, "canceled")], overdue=True)
    assert (plan.status, plan.error_code) == ("failed", "timeout")


def test_what_was_done_in_time_is_not_late():
    """All steps over: the job's result is theirs, even when it is looked at after its time."""
    assert decide(job("a"), [task(0, "succeeded")], overdue=True).status == "succeeded"


def test_a_job_that_is_over_has_no_waiting_steps():
    """Steps without a task are skipped once the job is over."""
    assert states(job("a", "b"), task(0, "canceled"), over=True) == ["canceled", "skipped"]


@pytest.mark.parametrize(
    ("tasks", "index"),
    [
        ([], -1),
        ([task(0, "queued")], -1),
        ([task(0, "canceled")], -1),
        ([task(0, "starting", attempt=1)], 0),
        ([task(0, "failed", attempt=1)], 0),
        ([task(0, "failed", attempt=1), task(0, "queued", 1)], 0),
        ([task(0, "succeeded", attempt=1), task(1, "queued")], 0),
        ([task(0, "succeeded", attempt=1), task(1, "running", attempt=1)], 1),
    ],
    ids=["none", "queued", "never-began", "starting", "rests", "next-try", "next-queued", "next-runs"],
)
def test_the_current_step_is_the_latest_that_began(tasks, index):
    """A step counts from its first program on, never goes back between tries, and not when it never began."""
    spec = job(step("a", retry=1), "b")
    head = JobHead(
        id="job",
        spec=spec,
        status="running",
        session_key="k",
        steps=steps_of(spec, tasks),
        created_at=datetime.now(UTC),
    )
    assert head.current_step_index == index


def test_ids_of_steps_are_derived():
    """The same step and try is the same task; any other is another."""
    ids = {step_task_id(job_id, index, number) for job_id in "ab" for index in range(3) for number in range(3)}
    assert len(ids) == 18
    assert step_task_id("a", 1, 2) == step_task_id("a", 1, 2)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((), "a job has at least one step"),
        ((step("a"), step("a")), "steps have one name: a"),
        ((step("a", "b"),), "step a needs b, which is no step of this job"),
        ((step("a", "b"), step("b", "a")), "steps need one another in a ring: a, b"),
        ((step("a", "a"),), "steps need one another in a ring: a"),
    ],
    ids=["empty", "twice", "unknown", "ring", "itself"],
)
def test_what_is_no_graph_is_told(steps, words):
    """Names must be unique and known, and nothing may wait for itself."""
    assert graph_problem([(one.name, one.needs) for one in steps]) == words


@st.composite
def graphs(draw):
    """Draw a job whose steps need earlier ones."""
    count = draw(st.integers(1, 7))
    steps = []
    for index in range(count):
        needs = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        steps.append(
            step(
                f"s{index}",
                *(f"s{one}" for one in sorted(needs)),
                retry=draw(st.integers(0, 2)),
                continue_on_error=draw(st.booleans()),
            )
        )
    return job(*steps, max_concurrency=draw(st.integers(1, 4)))


@given(spec=graphs(), ends=st.lists(st.sampled_from(["succeeded", "failed", "canceled"]), min_size=1, max_size=30))
def test_every_job_ends(spec, ends):
    """Whatever the tasks come to, the job ends, within its concurrency, no step after one it needs that did not pass."""
    assert graph_problem([(one.name, one.needs) for one in spec.steps]) is None
    tasks, turn = [], 0
    while (plan := decide(spec, tasks)).status is None:
        running = [one for one in tasks if not one.terminal]
        assert plan.start or running
        assert len(running) + len(plan.start) <= spec.max_concurrency
        for index, number in plan.start:
            for needed in needs_of(spec)[index]:
                last = max((one for one in tasks if one.step == needed), key=lambda one: one.try_)
                assert last.status == "succeeded" or spec.steps[needed].continue_on_error
            tasks.append(task(index, "running", number))
        first = next(one for one in tasks if not one.terminal)
        tasks[tasks.index(first)] = replace(first, status=ends[turn % len(ends)])
        turn += 1
    assert all(one.status in ("succeeded", "failed", "canceled", "skipped") for one in steps_of(spec, tasks, over=True))
    assert len({one.id for one in tasks}) == len(tasks)
