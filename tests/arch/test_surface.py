"""The public surface: what may be imported from where, and what importing it costs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PUBLIC = [
    "AgentRules", "Bundle", "CitationStream", "Diagnostic", "Granted", "Host", "MergeResult", "ReactSolver", "Refused",
    "RewriteResult", "ScriptedModel", "Settings", "Skill", "SkillRuntime", "SkillView", "SkillsDescriptor", "SkillsSubsystem",
    "SolverSystem", "SourcesPool", "build_skill_short_id_map",
    "build_skills_instruction_block", "extract_citations", "get_active_skills_subsystem", "get_skill", "import_skillset",
    "load_bundle", "render_citations", "resolve_skill_ref", "rewrite_citations", "set_active_skills_subsystem",
    "set_skills_descriptor", "skills_for_consumer", "skills_gallery_text",
]  # fmt: skip

ROOMS = {
    "kdskills.skills": ["parse_skill", "render_body", "validate_skill"],
    "kdskills.session": ["SkillRuntime"],
    "kdskills.solver": ["ReactSolver", "SolverSystem", "TurnResult"],
    "kdskills.execution": ["ExecRequest", "ExecResult", "Executor", "Limits"],
    "kdskills.remote": ["AsyncCodexClient", "AsyncRemoteSkillsFacade", "CodexClient", "RemoteSkillsFacade"],
    "kdskills.app": ["Host", "Settings"],
    "kdskills.app.operations": ["Context", "Operation"],
    "kdskills.bundle": ["AgentRules", "SkillsDescriptor"],
    "kdskills.environments": ["EnvironmentSpec"],
    "kdskills.errors": ["Diagnostic", "KdskillsError"],
    "kdskills.models": ["ModelProvider", "ModelRequest"],
    "kdskills.prompts": ["render_catalog"],
    "kdskills.remote.dispatch": ["RemoteDispatcher"],
    "kdskills.remote.journal": ["MemoryJournal", "SqlJournal"],
    "kdskills.search": ["SearchIndex"],
    "kdskills.sources": ["SourcesPool"],
    "kdskills.testing": ["ScriptedModel", "call", "say"],
    "kdskills.turn": ["SkillView", "SkillsSubsystem"],
}

FORBIDDEN = {
    "pluggy",
    "docker",
    "typer",
    "fastapi",
    "kdskills.app",
    "kdskills.builtin",
    "kdskills.execution",
    "asyncio",
}


def test_top_level_names() -> None:
    """`kdskills.__all__` is exactly the promised list, sorted, and every name is there."""
    kdskills = importlib.import_module("kdskills")
    assert sorted(kdskills.__all__) == sorted(PUBLIC)
    assert list(kdskills.__all__) == sorted(kdskills.__all__)
    assert [name for name in PUBLIC if not hasattr(kdskills, name)] == []


def test_a_wrong_import_names_the_right_room() -> None:
    """What another room exports is told where it is; what is nowhere is no attribute, and modules of a room still import."""
    import kdskills
    from kdskills import hooks

    assert hooks.__name__ == "kdskills.hooks"
    for room, name, home in (
        ("kdskills", "SkillRegistry", "kdskills.skills"),
        ("kdskills", "Executor", "kdskills.execution"),
        ("kdskills.session", "ReactSolver", "kdskills"),
        ("kdskills.app", "Operation", "kdskills.app.operations"),
    ):
        with pytest.raises(ImportError, match=f"{room} does not export {name}: write `from {home} import {name}`$"):
            exec(f"from {room} import {name}")
    assert not any(hasattr(kdskills, name) for name in ("no_such_name", "_x", "__x__", "a.b", "", "../x"))


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_every_room_tells_where_a_name_is(room: str) -> None:
    """Each public room, with its names loaded or not, names the room of what it does not export."""
    module = importlib.import_module(room)
    name, home = ("SkillRuntime", "kdskills") if room == "kdskills.bundle" else ("Bundle", "kdskills")
    assert name not in module.__all__
    with pytest.raises(ImportError, match=f"^{room} does not export {name}: write `from {home} import {name}`$"):
        exec(f"from {room} import {name}")
    assert not hasattr(module, "no_such_name")


def test_the_version_is_the_packages() -> None:
    """`kdskills.__version__` and `kdskills --version` say what is installed."""
    import kdskills

    run = subprocess.run(
        [Path(sys.executable).with_name("kdskills"), "--version"], capture_output=True, text=True, check=False
    )
    assert (kdskills.__version__, run.stdout) == (version("kdskills"), f"kdskills {version('kdskills')}\n")


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_room_names(room: str) -> None:
    """Each room exports the names the design promises, and every name it lists is there."""
    module = importlib.import_module(room)
    assert [name for name in ROOMS[room] if name not in module.__all__] == []
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_import_is_light() -> None:
    """`import kdskills` loads none of the heavy or upper parts."""
    code = "import json, sys, kdskills; print(json.dumps(sorted(sys.modules)))"
    loaded = set(
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    )
    assert loaded & FORBIDDEN == set()


def test_import_loads_rooms_on_first_use() -> None:
    """Importing the package alone loads none of its rooms: each name brings what it needs when it is first used."""
    code = "import sys, kdskills; print(sorted(m for m in sys.modules if m.startswith('kdskills.')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['kdskills.exports']"  # what loads them then


LAZY = ["kdskills.bundle", "kdskills.skills", "kdskills.turn"]


@pytest.mark.parametrize("room", LAZY)
def test_rooms_of_the_ground_floor_load_names_on_first_use(room: str) -> None:
    """Importing such a room loads nothing below it; its names are listed, come from where they live, and no others exist."""
    code = (
        f"import sys, {room} as room; before = [m for m in sys.modules if m.startswith('{room}.')];"
        "listed = set(room.__all__) <= set(dir(room)); wrong = hasattr(room, 'no_such_name');"
        "same = all(getattr(room, n) is getattr(room, n) for n in room.__all__); print(before, listed, wrong, same)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] True False True"


def test_types_are_shipped(repo: Path) -> None:
    """The package says that it is typed."""
    assert (repo / "kdskills" / "py.typed").exists()
