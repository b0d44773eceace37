"""The pool's own decisions: what an order says, which workers are kept."""

import json
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdskills.execution.bwrap import Pool, SandboxJob, SandboxSetup, WorkerKind, build_order
from kdskills.execution.check import check_request
from kdskills.execution.request import ExecRequest, InputFile, Limits
from kdskills.execution.rootfs import Rootfs


def job(*, payload=None, inputs=(), **request):
    """Return a checked job."""
    return SandboxJob(check_request(ExecRequest(**request)), payload, (), tuple(inputs))


def setup(*, cgroups=True):
    """Return what orders need to know of an engine."""
    return SandboxSetup({}, None, Rootfs(Path("/tree"), "abc", "/entry"), b"", None, cgroups or None, False, None)


def read(data):
    """Return the order and what follows it."""
    size = int.from_bytes(data[:8], "big")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_an_order_says_everything_a_command_line_would():
    """Program, variables, folder, limits, and the inputs' bytes after it."""
    inputs = (InputFile("a", b"xy"),)
    made = job(
        argv=("cat", "a"), env={"A": "\udcff"}, inputs=[("a", b"xy")], workdir="w", limits=Limits(wall_s=2, nofile=50)
    )
    order, rest = read(build_order(setup(), made, (5, 6)))
    assert (order["argv"], order["cwd"], order["code"], order["inputs"]) == (["cat", "a"], "/work/w", False, [["a", 2]])
    assert order["env"]["A"] == "\udcff"
    assert set(order["env"]) == {"A", "PATH", "HOME", "LANG", "TMPDIR"}
    assert order["limits"] == {"core": [0, 0], "nofile": [50, 50], "fsize": [64 << 20] * 2, "cpu": [2, 3]}
    assert rest == inputs[0].content


def test_without_a_cgroup_rlimits_stand_in():
    """Address space and processes are bounded inside."""
    order, _ = read(build_order(setup(cgroups=False), job(argv=("x",)), (5, 6)))
    assert (order["limits"]["as"], order["limits"]["nproc"]) == ([256 << 20] * 2, [65, 65])


def test_code_with_variables_gets_an_interpreter_of_its_own():
    """Variables are read by an interpreter when it starts, so the waiting one will not do."""
    plain = read(build_order(setup(), job(code="1", payload=b"{}"), (5, 6)))
    assert (plain[0]["argv"], plain[0]["code"], plain[1]) == (None, True, b"{}")
    own = read(build_order(setup(), job(code="1", payload=b"{}", env={"A": "b"}), (5, 6)))
    assert (own[0]["argv"], own[0]["code"]) == (
        ["/usr/local/bin/python3", "-I", "/entry", "--payload-fd", "5", "--report-fd", "6"],
        True,
    )


def test_a_kind_is_what_cannot_be_changed():
    """Skills and sizes make a kind; limits, inputs and variables do not."""
    assert WorkerKind.for_job(job(argv=("x",))) == WorkerKind.for_job(
        job(argv=("y",), env={"A": "b"}, limits=Limits(memory=64 << 20, pids=3))
    )
    assert WorkerKind.for_job(job(argv=("x",))) != WorkerKind.for_job(
        job(argv=("x",), limits=Limits(work_size=1 << 20))
    )


def test_a_folder_that_was_made_anew_is_another_kind(tmp_path):
    """A sandbox that mounts a removed folder is not used for what lies at its path now."""
    made = SandboxJob(check_request(ExecRequest(argv=("x",))), None, (("/env/0", tmp_path / "e"),), ())
    (tmp_path / "e").mkdir()
    before = WorkerKind.for_job(made)
    (tmp_path / "e").rename(tmp_path / "old")
    (tmp_path / "e").mkdir()
    assert WorkerKind.for_job(made) != before


def kind(name):
    """Return a kind."""
    return WorkerKind(((name, Path("/") / name),), 1, 1)


class Workers:
    """Makes workers that are nothing but counted."""

    def __init__(self):
        self.made = []
        self.ended = []
        self.fit = True
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def __call__(self, wanted):
        self.asked.set()
        self.gate.wait(60)
        stack = ExitStack()
        worker = SimpleNamespace(kind=wanted, stack=stack, usable=lambda: self.fit)
        stack.callback(self.ended.append, wanted)
        self.made.append(wanted)
        return worker


