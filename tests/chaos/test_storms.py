"""The storms of the promises in full (spec work §6): many minutes, so they run only where `KDSKILLS_CHAOS=full` asks for them."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from kdskills.testing.work import WorkLab, job_storm, kill_storm, outage_storm, private_cluster, two_host_storm

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


@pytest.fixture(scope="module")
def cluster():
    """Return a running PostgreSQL server."""
    with private_cluster() as made:
        yield made


@pytest.fixture
def database(request):
    """Return the URL of an empty database; None for SQLite in the state folder."""
    if request.param == "sqlite":
        return None
    return request.getfixturevalue("cluster").create(f"kd_{request.node.originalname[5:40]}")


@contextlib.asynccontextmanager
async def labs(*hosts, url=None, **jobs):
    """Give one host per name, in one folder; everything of them is ended."""
    with tempfile.TemporaryDirectory(prefix="kdskills-chaos-") as top:
        made = [WorkLab(Path(top), url, host=host, **jobs) for host in hosts]
        try:
            yield made
        finally:
            for lab in made:
                await lab.aclose()


@both
async def test_three_hundred_tasks(database):
    """300 tasks, 20 kill -9: none lost, none twice."""
    async with labs("a", url=database) as (lab,):
        report = await kill_storm(lab, tasks=300, kills=20, deadline_s=1800)
        assert report.clean, (report, lab.said())


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
