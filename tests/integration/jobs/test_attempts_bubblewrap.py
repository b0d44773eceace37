"""Attempts with real shims, runners and sandboxes: the whole way from an order to its verdict."""

import pytest

from kdskills.jobs import shim

pytestmark = pytest.mark.needs("bubblewrap")


async def test_program_runs_to_its_verdict(lab):
    """Exit code, output and declared outputs of a program come back, and its state is `ended`."""
    attempt, verdict = await lab.run("echo out; echo err >&2; printf 12345 > r.txt; exit 3", outputs=("r.txt",))
    assert (verdict.status, verdict.exit_code, attempt.state()) == ("nonzero", 3, "ended"), lab.log(attempt)
    assert attempt.logs("stdout").data == b"out\n"
    assert attempt.logs("stderr").data == b"err\n"
    assert [(item.path, (attempt.folder / item.file).read_bytes()) for item in verdict.artifacts] == [
        ("r.txt", b"12345")
    ]


async def test_session_files_survive_between_commands(lab):
    """What one command of a session writes, the next one finds."""
    await lab.run("echo one > notes.txt", session="s")
    attempt, _ = await lab.run("cat notes.txt", session="s")
    assert attempt.logs("stdout").data == b"one\n"


async def test_cancel_ends_the_tree(lab):
    """A cancelled program is gone and says so, with what it had printed."""
    attempt = await lab.attempts.start(lab.order("echo begun; sleep 600 & sleep 600"))
    await attempt.until_running()
    await lab.until(lambda: attempt.logs("stdout").total)
    assert attempt.cancel("enough")
    verdict = await attempt.wait()
    assert (verdict.status, verdict.exit_code, verdict.error_code) == ("cancelled", None, "canceled")
    assert (attempt.logs("stdout").data, shim.read_json(attempt.folder / shim.CANCEL)) == (
        b"begun\n",
        {"reason": "enough"},
    )
    assert not attempt.cancel("again")
