"""Quotas by project: what is counted, who is refused and told what, and who waits in nobody's way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kdskills.jobs.attempts import Verdict
from kdskills.jobs.model import Placement, Scope, TaskHead
from kdskills.jobs.queue import Capacity
from kdskills.jobs.quotas import DAY_US, FreePlaces, QuotaExceeded
from kdskills.jobs.records import new_row
from kdskills.jobs.settings import QuotaLimits, Quotas
from kdskills.storage.database import micros, utc_now

NOON = 20_000 * DAY_US + DAY_US // 2
ACME = Scope(project="acme")
ROOM = Capacity(batch=100, service=0, job=0)


@pytest.fixture
def bounded(open_place):
    """Return a function that opens the place with quotas."""
    return lambda **quotas: open_place(quotas=Quotas(**quotas))


def add(work, make, item, scope=ACME, **more):
    """Add a task as a submission does, and count it at noon."""
    row = new_row(item, make.task(scope=scope), item, body_hash="", home=work.host) | more

    def change(link):
        work.records.add(link, "task", row)
        work.quotas.admit(link, scope, 1, NOON)

    work.database.change(change)


def used(work, scope=ACME, now=NOON):
    """Return what a project has."""
    return work.database.ask(lambda link: work.quotas.usage(link, scope, now, 1000))


def claim(work, batch=100):
    """Claim as a worker `me` of this host, and return ids."""
    table, now = work.tables.workers, micros(utc_now())
    row = {"executor": "me", "host": work.host, "slot": 0, "pid": 1, "name": "n", "state": "live"}

    def change(link):
        if link.execute(table.select().where(table.c.executor == "me")).first() is None:
            link.execute(table.insert().values(**row, started_at=now, beat_at=now))
        mine = [item[0] for item in link.execute(work.tables.tasks.select().with_only_columns(work.tables.tasks.c.id))]
        return work.queue.claim(link, "me", ROOM._replace(batch=batch), mine)

    return [head.id for head in work.database.change(change).tasks]


def test_a_projects_own_limits_go_before():
    """What a project's limits name counts for it, none of it included; what they leave out is as for every project."""
    quotas = Quotas(queued=5, tasks_per_day=10, projects={"acme": QuotaLimits(queued=None, running=2)})
    acme, other = quotas.of("acme"), quotas.of("other")
    assert (acme.queued, acme.running, acme.tasks_per_day) == (None, 2, 10)
    assert (other.queued, other.running, other.tasks_per_day) == (5, None, 10)


@pytest.mark.parametrize(
    "bad", [{"queued": -1}, {"running": 0}, {"cpu_s_per_day": -0.5}, {"cpu": 1}, {"queued": "many"}]
)
def test_limits_that_are_none(bad):
    """A limit that cannot be one, or has no such name, is an error where it is set."""
    with pytest.raises(ValidationError):
        Quotas(**bad)
    with pytest.raises(ValidationError):
        Quotas(projects={"acme": bad})


