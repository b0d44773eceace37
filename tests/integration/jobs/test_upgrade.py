"""A database that 0.1.0 wrote, with work in every state, is taken over: nothing is lost, doubled or out of order."""

import itertools
import re
import shutil
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from kdskills.app.worker.launcher import warm_starter
from kdskills.jobs.attempts import AttemptOrder, Attempts
from kdskills.jobs.client import JobsClient, new_id
from kdskills.jobs.model import JobHead, TaskHead
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.xdist_group("work"), pytest.mark.timeout(300)]

FIXTURES = Path(__file__).with_name("fixtures")
"""Dumps made by 0.1.0 on a worker with three places, killed with its launcher and all programs.

Of session `s` a task ran, and a task, a job and a task waited; of a job of three steps the first ran; one task was
`starting`, one waited without a session, and a job of a graph waited for a place with two of its steps.
"""


def load(database, text):
    """Fill an empty database with a dump."""
    if database is None:
        return
    lines = [line for line in text.splitlines() if not line.startswith("\\")]
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write("\n".join(lines))
        file.flush()
        psql = max(Path("/usr/lib/postgresql").glob("*/bin/psql"))
        subprocess.run(
            [psql, "-q", "-v", "ON_ERROR_STOP=1", "-f", file.name, database], check=True, capture_output=True
        )


@pytest.fixture
async def lab(database):
    """Return the host of the dump, whose programs that ran are made to run again; everything of it is ended."""
    kind = "sqlite" if database is None else "postgresql"
    text = (FIXTURES / f"work_0_1_0_{kind}.sql").read_text()
    text += f"UPDATE {'' if database is None else 'public.'}kd_jobs SET started_at = {round(time.time() * 1_000_000)} WHERE started_at > 0;"  # their time would be over
    top = Path(tempfile.mkdtemp(prefix="kdskills-upgrade-"))
    lab = WorkLab(top, database)
    state = lab.settings.state_dir
    state.mkdir(mode=0o700)
    (state / "host").write_text(re.match(r"-- host (\w+)", text)[1] + "\n")
    if database is None:
        with sqlite3.connect(state / "work.db") as link:
            link.executescript(text)
        link.close()
    load(database, text)
    yield lab
    await lab.aclose()
    shutil.rmtree(top)


async def run_again(lab, items):
    """Start the attempts of tasks that ran, as their worker had done before it was killed."""
    starter = warm_starter(lab.settings)
    attempts = Attempts(lab.settings.state_dir, starter)
    try:
        for item in items:
            head = await lab.client.head(TaskHead, lab.scope, item)
            folder = attempts.session_dir(head.session_key)
            await attempts.start(AttemptOrder(task_id=item, attempt=1, spec=head.spec, session_dir=folder))
    finally:
        starter.close()


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)
async def test_work_of_the_version_before_goes_on(lab):
    """What ran is adopted, what waited runs in its order, and what was over stays as it was."""
    client, scope = lab.client, lab.scope
    tasks = {key: new_id("task", scope, key) for key in ("done", "running", "starting", "second", "fourth", "free")}
    jobs = {key: new_id("job", scope, key) for key in ("job", "third", "waiting")}
    step = (await client.head(JobHead, scope, jobs["job"])).steps[0].task
    await run_again(lab, [tasks["running"], step.id])
    lab.start()
    heads = {key: await client.wait(TaskHead, scope, item, 120) for key, item in tasks.items()}
    ends = {key: await client.wait(JobHead, scope, item, 120) for key, item in jobs.items()}
    assert {key: head.status for key, head in heads.items()} == dict.fromkeys(tasks, "succeeded"), lab.said()
    assert {key: head.status for key, head in ends.items()} == dict.fromkeys(jobs, "succeeded"), lab.said()
    assert {head.attempt for head in heads.values()} == {1}
    assert (heads["running"].stdout_tail, heads["starting"].stdout_tail) == (b"a\nb\n", b"e\n")
    line = [heads["running"], heads["second"], ends["third"], heads["fourth"]]
    assert all(one.finished_at <= other.started_at for one, other in itertools.pairwise(line))
    assert [one.task.attempt for one in (*ends["job"].steps, *ends["waiting"].steps)] == [1] * 6


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)
async def test_nothing_of_the_old_queue_stays(lab):
    """Tables of the engine that was beside the heads are gone, and its workers are given up."""
    import sqlalchemy as sa

    client = JobsClient(lab.settings.work_database, lab.settings.state_dir)
    work = await client.work()
    inspector = sa.inspect(work.database.engine)
    assert "dbos" not in inspector.get_schema_names()
    assert not [name for name in inspector.get_table_names() if not name.startswith("kd_")]
    assert work.database.ask(work.roster.live) == []
    await client.aclose()
