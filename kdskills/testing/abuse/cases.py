"""The table of hostile programs, in the order of their areas."""

from __future__ import annotations

from typing import Final

from kdskills.testing.abuse.case import Case
from kdskills.testing.abuse.cases_around import AROUND
from kdskills.testing.abuse.cases_inside import INSIDE

__all__ = ["CASES", "Case"]

CASES: Final[tuple[Case, ...]] = INSIDE + AROUND
