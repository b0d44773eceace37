"""The official conformance tool judges the server and the root, in both eras of the protocol."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kdskills.app import Host

VERSIONS = ("2025-11-25", "2026-07-28")
HERE = Path(__file__).parent

pytestmark = pytest.mark.needs("mcp-conformance")


def judged(*words: str) -> subprocess.CompletedProcess[str]:
    folder = Path(os.environ.get("KDSKILLS_MCP_DIR") or "/tmp/kdskills-mcp") / "node_modules" / ".bin"
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
    return subprocess.run([folder / "conformance", *words], env=env, capture_output=True, text=True, timeout=110)


def passed(done: subprocess.CompletedProcess[str], version: str) -> bool:
    """Whether every check passed and none was skipped.

    Two checks are about fields that only the newer protocol has; the tool skips these in the older one.
    """
    said = done.stdout + done.stderr
    skipped = [line for line in said.splitlines() if "SKIPPED" in line and "-cache-attributes" not in line]
    newer = version > "2025-11-25"
    whole = not skipped and not (newer and "SKIPPED" in said)
    return done.returncode == 0 and " 0 failed" in said and whole and "Passed: 0/" not in said


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", ["enumeration", "manifest", "directory"])
def test_server(bundle, tmp_path, serve, scenario, version):
    """Every server scenario of the Skills extension passes."""
    bundle.skill("public/tidy", references__guide_md=b"# Guide", scripts__run_py=b"print(1)")
    bundle.skill("acme/sweep", data__table_bin=b"\x00\xff")
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        done = judged(
            "server", "--force", "--url", url, "--scenario", f"sep-2640-skills-{scenario}", "--spec-version", version
        )
    assert passed(done, version), done.stdout + done.stderr


def client(scenario: str, version: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = shlex.join([sys.executable, str(HERE / "conformance_client.py"), *options])
    return judged(
        "client", "--force", "--scenario", f"sep-2640-client-{scenario}", "--spec-version", version,
        "--command", command, "--timeout", "100000",
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", ["no-prefetch", "verify-digest", "verify-size", "verify-frontmatter"])
def test_root(scenario, version):
    """Every client scenario of the Skills extension passes."""
    done = client(scenario, version)
    assert passed(done, version), done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", ["verify-digest", "verify-size", "verify-frontmatter"])
def test_root_without_its_check(scenario, version):
    """The scenarios really see the check: with one that accepts everything they fail."""
    done = client(scenario, version, "--unverified")
    assert done.returncode != 0
    assert "so it did not reject the content" in done.stdout + done.stderr