@pytest.fixture
def workers():
    """Return the maker."""
    return Workers()


@pytest.fixture
def pool(workers):
    """Return a pool of two."""
    made = Pool(2, workers)
    yield made
    made.close()


def until(condition):
    """Wait until *condition* holds."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_it_fills_up_to_its_size_and_no_further(pool, workers):
    """Asking often makes no more than there is room for."""
    for _ in range(5):
        pool.want(kind("a"))
    until(lambda: pool.idle() == 2)
    assert workers.made == [kind("a")] * 2


def test_a_worker_is_given_away_once(pool):
    """Nobody else gets it, and only runs of its kind do."""
    pool.want(kind("a"))
    until(lambda: pool.idle(kind("a")) == 2)
    assert pool.take(kind("b")) is None
    first, second = pool.take(kind("a")), pool.take(kind("a"))
    assert first is not second
    assert pool.take(kind("a")) is None


def test_kinds_not_asked_for_make_room(pool, workers):
    """The last kind asked for has the pool; the others' sandboxes are ended."""
    pool.want(kind("a"))
    until(lambda: pool.idle(kind("a")) == 2)
    pool.want(kind("b"))
    until(lambda: pool.idle(kind("b")) == 2)
    assert (pool.idle(), workers.ended) == (2, [kind("a")] * 2)


def test_only_the_latest_wish_counts(pool, workers):
    """Wishes that grew old while a sandbox was made are dropped."""
    workers.gate.clear()
    for name in "abc":
        pool.want(kind(name))
    workers.gate.set()
    until(lambda: pool.idle(kind("c")) == 2)
    assert pool.idle() == 2
    assert len(workers.made) <= 4


def test_unfit_workers_are_ended_not_used(pool, workers):
    """A dead or old worker is no worker."""
    pool.want(kind("a"))
    until(lambda: pool.idle() == 2)
    workers.fit = False
    assert pool.take(kind("a")) is None
    assert workers.ended == [kind("a")] * 2


def test_trouble_is_kept_and_the_pool_goes_on():
    """A failure to make a sandbox is told, and the next wish tries again."""
    workers = Workers()
    tries = []

    def make(wanted):
        tries.append(wanted)
        if len(tries) == 1:
            raise OSError("no room")
        return workers(wanted)

    pool = Pool(1, make)
    pool.want(kind("a"))
    until(lambda: pool.trouble == "no room")
    pool.want(kind("a"))
    until(lambda: pool.idle() == 1)
    pool.close()


def test_a_closed_pool_ends_what_it_has_and_takes_no_wish(pool, workers):
    """Closing ends every worker, one being made too, and stays closed."""
    pool.want(kind("a"))
    until(lambda: pool.idle() == 2)
    worker = pool.take(kind("a"))
    workers.gate.clear()
    workers.asked.clear()
    pool.want(kind("a"))
    assert workers.asked.wait(60)
    opening = threading.Timer(0.1, workers.gate.set)
    opening.start()
    pool.close()
    opening.join()
    pool.want(kind("a"))
    worker.stack.close()
    assert pool.idle() == 0
    assert len(workers.ended) == len(workers.made)


class Collecting:
    """Sizes of a kind at whose comparison an engine that is garbage is collected, as may happen at any allocation."""

    def __init__(self):
        self.engine = None

    def __eq__(self, other):
        self.engine = None
        return self is other

    def __hash__(self):
        return 1


def test_an_engine_that_is_collected_in_the_middle_of_a_step_ends_its_pool(workers):
    """The finalizer closes the pool from within the pool's own thread, and nothing waits for itself."""
    pool = Pool(1, workers)
    size = Collecting()
    pool.want(WorkerKind((), size, 1))
    until(lambda: pool.idle() == 1)
    engine = Workers()
    closed = weakref.finalize(engine, pool.close)
    size.engine, engine = engine, None
    pool.want(WorkerKind((), Collecting(), 1))
    until(lambda: not closed.alive)
    pool._thread.join(60)
    assert not pool._thread.is_alive()
    assert (pool.idle(), len(workers.ended)) == (0, len(workers.made))
