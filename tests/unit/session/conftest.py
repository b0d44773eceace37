"""Skills on disk, a runtime over them, and an executor that records what it was asked to run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kdskills.execution import ExecRequest, ExecResult, IsolationLevel, Stream
from kdskills.session import SkillRuntime
from kdskills.turn import SkillsSubsystem


class Bundle:
    """A folder of skills that tests write to, and the subsystem over it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "skills").mkdir(parents=True)
        self.agents: dict[str, Any] = {}

    def skill(self, full_id: str, body: str = "", **fields: Any) -> Path:
        """Write a skill and return its folder."""
        namespace, _, name = full_id.partition(".")
        folder = self.root / "skills" / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"name: {name}", f"description: {fields.pop('description', f'About {name}.')}"]
        lines += [f"{key}: {value}" for key, value in fields.items()]
        text = "---\n" + "\n".join(lines) + f"\n---\n{body or f'Body of {full_id}.'}\n"
        (folder / "SKILL.md").write_text(text, encoding="utf-8")
        return folder

    def file(self, full_id: str, path: str, content: str | bytes) -> Path:
        """Write a file of a skill."""
        target = self.root / "skills" / full_id.replace(".", "/") / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        return target

    def subsystem(self, **options: Any) -> SkillsSubsystem:
        """Return a subsystem that looks at the files on every view."""
        options.setdefault("auto_refresh", 0.0)
        return SkillsSubsystem(
            {"agents_config": self.agents}, bundle_root=self.root, roots=(), index_dir=None, **options
        )


class Clock:
    """A clock tests turn by hand."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        """Return the time."""
        return self.now

    def turn(self, **by: float) -> None:
        """Let time pass."""
        self.now += timedelta(**by)


class FakeExecutor:
    """Answers every run with a prepared result, and keeps the requests."""

    name = "fake"
    level = IsolationLevel.NAMESPACE

    def __init__(self) -> None:
        self.requests: list[ExecRequest] = []
        self.answer: Callable[[ExecRequest], ExecResult] = lambda request: result()

    async def run(self, request: ExecRequest) -> ExecResult:
        """Record and answer."""
        self.requests.append(request)
        return self.answer(request)


def result(status: str = "ok", **facts: Any) -> ExecResult:
    """Return a result; streams may be given as bytes."""
    base: dict[str, Any] = {
        "status": status,
        "exit_code": 0 if status == "ok" else None,
        "signal": None,
        "stdout": Stream(),
        "stderr": Stream(),
        "duration_s": 0.25,
        "engine": "fake",
        "level": IsolationLevel.NAMESPACE,
        "limits_enforced": frozenset({"wall"}),
    }
    for name in ("stdout", "stderr"):
        if isinstance(facts.get(name), bytes):
            facts[name] = Stream(facts[name], len(facts[name]))
    return ExecResult(**{**base, **facts})


@pytest.fixture
def exec_result() -> Callable[..., ExecResult]:
    """Builds `ExecResult`s."""
    return result


@pytest.fixture
def executor() -> FakeExecutor:
    """An executor that records."""
    return FakeExecutor()


@pytest.fixture
def clock() -> Clock:
    """A clock turned by hand."""
    return Clock()


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Three plain skills, one with imports, one hidden, one denied to the decision consumer."""
    made = Bundle(tmp_path / "bundle")
    made.skill("acme.sales", "Read the sales table.")
    made.skill("acme.charts", "Draw charts.")
    made.skill("acme.brief", "Write a brief.")
    made.skill("acme.base", "Common ground.")
    made.skill("acme.report", "Write reports.", imports="[base]")
    made.skill("acme.secret", "Quiet guidance.", disclosure="hidden")
    made.skill("acme.embargo", "Not for models.")
    made.agents["solver.react.decision"] = {"disabled": ["acme.embargo"]}
    made.file("acme.sales", "references/guide.md", "# Guide\nUse the table.\n")
    made.file("acme.sales", "scripts/total.py", "print(1)\n")
    made.file("acme.sales", "assets/logo.bin", bytes(range(256)))
    return made


@pytest.fixture
def make(bundle: Bundle) -> Callable[..., SkillRuntime]:
    """Builds runtimes over `bundle`."""

    def build(**options: Any) -> SkillRuntime:
        if not {"subsystem", "view", "catalog"} & set(options):
            options["subsystem"] = bundle.subsystem()
        return SkillRuntime(**options)

    return build


@pytest.fixture
def runtime(make: Callable[..., SkillRuntime]) -> SkillRuntime:
    """A runtime with every default."""
    return make()


@pytest.fixture
def events() -> list[Any]:
    """Collects what a runtime tells."""
    return []
