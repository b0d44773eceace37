"""Rows move by compare-and-set, fenced by the worker that holds them and by the roster of the living."""

import pytest
import sqlalchemy as sa

from kdskills.jobs.model import TASKS, TERMINAL, JobHead, Scope, TaskHead
from kdskills.jobs.queue import Roster
from kdskills.jobs.records import ListQuery, WorkUnreadable, new_row
from kdskills.storage.database import micros, utc_now


class Bench:
    """A place with two workers in its roster and one task."""

    def __init__(self, work, make):
        self.work, self.records = work, work.records
        self.roster = Roster(work)
        self.roster.enter("one", 1)
        self.roster.enter("two", 2)
        self.spec = make.task("s")
        self.add("t")

    def add(self, item, **more):
        """Add a task."""
        row = new_row(item, self.spec, "key", body_hash="", home=self.work.host)
        return self.do(lambda link: self.records.add(link, "task", row | more))

    def do(self, change):
        """Change something in one transaction."""
        return self.work.database.change(change)

    def claim(self, executor, item="t"):
        """Let a worker have the task, which stays queued."""
        self.put("queued", executor, item)

    def move(self, executor, to, item="t", **values):
        """Move the task."""
        return self.do(lambda link: self.records.move(link, "task", item, to, executor, **values))

    def head(self, item="t"):
        """Return the task."""
        return self.do(lambda link: self.records.head(link, TaskHead, item))

    def put(self, status, executor="one", item="t"):
        """Put the task into a state, whatever it was in."""
        table = self.work.tables.tasks
        self.do(
            lambda link: link.execute(table.update().where(table.c.id == item).values(status=status, executor=executor))
        )


@pytest.fixture
def bench(work, make):
    """Return the bench."""
    return Bench(work, make)


def test_a_row_is_added_once(bench):
    """A second row of the same id is no row."""
    assert not bench.add("t", status="running")
    assert bench.head().status == "queued"


@pytest.mark.parametrize("to", sorted(TASKS))
@pytest.mark.parametrize("status", sorted(TASKS))
def test_moves_are_those_of_the_table(bench, status, to):
    """A move happens exactly when the table of states allows it."""
    bench.put(status)
    assert bench.move("one", to) == (to in TASKS[status])
    assert bench.head().status == (to if (to in TASKS[status]) else status)


def test_moves_are_fenced(bench):
    """Only the holder moves a row, and only while it lives."""
    bench.claim("one")
    assert not bench.move("two", "starting")
    bench.roster.leave("one")
    assert not bench.move("one", "starting")
    assert bench.head().status == "queued"


def test_a_word_of_an_earlier_attempt_moves_nothing(bench):
    """What is said of one attempt changes the row only while it is the latest."""
    bench.put("starting")
    assert not bench.move("one", "running", of_attempt=1)
    assert bench.head().status == "starting"
    assert bench.move("one", "running", of_attempt=0)


def test_a_terminal_head_is_final(bench):
    """Later facts change nothing of what is over: not the state, not the exit code, not the output."""
    bench.claim("one")
    bench.move("one", "starting")
    bench.move("one", "succeeded", exit_code=0, stdout_tail=b"done")
    before = bench.head()
    for to in TASKS:
        assert not bench.move("one", to, exit_code=9, stdout_tail=b"no")
    bench.do(lambda link: bench.records.ask_cancel(link, "task", "t", "late"))
    bench.do(lambda link: bench.records.force(link, "task", "t", "failed", executor="one"))
    assert bench.head() == before


def test_bytes_of_programs_are_kept_as_they_are(bench):
    """NUL bytes, broken UTF-8 and 200 KiB of it do not break a row."""
    tail = bytes(range(256)) * 800
    bench.claim("one")
    bench.move("one", "starting")
    bench.move("one", "failed", stdout_tail=tail, stderr_tail=b"\0\0", exit_code=1)
    assert (bench.head().stdout_tail, bench.head().stderr_tail) == (tail, b"\0\0")


