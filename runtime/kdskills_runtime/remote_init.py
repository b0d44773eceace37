"""The far side of a remote machine: runs one program behind walls of its own and leaves the answer in a file.

::

    python3 -I remote_init.py facts                  what this machine can enforce, as one JSON line
    python3 -I remote_init.py run FOLDER TOKEN       run FOLDER/order, leave FOLDER/answer

Run as root of the machine. Orders and answers are files, because the way a remote command's output comes back is made
for text. Order: 8 bytes of length, JSON, then the bytes it announces: inputs, standard input, payload. JSON: {"argv",
"env", "cwd", "wall", "grace", "limits", "memory", "pids", "work_size", "tmp_size", "stdout", "stderr", "mounts": {path
below /skills or /env: folder}, "seccomp": hex, "inputs": [[path, size]], "executable": [path], "stdin": size, "payload": size or null,
"outputs", "max_files", "max_bytes"}. Answer: 8 bytes of length, {"streams": [[kept, total], [kept, total]], "oom", "limits"}, the kept ends of
stdout and stderr, then the lines `container_init` speaks after its nonce.

Standard output carries JSON lines: {"kind": "live", "out", "err"} (base64, a view of what is being printed), and last
{"kind": "done"}, {"kind": "fenced", "token"} or {"kind": "failed", "stage", "message"}.

TOKEN fences: a machine once used with a higher token refuses a lower one, and a higher one ends what a lower one left
running. SIGRTMIN+1 ends the run (TERM, grace, KILL), SIGRTMIN+2 kills the program, other signals are handed on to it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # the name type checkers know
if TYPE_CHECKING:
    from typing import Any

HOME = Path("/opt/kdskills")
NEEDED = ("pydantic", "yaml", "jinja2")


def main(argv: list[str]) -> int:
    """Serve one command."""
    package_parent = __file__.rpartition("/")[0].rpartition("/")[0]
    if package_parent not in sys.path:  # the code delivered with this file goes before packages of the machine
        sys.path.insert(0, package_parent)
    if argv[:1] == ["facts"]:
        say(facts())
        return 0
    from kdskills_runtime.remote_run import RemoteRun

    folder, token = Path(argv[1]), int(argv[2])
    order_file = folder / "order"
    data = order_file.read_bytes()
    order_file.unlink()
    size = 8 + int.from_bytes(data[:8], "big")
    order: dict[str, Any] = json.loads(data[8:size])
    newer_token = fence(token)
    if newer_token is not None:
        say({"kind": "fenced", "token": newer_token})
        return 3
    for path in (HOME / "runs").iterdir():  # folders of earlier runs, with their answers and unread orders
        if path != folder:
            shutil.rmtree(path, ignore_errors=True)
    try:
        RemoteRun(order, memoryview(data)[size:], f"run-{token}").serve(folder / "answer", say)
    except OSError as error:
        say({"kind": "failed", "stage": "walls", "message": str(error)})
        return 125
    say({"kind": "done"})
    return 0


def say(line: dict[str, Any]) -> None:
    """Write one line to standard output."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def facts() -> dict[str, Any]:
    """Return what this machine is and which limits it can enforce, tested by trying."""
    from kdskills_runtime import remote_run

    limits = {"wall", "cpu", "nofile", "fsize", "stdout", "stderr", "pids"}
    if os.getuid() != 0:
        problem: str | None = "commands do not run as root, so programs cannot be walled in"
    else:
        problem = remote_run.try_walls()
        if problem is None:
            limits |= {"work", "tmp", "network"}
        leaf = remote_run.make_leaf(f"facts-{os.getpid()}", 64 * 1024 * 1024, 8)
        if leaf is not None:
            leaf.remove()
            limits.add("memory")
    return {
        "kind": "facts",
        "python": sys.executable,
        "version": list(sys.version_info[:2]),
        "machine": platform.machine(),
        "packages": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "limits": sorted(limits),
        "problem": problem,
        "trees": sorted(str(path.relative_to(HOME)) for top in ("skills", "env") for path in (HOME / top).glob("*")),
    }


def fence(token: int) -> int | None:
    """Claim the machine for *token* and end runs of older tokens; return the newer token when one has claimed it."""
    from kdskills_runtime import remote_run

    fd = os.open(HOME / "fence", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "r+", encoding="ascii") as file:  # noqa: PTH123 - a descriptor, not a path
        fcntl.flock(file, fcntl.LOCK_EX)
        words = file.read().split()
        last_token, pid, start = (int(words[0]), int(words[1]), words[2]) if len(words) == 3 else (0, 0, "")
        if last_token >= token:
            return last_token
        if pid and _start(pid) == start:
            os.kill(pid, signal.SIGKILL)  # what it started dies with it
            until = time.monotonic() + 2
            while _start(pid) == start and time.monotonic() < until:
                time.sleep(0.005)
        for leaf in remote_run.leaves("run-"):
            leaf.remove()
        file.seek(0)
        file.truncate()
        file.write(f"{token} {os.getpid()} {_start(os.getpid())}")
    return None


def _start(pid: int) -> str:
    """Return when *pid* started; empty when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
