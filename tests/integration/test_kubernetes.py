"""What is Kubernetes' own: what the API refuses, pods that never start or go away, streams that break, what is left behind."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kdskills.builtin.executors.kubernetes import KubernetesExecutor
from kdskills.builtin.executors.kubernetes.cluster import POLICY, policy_manifest
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, InputFile, Limits, Owner
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.request import MIB
from tests.integration.kubernetes_cluster import VERSION, FakeCluster

pytestmark = [
    pytest.mark.needs("kubernetes"),
    pytest.mark.xdist_group("kubernetes"),
]  # uids of pods bound what they start

PAGE = Path(__file__).parents[2] / "docs/how-to/run-on-kubernetes.md"


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory):
    """Return the one cluster of this module."""
    with FakeCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster):
    """Return the cluster with nothing in it and nothing wrong with it."""
    for name in list(whole_cluster.pods):
        whole_cluster.kill(name)
    whole_cluster.reset()
    return whole_cluster


@pytest.fixture
def make(cluster):
    """Return a maker of engines."""
    return lambda **changes: KubernetesExecutor(ExecutionOptions(kubernetes=cluster.options(**changes)))


def sh(script: str, **fields) -> ExecRequest:
    """Return a request for a line of shell."""
    return ExecRequest(argv=("sh", "-c", script), **fields)


async def until(true) -> None:
    """Wait for *true*."""
    for _ in range(400):
        if true():
            return
        await asyncio.sleep(0.025)
    raise AssertionError("it did not become true in 10 s")


async def begun(engine, script: str = "echo ready; sleep 60", **fields):
    """Start a program that says `ready`, and return its handle once it did."""
    handle = await engine.start(sh(script, **fields))
    await until(lambda: b"ready" in handle.tail()[0])
    return handle


async def gone(cluster) -> None:
    """Wait until every pod is gone."""
    await until(lambda: not cluster.pods)


async def refusal(engine, request: ExecRequest | None = None) -> ExecRefused:
    """Return the refusal of a run."""
    with pytest.raises(ExecRefused) as refused:
        await engine.run(request or sh("true"))
    return refused.value


async def test_a_program_that_stops_everybody_leaves_nothing(cluster, make):
    """What it stopped beside itself ends with its pod, at the limit of its time."""
    stop = "import os, signal; [os.kill(int(n), signal.SIGSTOP) for n in os.listdir('/proc') if n.isdigit() and n not in ('1', str(os.getpid()))]"
    request = ExecRequest(argv=("python3", "-c", f"{stop}; signal.pause()"), limits=Limits(wall_s=1))
    assert (await make().run(request)).status == "timeout"
    await gone(cluster)
    await until(cluster.nothing_runs)


async def test_a_run_and_what_is_left_of_it(cluster, make):
    """Inputs go in, outputs come out, by either protocol of commands; then the pod is gone."""
    for cluster.protocol in ("v4.channel.k8s.io", "v5.channel.k8s.io"):
        request = sh(
            "cat in.bin > out.bin; cat >&2; exit 3",
            inputs=(InputFile("in.bin", bytes(range(256)) * 1024),),
            stdin=b"\x00\xff words",
            outputs=("*.bin",),
        )
        result = await make().run(request)
        assert (result.status, result.exit_code, result.stderr.data) == ("nonzero", 3, b"\x00\xff words")
        assert {item.path: item.content for item in result.artifacts}["out.bin"] == bytes(range(256)) * 1024
    await gone(cluster)


@pytest.mark.parametrize(
    ("asked", "statuses", "reason"),
    [
        ("create pods", [401], "unauthorized"),
        ("create pods", [403], "forbidden"),
        ("create pods", [409, 409, 409], "conflict"),
        ("create pods", [422], "manifest_refused"),
        ("create pods", [429], "rate_limited"),
        ("create pods", [500], "unreachable"),
        ("get pods", [403], "forbidden"),
        ("get networkpolicies", [403], "forbidden"),
        ("create networkpolicies", [500], "unreachable"),
        ("get pods/exec", [403], "forbidden"),
        ("get pods/exec", [500], "unreachable"),
    ],
)
async def test_what_the_api_refuses(cluster, make, asked, statuses, reason):
    """What the API says is told by a stable reason, no program ran anywhere else, and no pod stays."""
    cluster.faults[asked] = statuses
    error = await refusal(make())
    assert (error.code, error.details["reason"]) == ("engine_unavailable", reason)
    await gone(cluster)


async def test_answers_that_pass(cluster, make):
    """A conflict over a quota, or an API that is busy while the pod starts, costs no run."""
    cluster.faults = {"create pods": [409], "get pods": [500, 429, 503], "create networkpolicies": [409]}
    cluster.policies[POLICY] = policy_manifest()
    assert (await make().run(sh("true"))).status == "ok"


async def test_no_cluster_and_no_image(cluster, make, tmp_path, monkeypatch):
    """Without an image by digest, a kubeconfig, an API or the client's package, a run is refused in words that help."""
    for image in (None, "registry.example/kdskills", "registry.example/kdskills:latest", f"x@sha256:{'5a' * 31}"):
        assert "by digest" in (await refusal(make(image=image))).message
    assert "knows no cluster" in (await refusal(make(config=tmp_path / "none"))).message
    for text in ("", "[", "[]", "x: 1", "clusters: 5", '{"current-context": "a", "contexts": [{"name": "a"}]}'):
        (tmp_path / "bad").write_text(text)
        assert "knows no cluster" in (await refusal(make(config=tmp_path / "bad"))).message
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9", cluster.config.read_text())
    (tmp_path / "closed").write_text(text)
    error = await refusal(make(config=tmp_path / "closed"))
    assert error.details["reason"] == "unreachable"
    report = await make(config=tmp_path / "closed").probe()
    assert not report.ok
    assert "no pod is available" in report.cure
    assert "not run against a cluster" in report.cure
    for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    for name in ("client", "config"):
        monkeypatch.setattr(f"kdskills.builtin.executors.kubernetes.cluster.{name}", _lazy(f"kubernetes.{name}"))
    assert "pip install" in (await refusal(make())).message


