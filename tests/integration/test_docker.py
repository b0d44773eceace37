"""What is docker's own: the daemon, the image, leftovers, memory, the queue."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

import docker
import pytest

from kdskills.builtin.executors.docker import REPOSITORY, DockerExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, Limits, Owner
from kdskills.execution.owner import RUN_LABEL, owner_labels
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.request import MIB

pytestmark = [pytest.mark.needs("docker"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def executor():
    """Return one engine."""
    return DockerExecutor(ExecutionOptions())


@pytest.fixture
def client():
    """Return a client of our own to look at the daemon with."""
    client = docker.from_env()
    yield client
    client.close()


def runs_of(client, conversation: str):
    """Return the containers of a conversation."""
    return client.containers.list(
        all=True, filters={"label": f"kdskills.conversation={conversation}"}, ignore_removed=True
    )


async def test_no_daemon_is_a_refusal_with_a_cure(monkeypatch, tmp_path):
    """Without a daemon the probe says what to do, and a run is refused before anything happens."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    engine = DockerExecutor(ExecutionOptions())
    report = await engine.probe()
    assert (report.ok, "daemon" in (report.cure or "")) == (False, True)
    with pytest.raises(ExecRefused) as caught:
        await engine.run(ExecRequest(argv=("true",)))
    assert caught.value.code == "engine_unavailable"
    assert (await engine.reap()).ended == ()


async def test_a_run_leaves_no_container(executor, client):
    """Ended, failed and cancelled runs are removed; while it runs a container carries its labels and its image's id."""
    conversation = secrets.token_hex(8)
    owner = Owner("t", "p", "a", conversation)
    handle = await executor.start(
        ExecRequest(argv=("sleep", "600"), owner=owner, request_id="r-1", limits=Limits(wall_s=300))
    )
    for _ in range(1200):
        found = [one for one in runs_of(client, conversation) if one.status == "running"]
        if found:
            break
        await asyncio.sleep(0.05)
    labels, config = found[0].labels, found[0].attrs["HostConfig"]
    assert {labels[RUN_LABEL], labels["kdskills.tenant"]} == {"r-1", "t"}
    assert found[0].attrs["Image"] == found[0].attrs["Config"]["Image"]
    assert (config["NetworkMode"], config["ReadonlyRootfs"], config["CapDrop"], config["Init"]) == (
        "none",
        True,
        ["ALL"],
        True,
    )
    assert config["PidsLimit"] == Limits().pids + 2
    assert config["Memory"] == config["MemorySwap"] == Limits().memory
    await handle.cancel()
    assert (await handle.wait()).status == "cancelled"
    await executor.run(ExecRequest(argv=("false",), owner=owner))
    assert runs_of(client, conversation) == []


async def test_memory_is_told_from_failure(executor):
    """A container that ran out of memory says `oom`, whoever the kernel chose."""
    result = await executor.run(
        ExecRequest(argv=("sh", "-c", "head -c 200m /dev/zero | tail"), limits=Limits(memory=64 * MIB, wall_s=20))
    )
    assert result.status == "oom", result


async def test_too_little_memory_is_refused(executor):
    """What the container's own first program does not fit in is refused, not tried."""
    with pytest.raises(ExecRefused) as caught:
        await executor.run(ExecRequest(argv=("true",), limits=Limits(memory=8 * MIB)))
    assert caught.value.code == "limit_not_enforceable"


async def test_killing_the_watcher_is_no_result(executor):
    """A program that kills what watches it gets no exit code."""
    script = "for p in /proc/[0-9]*; do n=${p#/proc/}; [ $n -gt 1 ] && [ $n != $$ ] && kill -9 $n; done; sleep 30"
    result = await executor.run(ExecRequest(argv=("sh", "-c", script), limits=Limits(wall_s=100)))
    assert (result.status, result.exit_code, result.error.code) == ("infra_error", None, "init_lost")


async def test_reap_removes_what_dead_owners_left(executor, client):
    """Containers of dead processes and other boots go; others stay."""
    image, _ = await asyncio.to_thread(executor.image)
    conversation = secrets.token_hex(8)
    mine = owner_labels(Owner(conversation=conversation), "r")
    made = {
        "dead": {**mine, "kdskills.pid": "4194304"},
        "other boot": {**mine, "kdskills.boot": "another"},
        "living": mine,
    }
    containers = {name: client.containers.create(image, ["true"], labels=labels) for name, labels in made.items()}
    try:
        report = await executor.reap()
        assert report.failed == ()
        ours = {f"container {container.name}": name for name, container in containers.items()}
        # The daemon is everybody's: another kdskills that starts at this moment may have named one of the dead.
        assert {ours[line] for line in report.ended if line in ours} <= {"dead", "other boot"}
        for _ in range(600):
            if len(left := runs_of(client, conversation)) == 1:
                break
            await asyncio.sleep(0.1)
        assert [one.id for one in left] == [containers["living"].id]
    finally:
        for container in runs_of(client, conversation):
            container.remove(force=True)


async def test_the_image_is_ours_and_local(executor, client):
    """The image is named by the digest of the tree it was made of."""
    image, _ = await asyncio.to_thread(executor.image)
    tags = client.images.get(image).tags
    assert all(tag.startswith(f"{REPOSITORY}:") for tag in tags)
    assert image.startswith("sha256:")


async def test_queued_runs_can_be_cancelled(executor):
    """A run that still waits its turn is cancelled at once, without a container; whoever waits for it hears so."""
    request = ExecRequest(argv=("sleep", "600"), limits=Limits(wall_s=300))
    first = [await executor.start(request) for _ in range(2)]
    queued = await executor.start(dataclasses.replace(request, request_id="waits"))
    waiter = asyncio.create_task(queued.wait())
    await asyncio.sleep(0.1)
    async with asyncio.timeout(60):  # the first two are there for longer
        await queued.cancel()
        assert (await waiter).status == "cancelled"
        assert (await queued.wait()).status == "cancelled"
    for handle in first:
        await handle.cancel()