def test_a_cancel_of_what_waits_is_done(bench):
    """A queued row is canceled by the asking itself, also when a worker has it in hand."""
    bench.claim("one")
    assert bench.do(lambda link: bench.records.ask_cancel(link, "task", "t", "why")) == "canceled"
    assert not bench.move("one", "starting")


def test_a_cancel_of_what_runs_is_asked_once(bench):
    """The first reason stays; asking again is no error."""
    bench.put("running")
    for reason in ("first", "second"):
        assert bench.do(lambda link, r=reason: bench.records.ask_cancel(link, "task", "t", r)) == "asked"
    assert (bench.head().status, bench.head().cancel_reason) == ("running", "first")


def test_force_needs_a_row_nobody_alive_holds(bench):
    """Only what nobody alive holds is ended from outside, and only as it was seen."""
    force = bench.records.force
    bench.put("running")
    assert not bench.do(lambda link: force(link, "task", "t", "canceled", executor="one"))
    bench.roster.leave("one")
    assert not bench.do(lambda link: force(link, "task", "t", "canceled", executor="other"))
    assert bench.do(lambda link: force(link, "task", "t", "canceled", executor="one"))
    assert bench.head().status == "canceled"


def test_the_first_that_is_not_over_holds_a_session(bench):
    """The holder told to callers is the oldest task or job of the session, and no step of a job."""
    bench.add("step", job_id="j", created_at=1)
    bench.add("u")
    assert bench.do(lambda link: bench.records.holder(link, "key")) == "t"
    bench.put("failed")
    assert bench.do(lambda link: bench.records.holder(link, "key")) == "u"
    assert bench.do(lambda link: bench.records.holder(link, "nobody's")) is None


def test_listings_show_one_scope(bench):
    """Tenant and project always bind; the agent unless the reader is of the project."""
    for name in ("tenant", "project", "agent"):
        bench.spec = bench.spec.model_copy(update={"scope": Scope(**{name: "x"})})
        bench.add(name)
    listed = {
        (agent, everyone): [
            head.id
            for head in bench.do(
                lambda link, a=agent, e=everyone: bench.records.heads(
                    link, TaskHead, ListQuery(Scope(agent=a), any_agent=e)
                )
            )
        ]
        for agent in ("local", "x")
        for everyone in (False, True)
    }
    assert sorted(listed["local", True]) == sorted(listed["x", True]) == ["agent", "t"]
    assert (listed["local", False], listed["x", False]) == (["t"], ["agent"])


