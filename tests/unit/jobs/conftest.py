"""What unit tests of background work share: an opened place on SQLite, made from a template in milliseconds."""

import shutil

import pytest

from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, JobSpec, Placement, Scope, StepSpec, TaskSpec
from kdskills.jobs.queue import Work
from kdskills.jobs.settings import JobsSettings


class Makes:
    """Specs of tasks and jobs that are submitted and never run."""

    scope = Scope()
    placement = Placement(engine="subprocess", skill_name="public.x", version_hash="0")

    def command(self, *argv, **more):
        """Return a command."""
        return Command(argv=argv or ("/bin/true",), timeout_s=10, **more)

    def task(self, session=None, scope=None, **more):
        """Return a task."""
        return TaskSpec(
            scope=scope or self.scope, session_id=session, command=self.command(), placement=self.placement, **more
        )

    def step(self, name, needs=(), **more):
        """Return a step."""
        return StepSpec(name=name, command=self.command(), needs=tuple(needs), **more)

    def job(self, *steps, session="s", scope=None, **more):
        """Return a job of steps, given by name or whole."""
        whole = tuple(self.step(one) if isinstance(one, str) else one for one in steps)
        return JobSpec(scope=scope or self.scope, session_id=session, steps=whole, placement=self.placement, **more)


@pytest.fixture
def make():
    """Return a maker of specs."""
    return Makes()


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """Return a folder with an empty, prepared database."""
    folder = tmp_path_factory.mktemp("work-template")
    Work(f"sqlite:///{folder / 'work.db'}", folder).close()
    return folder / "work.db"


@pytest.fixture
def place(template, tmp_path):
    """Return a state folder with an empty database."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    shutil.copyfile(template, folder / "work.db")
    return folder


@pytest.fixture
def open_place(place):
    """Return a function that opens the place; it is closed at the end."""
    opened = []

    def open_it(**settings):
        opened.append(Work(f"sqlite:///{place / 'work.db'}", place, JobsSettings(**settings)))
        return opened[-1]

    yield open_it
    for work in opened:
        work.close()


@pytest.fixture
def work(open_place):
    """Return the opened place."""
    return open_place()


@pytest.fixture
async def client(place):
    """Return a client of the place, without a worker."""
    made = JobsClient(f"sqlite:///{place / 'work.db'}", place)
    yield made
    await made.aclose()