def _lazy(name: str):
    from kdskills.storage.database import LazyModule

    return LazyModule(name)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"])
async def test_an_image_that_cannot_be_had(cluster, make, reason):
    """A pod whose image cannot be pulled, or whose container cannot be made, is given up at once and deleted."""
    cluster.image_error = (reason, "not found:\nregistry.example/kdskills")
    error = await refusal(make())
    expected = "image_unavailable" if "Image" in reason else "container_failed"
    assert error.details["reason"] == expected
    assert f"{reason}: not found: registry.example/kdskills" in error.message
    await gone(cluster)


async def test_a_pod_that_finds_no_node(cluster, make):
    """A pod that is not scheduled in time is refused with the scheduler's words; a cancelled wait for one ends soon."""
    cluster.unschedulable = True
    error = await refusal(make(start_s=0.5))
    assert error.details["reason"] == "not_scheduled"
    assert "0/3 nodes fit" in error.message
    task = asyncio.create_task(make().run(sh("true")))
    await until(lambda: cluster.pods)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not cluster.pods


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("Evicted", "infra_error", "sandbox_lost"),
        ("", "infra_error", "sandbox_lost"),
        ("DeadlineExceeded", "timeout", None),
    ],
)
async def test_a_pod_that_goes_away(cluster, make, reason, status, code):
    """A pod that the cluster ends while a program runs is told by what the API says, with the output so far."""
    handle = await begun(make())
    (name,) = cluster.pods
    cluster.kill(name, reason, "the node was low on memory")
    result = await handle.wait()
    assert (result.status, result.exit_code, result.error and result.error.code) == (status, None, code)
    assert result.stdout.data == b"ready\n"
    if reason == "Evicted":
        assert "the node was low on memory" in result.error.message


async def test_a_stream_that_breaks(cluster, make):
    """A stream that is cut off while the pod lives is `engine_failed`, never the program's end; the pod is deleted."""
    cluster.cut_after = 5
    result = await make().run(sh("echo ready; sleep 60"))
    assert (result.status, result.exit_code, result.error.code) == ("infra_error", None, "engine_failed")
    await gone(cluster)


async def test_an_archive_that_is_altered_on_its_way(cluster, make):
    """No program starts from files that are not what was sent."""
    cluster.altered = True
    error = await refusal(make())
    assert error.details["reason"] == "container_failed"
    assert "has digest" in error.message


