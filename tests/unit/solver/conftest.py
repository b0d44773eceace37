"""A small bundle, an engine that pretends, and a system over both."""

import asyncio
from pathlib import Path

import pytest

from kdskills.bundle import load_bundle
from kdskills.execution import Artifact, ExecResult, IsolationLevel, ProbeReport, ReapReport, Stream
from kdskills.solver import PlainWiring, ReactSolver, SolverSettings, SolverSystem
from kdskills.solver.parts import Pacing
from kdskills.testing.models import ScriptedModel

DESCRIPTOR = """\
CUSTOM_SKILLS_ROOT = "skills"
AGENTS_CONFIG = {
    "*": {"disabled": ["acme.secret"]},
    "answer.generator.strong": {"enabled": ["acme.brief"]},
    "solver.codegen": {"enabled": ["acme.sales"]},
}
"""

SKILLS = {
    "acme/sales": {
        "SKILL.md": "---\nname: sales\ndescription: Reads sales figures.\n---\nSum the column. See [[S:1]].\n",
        "sources.yaml": "- {sid: 1, title: Sales guide, url: 'https://example.org/sales'}\n",
        "references/notes.md": "Mind the totals [[S:1]].\n",
        "scripts/sum.py": "print(42)\n",
    },
    "acme/brief": {
        "SKILL.md": "---\nname: brief\ndescription: Writes briefs.\n---\nBe short [[S:1]].\n",
        "sources.yaml": "- {sid: 1, title: Brief guide, url: 'https://example.org/brief'}\n",
    },
    "acme/secret": {"SKILL.md": "---\nname: secret\ndescription: Not for you.\n---\nHidden things.\n"},
}


@pytest.fixture
def bundle_path(tmp_path) -> Path:
    """A bundle of three skills, one of which is denied to all, with a data folder."""
    root = tmp_path / "bundle"
    for folder, files in SKILLS.items():
        for name, text in files.items():
            target = root / "skills" / folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    (root / "skills_descriptor.py").write_text(DESCRIPTOR)
    (root / "data").mkdir()
    (root / "data" / "sales.csv").write_text("region,total\nnorth,42\n")
    return root


class FakeExecutor:
    """Pretends to run programs: keeps the requests and gives what it was told to."""

    name = "fake"
    level = IsolationLevel.NAMESPACE

    def __init__(self):
        self.requests = []
        self.outcome = {}
        self.error = None
        self.hang = False
        self.cancelled = 0
        self.started = asyncio.Event()

    async def probe(self):
        return ProbeReport("fake", self.level, True)

    async def run(self, request):
        self.requests.append(request)
        self.started.set()
        if self.error is not None:
            raise self.error
        if self.hang:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        files = self.outcome.get("files", {})
        import hashlib

        artifacts = tuple(
            Artifact(path, len(data), hashlib.sha256(data).hexdigest(), 0o644, data) for path, data in files.items()
        )
        out, err = self.outcome.get("stdout", b"42\n"), self.outcome.get("stderr", b"")
        return ExecResult(
            status=self.outcome.get("status", "ok"),
            exit_code=self.outcome.get("exit_code", 0),
            signal=self.outcome.get("signal"),
            stdout=Stream(out, self.outcome.get("total", len(out)), "total" in self.outcome),
            stderr=Stream(err, len(err)),
            duration_s=0.01,
            engine=self.name,
            level=self.level,
            limits_enforced=frozenset({"wall", "memory"}),
            artifacts=artifacts,
            value=self.outcome.get("value"),
        )

    async def start(self, request):
        raise AssertionError("not used")

    async def reap(self):
        return ReapReport()


@pytest.fixture
def executor() -> FakeExecutor:
    """An engine that pretends."""
    return FakeExecutor()


@pytest.fixture
def build(bundle_path, executor, tmp_path):
    """Return a function that builds a system over the bundle with the given replies."""

    def make(replies=(), *, model=None, roles=None, wiring=None, engine=executor, waits=None, **options):
        settings = {"work_dir": tmp_path / "turns", "transcripts": tmp_path / "transcripts"}
        names = SolverSettings.model_fields
        settings |= {key: options.pop(key) for key in list(options) if key in names}
        waited = [] if waits is None else waits

        async def sleep(seconds):
            waited.append(seconds)

        return SolverSystem(
            bundle=load_bundle(bundle_path),
            model=model or ScriptedModel(replies, roles=roles),
            executor=engine,
            settings=SolverSettings(**settings),
            wiring=wiring or PlainWiring(),
            pacing=Pacing(sleep, lambda: 1.0),
            **options,
        )

    return make


@pytest.fixture
def solve(build):
    """Return a function that runs one request and gives the result and the model."""

    async def run(replies=(), request="Which region grew?", *, files=(), skills=(), deadline=None, **options):
        system = build(replies, **options)
        async with system:
            return await ReactSolver(system).run(request, files=files, skills=skills, deadline=deadline)

    return run


@pytest.fixture
def events_of(build):
    """Return a function that streams one request and gives all events."""

    async def run(replies=(), request="Which region grew?", *, files=(), skills=(), **options):
        system = build(replies, **options)
        async with system:
            return [event async for event in ReactSolver(system).stream(request, files=files, skills=skills)]

    return run
