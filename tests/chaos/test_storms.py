"""The storms of the promises in full: many minutes, so they run only where `KDSKILLS_CHAOS=full` asks for them."""

import os

import pytest

from kdskills.testing.journal_storm import journal_storm
from kdskills.testing.work import job_storm, kill_storm, labs, outage_storm, sessions_storm, two_host_storm

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("KDSKILLS_CHAOS") != "full", reason="KDSKILLS_CHAOS=full runs the storms in full"
    ),
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("chaos"),
]

both = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)


@both
async def test_three_hundred_tasks(database):
    """300 tasks, 20 kill -9: none lost, none twice."""
    async with labs("a", url=database) as (lab,):
        report = await kill_storm(lab, tasks=300, kills=20, deadline_s=1800)
        assert report.clean, (report, lab.said())


@pytest.mark.parametrize("burners", [0, 8], ids=["low-load", "high-load"])
@pytest.mark.parametrize("storm", range(5))
def test_clients_that_come_and_go(tmp_path, burners, storm):
    """Four processes of three clients each, 2,000 keys: one claim for each key, nobody fails, the file stays whole."""
    report = journal_storm(tmp_path, processes=4, clients=3, keys=2000, burners=burners)
    assert report.clean, (storm, report)


@both
@pytest.mark.parametrize("load", [0, 4], ids=["calm", "loaded"])
async def test_sessions_whose_worker_and_launcher_die_together(database, load):
    """Ten storms of 100 tasks in 20 sessions, worker and launcher killed at once: none lost, stuck, doubled or overtaken."""
    for seed in range(10):
        async with labs("a", url=database) as (lab,):
            report = await sessions_storm(lab, tasks=100, sessions=20, kills=8, load=load, seed=seed, deadline_s=300)
            assert report.clean, (seed, report, lab.said())


@both
async def test_twenty_jobs(database):
    """20 jobs of 4 steps, 8 kill -9: 80 step runs, in order."""
    async with labs("a", url=database) as (lab,):
        report = await job_storm(lab, jobs=20, steps=4, kills=8, deadline_s=1800)
        assert (report.clean, report.submitted) == (True, 80), (report, lab.said())


@pytest.mark.needs("postgres")
async def test_two_hosts(cluster):
    """Two hosts, 400 tasks, 25 kill -9: none lost, none twice, never more at once than allowed."""
    async with labs("a", "b", url=cluster.create("two"), global_concurrency=4) as made:
        report = await two_host_storm(made, tasks=400, kills=25, deadline_s=2400)
        assert report.clean, (report, *(lab.said() for lab in made))
        assert report.most_at_once <= 4


@pytest.mark.needs("postgres")
@pytest.mark.parametrize(
    ("mode", "away_s"), [("fast", 0.0), ("immediate", 0.0), ("fast", 8.0)], ids=["restart", "crash", "outage"]
)
async def test_a_server_away(cluster, mode, away_s):
    """A restart, a crash and 8 s without the server: nothing lost, nothing failed."""
    async with labs("a", url=cluster.create(f"away_{mode}_{away_s:.0f}")) as (lab,):
        report = await outage_storm(lab, cluster, tasks=60, away_s=away_s, mode=mode, deadline_s=900)
        assert report.clean, (report, lab.said())
