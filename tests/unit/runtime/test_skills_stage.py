"""Stage 1 of the entry: the descriptor's skills are in force, or nothing starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kdskills import SkillsSubsystem, load_bundle
from kdskills.execution.payload import host_entry

PROGRAM = """
import kdskills, kdskills_runtime
kdskills_runtime.report([kdskills.resolve_skill_ref(REF), kdskills.resolve_skill_ref("no.such")])
"""


@pytest.fixture
def launch(tmp_path):
    """Return a function that runs PROGRAM under an export and gives (exit code, report lines)."""

    def run(descriptor, ref="", **order):
        path = tmp_path / "main.py"
        path.unlink(missing_ok=True)
        payload = {
            "version": 1,
            "program": {"path": str(path), "source": PROGRAM},
            "globals": {"SKILLS_DESCRIPTOR": descriptor, "REF": ref},
            **order,
        }
        with (tmp_path / "report").open("wb") as report:
            argv = [sys.executable, "-I", str(host_entry()), "--payload-fd", "0", "--report-fd", str(report.fileno())]
            done = subprocess.run(
                argv, input=json.dumps(payload).encode(), pass_fds=(report.fileno(),), capture_output=True, check=False
            )
        return done.returncode, [json.loads(line) for line in (tmp_path / "report").read_bytes().splitlines()]

    return run


@pytest.fixture
def export(repo):
    """Return the export of everything in the hello bundle."""
    top = repo / "bundles" / "hello"
    subsystem = SkillsSubsystem(load_bundle(top).descriptor, bundle_root=top, roots=())
    return subsystem.export_runtime_globals()["SKILLS_DESCRIPTOR"]


def test_skills_are_in_force(launch, export):
    """Generated code resolves what the descriptor holds, and nothing else."""
    ref = export["skills"][0]["id"]
    code, lines = launch(export, ref)
    assert (code, lines[-1]["value"]) == (0, [ref, None])


def test_a_root_that_is_missing(launch, export, tmp_path):
    """Skills that are not there are `skills_mismatch`, and the program does not start."""
    mounts = dict.fromkeys(export["mounts"], str(tmp_path / "absent"))
    code, lines = launch({**export, "mounts": mounts})
    assert (code, [(line["event"], line["code"]) for line in lines]) == (125, [("refused", "skills_mismatch")])


@pytest.mark.parametrize("key", ["digest", "tree"])
def test_a_skill_that_differs(launch, export, key):
    """Another digest of a skill file or of its folder is `skills_mismatch`."""
    rows = [{**row, key: row[key][:-4] + "0000"} for row in export["skills"]]
    code, lines = launch({**export, "skills": rows})
    assert (code, lines[0]["code"], len(lines)) == (125, "skills_mismatch", 1)


def test_depth_of_verification_is_the_orders(launch, export):
    """With `none` digests are not compared."""
    rows = [{**row, "tree": row["tree"][:-4] + "0000"} for row in export["skills"]]
    assert launch({**export, "skills": rows}, verify="none")[0] == 0


@pytest.mark.parametrize("descriptor", [{"version": 99}, {"agents_config": []}])
def test_what_is_no_export(launch, descriptor):
    """A descriptor that is not understood is refused with its own code; the program does not start."""
    code, lines = launch(descriptor)
    assert (code, [line["event"] for line in lines]) == (125, ["refused"])
    assert lines[0]["code"] != "skills_mismatch"
