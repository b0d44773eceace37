"""Background work under test: workers that are killed, databases that go away, and a ledger of what really ran."""

from kdskills.testing.work.fleet import FleetHostLab, FleetReport, fleet, fleet_storm
from kdskills.testing.work.lab import Ledger, WorkLab, end_attempts, keep_finished, kill_attempt, labs
from kdskills.testing.work.postgres import Cluster, private_cluster
from kdskills.testing.work.storms import (
    Report,
    failover_storm,
    failover_url,
    job_storm,
    kill_storm,
    outage_storm,
    service_storm,
    sessions_storm,
    two_host_storm,
)

__all__ = [
    "Cluster",
    "FleetHostLab",
    "FleetReport",
    "Ledger",
    "Report",
    "WorkLab",
    "end_attempts",
    "failover_storm",
    "failover_url",
    "fleet",
    "fleet_storm",
    "job_storm",
    "keep_finished",
    "kill_attempt",
    "kill_storm",
    "labs",
    "outage_storm",
    "private_cluster",
    "service_storm",
    "sessions_storm",
    "two_host_storm",
]
