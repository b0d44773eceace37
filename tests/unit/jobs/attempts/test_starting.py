"""Starting attempts: ids that are safe names, launchers that die, settings that travel."""

import errno
import json
import sys

import pytest
from pydantic import SecretStr

from kdskills.app.settings import Settings, settings_line
from kdskills.app.worker.launcher import warm_starter
from kdskills.errors import BadRequest, ExecFailed
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts, WarmStarter

ANSWERS = "import sys\nsys.stdin.readline()\nfor line in sys.stdin: print({answer!r}, flush=True)"


@pytest.mark.parametrize("task", ["", "..", "a/b", "a\n", "ä", "x" * 129, "a b", "."])
def test_task_ids_that_are_no_names_are_refused(tmp_path, task):
    """No id leads out of the folder of runs, and none makes anything in it."""
    attempts = Attempts(tmp_path)
    for call in (lambda: attempts.find(task, 1), lambda: attempts.remove(task), lambda: attempts.session_dir(task)):
        with pytest.raises(BadRequest):
            call()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_found_where_nothing_is(tmp_path):
    """Unknown tasks have no attempts, and forgetting them is no error."""
    attempts = Attempts(tmp_path)
    assert (attempts.find("t", 1), attempts.latest("t"), attempts.tasks(), attempts.remove("t")) == (
        None,
        None,
        [],
        True,
    )


async def test_launcher_that_says_no_is_an_error(tmp_path, make_order):
    """The launcher's words reach the operator."""
    starter = WarmStarter((sys.executable, "-c", ANSWERS.format(answer='{"error": "no room"}')), b"{}")
    with pytest.raises(ExecFailed, match="no room"):
        await Attempts(tmp_path, starter).start(make_order())
    starter.close()


async def test_a_full_disk_is_told_as_one(tmp_path):
    """A launcher without room for an attempt's lock began nothing, so whoever asked may wait and ask again."""
    answer = f'{{"error": "no room", "errno": {errno.ENOSPC}}}'
    starter = WarmStarter((sys.executable, "-c", ANSWERS.format(answer=answer)), b"{}")
    with pytest.raises(OSError, match="no room") as full:
        await starter.start(tmp_path)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path))
    starter.close()


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "print('gibberish', flush=True); input()"])
async def test_launcher_that_dies_is_tried_again_once(tmp_path, make_order, program):
    """A launcher that dies or talks nonsense is replaced; when the next does it too, the error says so."""
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x')\n{program}"
    starter = WarmStarter((sys.executable, "-c", code), b"{}")
    with pytest.raises(ExecFailed, match="it died"):
        await Attempts(tmp_path / "s", starter).start(make_order())
    starter.close()
    assert count.read_text() == "xx"


async def test_order_is_written_once(tmp_path, make_order):
    """A second start does not replace what the first one said."""
    starter = WarmStarter((sys.executable, "-c", ANSWERS.format(answer='{"shim": 1}')), b"{}")
    attempts = Attempts(tmp_path, starter)
    first = await attempts.start(make_order(("first",)))
    await attempts.start(make_order(("second",)))
    starter.close()
    kept = shim.read_json(first.folder / shim.ORDER)["order"]
    assert kept["spec"]["command"]["argv"] == ["first"]
    assert (first.folder.stat().st_mode & 0o777, first.folder.parents[1].stat().st_mode & 0o777) == (0o700, 0o700)


async def test_reaping_that_fails_says_why(tmp_path):
    """The words of a reaper that gave up are in the error."""
    starter = WarmStarter((sys.executable, "-c", "raise SystemExit('stuck')"), b"{}")
    with pytest.raises(ExecFailed, match="stuck"):
        await starter.reap("docker")


def test_settings_travel_whole_with_their_secrets():
    """The launcher's settings are the worker's, key included, and stand on no command line."""
    settings = Settings(e2b_api_key=SecretStr("e2b_key"), image_packages=("fpdf2",), pool=3)
    line = settings_line(settings)
    assert b"\n" not in line
    assert Settings(**json.loads(line)) == settings
    assert "e2b_key" not in " ".join(warm_starter(settings)._command)
