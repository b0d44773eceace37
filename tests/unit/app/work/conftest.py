"""A Host over a small bundle, with an engine that runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from kdskills import hooks
from kdskills.app import Host, Settings
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ProbeReport, ReapReport
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec

DESCRIPTOR = """
CUSTOM_SKILLS_ROOT = "skills"
AGENTS_CONFIG = {"reader": {"enabled": ["acme.*", "lone"]}, "*": {"disabled": ["acme.banned"]}}
"""


class Idle:
    """An engine that is there and runs nothing."""

    def __init__(self, name: str, level: IsolationLevel) -> None:
        self.name = name
        self.level = level

    async def probe(self) -> ProbeReport:
        """Say that it works."""
        return ProbeReport(self.name, self.level, ok=True)

    async def start(self, request: object) -> NoReturn:
        """Start nothing."""
        raise AssertionError(f"{self.name} was asked to run {request}")

    run = start

    async def reap(self) -> ReapReport:
        """Find nothing."""
        return ReapReport()


class Engines:
    """Engines of every strength, and a policy that may deny."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.denial: object | None = None

    @hooks.hookimpl
    def kdskills_register_executors(self, register) -> None:
        """Add an engine with a wall, a remote one and a bare one."""
        register("wall", lambda options: Idle("wall", IsolationLevel.NAMESPACE))
        register("far", lambda options: Idle("far", IsolationLevel.VM))
        register("bare", lambda options: Idle("bare", IsolationLevel.NONE))

    @hooks.hookimpl
    def kdskills_deny(self, request) -> object | None:
        """Answer what the test wants."""
        self.asked.append(request)
        return self.denial


def skill(folder: Path, name: str, extra: str = "", body: str = "Do it.") -> Path:
    """Write a skill."""
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: What {name} does.\n{extra}---\n{body}\n")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "run.sh").write_text("echo run\n")
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with skills for some."""
    top = tmp_path / "bundle"
    top.mkdir()
    (top / "skills_descriptor.py").write_text(DESCRIPTOR)
    skill(top / "skills" / "acme" / "main", "main", "metadata:\n  imports: acme.helper\n")
    skill(top / "skills" / "acme" / "helper", "helper")
    skill(top / "skills" / "acme" / "banned", "banned")
    skill(top / "skills" / "lone", "lone")
    skill(top / "skills" / "beta" / "other", "other")
    return top


@pytest.fixture
def engines() -> Engines:
    """The plugin under the Host."""
    return Engines()


@pytest.fixture
def make_host(tmp_path: Path, bundle: Path, engines: Engines):
    """Return a function that makes a Host."""

    def make(**settings) -> Host:
        chosen = {"executor": "wall", "bundle": bundle, "state_dir": tmp_path / "state"} | settings
        return Host(Settings(**chosen), plugins=(engines,), entry_points=False)

    return make


@pytest.fixture
def make_task() -> TaskSpec:
    """A task that is submitted and never run."""
    placement = Placement(engine="subprocess", skill_name="public.x", version_hash="0")
    return TaskSpec(scope=Scope(), session_id=None, command=Command(argv=("/bin/true",)), placement=placement)
