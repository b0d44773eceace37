"""Background work under test: workers that are killed, databases that go away, and a ledger of what really ran."""

from kdskills.testing.work.lab import Ledger, WorkLab, end_attempts, keep_finished, labs
from kdskills.testing.work.postgres import Cluster, private_cluster
from kdskills.testing.work.storms import (
    Report,
    job_storm,
    kill_storm,
    outage_storm,
    service_storm,
    sessions_storm,
    two_host_storm,
)

__all__ = [
    "Cluster",
    "Ledger",
    "Report",
    "WorkLab",
    "end_attempts",
    "job_storm",
    "keep_finished",
    "kill_storm",
    "labs",
    "outage_storm",
    "private_cluster",
    "service_storm",
    "sessions_storm",
    "two_host_storm",
]
