"""Background work as a Host offers it: skills and policy become places to run, heads become progress.

`host.work` is the one object operations use. `placing` asks the policy gate and the engines, `watching` keeps watches apart
from what they watch, `texts` turns bytes of programs into text.
"""

from kdskills.app.work.owning import scope_of
from kdskills.app.work.placing import Asked, Placed
from kdskills.app.work.revisions import job_revision, task_revision
from kdskills.app.work.service import WorkService
from kdskills.app.work.texts import Text, text_of
from kdskills.app.work.watching import Event, Look, Seen, Watch, Watched, Watches

__all__ = [
    "Asked",
    "Event",
    "Look",
    "Placed",
    "Seen",
    "Text",
    "Watch",
    "Watched",
    "Watches",
    "WorkService",
    "job_revision",
    "scope_of",
    "task_revision",
    "text_of",
]
