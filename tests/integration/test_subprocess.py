"""The bare engine: consent, truthfulness about limits, and leaving nothing behind."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest

from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, IsolationLevel, Owner, SkillMount
from kdskills.execution.local_tree import RUN_MARK, RunFolder, end_marked, leftovers, marked
from kdskills.execution.protocol import ExecutionOptions


@pytest.fixture
def executor(tmp_path):
    """Return the engine with the operator's consent."""
    return SubprocessExecutor(
        ExecutionOptions(allow_unisolated=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state")
    )


def ask(**fields) -> ExecRequest:
    """Return a request with the caller's consent."""
    return ExecRequest(**{"profile": "unsafe-local", **fields})


def sleeper(env) -> subprocess.Popen[bytes]:
    """Return a process in a session of its own."""
    return subprocess.Popen(["sleep", "600"], env=env, start_new_session=True)


@pytest.mark.parametrize(
    ("allowed", "profile"), [(False, "unsafe-local"), (True, None), (True, "other"), (False, None)]
)
async def test_both_must_ask(allowed, profile):
    """Operator and caller must each consent; the environment cannot."""
    engine = SubprocessExecutor(ExecutionOptions(allow_unisolated=allowed))
    with pytest.raises(ExecRefused) as caught:
        await engine.run(ask(argv=("true",), profile=profile))
    assert caught.value.code == "policy_denied"


async def test_the_probe_says_what_is_missing():
    """Without consent the probe fails and names the setting."""
    report = await SubprocessExecutor(ExecutionOptions()).probe()
    assert (report.ok, report.level, "allow_unisolated" in report.cure) == (False, IsolationLevel.NONE, True)


async def test_what_is_not_enforced_is_not_claimed(executor):
    """Totals, folder sizes and the network are absent from `limits_enforced`."""
    result = await executor.run(ask(argv=("true",)))
    assert result.limits_enforced == {"wall", "cpu", "nofile", "fsize", "stdout", "stderr"}


async def test_a_changed_skill_is_refused(executor, tmp_path):
    """A skill that is not what was checked gives `skills_mismatch`, by handle and by run."""
    mount = SkillMount("public.x", tmp_path / "absent", "sha256:" + "0" * 64)
    handle = await executor.start(ask(argv=("true",), skills=(mount,)))
    handle.signal(15)
    await handle.cancel()
    assert handle.tail() == (b"", b"")
    assert (await handle.wait()).error.code == "skills_mismatch"


async def test_a_missing_program_leaves_no_folder(executor, tmp_path):
    """Nothing is left of a run that could not start."""
    result = await executor.run(ask(argv=("no-such-program",)))
    assert (result.status, result.error.code) == ("infra_error", "program_missing")
    assert list((tmp_path / "state" / "local-runs").iterdir()) == []


async def test_refused_values_leave_no_folder(executor, tmp_path):
    """A payload that cannot be built is refused before a process is made."""
    with pytest.raises(ExecRefused):
        await executor.run(ask(code="pass", globals={"x": object()}))
    assert list((tmp_path / "state" / "local-runs").iterdir()) == []


async def test_reap_ends_what_a_dead_owner_left(executor, tmp_path):
    """Processes bearing the mark of a dead owner's run are killed, and its folder is removed."""
    await executor.run(ask(argv=("true",)))
    top = tmp_path / "state" / "local-runs"
    folder = RunFolder.make(top, ask(argv=("true",), owner=Owner()))
    note = folder.path / "owner.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "kdskills.pid": "4194304"}))
    child = sleeper({RUN_MARK: folder.mark})
    report = await executor.reap()
    assert child.wait() == -9
    assert f"process {child.pid}" in report.ended
    assert f"run {folder.mark}" in report.ended
    assert not folder.path.exists()


def test_living_owners_keep_their_runs(tmp_path):
    """What this process watches is left alone; a note that cannot be read is reported."""
    folder = RunFolder.make(tmp_path, ask(argv=("true",)))
    (tmp_path / "being-made").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "owner.json").write_text("{")
    report = leftovers(tmp_path)
    assert (report.ended, len(report.failed), folder.path.exists()) == ((), 1, True)
    folder.remove()


def test_marks_are_found_and_ended():
    """Only processes with exactly this mark are found."""
    mark = f"mark-{secrets.token_hex(8)}"
    one = subprocess.Popen(["sleep", "600"], env={RUN_MARK: mark})
    two = subprocess.Popen(["sleep", "600"], env={RUN_MARK: f"{mark}-and-more"})
    try:
        assert marked(mark) == [one.pid]
        assert end_marked(mark, one.pid) == []
        assert end_marked("no-such-mark") == []
    finally:
        one.kill()
        two.kill()
        one.wait()
        two.wait()


def test_a_folder_closed_to_everybody_is_removed(tmp_path):
    """Modes a program left do not keep its folder alive."""
    folder = RunFolder.make(tmp_path, ask(argv=("true",)))
    (folder.work / "a" / "b").mkdir(parents=True)
    (folder.work / "a" / "b").chmod(0)
    (folder.work / "a").chmod(0)
    folder.remove()
    assert not folder.path.exists()
    assert Path(tmp_path).exists()
