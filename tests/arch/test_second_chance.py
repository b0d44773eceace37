"""What the gates do with tests that fail once."""

import os
import subprocess
import sys

import pytest

TESTS = '''
from pathlib import Path
import pytest

def test_good():
    """Passes."""

def test_bad():
    """Fails always."""
    assert False

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("word", ["a@b", "c d"])
def test_once(word):
    """Fails the first time."""
    seen = Path(__file__).with_name(f"seen-{word}")
    again = seen.exists()
    seen.touch()
    assert again

@pytest.fixture
def broken():
    """Breaks."""
    raise OSError

def test_setup(broken):
    """Is never reached."""
'''


@pytest.fixture
def run(tmp_path, repo):
    """Return what runs pytest over a small file of tests, with the plugin."""
    (tmp_path / "test_small.py").write_text(TESTS)

    def run(*words):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.second_chance", "-p", "xdist"]
        where = ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "test_small.py")]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others cost seconds at each start
        done = subprocess.run([*command, *words, *where], cwd=repo, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("workers", [[], ["-n", "1", "--dist", "loadgroup"]], ids=["alone", "workers"])
def test_what_failed_is_run_again_and_nothing_else(run, tmp_path, workers):
    """Failures of each phase are noted; the second look runs those alone, and what fails again fails it."""
    noted = tmp_path / "failed"
    assert run(*workers, "--failed-to", str(noted))[0] == 1
    assert len(noted.read_text().splitlines()) == 4
    status, said = run("--only-from", str(noted))
    assert (status, "2 passed" in said, "1 failed" in said, "1 error" in said, "1 deselected" in said) == (
        1,
        *[True] * 4,
    )
    kept = [line for line in noted.read_text().splitlines() if "test_once" in line]
    noted.write_text("\n".join(kept))
    assert run("--only-from", str(noted))[0] == 0


def test_nothing_to_run_again_is_no_success(run, tmp_path):
    """Ids that name no test, such as those of a file that could not be imported, do not pass."""
    (tmp_path / "failed").write_text("test_gone.py\n")
    assert run("--only-from", str(tmp_path / "failed"))[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_gates_keep_the_configuration(repo, tmp_path):
    """The options as the gates write them do not make pytest look for its configuration elsewhere."""
    gates = (repo / ".ci/gates").read_text(encoding="utf-8")
    options = [word for word in gates.split() if word.startswith(("--failed-to", "--only-from"))]
    assert [word.partition("=")[::2] for word in options] == [
        ("--failed-to", '"$failed"'),
        ("--only-from", '"$failed"'),
    ]
    noted = tmp_path / "failed"
    noted.touch()
    command = [sys.executable, "-m", "pytest", "-p", "tests.second_chance", "--collect-only"]
    done = subprocess.run(
        [*command, f"--failed-to={noted}", f"--only-from={noted}", str(repo / "tests/arch/test_second_chance.py")],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert f"rootdir: {repo}\nconfigfile: pyproject.toml\n" in done.stdout
