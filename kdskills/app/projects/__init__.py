"""Projects of the service: uploaded skills and their versions, which one is active, who changed what.

`Projects` is the one object doors and operations use. `records` speaks to the tables, `folders` keeps versions on disk,
`views` puts a project's skills under its policy.
"""

from kdskills.app.projects.model import (
    AuditRow,
    CollectReport,
    PinnedVersion,
    Project,
    SkillFile,
    SkillState,
    SkillVersion,
    UploadReport,
)
from kdskills.app.projects.service import Projects

__all__ = [
    "AuditRow",
    "CollectReport",
    "PinnedVersion",
    "Project",
    "Projects",
    "SkillFile",
    "SkillState",
    "SkillVersion",
    "UploadReport",
]
