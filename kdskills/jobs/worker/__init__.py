"""The worker: the one process that takes work from the queue and sees it through.

`Worker` holds a slot, beats, claims and recovers; a `TaskRun` sees one task through, a `JobRun` one job.
"""

from kdskills.jobs.worker.context import AboutWork, OutputKeeper, TaskOutput, about
from kdskills.jobs.worker.worker import BURIED, Worker

__all__ = ["BURIED", "AboutWork", "OutputKeeper", "TaskOutput", "Worker", "about"]
