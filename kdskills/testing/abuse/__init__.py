"""Hostile programs, what must be true of each, and how to put an engine through them."""

from kdskills.testing.abuse.cases import CASES, Case
from kdskills.testing.abuse.run import Verdict, abuse, run_case

__all__ = ["CASES", "Case", "Verdict", "abuse", "run_case"]
