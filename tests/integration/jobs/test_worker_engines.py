"""Adoption through the worker: on every engine a program goes on without its worker, and the next one follows it."""

import asyncio
import contextlib
import secrets
from pathlib import Path

import docker
import pytest

from kdskills.jobs.model import Command, JobHead, StepSpec, TaskHead
from kdskills.testing.e2b_server import E2bServer
from kdskills.testing.work import WorkLab

pytestmark = [pytest.mark.xdist_group("work"), pytest.mark.timeout(300)]

LONG = "echo up; n=0; while [ $n -lt 40 ]; do sleep 0.1; n=$((n+1)); done; echo done >> runs; cat runs"


@pytest.fixture
async def make_lab(tmp_path):
    """Return a maker of hosts; everything of them is ended."""
    made = []

    def make(engine, **more):
        made.append(WorkLab(tmp_path, engine=engine, **more))
        made[-1].start()
        return made[-1]

    yield make
    for lab in made:
        await lab.aclose()


@pytest.fixture
def e2b():
    """Settings for a local server of remote sandboxes, whose programs are processes of this machine."""
    with E2bServer() as server:
        options = server.options()
        yield {
            "e2b_api_key": options.api_key,
            "e2b_template": options.template,
            "e2b_api_url": options.api_url,
            "e2b_sandbox_url": options.sandbox_url,
        }


def containers(task):
    """Return how many containers of a task's first attempt there are."""
    client = docker.from_env(timeout=60)
    try:
        return len(client.containers.list(all=True, filters={"label": f"kdskills.run={task}.1"}, ignore_removed=True))
    finally:
        client.close()


def command_lines():
    """Return the command line of each process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return found


async def adopted(lab):
    """Kill the worker below a running program and let the next one see it through; return the task's id."""
    head = await lab.client.submit(lab.task(LONG, session="s"))
    await lab.running(head.id)
    assert lab.kill() == -9
    lab.start()
    over = await lab.client.wait(TaskHead, lab.scope, head.id, 120)
    assert (over.status, over.attempt, over.stdout_tail) == ("succeeded", 1, b"up\ndone\n"), (over, lab.said())
    return head.id


async def canceled(lab, nap="sleep 610"):
    """Kill the worker below a running program and cancel it under the next one; return the task's id."""
    head = await lab.client.submit(lab.task(f"echo up; {nap}"))
    await lab.running(head.id)
    lab.kill()
    lab.start()
    await lab.started()
    assert await lab.client.cancel(TaskHead, lab.scope, head.id, "enough")
    over = await lab.client.wait(TaskHead, lab.scope, head.id, 120)
    assert (over.status, over.cancel_reason, over.attempt) == ("canceled", "enough", 1), lab.said()
    return head.id


@pytest.mark.needs("bubblewrap")
async def test_a_killed_worker_is_followed_on_bubblewrap(make_lab):
    """A program in a bubblewrap sandbox is adopted with its output, and another can be canceled after a restart."""
    lab = make_lab("bubblewrap")
    await adopted(lab)
    await canceled(lab)


@pytest.mark.needs("docker")
async def test_a_killed_worker_is_followed_on_docker(make_lab):
    """A program in a container is adopted, another canceled, and no container of either is left."""
    lab = make_lab("docker")
    for task in (await adopted(lab), await canceled(lab)):
        assert await asyncio.to_thread(containers, task) == 0


@pytest.mark.needs("e2b")
async def test_a_killed_worker_is_followed_on_e2b(make_lab, e2b):
    """A program in a remote sandbox is adopted, another canceled, and nothing of it runs on."""
    lab = make_lab("e2b", engine_settings=e2b)
    await adopted(lab)
    nap = f"sleep 610.{secrets.randbelow(10**12):012d}"
    await canceled(lab, nap)
    assert [line for line in command_lines() if nap in line] == []


@pytest.mark.needs("bubblewrap")
async def test_steps_that_run_at_once_keep_each_others_files(make_lab):
    """Steps side by side in one session merge what they wrote, removed and left alone; none undoes another's work."""
    lab = make_lab("bubblewrap")
    scripts = {
        "first": "echo 0 > shared; echo old > gone; echo old > mine",
        "one": "echo 1 > one; rm gone; sleep 6",  # they cannot meet: each waits long enough for the other to begin
        "two": "echo 2 > two; echo new > mine; sleep 6",
        "last": "cat shared one two mine; ls gone",
    }
    needs = {"one": ("first",), "two": ("first",), "last": ("one", "two")}
    steps = tuple(
        StepSpec(
            name=name,
            command=Command(argv=("/bin/sh", "-c", script), timeout_s=60),
            needs=needs.get(name, ()),
            continue_on_error=name == "last",
        )
        for name, script in scripts.items()
    )
    head = await lab.client.submit(lab.job([], steps=steps, max_concurrency=2))
    over = await lab.client.wait(JobHead, lab.scope, head.id, 120)
    tasks = {step.name: step.task for step in over.steps}
    assert {tasks[name].status for name in ("first", "one", "two")} == {"succeeded"}, lab.said()
    assert tasks["one"].started_at < tasks["two"].finished_at
    assert tasks["two"].started_at < tasks["one"].finished_at
    assert tasks["last"].stdout_tail == b"0\n1\n2\nnew\n"
    assert b"No such file" in tasks["last"].stderr_tail
