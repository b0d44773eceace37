"""What a killed kdskills left is ended before an engine is used again."""

import logging

import pytest

from kdskills.app import Host, Settings
from kdskills.execution import IsolationLevel, ProbeReport, ReapReport
from kdskills.hooks import hookimpl


class Engine:
    """An engine that counts how often it reaps."""

    name = "counted"
    level = IsolationLevel.VM

    def __init__(self):
        self.reaped = 0

    async def probe(self):
        """Say that it works."""
        return ProbeReport(self.name, self.level, ok=True)

    async def run(self, request):
        """Run nothing."""
        raise NotImplementedError  # reaping must start nothing

    async def start(self, request):
        """Start nothing."""
        raise NotImplementedError  # likewise

    async def reap(self):
        """Report one leftover that was ended and one that was not."""
        self.reaped += 1
        return ReapReport(("run old",), ("run stuck",))


class Plugin:
    """Registers the engine."""

    def __init__(self, engine):
        self.engine = engine

    @hookimpl
    def kdskills_register_executors(self, register):
        """Register it."""
        register("counted", lambda _options: self.engine)


@pytest.fixture
def engine():
    """Return the engine."""
    return Engine()


@pytest.fixture
def host(engine):
    """Return a Host that knows it."""
    return Host(Settings(), plugins=[Plugin(engine)], entry_points=False)


async def test_an_engine_reaps_before_its_first_use_only(host, engine, caplog):
    """Leftovers are ended once, and each is said in the log."""
    with caplog.at_level(logging.INFO, "kdskills.execution"):
        assert await host.wiring.executor("counted") is engine
        assert await host.wiring.executor("counted") is engine
    assert engine.reaped == 1
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "counted: ended what a dead owner left: run old"),
        ("WARNING", "counted: a dead owner's leftover cannot be ended: run stuck"),
    ]


async def test_nothing_is_reaped_for_an_engine_that_is_not_used(host, engine):
    """A Host that runs nothing touches nothing."""
    assert host.engines()
    assert engine.reaped == 0
