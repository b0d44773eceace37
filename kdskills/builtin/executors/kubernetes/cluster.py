"""A cluster: what is asked of its API, and what objects say. A manifest is an object as JSON has it.

What happened to a pod is asked of the API, never read from a program's output.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import yaml

from kdskills.errors import ExecRefused
from kdskills.execution.check import RunPlan
from kdskills.execution.container import Archive
from kdskills.execution.owner import RUN_LABEL, boot_id, is_leftover
from kdskills.execution.payload import host_entry
from kdskills.execution.protocol import KubernetesOptions
from kdskills.execution.request import MIB
from kdskills.storage.database import LazyModule

if TYPE_CHECKING:
    import websocket
    from kubernetes import client, config
    from kubernetes.stream import ws_client
else:
    client, config = LazyModule("kubernetes.client"), LazyModule("kubernetes.config")
    websocket, ws_client = LazyModule("websocket"), LazyModule("kubernetes.stream.ws_client")

Manifest = dict[str, Any]

MANAGED: Final = {"app.kubernetes.io/managed-by": "kdskills"}
"""The label of everything the engine makes; the network policy and `reap` go by it."""
POLICY: Final = "kdskills-runs"
DELIVERY, PROGRAM = "delivery", "program"
HOME: Final = "/opt/kdskills"
ARCHIVE: Final = f"{HOME}/in.tar"
INIT: Final = ("python3", "-s", "-P", "-m", "kdskills_runtime.container_init")
REQUEST_S: Final = 30.0
COLLECT_S: Final = 20.0
PING_S: Final = 20.0
"""How long a silent command's stream is left alone: what lies on the way ends idle connections."""
LEASE_SLACK_S: Final = 60.0
CHUNK: Final = 64 * 1024
_IMAGE: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_NEVER: Final = _IMAGE | {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}


