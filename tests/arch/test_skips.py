"""What a run of the tests says about those it skipped, and when skipping fails it."""

import os
import subprocess
import sys

import pytest

TESTS = '''
import pytest

def test_good():
    """Passes."""

def test_itself():
    """Skips itself."""
    pytest.skip("no such thing here")

@pytest.mark.parametrize("number", range(3))
@pytest.mark.needs("docker")
def test_service(number):
    """Needs a service."""

def test_storm():
    """Is run by itself."""
    pytest.skip("KDSKILLS_CHAOS=full runs it")
'''


@pytest.fixture
def run(tmp_path, repo):
    """Return what runs pytest over a small file of tests, with this repository's set-up and no docker engine."""
    (tmp_path / "test_small.py").write_text(TESTS)
    set_up = f"import runpy\nshared = runpy.run_path({str(repo / 'tests/conftest.py')!r})\n"
    set_up += "globals().update({name: value for name, value in shared.items() if not name.startswith('__')})\n"
    (tmp_path / "conftest.py").write_text(set_up)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs\naddopts = -p no:cacheprovider -p xdist\n")

    def run(*words, **env):
        told = {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "DOCKER_HOST": f"unix://{tmp_path}/no.sock",
            "KDSKILLS_REQUIRE": "",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rfE", *words, str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, **told, **env},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def test_skips_are_summed_up(run):
    """Each reason is told once, with how many tests it concerns and what would make them run."""
    status, printed = run("-n", "1")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert status == 0
    assert any(line.startswith("3 needs docker: no docker engine answers") for line in lines), printed
    assert any(line.endswith("[.ci/services]") for line in lines), printed
    assert "1 no such thing here" in lines


def test_what_is_required_may_not_be_skipped(run):
    """Where everything is required, a service that is absent fails its tests, and a test that skips itself fails the run."""
    status, printed = run(KDSKILLS_REQUIRE="all")
    assert (status, "docker is required here" in printed, "3 errors" in printed) == (1, True, True), printed
    status, printed = run("-k", "itself", KDSKILLS_REQUIRE="all")
    assert (status, "REFUSED" in printed) == (1, True), printed


def test_what_is_run_by_itself_may_be_skipped(run):
    """Storms that are asked for by a variable of their own are told, and fail nothing."""
    status, printed = run("-k", "storm or good", KDSKILLS_REQUIRE="all")
    assert (status, "REFUSED" in printed, "KDSKILLS_CHAOS" in printed) == (0, False, True), printed
