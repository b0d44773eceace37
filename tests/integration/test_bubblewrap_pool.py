"""Sandboxes made ahead of time: the same promises, one run each, nothing left over."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills import SkillsSubsystem, load_bundle
from kdskills.builtin.executors import bubblewrap as engine_module
from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, ExecutionOptions, InputFile, IsolationLevel, Limits, SkillMount
from kdskills.execution import bwrap as pool_module
from kdskills.execution.owner import find_parent
from kdskills.skills.safe_open import tree_digest
from kdskills.testing.conformance.packages import PLANTED, small_environment
from kdskills.testing.executors import conformance

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.xdist_group("pool")]

SIZE = 2
WHO = "import os; print(os.getpid(), sorted(os.listdir('/work')), sorted(os.listdir('/tmp')))"


@pytest.fixture(scope="module")
def executor():
    """Return an engine that keeps sandboxes ready."""
    engine = BubblewrapExecutor(ExecutionOptions(pool=SIZE))
    yield engine
    engine.close()


@pytest.fixture
def fresh():
    """Return an engine of one test's own."""
    engine = BubblewrapExecutor(ExecutionOptions(pool=SIZE))
    yield engine
    engine.close()


async def full(engine, count=SIZE):
    """Wait until the pool is full."""
    end = time.monotonic() + 60
    while engine.ready() < count and time.monotonic() < end:  # noqa: ASYNC110 - another thread fills it
        await asyncio.sleep(0.01)
    assert engine.ready() == count


def alive(pids):
    """Return those of *pids* that still are processes."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def leaves():
    """Return the names of this process's cgroup leaves."""
    parent = find_parent()
    return (
        []
        if parent is None
        else [leaf.memory.name for leaf in parent.leaves() if f"-{os.getpid()}-" in leaf.memory.name]
    )


@conformance(IsolationLevel.NAMESPACE)
async def test_conformance(executor, promise):
    """A prepared sandbox keeps every promise a fresh one keeps."""
    await executor.run(ExecRequest(code="pass"))
    await full(executor)
    await promise.check(executor)


async def test_a_worker_serves_one_run_and_starts_empty(fresh):
    """Each run has a sandbox of its own: what one leaves, the next does not see."""
    await fresh.run(ExecRequest(code="pass"))
    seen = []
    for _ in range(4):
        await full(fresh)
        before = fresh.ready()
        seen.append(
            (await fresh.run(ExecRequest(code=f"{WHO}; open('/work/x', 'w'); open('/tmp/x', 'w')"))).stdout.text
        )
        assert before - fresh.ready() in {0, 1}
    assert len(set(seen)) == 1
    assert "[] ['program']" in seen[0]


async def test_more_runs_than_workers(fresh):
    """Runs beyond the pool get a sandbox of their own at once."""
    await fresh.run(ExecRequest(code="pass"))
    await full(fresh)
    results = await asyncio.gather(*(fresh.run(ExecRequest(code=f"print({number})")) for number in range(6)))
    assert [item.stdout.text for item in results] == [f"{number}\n" for number in range(6)]
    await full(fresh)


@pytest.mark.parametrize("how", ["code", "argv"])
async def test_a_run_gets_everything_it_asked_for(fresh, how):
    """Inputs, variables, folder, limits and outputs reach a prepared sandbox as they reach a fresh one."""
    program = "import os, resource, sys; print(os.environ['NAME'], os.getcwd(), open('../in/a').read(), resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CPU), sys.stdin.read()); open('o', 'w').write('made')"
    request = ExecRequest(
        **({"code": program} if how == "code" else {"argv": ("python3", "-c", program), "stdin": b"in"}),
        env={"NAME": "v\x01\udcff"},
        inputs=(InputFile("in/a", b"data"),),
        outputs=("there/*",),
        workdir="there",
        limits=Limits(nofile=77, wall_s=9, memory=100 << 20, pids=9),
    )  # fmt: skip
    await fresh.run(ExecRequest(code="pass"))
    await full(fresh)
    prepared = await fresh.run(request)
    cold = await BubblewrapExecutor(ExecutionOptions()).run(request)
    assert prepared.stdout.data == cold.stdout.data
    assert prepared.stdout.data.startswith(b"v\x01\xff /work/there data (77, 77) (9, 10)")
    assert (prepared.status, prepared.artifacts) == ("ok", cold.artifacts)