@pytest.mark.parametrize("whole", [False, True])
async def test_memory_that_runs_out(cluster, make, whole):
    """`oom` is told by the init where the kernel ends one process, and by the API where it ends the whole container."""
    cluster.oom_group = whole
    script = "head -c 200000000 /dev/zero | tail -c 199999999 | wc -c"
    result = await make().run(sh(script + "; exit 1", limits=Limits(memory=48 * MIB)))
    assert result.status == "oom"


async def test_kill_as_a_signal(cluster, make):
    """KILL ends the program as a death by it, and its pod."""
    handle = await begun(make())
    handle.signal(signal.SIGKILL)
    result = await handle.wait()
    assert (result.status, result.exit_code, result.signal) == ("nonzero", 137, 9)
    await gone(cluster)


async def test_cancelling_waits_for_the_pod(cluster, make):
    """When `cancel` returns, the pod is gone, although the program is deaf to TERM."""
    handle = await begun(make(), "trap '' TERM; echo ready; while :; do sleep 1; done")
    started = time.monotonic()
    await handle.cancel()
    assert not cluster.pods
    assert time.monotonic() - started < 5
    assert (await handle.wait()).status == "cancelled"


async def test_a_policy_that_is_open(cluster, make):
    """A policy of our name that lets something through is no wall, and no pod is made."""
    open_policy = policy_manifest()
    open_policy["spec"]["egress"] = [{}]
    cluster.policies[POLICY] = open_policy
    before = cluster.verbs["create pods"]
    assert (await refusal(make())).details["reason"] == "policy_open"
    assert cluster.verbs["create pods"] == before


async def test_hosts_are_refused(make):
    """A cluster's policies know no names of hosts: a request that names any is refused, and secrets with it."""
    error = await refusal(make(), sh("true", network=("example.org",)))
    assert error.code == "limit_not_enforceable"


async def test_what_a_program_is_told_of_the_cluster(cluster, make):
    """No token, no address of the API, no name of the node and nobody's variables are inside."""
    request = ExecRequest(argv=("sh", "-c", "env; ls -A /var/run/secrets /run/secrets; cat /etc/hostname; hostname"))
    result = await make().run(request)
    told = (result.stdout.data + result.stderr.data).decode()
    assert "KUBERNETES" not in told
    assert "serviceaccount" not in told
    assert "kdskills" not in told


async def test_reap(cluster, make):
    """Pods of dead processes of this machine go, and pods over their lease, whoever had them; all others stay."""
    engine = make()
    living = await begun(engine, owner=Owner(tenant="us"))
    (name,) = cluster.pods
    pod = cluster.pods[name]
    for other, boot, pid, made in (
        ("dead", None, "1", None),
        ("elsewhere", "another", "1", None),
        ("over", "another", "1", "2026-01-01T00:00:00Z"),
    ):
        body = json.loads(json.dumps(pod.body))
        body["metadata"]["name"] = other
        body["metadata"]["creationTimestamp"] = made or body["metadata"]["creationTimestamp"]
        marks = body["metadata"]["annotations"]
        marks |= {"kdskills.pid": pid, "kdskills.boot": boot or marks["kdskills.boot"]}
        cluster.pods[other] = type(pod)(body, pod.folder / other)
    report = await engine.reap()
    assert (sorted(report.ended), report.failed) == (["pod dead", "pod over"], ())
    await until(lambda: set(cluster.pods) == {name, "elsewhere"})
    cluster.faults["list pods"] = [403]
    assert "403" in (await engine.reap()).failed[0]
    await living.cancel()


async def test_the_page_asks_for_what_is_used(cluster, make):
    """The objects of the guide are what the schema says, and its role allows what the engine asks for, and nothing else."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    objects = [item for block in blocks for item in yaml.safe_load_all(block)]
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    kinds = {item["kind"]: item for item in objects}
    assert kinds["NetworkPolicy"]["spec"] == policy_manifest()["spec"]
    assert kinds["NetworkPolicy"]["metadata"]["name"] == POLICY
    allowed = {
        f"{verb} {resource}"
        for rule in kinds["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    engine = make()
    await engine.run(sh("true"))
    await engine.reap()
    assert set(cluster.verbs) | {"create pods/exec"} == allowed  # newer clusters ask for `create` as well
