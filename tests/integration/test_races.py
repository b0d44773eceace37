"""A program, or somebody beside it, swaps files for links all the time: nothing of the host leaks.

Each race runs for three seconds against the code that opens inputs and collects outputs.
"""

import asyncio
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.docker import DockerExecutor
from kdskills.errors import ExecRefused, FileRefused, RootChanged
from kdskills.execution import ExecRequest, ExecutionOptions, InputFile, Limits, SkillMount
from kdskills.execution.check import compile_glob
from kdskills.execution.stage import collect, read_inputs, stage_skill
from kdskills.skills.safe_open import read_file, tree_digest

SECONDS = 3.0
LONG = 80.0
SECRET = b"secret of the host"
SWAPPER = Path(__file__).with_name("race_swapper.py")


@contextmanager
def swapping(*steps):
    """Let another thread take *steps* in turn, over and over."""
    over = threading.Event()

    def swap():
        while not over.is_set():
            for step in steps:
                with suppress(OSError):
                    step()

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


@pytest.fixture
def place(tmp_path):
    """Return a folder with a harmless file, a link to a secret, and a folder that is swapped for a link to a secret one."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file.txt").write_bytes(SECRET)
    top = tmp_path / "top"
    (top / "folder").mkdir(parents=True)
    (top / "file.txt").write_bytes(b"harmless")
    (top / "folder/file.txt").write_bytes(b"harmless")
    (top / "link.txt").symlink_to(tmp_path / "secret/file.txt")
    (top / "linked").symlink_to(tmp_path / "secret")
    return top


def swaps(top):
    """Return steps that exchange file and link, folder and link, by rename."""
    pairs = [("file.txt", "link.txt", "aside.txt"), ("folder", "linked", "aside")]
    steps = []
    for real, link, aside in pairs:
        for old, new in ((real, aside), (link, real), (real, link), (aside, real)):
            steps.append(lambda old=old, new=new: os.rename(top / old, top / new))  # noqa: PTH104 - the call itself
    return steps


def race(act, given_least, refused_least):
    """Call *act* for three seconds, or until it gave something and refused so often; return how often it did."""
    begun = time.monotonic()
    given = refused = 0
    while (passed := time.monotonic() - begun) < SECONDS or (
        (given <= given_least or refused <= refused_least) and passed < LONG
    ):
        try:
            data = act()
        except (ExecRefused, FileRefused, RootChanged, OSError):
            refused += 1
            continue
        assert SECRET not in data, f"leaked after {given} reads"
        given += 1
    return given, refused


@pytest.mark.parametrize("path", ["file.txt", "folder/file.txt"])
def test_reading_below_a_root_never_follows(place, path):
    """Neither the file itself nor a folder on the way is followed when it becomes a link."""
    with swapping(*swaps(place)):
        given, refused = race(lambda: read_file(place, path, limit=1 << 20).data, 100, 100)
    assert given > 100
    assert refused > 100


@pytest.mark.parametrize("path", ["file.txt", "folder/file.txt"])
def test_inputs_are_never_read_through_a_link(place, path):
    """An input named by its host path is what stands there, or a refusal."""
    inputs = (InputFile("in.txt", place / path),)
    with swapping(*swaps(place)):
        given, refused = race(lambda: read_inputs(inputs, Limits())[0][1], 100, 100)
    assert given > 100
    assert refused > 100


def test_outputs_are_never_collected_through_a_link(place):
    """Collecting a folder that changes meanwhile gives regular files of that folder or errors."""
    globs = (compile_glob("**"),)

    def gather():
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return b"".join(item.content for item in collect(fd, globs, Limits()).artifacts)
        finally:
            os.close(fd)

    with swapping(*swaps(place)):
        given, _ = race(gather, 100, -1)
    assert given > 100


def test_a_staged_skill_is_the_one_that_was_checked(place, tmp_path):
    """A copy is made of what the digest names, or not at all; a swapped tree never gets in."""
    (place / "link.txt").unlink()
    (place / "linked").unlink()
    digest = tree_digest(place)
    (place / "link.txt").symlink_to(tmp_path / "secret/file.txt")
    aside = tmp_path / "elsewhere"
    cache = tmp_path / "cache"
    steps = [
        lambda: os.rename(place / "file.txt", aside),  # noqa: PTH104 - the call itself
        lambda: os.rename(place / "link.txt", place / "file.txt"),  # noqa: PTH104 - as above
        lambda: os.rename(place / "file.txt", place / "link.txt"),  # noqa: PTH104 - as above
        lambda: os.rename(aside, place / "file.txt"),  # noqa: PTH104 - as above
    ]

    def stage():
        copy = stage_skill(SkillMount("a.b", place, digest), cache)
        assert tree_digest(copy) == digest
        return b"".join(path.read_bytes() for path in copy.rglob("*.txt") if not path.is_symlink())

    with swapping(*steps):
        race(stage, -1, -1)
    assert not any(SECRET in path.read_bytes() for path in cache.rglob("*.txt") if path.is_file())


@pytest.mark.parametrize(
    ("make", "fewest"),
    [
        pytest.param(BubblewrapExecutor, 5, marks=pytest.mark.needs("bubblewrap"), id="bubblewrap"),
        pytest.param(DockerExecutor, 1, marks=pytest.mark.needs("docker"), id="docker"),
    ],
)
async def test_a_program_that_swaps_until_it_is_killed(make, fewest, packages):
    """Whole runs whose outputs change until the last moment, with packages in place: the host's files never come back."""
    engine = make(ExecutionOptions())
    limits = Limits(wall_s=110)
    request = ExecRequest(code=SWAPPER.read_text(), outputs=("**",), limits=limits, environment=packages)
    begun = time.monotonic()
    runs = 0
    while (passed := time.monotonic() - begun) < SECONDS or (runs < fewest and passed < LONG):
        results = await asyncio.gather(engine.run(request), engine.run(request))
        for result in results:
            assert result.status == "ok", result
            assert all(item.content in {b"", b"harmless"} for item in result.artifacts), result.artifacts
        runs += len(results)
    assert runs >= fewest
