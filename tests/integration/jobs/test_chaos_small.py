"""The storms of the promises, small enough for every run: workers killed with -9, servers taken away."""

import asyncio

import pytest

from kdskills.testing.work import (
    failover_storm,
    failover_url,
    fleet,
    fleet_storm,
    job_storm,
    kill_storm,
    labs,
    outage_storm,
    private_cluster,
    service_storm,
    sessions_storm,
    two_host_storm,
)

pytestmark = pytest.mark.xdist_group("chaos")

both = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.needs("postgres"))], indirect=True
)


@pytest.mark.timeout(300)
@both
async def test_killed_workers_lose_nothing(database):
    """Tasks under kill -9 of their worker: none lost, none run twice."""
    async with labs("a", url=database) as (lab,):
        report = await kill_storm(lab, tasks=40, kills=4, deadline_s=200)
        assert report.clean, (report, lab.said())


@pytest.mark.timeout(300)
@both
async def test_sessions_go_on_after_worker_and_launcher_died_together(database):
    """Sessions under kill -9 of worker and launcher at once: none lost, none stuck, none overtaken."""
    async with labs("a", url=database) as (lab,):
        report = await sessions_storm(lab, tasks=60, sessions=12, kills=5, deadline_s=200)
        assert report.clean, (report, lab.said())


@pytest.mark.timeout(300)
@both
async def test_killed_workers_keep_steps_in_order(database):
    """Jobs under kill -9 of their worker: every step once, in its order."""
    async with labs("a", url=database) as (lab,):
        report = await job_storm(lab, jobs=4, steps=4, kills=3, deadline_s=200)
        assert (report.clean, report.submitted) == (True, 16), (report, lab.said())


@pytest.mark.timeout(300)
@pytest.mark.needs("postgres")
async def test_two_hosts_share_the_work(cluster):
    """Two hosts on one database under kill -9: none lost, none twice, and never more at once than allowed."""
    async with labs("a", "b", url=cluster.create("two_hosts"), global_concurrency=3) as made:
        report = await two_host_storm(made, tasks=40, kills=4, deadline_s=200)
        assert report.clean, (report, *(lab.said() for lab in made))
        assert report.most_at_once <= 3


@pytest.mark.timeout(300)
@pytest.mark.needs("postgres")
@pytest.mark.parametrize(
    ("mode", "away_s"), [("fast", 0.0), ("immediate", 0.0), ("fast", 3.0)], ids=["restart", "crash", "outage"]
)
async def test_a_server_that_goes_away(cluster, mode, away_s):
    """A restart, a crash and an outage of the database: nothing lost, nothing failed, nothing twice."""
    async with labs("a", url=cluster.create(f"away_{mode}_{away_s:.0f}")) as (lab,):
        report = await outage_storm(lab, cluster, tasks=12, away_s=away_s, mode=mode, deadline_s=200)
        assert report.clean, (report, lab.said())


@pytest.mark.timeout(300)
@pytest.mark.needs("postgres")
async def test_a_server_that_fails_over():
    """A standby takes over from a server that crashed in the middle of a transaction: nothing lost, half-written or twice."""
    with private_cluster() as cluster:
        cluster.create("failover")
        with cluster.standby() as standby:
            async with labs("a", url=failover_url("failover", cluster, standby)) as (lab,):
                report = await failover_storm(lab, cluster, standby, tasks=12, deadline_s=200)
                assert report.clean, (report, lab.said())


@pytest.mark.timeout(300)
@pytest.mark.needs("bubblewrap")
@both
async def test_a_service_outlives_its_workers(database):
    """A service is asked without a pause while its worker is killed: every request is answered."""

    async def ask(host, port):
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            line = await asyncio.wait_for(reader.readline(), 60)
            writer.close()
        except OSError:
            return False
        return b" 200 " in line

    async with labs("a", url=database) as (lab,):
        report = await service_storm(lab, kills=2, ask=ask)
        assert report.clean, (report, lab.said())
        assert report.submitted > 2


@pytest.mark.timeout(300)
@pytest.mark.needs("postgres")
async def test_a_fleet_under_storm(cluster):
    """Hosts that are killed, cut off or full: no task lost or begun more often than it allows, and every one is counted."""
    async with fleet(cluster.create("fleet"), 3, lease_s=2.0, beat_s=0.5) as (door, members):
        report = await fleet_storm(door, members, seconds=8.0, rate=4.0, pause_s=(0.2, 1.0), deadline_s=200)
        assert report.clean, (report, *(member.lab.said() for member in members))
    assert report.begun - report.again >= report.submitted - report.told_lost
    assert report.deeds.keys() >= {"worker", "launcher", "host", "partition"}