async def test_memory_and_processes_have_the_runs_own_bounds(fresh):
    """A worker's cgroup takes on the limits of the run it serves, wider or narrower."""
    if find_parent() is None:
        pytest.skip("no cgroup is writable here")
    await fresh.run(ExecRequest(code="pass"))
    take = "x = b'x' * (120 << 20); print('took')"
    for memory, status in ((80 << 20, "oom"), (400 << 20, "ok")):
        await full(fresh)
        result = await fresh.run(ExecRequest(code=take, limits=Limits(memory=memory)))
        assert result.status == status
    fork = "import os, time\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0: time.sleep(600); os._exit(0)\n        n += 1\nexcept OSError: print(n)"
    await full(fresh)
    assert (await fresh.run(ExecRequest(code=fork, limits=Limits(pids=8)))).stdout.text == "7\n"


async def test_workers_are_keyed_by_skills_and_sizes(fresh, tmp_path):
    """A run with other skills or sizes never gets a worker made for something else; the pool learns its kind."""
    skill = tmp_path / "s"
    skill.mkdir()
    (skill / "SKILL.md").write_text("---\nname: s\ndescription: d\n---\nbody\n")
    see = "import os; print(os.listdir('/skills'), os.statvfs('/work').f_blocks * os.statvfs('/work').f_frsize)"
    plain = ExecRequest(code=see)
    with_skill = ExecRequest(code=see, skills=(SkillMount("local.s", skill, tree_digest(skill)),))
    small = ExecRequest(code=see, limits=Limits(work_size=8 << 20))
    expected = ((plain, "[] 67108864\n"), (with_skill, "['local.s'] 67108864\n"), (small, "[] 8388608\n"))
    for request, text in (*expected, *expected):
        assert (await fresh.run(request)).stdout.text == text
        await full(fresh)
        assert (await fresh.run(request)).stdout.text == text
    (skill / "SKILL.md").write_text("---\nname: s\ndescription: d\n---\nchanged\n")
    changed = await fresh.run(with_skill)
    assert (changed.status, changed.error.code) == ("refused", "skills_mismatch")


async def test_workers_are_keyed_by_environment(fresh):
    """A run gets a waiting sandbox with its own packages or one made for it; the waiting process has imported none of them."""
    see = "import os, sys\nprint(sorted(os.listdir('/env')), '/env/' in str(sys.modules.values()))\ntry:\n    import packed\n    print(packed.NAME)\nexcept ImportError:\n    pass"
    with small_environment(shadows=PLANTED) as first, small_environment(name="second") as second:
        requests = [ExecRequest(code=see, environment=mount) for mount in (first, None, second)]
        expected = [f"['{first.digest}'] False\npacked\n", "[] False\n", f"['{second.digest}'] False\npacked\n"]
        for request, text in zip(requests * 2, expected * 2, strict=True):
            assert (await fresh.run(request)).stdout.text == text
            await full(fresh)
            result = await fresh.run(request)
            assert (result.stdout.text, result.stderr.text) == (text, "")
        await full(fresh)
        script = ExecRequest(argv=("say-packed", "x"), environment=second)
        assert (await fresh.run(script)).stdout.text == "said x\n"


async def test_a_worker_that_died_or_grew_old_is_not_used(fresh, monkeypatch):
    """Waiting sandboxes are looked at before they are given away."""
    await fresh.run(ExecRequest(code="pass"))
    await full(fresh)
    for worker in fresh._pool[1]._idle:
        os.kill(worker.box.init, signal.SIGKILL)
        worker.box._launcher.wait()
    assert (await fresh.run(ExecRequest(code="print(1)"))).stdout.text == "1\n"
    await full(fresh)
    monkeypatch.setattr(pool_module, "KEEP_S", 0.0)
    assert (await fresh.run(ExecRequest(code="print(2)"))).stdout.text == "2\n"


