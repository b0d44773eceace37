"""Ask for the active subsystem where there is none."""

import kdskills
import kdskills_runtime
from kdskills.errors import NoActiveSkills

try:
    kdskills.get_active_skills_subsystem()
except NoActiveSkills as error:
    kdskills_runtime.report(error.code)
