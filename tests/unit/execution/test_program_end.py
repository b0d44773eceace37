"""How an end becomes status, exit code, signal and error."""

from __future__ import annotations

import pytest

from kdskills.execution import ExecError
from kdskills.execution.run import ProgramEnd, status_of

TROUBLE = ExecError("exec", "program_missing", "x")


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ProgramEnd("exited", 0, None, 0), ("ok", 0, None, None)),
        (ProgramEnd("exited", 127, None, 0), ("nonzero", 127, None, None)),
        (ProgramEnd("exited", None, 15, 0), ("nonzero", 143, 15, None)),
        (ProgramEnd("timeout", 0, None, 0), ("timeout", None, None, None)),
        (ProgramEnd("timeout", None, 15, 0), ("timeout", None, None, None)),
        (ProgramEnd("cancelled", None, 9, 0), ("cancelled", None, None, None)),
        (ProgramEnd("exited", None, None, 0, TROUBLE), ("infra_error", None, None, TROUBLE)),
    ],
)
def test_ends(end, expected):
    """Exit codes are never invented; a program we ended or never started has none."""
    assert status_of(end) == expected


@pytest.mark.parametrize(("number", "code"), [(24, "cpu"), (25, "fsize")])
def test_limits_that_kill(number, code):
    """SIGXCPU and SIGXFSZ are limits, not crashes."""
    status, exit_code, signal, error = status_of(ProgramEnd("exited", None, number, 0))
    assert (status, exit_code, signal, error.code) == ("limit", 128 + number, number, code)
