"""The talk with `kdskills_runtime.remote_init`: the order written as a file, the answer read as one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kdskills.execution.check import RunPlan
from kdskills.execution.container import NONCE_SIZE, ContainerAnswer, rlimits
from kdskills.execution.request import Stream
from kdskills.execution.streams import GRACE_S, TailBuffer

PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_NONCE = bytes(NONCE_SIZE)


def build_order(
    plan: RunPlan,
    argv: Sequence[str],
    inputs: Sequence[tuple[str, bytes]],
    skills: Mapping[str, str],
    *,
    seccomp: bytes,
    payload: bytes | None,
) -> bytes:
    """Return the order file: length, JSON, and the bytes it announces.

    Args:
        plan: The checked request.
        argv: Program and arguments, `{payload_fd}` and `{report_fd}` standing for descriptors.
        inputs: Path and content of each input.
        skills: Folder of each skill in the sandbox, by full id.
        seccomp: The filter for the sandbox's architecture.
        payload: Payload of generated code.
    """
    request, limits = plan.request, plan.request.limits
    env = {"PATH": PATH, "HOME": "/work", "LANG": "C.UTF-8", "TMPDIR": "/tmp", **request.env}  # noqa: S108 - inside
    order = {
        "argv": list(argv),
        "env": env,
        "cwd": plan.cwd,
        "wall": limits.wall_s,
        "grace": GRACE_S,
        "limits": rlimits(limits),
        "memory": limits.memory,
        "pids": limits.pids,
        "work_size": limits.work_size,
        "tmp_size": limits.tmp_size,
        "stdout": limits.stdout,
        "stderr": limits.stderr,
        "skills": dict(skills),
        "seccomp": seccomp.hex(),
        "inputs": [(path, len(data)) for path, data in inputs],
        "executable": list(request.executable),
        "stdin": len(request.stdin),
        "payload": None if payload is None else len(payload),
        "outputs": list(request.outputs),
        "max_files": limits.output_files,
        "max_bytes": limits.output_size,
    }
    head = json.dumps(order).encode("ascii")
    return b"".join([len(head).to_bytes(8, "big"), head, *(data for _, data in inputs), request.stdin, payload or b""])


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """The content of an answer file: the init's answer, both streams, whether memory was bounded and ran out."""

    answer: ContainerAnswer
    stdout: Stream
    stderr: Stream
    oom: bool
    memory: bool


def read_answer(plan: RunPlan, data: bytes) -> AnswerFile | None:
    """Read an answer file; None when it is not one."""
    limits = plan.request.limits
    try:
        size = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(data[8:size])
        (out, out_total), (err, err_total) = head["streams"]
        if not (0 <= out <= limits.stdout and 0 <= err <= limits.stderr and out <= out_total and err <= err_total):
            return None
        stdout, stderr = data[size : size + out], data[size + out : size + out + err]
        oom, memory = bool(head["oom"]), "memory" in head["limits"]
    except (ValueError, KeyError, TypeError):
        return None
    answer = ContainerAnswer(plan, _NONCE, TailBuffer(0))
    answer.feed(_NONCE + data[size + out + err :])
    answer.close()
    return AnswerFile(
        answer,
        Stream(stdout, out_total, out_total > len(stdout)),
        Stream(stderr, err_total, err_total > len(stderr)),
        oom,
        memory,
    )


@dataclass(slots=True)
class Talk:
    """Reads the JSON lines of our init: a live view of the program's output, and its last word."""

    stdout: Callable[[bytes], None]
    stderr: Callable[[bytes], None]
    last: dict[str, Any] = field(default_factory=dict)
    _partial_line: str = ""

    def feed(self, text: str) -> None:
        """Take the next piece of text."""
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        for raw in lines:
            try:
                line = json.loads(raw)
                if line["kind"] == "live":
                    self.stdout(base64.b64decode(line["out"]))
                    self.stderr(base64.b64decode(line["err"]))
                else:
                    self.last = line
            except (ValueError, KeyError, TypeError):
                continue  # no line of the init's: the login shell's profile wrote something
