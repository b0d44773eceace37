"""What the host believes of a report."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution import ExecError, ExecResult, IsolationLevel, Stream
from kdskills.execution.payload import MAX_REPORT, CodeReport, apply_report, read_report


def lines(*events: object) -> bytes:
    """Return *events* as report lines."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def result(status: str, exit_code: int | None = 0, stderr: bytes = b"") -> ExecResult:
    """Return an engine's result before the report is applied."""
    return ExecResult(
        status=status,
        exit_code=exit_code,
        signal=None,
        stdout=Stream(),
        stderr=Stream(stderr, len(stderr)),
        duration_s=0.1,
        engine="test",
        level=IsolationLevel.NONE,
        limits_enforced=frozenset(),
    )


STARTED = {"event": "started"}


@given(st.binary(max_size=400))
def test_any_bytes_make_a_report(data):
    """Reading never raises, whatever a program wrote."""
    assert isinstance(read_report(data), CodeReport)


def test_exception_names_type_message_and_traceback():
    """An exception becomes an error of the program, not of the engine."""
    ended = {"event": "ended", "outcome": "exception", "exception": "ValueError", "message": "ValueError: boom"}
    report = read_report(lines(STARTED, {**ended, "traceback": "Traceback\n"}))
    assert report.error == ExecError("program", "exception", "ValueError: boom", "ValueError", "Traceback\n")


def test_value_is_handed_on():
    """A reported value arrives as it was, None included."""
    assert read_report(lines(STARTED, {"event": "ended", "outcome": "ok", "value": {"a": [1]}})).value == {"a": [1]}


def test_a_program_cannot_unsay_that_it_ran():
    """After `started`, neither `refused` nor `failed` nor a second end counts."""
    report = read_report(
        lines(
            STARTED,
            {"event": "refused", "code": "skills_mismatch", "message": "no"},
            {"event": "ended", "outcome": "ok", "value": 1},
            {"event": "ended", "outcome": "ok", "value": 2},
        )
    )
    assert (report.start, report.error, report.value) == ("started", None, 1)


def test_refusal_takes_the_exit_code_away():
    """Skills that do not match end the run before the program: `refused`, with no exit code."""
    got = apply_report(result("nonzero", 125), lines({"event": "refused", "code": "skills_mismatch", "message": "m"}))
    assert (got.status, got.exit_code, got.error) == ("refused", None, ExecError("skills", "skills_mismatch", "m"))


def test_failing_entry_is_the_engines_fault():
    """A work order that cannot be carried out is never a program's result."""
    failed = {"event": "failed", "stage": "program", "code": "workdir_missing", "message": "m"}
    got = apply_report(result("nonzero", 125), lines(failed))
    assert (got.status, got.exit_code, got.error) == ("infra_error", None, ExecError("program", "workdir_missing", "m"))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"garbage", b"[1]\n", b'{"event": "ended"}\n'])
def test_silent_entry_is_the_engines_fault(data):
    """Without a first line no program started; standard error says why."""
    got = apply_report(result("nonzero", 1, b"No module named x\n"), data)
    assert (got.status, got.exit_code) == ("infra_error", None)
    assert got.error is not None
    assert got.error.code == "entry_failed"
    assert "No module named x" in got.error.message


@pytest.mark.parametrize("status", ["timeout", "oom", "limit", "cancelled"])
def test_the_engines_word_comes_first(status):
    """What the engine saw from outside is not changed by an absent report."""
    before = result(status, None)
    assert apply_report(before, b"") == before


def test_plain_exit_code_stays():
    """`sys.exit(3)` keeps status and exit code of the engine and is no error."""
    got = apply_report(result("nonzero", 3), lines(STARTED, {"event": "ended", "outcome": "exit", "exit_code": 0}))
    assert (got.status, got.exit_code, got.error) == ("nonzero", 3, None)


def test_program_killed_before_its_end_has_no_error_of_its_own():
    """`os._exit` leaves `started` only: the engine's facts stand alone."""
    got = apply_report(result("nonzero", 7), lines(STARTED))
    assert (got.status, got.exit_code, got.error, got.value) == ("nonzero", 7, None, None)


def test_hostile_values():
    """Lone surrogates, NaN, wrong types, deep nests and floods do not get through."""
    surrogate = {"event": "ended", "outcome": "exception", "message": "\udc80", "exception": 7, "traceback": None}
    error = read_report(lines(STARTED, surrogate)).error
    assert error == ExecError("program", "exception", "?", "", "")
    assert read_report(lines(STARTED) + b'{"event":"ended","value":NaN}\n').value is None
    assert read_report(lines(STARTED) + b'{"event":"ended","value":' + b"[" * 200_000).value is None
    assert read_report(lines(STARTED) + b"x" * MAX_REPORT + lines({"event": "ended"})).value is None
