"""Stage 1: put the skills of the descriptor in force before the program starts."""

from __future__ import annotations

from typing import Any, Literal, cast

from kdskills_runtime.reporting import Reporter

Verify = Literal["catalog", "tree", "none"]


def restore(descriptor: dict[str, Any], verify: str, reporter: Reporter) -> bool:
    """Activate the subsystem *descriptor* describes and leave it active; False when it was refused and reported.

    A root or skill that is missing or differs is `skills_mismatch`; any other fault of the descriptor keeps its own
    code.
    """
    try:
        from kdskills.errors import KdskillsError, RootChanged, RootMissing
        from kdskills.turn import set_skills_descriptor
    except ImportError as error:
        reporter.failed("skills", "skills_unavailable", f"kdskills cannot be imported here: {error}")
        return False
    try:
        set_skills_descriptor(descriptor, verify=cast("Verify", verify))
    except (RootMissing, RootChanged) as error:
        reporter.refused("skills_mismatch", error.message)
        return False
    except KdskillsError as error:
        reporter.refused(error.code, error.message)
        return False
    return True
