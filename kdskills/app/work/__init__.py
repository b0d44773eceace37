"""Background work as a Host offers it: skills and policy become places to run, heads become progress.

`host.work` is the one object operations use: it asks the policy gate and the engines where a command runs, and submits it.
`watching` keeps watches apart from what they watch.
"""

from kdskills.app.work.service import RunPlace, SkillCall, WorkService, scope_of
from kdskills.app.work.watching import (
    Look,
    ProgressEvent,
    Snapshot,
    Watch,
    WatchEnd,
    Watches,
    job_revision,
    task_revision,
)

__all__ = [
    "Look",
    "ProgressEvent",
    "RunPlace",
    "SkillCall",
    "Snapshot",
    "Watch",
    "WatchEnd",
    "Watches",
    "WorkService",
    "job_revision",
    "scope_of",
    "task_revision",
]