@pytest.mark.parametrize(("quota", "after"), [("queued", 5), ("tasks_per_day", DAY_US // 2_000_000)])
def test_one_more_is_refused(bounded, make, quota, after):
    """A project has as many as its quota says; one more is refused with everything a caller needs, and not counted."""
    work = bounded(**{quota: 2})
    add(work, make, "a")
    add(work, make, "b")
    for item in ("c", "d"):
        with pytest.raises(QuotaExceeded) as refused:
            add(work, make, item)
        assert refused.value.details == {"quota": quota, "limit": 2, "used": 3, "retry_after": after}
    assert (used(work).queued, used(work).tasks_per_day) == (2, 2)
    add(work, make, "e", Scope(project="other"))
    add(work, make, "f", Scope(tenant="far", project="acme"))


def test_a_day_begins_at_nothing(bounded, make):
    """What was counted yesterday is no part of today, and is forgotten with the work that is."""
    work = bounded(tasks_per_day=1)
    add(work, make, "a")
    assert used(work, now=NOON + DAY_US).tasks_per_day == 0
    work.database.change(lambda link: work.quotas.admit(link, ACME, 1, NOON + DAY_US))
    work.database.change(lambda link: work.quotas.forget(link, NOON + DAY_US))
    assert (used(work).tasks_per_day, used(work, now=NOON + DAY_US).tasks_per_day) == (0, 1)


@pytest.mark.parametrize(
    ("engine", "cpu_ms", "duration_ms", "counted_s"),
    [
        ("subprocess", 1500, 9000, 1.5),
        ("bubblewrap", 0, 9000, 0.0),
        ("docker", 30, 9000, 9.0),
        ("of-a-plugin", 30, 10, 0.03),
        ("subprocess", None, 9000, 9.0),
    ],
)
def test_processor_time(bounded, make, engine, cpu_ms, duration_ms, counted_s):
    """What was measured counts; where nobody measured, the time that it took does; used up, nothing more is taken today."""
    work = bounded(cpu_s_per_day=0.01)
    add(work, make, "a")
    head = work.database.ask(lambda link: work.records.head(link, TaskHead, "a"))
    placement = Placement(engine=engine, skill_name="x", version_hash="0")
    head = replace(head, spec=head.spec.model_copy(update={"placement": placement}))
    verdict = Verdict(status="ok", cpu_ms=cpu_ms, duration_ms=duration_ms)
    work.database.change(lambda link: work.quotas.charge(link, head, verdict, NOON))
    assert used(work).cpu_s_per_day == pytest.approx(counted_s)
    if counted_s:
        with pytest.raises(QuotaExceeded, match="cpu_s_per_day"):
            add(work, make, "b")


def test_bytes_of_artifacts(bounded, make):
    """A project that keeps more than it may gets nothing more done until some of it is gone."""
    work = bounded(artifact_bytes=100)
    row = {
        "tenant": ACME.tenant,
        "project": "acme",
        "agent": "x",
        "path": "f",
        "sha256": "0",
        "size": 101,
        "created_at": 1,
    }
    row |= {"id": "art_1", "mime": "x", "mode": 420, "skill_name": "x", "version_hash": "0"}
    work.database.change(lambda link: link.execute(work.tables.artifacts.insert().values(**row)))
    with pytest.raises(QuotaExceeded, match="artifact_bytes"):
        add(work, make, "a")
    work.database.change(lambda link: link.execute(work.tables.artifacts.delete()))
    add(work, make, "a")


def test_no_more_run_than_may(bounded, make):
    """So many of a project are claimed as may run, in the order they came; what ends makes room for the next."""
    work = bounded(projects={"acme": {"running": 2}})
    for item in "abcd":
        add(work, make, item, created_at=ord(item))
    assert claim(work) == ["a", "b"]
    assert claim(work) == []
    table = work.tables.tasks
    work.database.change(lambda link: link.execute(table.update().where(table.c.id == "a").values(status="succeeded")))
    assert claim(work) == ["c"]


def test_a_project_that_waits_is_in_nobodys_way(bounded, make):
    """Though everything of a project at its limit came first, the next project's work is claimed with the one place there is."""
    work = bounded(projects={"acme": {"running": 1}})
    for number in range(20):
        add(work, make, f"a{number:02}", created_at=number)
    add(work, make, "z", Scope(project="other"), created_at=99)
    assert claim(work, batch=1) == ["a00"]
    assert claim(work, batch=1) == ["z"]


projects = st.sampled_from(["acme", "other", "third"])


@given(st.lists(projects), st.dictionaries(projects, st.integers(1, 4)))
def test_places_are_given_once(wanted, limits):
    """However claims come, no project begins more than it may, and one that may begin is never turned away."""
    places = FreePlaces(Quotas(projects={name: QuotaLimits(running=most) for name, most in limits.items()}), {})
    begun: dict[str, int] = {}
    for name in wanted:
        may = name not in limits or begun.get(name, 0) < limits[name]
        assert places.take("main", name) is may
        begun[name] = begun.get(name, 0) + may
    assert set(places.busy) == {("main", name) for name, most in limits.items() if begun.get(name, 0) >= most}


def test_jobs_wait_too(bounded, make):
    """A job that waits counts among what is queued before any of its steps is there."""
    work = bounded(queued=1)
    row = new_row("j", make.job("one", scope=ACME), "j", body_hash="", home=work.host)
    work.database.change(lambda link: work.records.add(link, "job", row))
    assert used(work).queued == 1
    with pytest.raises(QuotaExceeded, match="queued"):
        add(work, make, "a")


@pytest.mark.parametrize("quotas", [{"queued": 0}, {"tasks_per_day": 0}, {"cpu_s_per_day": 0}, {"artifact_bytes": 99}])
def test_what_would_be_refused_is_known_before(bounded, quotas):
    """Before inputs are kept the same refusal is told, with the bytes they would add, and nothing is counted."""
    work = bounded(**quotas)
    with pytest.raises(QuotaExceeded, match=next(iter(quotas))):
        work.database.ask(lambda link: work.quotas.require_room(link, ACME, 100, NOON))
    assert used(work).tasks_per_day == 0
    free = bounded(queued=1, tasks_per_day=1, artifact_bytes=100)
    free.database.ask(lambda link: free.quotas.require_room(link, ACME, 100, NOON))
