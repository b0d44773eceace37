"""What Kubernetes' objects say, decided without a cluster: manifests by the published schema, ends and delays of pods, leases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kdskills.builtin.executors.kubernetes import cluster
from kdskills.execution import ExecRequest, Limits, Owner
from kdskills.execution.check import check_request
from kdskills.execution.container import Archive
from kdskills.execution.owner import boot_id, owner_labels
from kdskills.execution.protocol import KubernetesOptions
from kdskills.execution.request import MIB

kubernetes_validate = pytest.importorskip("kubernetes_validate")

NOBODY = Owner()
HOSTILE = Owner(tenant='t" } { "', project="../../etc", agent="ä" * 200, conversation="kube-system")
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def pod(owner: Owner = NOBODY, background: bool = False, **limits: Any) -> dict[str, Any]:
    """Return the manifest of a run."""
    request = ExecRequest(argv=("true",), limits=Limits(**limits), background=background, owner=owner)
    options = KubernetesOptions(image=f"registry.example/x@sha256:{'0' * 64}", runtime_class="gvisor", start_s=0.25)
    archive = Archive(b"tar", "1" * 64)
    return cluster.pod_manifest(check_request(request), options, archive, owner_labels(owner, "r"), 1_000_000_001)


@pytest.mark.parametrize("version", ["1.28", "1.31", kubernetes_validate.latest_version()])
def test_every_version_of_the_schema_takes_the_objects(version: str) -> None:
    """Pod and policy are what the schema says, for hostile owners, the smallest and the longest of runs."""
    for item in (
        pod(),
        pod(HOSTILE),
        pod(background=True, wall_s=10 * 365 * 86_400.0),
        pod(wall_s=0.1, memory=32 * MIB, work_size=1, tmp_size=1),
        cluster.policy_manifest(),
    ):
        kubernetes_validate.validate(item, version, strict=True)


def test_bounds_of_a_pod() -> None:
    """Memory, sizes and times are the request's; a uid and a class of its own; labels never hold what a caller chose."""
    made = pod(HOSTILE, wall_s=10.0, memory=64 * MIB, work_size=5, tmp_size=7)
    spec, program = made["spec"], made["spec"]["containers"][0]
    assert program["resources"]["limits"]["memory"] == str(64 * MIB)
    sizes = {item["name"]: item["emptyDir"] for item in spec["volumes"]}
    assert [sizes[name]["sizeLimit"] for name in ("work", "tmp", "shm")] == ["5", "7", "7"]
    assert {sizes[name]["medium"] for name in ("work", "tmp", "shm")} == {"Memory"}
    assert spec["activeDeadlineSeconds"] == 91
    assert (spec["runtimeClassName"], spec["securityContext"]["runAsUser"]) == ("gvisor", 1_000_000_001)
    writable = {mount["mountPath"] for mount in program["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/work", "/tmp", "/dev/shm"}
    assert HOSTILE.project not in str(made["metadata"]["labels"])


@pytest.mark.parametrize(
    ("changes", "closed"),
    [
        ({}, True),
        ({"podSelector": {}}, True),
        ({"podSelector": {"matchLabels": {"app": "web"}}}, False),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, False),
        ({"policyTypes": ["Ingress"]}, False),
        ({"policyTypes": None}, False),
        ({"egress": [{}]}, False),
        ({"ingress": [{"from": []}]}, False),
        ({"egress": [], "ingress": None}, True),
    ],
)
def test_which_policies_are_closed(changes: dict[str, Any], closed: bool) -> None:
    """A policy under our name counts only if it selects the pods of runs and lets nothing through."""
    policy = cluster.policy_manifest()
    policy["spec"] |= changes
    assert (cluster.policy_problem(policy) is None) is closed
    assert cluster.policy_problem({}) is not None


def status(**parts: Any) -> dict[str, Any]:
    """Return a pod with a status."""
    return {"metadata": {}, "status": parts}


def ended(name: str, **facts: Any) -> list[dict[str, Any]]:
    """Return the status of a container that ended."""
    return [{"name": name, "state": {"terminated": facts}}]


@pytest.mark.parametrize(
    ("seen", "end"),
    [
        (None, "sandbox_lost"),
        (status(phase="Running"), None),
        (status(phase="Running", containerStatuses=[{"name": "program", "state": {"running": {}}}]), None),
        ({}, None),
        (status(phase="Failed", reason="Evicted"), "sandbox_lost"),
        (status(phase="Failed", reason="DeadlineExceeded"), "timeout"),
        (status(phase="Failed", containerStatuses=ended("program", reason="OOMKilled", exitCode=137)), "oom"),
        (status(phase="Running", containerStatuses=ended("program", reason="Error", exitCode=1)), "sandbox_lost"),
        (status(phase="Unknown"), "sandbox_lost"),
        ({"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running"}}, "sandbox_lost"),
    ],
)
def test_how_a_pod_ended(seen: dict[str, Any] | None, end: str | None) -> None:
    """What the API tells of a pod is one of the ends a run can have, and absent parts are no end."""
    told = cluster.pod_end(seen)
    assert (told and told[0]) == end


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (status(phase="Pending"), None),
        (status(initContainerStatuses=ended("delivery", exitCode=0)), None),
        (status(initContainerStatuses=ended("delivery", exitCode=1, message="not unpacked")), "container_failed"),
        (status(containerStatuses=ended("program", exitCode=0)), "container_failed"),
        (status(containerStatuses=[{"name": "program", "state": {"waiting": {"reason": "PodInitializing"}}}]), None),
        (
            status(containerStatuses=[{"name": "program", "state": {"waiting": {"reason": "InvalidImageName"}}}]),
            "image_unavailable",
        ),
        (status(phase="Failed", reason="UnexpectedAdmissionError"), "pod_ended"),
        ({"metadata": {"deletionTimestamp": "x"}}, "pod_ended"),
    ],
)
def test_what_keeps_a_pod_from_starting(seen: dict[str, Any], reason: str | None) -> None:
    """A pod is given up when it cannot come up any more, and waited for otherwise."""
    told = cluster.start_problem(seen)
    assert (told and told[0]) == reason


def test_who_abandoned_a_pod() -> None:
    """A living owner of this boot is judged by its process and by the lease, one of another boot by the lease alone."""
    ours = owner_labels(Owner(), "r")
    dead, other = {**ours, "kdskills.pid": "1"}, {**ours, "kdskills.boot": "another", "kdskills.pid": "1"}

    def abandoned(annotations: dict[str, str] | None, age_s: float) -> bool:
        made = {"creationTimestamp": (NOW - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%SZ")}
        item = {"metadata": {**made, "annotations": annotations}, "spec": {"activeDeadlineSeconds": 100}}
        return cluster.is_abandoned(item, NOW)

    assert boot_id()
    assert [abandoned(one, 90) for one in (ours, dead, other, None)] == [False, True, False, False]
    assert [abandoned(one, 161) for one in (ours, dead, other, None)] == [True, True, True, True]


def test_the_unpacker_travels_as_it_is() -> None:
    """What a pod's first container runs is the file itself, not a text of its own."""
    source = Path(__file__).parents[3] / "runtime/kdskills_runtime/remote_unpack.py"
    assert pod()["spec"]["initContainers"][0]["command"][3] == source.read_text(encoding="utf-8")
