"""From results to verdicts: statuses, codes, outputs within bounds."""

import os
from dataclasses import replace

import pytest

from kdskills.errors import BadRequest, ExecFailed, ExecRefused
from kdskills.execution.request import Artifact, ArtifactError, ExecError, ExecResult, IsolationLevel, Stream
from kdskills.jobs.attempts import OutputBounds, Verdict
from kdskills.jobs.exchange import StartupTimeout, keep_outputs, refusal, to_verdict

RESULT = ExecResult(
    status="ok",
    exit_code=0,
    signal=None,
    stdout=Stream(b"x", 10, True),
    stderr=Stream(),
    duration_s=1.5,
    engine="e",
    level=IsolationLevel.NAMESPACE,
    limits_enforced=frozenset({"wall", "memory"}),
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ("ok", 0, None, None)),
        ({"status": "nonzero", "exit_code": 3}, ("nonzero", 3, None, None)),
        ({"status": "timeout", "exit_code": None}, ("timeout", None, "timeout", None)),
        ({"status": "cancelled", "exit_code": None}, ("cancelled", None, "canceled", None)),
        ({"status": "oom", "exit_code": 137, "signal": 9}, ("oom", 137, "oom", None)),
        ({"status": "limit", "error": ExecError("program", "cpu", "m")}, ("limit", 0, "cpu", "m")),
        ({"status": "limit"}, ("limit", 0, "limit", None)),
        (
            {"status": "infra_error", "error": ExecError("s", "setup_failed", "m")},
            ("infra_error", 0, "setup_failed", "m"),
        ),
        (
            {"status": "refused", "error": ExecError("s", "skills_mismatch", "m")},
            ("refused", 0, "skills_mismatch", "m"),
        ),
    ],
    ids=["ok", "nonzero", "timeout", "cancelled", "oom", "cpu", "limit", "infra", "refused"],
)
def test_status_and_code_of_a_result(make_order, tmp_path, changes, told):
    """Each status of an engine becomes one verdict, with the engine's code where it has one."""
    verdict = to_verdict(make_order(), tmp_path, replace(RESULT, **changes), started_at=5.0)
    assert (verdict.status, verdict.exit_code, verdict.error_code, verdict.error_message) == told
    assert (verdict.started_at, verdict.duration_ms, verdict.stdout_total) == (5.0, 1500, 10)
    assert verdict.enforced == ("memory", "wall")
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (StartupTimeout("late"), ("startup_timeout", "startup_timeout", "late")),
        (ExecRefused("no", code="ports_not_supported"), ("refused", "ports_not_supported", "no")),
        (ExecFailed("broke", code="forwarder_failed"), ("infra_error", "forwarder_failed", "broke")),
        (BadRequest("odd"), ("refused", "bad_request", "odd")),
    ],
    ids=["late", "ports", "broken", "odd"],
)
def test_why_we_ended_it_beats_what_the_engine_saw(make_order, tmp_path, cause, told):
    """A service we ended is not merely cancelled; a program that never ran has the same words."""
    ended = replace(RESULT, status="cancelled", exit_code=None)
    verdict = to_verdict(make_order(), tmp_path, ended, started_at=5.0, override=cause)
    assert (verdict.status, verdict.error_code, verdict.error_message) == told
    refused = refusal(cause)
    assert (refused.status, refused.error_code, refused.error_message, refused.started_at) == (*told, None)


def test_only_declared_outputs_are_told(make_order, tmp_path):
    """Files and troubles of the session are not outputs of the command."""
    result = replace(
        RESULT,
        artifacts=(Artifact("a", 1, "d", 0o644, b"1"), Artifact("other", 1, "d", 0o644, b"2")),
        artifact_errors=(
            ArtifactError("b", "missing", "m"),
            ArtifactError("link", "link", "m"),
            ArtifactError("**", "missing", "m"),
        ),
    )
    verdict = to_verdict(make_order(outputs=("a", "b"), session_dir=tmp_path), tmp_path, result, started_at=0.0)
    assert [(item.path, (tmp_path / item.file).read_bytes()) for item in verdict.artifacts] == [("a", b"1")]
    assert [error.path for error in verdict.output_errors] == ["b"]


def test_outputs_stay_within_their_bounds(tmp_path):
    """Size of one, size of all and number are bounded; what does not fit is named and the rest is kept."""
    items = [
        Artifact(name, size, "d", 0o644, b"x" * size)
        for name, size in (("a", 3), ("b", 9), ("c", 3), ("d", 3), ("e", 1), ("f", 0))
    ]
    kept, refused = keep_outputs(tmp_path, items, OutputBounds(files=3, each=5, total=8))
    assert [item.path for item in kept] == ["a", "c", "e"]
    assert [(error.path, error.code) for error in refused] == [
        ("b", "too_large"),
        ("d", "too_large"),
        ("f", "too_many"),
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0000", "0001", "0002"]


def test_hostile_names_never_become_paths(tmp_path):
    """An output's name on disk is a number, whatever the program called it."""
    kept, _ = keep_outputs(tmp_path, [Artifact("../../x", 1, "d", 0o644, b"1")], OutputBounds())
    assert [item.file for item in kept] == ["out/0000"]
    assert (tmp_path / "out" / "0000").read_bytes() == b"1"


def test_outputs_are_on_the_disk_before_their_verdict(tmp_path, monkeypatch):
    """Each file, and the names of all of them, are brought to the disk: a power cut after the verdict takes none."""
    synced, sync = set(), os.fsync

    def note(fd):
        synced.add((os.fstat(fd).st_ino, os.fstat(fd).st_size))
        sync(fd)

    monkeypatch.setattr(os, "fsync", note)
    kept, _ = keep_outputs(tmp_path, [Artifact(name, 2, "d", 0o644, b"ab") for name in "ab"], OutputBounds())
    paths = [*(tmp_path / item.file for item in kept), tmp_path / "out"]
    assert {(path.stat().st_ino, path.stat().st_size) for path in paths} <= synced


def test_nothing_to_keep_makes_no_folder(tmp_path):
    """A command without outputs leaves no empty folder."""
    assert keep_outputs(tmp_path, [], OutputBounds()) == ([], [])
    assert not (tmp_path / "out").exists()
