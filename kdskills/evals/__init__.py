"""Evaluations: does a model pick a skill, does the skill help, and what did a change break.

`read` understands the files of a skill or bundle, `run` runs what they say and writes an iteration, `read_iteration` reads one back,
`report` makes a page of it.
`grade` says what checks and a judge make of an outcome, `judge` of all that an iteration kept, and `run_rows` holds scripts to the rows that `read_rows` understands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.evals.files import Eval, EvalSet, read
    from kdskills.evals.grading import CHECKS, Outcome, grade
    from kdskills.evals.rejudging import judge
    from kdskills.evals.reports import report
    from kdskills.evals.results import Iteration, RowResult, read_iteration
    from kdskills.evals.retrieval import retrieval_figures
    from kdskills.evals.runs import EvalProgress, run
    from kdskills.evals.scripts import read_rows, run_rows
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".files": "Eval EvalSet read",
            ".grading": "CHECKS Outcome grade",
            ".rejudging": "judge",
            ".reports": "report",
            ".results": "Iteration RowResult read_iteration",
            ".retrieval": "retrieval_figures",
            ".runs": "EvalProgress run",
            ".scripts": "read_rows run_rows",
        },
    )

__all__ = [
    "CHECKS",
    "Eval",
    "EvalProgress",
    "EvalSet",
    "Iteration",
    "Outcome",
    "RowResult",
    "grade",
    "judge",
    "read",
    "read_iteration",
    "read_rows",
    "report",
    "retrieval_figures",
    "run",
    "run_rows",
]
