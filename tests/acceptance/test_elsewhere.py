"""Where Linux's own calls are missing the library works, and engines that need them refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("without_linux.py")


def ask(part: str, top: Path, *words: str) -> str:
    """Run a part of the program with a state of its own and no Docker, and return what it prints."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KDSKILLS_", "DOCKER_"))}
    own |= {"HOME": str(top), "XDG_CACHE_HOME": str(top / "cache"), "KDSKILLS_STATE_DIR": str(top / "state")}
    own |= {"DOCKER_HOST": f"unix://{top}/no-docker.sock", "NO_COLOR": "1", "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), part, *words], env=own, capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in run.stderr, run.stderr[-3000:]
    return run.stdout


def test_the_library_works(tmp_path: Path) -> None:
    """Skills are found, shown, searched and loaded, a turn works on files, sessions are kept; no path leaves its root."""
    skill = tmp_path / "bundle" / "skills" / "public" / "greeting"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: greeting\ndescription: Greets somebody.\n---\nSay hello to them.\n")
    (tmp_path / "bundle" / "skills_descriptor.py").write_text('CUSTOM_SKILLS_ROOT = "skills"\n')
    (tmp_path / "bundle" / "link").symlink_to("/etc")
    (tmp_path / "bundle" / "linked").symlink_to(skill / "SKILL.md")
    (tmp_path / "bundle" / "skills" / "public" / "outside").symlink_to("/etc")
    assert json.loads(ask("library", tmp_path, str(tmp_path))) == {
        "skills": ["public.greeting"],
        "hits": ["public.greeting"],
        "rendered": True,
        "link/passwd": "symlink",
        "../secret": "path_unsafe",
        "linked": "symlink",
        "loaded": True,
        "instructions": True,
        "kept": True,
        "turn": [
            "final",
            *("react.write ok", "files.edit ok", "files.grep ok", "files.read ok"),
            *("files.read path_denied", "files.read path_denied"),
        ],
        "files": ["a/note.txt"],
    }


def test_engines_refuse(tmp_path: Path) -> None:
    """An engine that would start a program of this host without the calls says so and starts nothing, consent or not."""
    refusals = json.loads(ask("engines", tmp_path))
    assert refusals == {name: ["engine_unavailable", True] for name in ("bubblewrap", "landlock", "srt", "subprocess")}


def test_doctor_names_the_wall(tmp_path: Path) -> None:
    """`kdskills doctor` names Docker, and is no traceback."""
    report = json.loads(ask("doctor", tmp_path, "--json"))
    cures = {engine["name"]: engine["cure"] for engine in report["engines"]}
    assert (report["ok"], report["chosen"]) == (False, None)
    assert "Docker is the wall here" in cures["bubblewrap"]
    assert "Docker is the wall here" in report["refusal"]
