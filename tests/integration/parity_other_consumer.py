"""Ask for another consumer's policy, and for what this one may not have."""

import kdskills
import kdskills_runtime
from kdskills.errors import PolicyUnavailable

code = None
try:
    kdskills.skills_for_consumer("desk.editor")
except PolicyUnavailable as error:
    code = error.code
kdskills_runtime.report(
    {
        "code": code,
        "hidden": [skill for skill in kdskills.get_active_skills_subsystem().snapshot.skills if "embargo" in skill],
        "denied": kdskills.get_skill("press.embargo"),
    }
)
