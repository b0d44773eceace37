"""The worker: the one process that takes work from the queue and sees it through.

`Worker` holds a slot, beats, recovers and runs the two workflows; `TaskRun` sees one task through, `JobRun` one job.
"""

from kdskills.jobs.worker.about import AboutWork, about
from kdskills.jobs.worker.context import OutputKeeper, TaskOutput
from kdskills.jobs.worker.worker import BURIED, Worker

__all__ = ["BURIED", "AboutWork", "OutputKeeper", "TaskOutput", "Worker", "about"]