def pod_manifest(
    plan: RunPlan, options: KubernetesOptions, archive: Archive, labels: Mapping[str, str], uid: int
) -> Manifest:
    """Return the pod of one run, whose owner is told by *labels*; programs and delivery run as *uid*."""
    limits = plan.request.limits
    memory_sizes = {"work": limits.work_size, "tmp": limits.tmp_size, "dev/shm": limits.tmp_size}
    room = 2 * len(archive.data) + 64 * MIB
    deadline = options.start_s + limits.wall_s + COLLECT_S + LEASE_SLACK_S
    profile = {"type": "RuntimeDefault"}
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": math.ceil(deadline),
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": uid, "seccompProfile": profile},
        "initContainers": [_delivery(options, archive) | _confined(options, 128 * MIB, room)],
        "containers": [_program(memory_sizes) | _confined(options, limits.memory, room)],
        "volumes": [
            {"name": "trees", "emptyDir": {"sizeLimit": str(room)}},
            *(
                {"name": path.rpartition("/")[2], "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
                for path, size in memory_sizes.items()
            ),
        ],
    }
    if options.runtime_class is not None:
        spec["runtimeClassName"] = options.runtime_class
    name = f"kdskills-{secrets.token_hex(8)}"
    about = {"name": name, "labels": {**MANAGED, RUN_LABEL: name}, "annotations": dict(labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def _delivery(options: KubernetesOptions, archive: Archive) -> Manifest:
    """Return the container that waits for the archive and unpacks it."""
    program = host_entry().with_name("remote_unpack.py").read_text(encoding="utf-8")
    words = [ARCHIVE, archive.digest, f"{HOME}/trees", f"{options.start_s:g}"]
    return {
        "name": DELIVERY,
        "command": ["python3", "-I", "-c", program, *words],
        "volumeMounts": [{"name": "trees", "mountPath": HOME}],
    }


def _program(memory_paths: Iterable[str]) -> Manifest:
    """Return the container that the program runs in; *memory_paths* are what it may write to."""
    trees = {"code": HOME, "skills": "/skills", "env": "/env"}
    return {
        "name": PROGRAM,
        "command": [*INIT, "hold"],
        "env": [{"name": "PYTHONPATH", "value": HOME}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
        "volumeMounts": [
            *({"name": path.rpartition("/")[2], "mountPath": f"/{path}"} for path in memory_paths),
            *(
                {"name": "trees", "mountPath": path, "subPath": f"trees/{part}", "readOnly": True}
                for part, path in trees.items()
            ),
        ],
    }


def _confined(options: KubernetesOptions, memory: int, room: int) -> Manifest:
    """Return what both containers have; of memory and disk as much is reserved as allowed, of the processor a tenth."""
    return {
        "image": options.image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "resources": {
            "limits": {"cpu": "1", "memory": str(memory), "ephemeral-storage": str(room)},
            "requests": {"cpu": "100m"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "workingDir": "/",
    }


def policy_manifest() -> Manifest:
    """Return the policy that lets nothing into pods of runs and nothing out of them."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "labels": dict(MANAGED)},
        "spec": {"podSelector": {"matchLabels": dict(MANAGED)}, "policyTypes": ["Ingress", "Egress"]},
    }


def policy_problem(policy: Manifest) -> str | None:
    """Return why a policy found in the cluster does not close what ours closes, or None."""
    spec = policy.get("spec") or {}
    selector = {key: value for key, value in (spec.get("podSelector") or {}).items() if value}
    if selector not in ({}, {"matchLabels": MANAGED}):
        return "does not select the pods of runs"
    if set(spec.get("policyTypes") or ()) != {"Ingress", "Egress"} or spec.get("ingress") or spec.get("egress"):
        return "lets something in or out"
    return None


def start_problem(pod: Manifest) -> tuple[str, str] | None:
    """Return (reason, words) of a pod that will not start its program, or None while it may."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") in _NEVER:
            reason = "image_unavailable" if waiting["reason"] in _IMAGE else "container_failed"
            return reason, f"{waiting['reason']}: {brief(waiting.get('message'))}"
        if ended and (ended.get("exitCode") != 0 or container["name"] == PROGRAM):
            words = ended.get("message") or ended.get("reason")
            return (
                "container_failed",
                f"container {container['name']}, exit code {ended.get('exitCode')}: {brief(words)}",
            )
    if status.get("phase") in {"Failed", "Succeeded"} or (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "pod_ended", brief(status.get("message") or status.get("reason") or "it was deleted")
    return None


def container_runs(pod: Manifest, container: str) -> bool:
    """Whether that container of *pod* runs."""
    status = pod.get("status") or {}
    every = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return any(one["name"] == container and (one.get("state") or {}).get("running") is not None for one in every)


def lateness(pod: Manifest) -> tuple[str, str]:
    """Return (reason, words) of a pod that did not start in time."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return "not_scheduled", f"{condition.get('reason')}: {brief(condition.get('message'))}"
    return "too_slow", f"phase {(pod.get('status') or {}).get('phase')}"


def pod_end(pod: Manifest | None) -> tuple[str, str] | None:
    """Return (`oom`, `timeout` or `sandbox_lost`, words) of a pod whose program can no longer run; None while it may."""
    if pod is None:
        return "sandbox_lost", "the pod is gone"
    status = pod.get("status") or {}
    states = [(one.get("state") or {}).get("terminated") for one in status.get("containerStatuses") or ()]
    if any(ended and ended.get("reason") == "OOMKilled" for ended in states):
        return "oom", ""
    words = ": ".join(brief(status[part]) for part in ("reason", "message") if status.get(part))
    if status.get("reason") == "DeadlineExceeded":
        return "timeout", words
    if status.get("phase") in {"Failed", "Succeeded", "Unknown"} or any(states):
        return "sandbox_lost", f"the pod ended: {words or status.get('phase')}"
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "sandbox_lost", "the pod was deleted"
    return None


def is_abandoned(pod: Manifest, now: datetime) -> bool:
    """Whether nobody watches *pod* any more: its process of this machine is gone, or its lease is over, wherever its owner is.

    The lease is the time it may be there for at all, from its creation on; no run outlasts it.
    """
    about = pod["metadata"]
    labels = about.get("annotations") or {}
    made = datetime.fromisoformat(about["creationTimestamp"])
    lease = float((pod.get("spec") or {}).get("activeDeadlineSeconds") or 0.0) + LEASE_SLACK_S
    return (labels.get("kdskills.boot") == boot_id() and is_leftover(labels)) or (now - made).total_seconds() > lease


def brief(words: object) -> str:
    """Return *words* on one line, at most 300 characters."""
    return " ".join(str(words).split())[:300]


class ClusterTrouble(Exception):
    """The cluster's API could not do what was asked; the message holds no credentials."""

    def __init__(self, reason: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status


_REASONS: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "gone",
    HTTPStatus.CONFLICT: "conflict",
    HTTPStatus.UNPROCESSABLE_ENTITY: "manifest_refused",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limited",
}


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn what the client raises into ClusterTrouble."""
    from urllib3.exceptions import HTTPError

    try:
        yield
    except client.ApiException as error:
        try:
            words = json.loads(error.body or "{}").get("message")
        except (ValueError, AttributeError):
            words = None
        status = int(error.status or 0)
        message = f"{status} {brief(words or error.reason)}"
        raise ClusterTrouble(_REASONS.get(status, "unreachable"), message, status) from None
    except websocket.WebSocketBadStatusException as error:
        status = int(error.status_code)
        raise ClusterTrouble(
            _REASONS.get(status, "unreachable"), f"a command was answered with {status}", status
        ) from None
    except (HTTPError, websocket.WebSocketException, OSError, ValueError) as error:  # the last: no answer of an API
        raise ClusterTrouble("unreachable", f"{type(error).__name__}: {brief(error)}") from None


class ClusterApi:
    """The API of a cluster, as far as the engine needs it. Every call raises ClusterTrouble.

    Raises ExecRefused when the client is not installed or not configured.
    """

    def __init__(self, options: KubernetesOptions) -> None:
        self._namespace, self._settings = options.namespace, self._configured(options)
        connection = client.ApiClient(self._settings)
        self._core, self._networking = client.CoreV1Api(connection), client.NetworkingV1Api(connection)
        self._json: Any = connection.sanitize_for_serialization

    @staticmethod
    def _configured(options: KubernetesOptions) -> Any:
        try:
            settings = client.Configuration()
            settings.retries = 1  # a kept connection may have been closed; more would make a cancellation wait
            if options.config is None and options.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config(client_configuration=settings)
            else:
                file = None if options.config is None else str(options.config)
                config.load_kube_config(file, options.context, client_configuration=settings)
        except ImportError:
            words = "the engine kubernetes needs the package kubernetes: pip install 'kdskills[kubernetes]'"
            raise ExecRefused(words, engine="kubernetes") from None
        except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
            words = f"the engine kubernetes knows no cluster: {brief(error)}; set kubernetes_config"
            raise ExecRefused(words, engine="kubernetes") from None
        return settings

    def close_network(self) -> None:
        """See to it that the namespace has the policy that closes pods of runs; `policy_open` when another has its name."""
        policy = self._policy()
        if policy is None:
            try:
                with translated():
                    body = policy_manifest()
                    self._networking.create_namespaced_network_policy(self._namespace, body, **self._patience)
            except ClusterTrouble as trouble:
                if trouble.status != HTTPStatus.CONFLICT:  # another run was quicker
                    raise
            policy = self._policy()
        if problem := policy_problem(policy or {}):
            raise ClusterTrouble("policy_open", f"the network policy {self._namespace}/{POLICY} {problem}")

    def _policy(self) -> Manifest | None:
        return self._object_named(self._networking.read_namespaced_network_policy, POLICY)

    def _object_named(self, read: Callable[..., Any], name: str, **how: Any) -> Manifest | None:
        """Return what *read* answers of the object; None when there is none of that name."""
        try:
            with translated():
                answer: Manifest = self._json(read(name, self._namespace, **how, **self._patience))
        except ClusterTrouble as trouble:
            if trouble.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        return answer

    def create(self, pod: Manifest) -> None:
        """Make *pod*."""
        with translated():
            self._core.create_namespaced_pod(self._namespace, pod, **self._patience)

    def look(self, name: str) -> Manifest | None:
        """Return the pod; None when there is none of that name."""
        return self._object_named(self._core.read_namespaced_pod, name)

    def delete(self, name: str) -> bool:
        """Have the pod end, within a second or two; False when it is gone already."""
        return self._object_named(self._core.delete_namespaced_pod, name, grace_period_seconds=1) is not None

    def pods(self) -> list[Manifest]:
        """Return every pod that an engine like this made, whoever watches it."""
        selector = ",".join(f"{key}={value}" for key, value in MANAGED.items())
        with translated():
            answer = self._core.list_namespaced_pod(self._namespace, label_selector=selector, **self._patience)
            return [self._json(pod) for pod in answer.items]

    def command(self, name: str, container: str, words: Sequence[str]) -> PodCommand:
        """Start a command in a container of a pod."""
        streams = {"stdin": "true", "stdout": "true", "stderr": "true", "tty": "false"}
        query = [("command", word) for word in words] + [("container", container), *streams.items()]
        path = f"{self._settings.host}/api/v1/namespaces/{self._namespace}/pods/{name}/exec"
        token = self._settings.auth_settings().get("BearerToken")
        headers = {} if token is None else {"authorization": token["value"]}
        wire: Future[Any] = Future()

        def connect() -> None:
            try:
                address = ws_client.get_websocket_url(path, query)
                wire.set_result(ws_client.create_websocket(self._settings, address, headers))
            except BaseException as error:  # noqa: BLE001 - raised again below
                wire.set_exception(error)

        # Connecting knows no time limit; a thread that hangs is left behind.
        threading.Thread(target=connect, name="kdskills-kubernetes-connect", daemon=True).start()
        with translated():
            return PodCommand(wire.result(REQUEST_S))

    @property
    def _patience(self) -> dict[str, Any]:
        return {"_request_timeout": REQUEST_S}


class PodCommand:
    """A command in a container: bytes go in, and bytes of its streams come out until it ends.

    The client's own reader is not used: it takes frames faster than a reader could look at them, and keeps them all.
    """

    def __init__(self, wire: Any) -> None:
        self._wire = wire
        self._ping = time.monotonic() + PING_S
        self.status = ""  # what the API said of its end

    def send(self, data: bytes) -> None:
        """Write to its standard input. Raises ClusterTrouble."""
        self._wire.settimeout(REQUEST_S)
        view = memoryview(data)
        with translated():
            for start in range(0, len(view), CHUNK):
                self._wire.send_binary(b"\0" + view[start : start + CHUNK])

    def read(self, patience_s: float) -> tuple[int, bytes] | None:
        """Return the next (1 for stdout or 2 for stderr, bytes), (0, b"") after *patience_s*, None at its end. Raises ClusterTrouble."""
        self._wire.settimeout(max(patience_s, 0.001))
        with translated():
            try:
                kind, frame = self._wire.recv_data_frame(True)
            except websocket.WebSocketTimeoutException:
                if time.monotonic() >= self._ping:
                    self._wire.ping()
                    self._ping = time.monotonic() + PING_S
                return 0, b""
        if kind == websocket.ABNF.OPCODE_CLOSE:
            return None
        data = bytes(frame.data)
        if kind not in {websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT} or not data:
            return 0, b""
        if data[0] == ws_client.ERROR_CHANNEL:
            self.status = (self.status + data[1:].decode("utf-8", "replace"))[:4096]
        return (data[0], data[1:]) if data[0] in {1, 2} else (0, b"")

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError, websocket.WebSocketException):
            self._wire.shutdown()

    def finish(self, patience_s: float) -> str:
        """Read to the end and return what it wrote, at most a few lines. Raises ClusterTrouble, `too_slow` after *patience_s*."""
        until, words = time.monotonic() + patience_s, b""
        while (piece := self.read(until - time.monotonic())) is not None:
            words = (words + piece[1])[-4096:]
            if time.monotonic() >= until:
                raise ClusterTrouble("too_slow", "a command in the pod does not end")
        return words.decode("utf-8", "replace")