def test_lists_leave_long_columns_where_they_are(bench, make):
    """What a row of a list shows is read, and not what tasks printed; a single head has all of it."""
    job = new_row("j", make.job("a", make.step("b", retry=1), traceparent="x"), "key", body_hash="", home=None)
    bench.do(lambda link: bench.records.add(link, "job", job | {"status": "running"}))
    bench.add("a", job_id="j", step=0, attempt=1, status="succeeded", stdout_tail=b"long", **{"try": 0})
    bench.add("b0", job_id="j", step=1, attempt=1, status="failed", stderr_tail=b"long", **{"try": 0})
    bench.add("b1", job_id="j", step=1, status="queued", **{"try": 1})
    wanted, asked = ListQuery(Scope()), []
    sa.event.listen(bench.work.database.engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
    tasks = bench.do(lambda link: bench.records.heads(link, TaskHead, wanted))
    (listed,) = bench.do(lambda link: bench.records.heads(link, JobHead, wanted))
    assert len(asked) == 3
    assert not [words for words in asked if "_tail" in words]
    assert {head.id: head.stdout_tail for head in tasks}["a"] == b""
    one = bench.do(lambda link: bench.records.head(link, JobHead, "j"))
    facts = [(step.status, step.tries, step.begun, step.task.id, step.task.attempt) for step in listed.steps]
    assert facts == [(step.status, step.tries, step.begun, step.task.id, step.task.attempt) for step in one.steps]
    assert (listed.current_step_index, listed.spec) == (one.current_step_index, one.spec)
    assert (one.steps[0].task.stdout_tail, listed.steps[0].task.stdout_tail) == (b"long", b"")
    assert bench.head("b0").stderr_tail == b"long"


def test_what_a_later_version_wrote_hides_nothing_of_a_list(bench, make):
    """A row this version does not understand is listed by what its columns say; asked for by its id it is refused."""
    job = new_row("j", make.job("a"), "key", body_hash="", home=None)
    bench.do(lambda link: bench.records.add(link, "job", job))
    for item, more in (("step", {"job_id": "j", "step": 0, "try": 0}), ("files", {"artifacts": '[{"of_a_later": 1}]'})):
        bench.add(item, **more)
    later = sa.literal('{"of_a_later_version": true}')
    for table, item in (
        (bench.work.tables.tasks, "t"),
        (bench.work.tables.tasks, "step"),
        (bench.work.tables.jobs, "j"),
    ):
        bench.do(lambda link, t=table, i=item: link.execute(t.update().where(t.c.id == i).values(spec=later)))
    tasks = bench.do(lambda link: bench.records.heads(link, TaskHead, ListQuery(Scope())))
    assert {head.id for head in tasks} == {"t", "step", "files"}
    seen = next(head for head in tasks if head.id == "t")
    assert (seen.status, seen.mode, seen.scope, seen.spec.session_id) == ("queued", "batch", Scope(), "s")
    assert (seen.spec.placement.skill_name, seen.spec.command.argv) == ("public.x", ())
    (listed,) = bench.do(lambda link: bench.records.heads(link, JobHead, ListQuery(Scope())))
    assert (listed.id, listed.status, listed.steps, listed.spec.session_id) == ("j", "queued", (), "s")
    for kind, item in ((TaskHead, "t"), (TaskHead, "files"), (JobHead, "j")):
        with pytest.raises(WorkUnreadable) as told:
            bench.do(lambda link, k=kind, i=item: bench.records.head(link, k, i))
        assert (told.value.code, told.value.details["id"]) == ("work_unreadable", item)


def test_times_survive_a_row(bench):
    """Moments are kept to the microsecond."""
    now = utc_now()
    bench.put("running")
    bench.move("one", "failed", finished_at=micros(now))
    assert bench.head().finished_at == now
    assert bench.head().status in TERMINAL


@pytest.mark.parametrize("item", ["", "a\0b", "\ud800", "t\u0308", "x" * 5000])
def test_no_id_is_no_row(bench, item):
    """What no database can keep, or never had, is just not there."""
    assert bench.do(lambda link: bench.records.head(link, TaskHead, item)) is None
    assert bench.do(lambda link: bench.records.head(link, JobHead, item)) is None


def test_a_reason_has_no_nul(bench):
    """Words with a NUL byte, which PostgreSQL refuses, are kept without it."""
    bench.do(lambda link: bench.records.ask_cancel(link, "task", "t", "a\0b"))
    assert (bench.head().cancel_reason, bench.head().error_code) == ("a\N{REPLACEMENT CHARACTER}b", "canceled")


def test_who_holds_a_row_in_its_own_session_is_not_in_its_way(bench):
    """The holder of a session, but for one: a task that asks is not refused for itself."""
    assert bench.do(lambda link: bench.records.holder(link, "key", but="t")) is None
    bench.add("u")
    assert bench.do(lambda link: bench.records.holder(link, "key", but="t")) == "u"


def test_a_row_goes_on_for_its_living_holder_only(bench):
    """Held, alive, not over and not canceled: all of it, or nothing new begins."""

    def goes_on(executor="one"):
        return bench.do(lambda link: bench.records.goes_on(link, "task", "t", executor))

    assert not goes_on()
    bench.put("running")
    assert goes_on()
    assert not goes_on("two")
    bench.roster.leave("one")
    assert not goes_on()
    bench.roster.enter("one-again", 1)
    bench.put("running", "one-again")
    assert goes_on("one-again")
    bench.do(lambda link: bench.records.ask_cancel(link, "task", "t", ""))
    assert not goes_on("one-again")