async def test_a_pool_that_cannot_be_filled_holds_nobody_up(fresh, monkeypatch):
    """Runs go on with sandboxes of their own, and the trouble can be read."""

    def fail(*_args, **_keywords):
        raise OSError("no more room")

    monkeypatch.setattr(engine_module, "make_worker", fail)
    assert (await fresh.run(ExecRequest(code="print(1)"))).stdout.text == "1\n"
    end = time.monotonic() + 60
    while fresh._pool[1].trouble is None and time.monotonic() < end:  # noqa: ASYNC110 - another thread tells
        await asyncio.sleep(0.01)
    assert (fresh._pool[1].trouble, fresh.ready()) == ("no more room", 0)
    assert (await fresh.run(ExecRequest(code="print(2)"))).stdout.text == "2\n"


async def test_timeouts_cancels_signals_and_tails(fresh):
    """A run in a prepared sandbox is a handle like any other."""
    await fresh.run(ExecRequest(code="pass"))
    await full(fresh)
    slow = "import time; print('on'); time.sleep(600)"
    assert (await fresh.run(ExecRequest(code=slow, limits=Limits(wall_s=0.5)))).status == "timeout"
    await full(fresh)
    handle = await fresh.start(ExecRequest(code=slow))
    while handle.tail()[0] != b"on\n":  # noqa: ASYNC110 - another process writes
        await asyncio.sleep(0.01)
    handle.signal(signal.SIGUSR1)
    assert (await handle.wait()).signal == signal.SIGUSR1
    await full(fresh)
    handle = await fresh.start(ExecRequest(code=slow))
    await handle.cancel()
    assert (await handle.wait()).status == "cancelled"


async def test_what_is_refused_is_refused_before_a_worker_is_taken(fresh):
    """A bad request costs no worker."""
    await fresh.run(ExecRequest(code="pass"))
    await full(fresh)
    with pytest.raises(ExecRefused):
        await fresh.run(ExecRequest(code="pass", env={"LD_PRELOAD": "x"}))
    assert fresh.ready() == SIZE


async def test_closing_ends_every_worker():
    """Nothing of a closed pool is left, and closing twice is harmless."""
    engine = BubblewrapExecutor(ExecutionOptions(pool=SIZE))
    before = leaves()
    await engine.run(ExecRequest(code="pass"))
    await full(engine)
    pids = [worker.box.pid for worker in engine._pool[1]._idle]
    engine.close()
    engine.close()
    assert leaves() == before
    assert alive(pids) == []


def test_the_end_of_the_process_ends_its_workers(repo):
    """A program that forgets to close leaves no sandbox and no cgroup behind."""
    program = (
        "import asyncio, os, time\n"
        "from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor\n"
        "from kdskills.execution import ExecRequest, ExecutionOptions\n"
        "engine = BubblewrapExecutor(ExecutionOptions(pool=2))\n"
        "asyncio.run(engine.run(ExecRequest(code='pass')))\n"
        "while engine.ready() < 2: time.sleep(0.01)\n"
        "print(os.getpid(), *[worker.box.pid for worker in engine._pool[1]._idle])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=repo, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    owner, *workers = done.stdout.split()
    assert alive(workers) == []
    parent = find_parent()
    left = [] if parent is None else [leaf.memory.name for leaf in parent.leaves()]
    assert [name for name in left if f"-{owner}-" in name] == []


async def test_skills_are_in_force_in_a_prepared_sandbox(fresh, repo):
    """Generated code sees the same skills through a worker as through a sandbox of its own."""
    top = repo / "bundles" / "hello"
    system = SkillsSubsystem(load_bundle(top).descriptor, bundle_root=top, roots=())
    view = system.view(None)
    export = view.export_runtime_globals()
    known = system.snapshot.skills
    rows = export["SKILLS_DESCRIPTOR"]["skills"]
    mounts = tuple(SkillMount(row["id"], known[row["id"]].folder, row["tree"]) for row in rows)
    code = (repo / "tests/integration/parity_program.py").read_text()
    request = ExecRequest(
        code=code, skills=mounts, globals={**export, "REFS": [*sorted(known), "SK1", "nobody.nothing"]}
    )
    first = await fresh.run(request)
    await full(fresh)
    prepared = await fresh.run(request)
    assert (prepared.status, prepared.error, prepared.value) == ("ok", None, first.value)
    assert rows
    assert first.value
