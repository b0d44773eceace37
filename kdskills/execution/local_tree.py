"""Folders and process trees of programs that run without a wall: found again by a mark.

A program without a pid namespace can leave its process group. Its environment carries a mark, which is found in /proc,
where a process cannot hide what it was started with; one that clears its environment on purpose gets away.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kdskills.execution.check import FOLDER_VARIABLES, RunPlan
from kdskills.execution.dirs import write_note
from kdskills.execution.owner import is_leftover, owner_labels
from kdskills.execution.payload import program_variables
from kdskills.execution.protocol import ReapReport
from kdskills.execution.request import ExecRequest
from kdskills.execution.stage import Collection, collect
from kdskills.skills.safe_open import FOLDER_FLAGS

RUN_MARK: Final = "KDSKILLS_RUN"
END_S: Final = 1.0


class RunFolder:
    """One run's folders: `work` and `tmp` for the program, `control` for generated code and the owner's note for us."""

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self.mark = path, mark
        self.work, self.tmp, self.control = (path / name for name in ("work", "tmp", "control"))

    @classmethod
    def make(cls, top: Path, request: ExecRequest) -> RunFolder:
        """Make the folders of a new run below *top*, and record its owner."""
        mark = secrets.token_hex(16)
        folder = cls(top / mark, mark)
        folder.path.mkdir(mode=0o700)
        labels = owner_labels(request.owner, request.request_id or mark)
        write_note(folder.path / "owner.json", json.dumps(labels))
        for subfolder in (folder.work, folder.tmp, folder.control):
            subfolder.mkdir(mode=0o700)
        return folder

    def write_inputs(self, inputs: Sequence[tuple[str, bytes]], cwd: str, executable: Container[str] = ()) -> None:
        """Write the inputs and make the folder *cwd* below /work; the paths are checked, and no program has run here yet."""
        if cwd.startswith("/work/"):
            (self.work / cwd.removeprefix("/work/")).mkdir(parents=True, exist_ok=True)
        for path, data in inputs:
            target = self.work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            if path in executable:
                target.chmod(0o755)

    def collect(self, plan: RunPlan) -> Collection:
        """Collect what a program left that is dead."""
        fd = os.open(self.work, FOLDER_FLAGS)
        try:
            return collect(fd, plan.globs, plan.request.limits)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Remove everything, folders the program closed to itself included."""
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(self.path)  # the usual tree, without a process for it
            return
        # coreutils walk trees of any depth; what a program nested without end would exhaust a recursive walk.
        for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            if not self.path.exists():
                return
            subprocess.run([*command, "--", str(self.path)], stderr=subprocess.DEVNULL, check=False)


def end_marked(mark: str, *reaped_pids: int) -> list[int]:
    """KILL every process with *mark* but those another part of the program reaps; return their pids, within a second."""
    ended: list[int] = []
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        pids = [pid for pid in marked(mark) if pid not in reaped_pids]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
        time.sleep(0.005)
    return ended


def marked(mark: str) -> list[int]:
    """Return the living processes whose environment carries *mark*."""
    needle = f"{RUN_MARK}={mark}".encode()
    ours = os.getpid()
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names are all that is needed
    return [pid for pid in numbers if pid != ours and needle in _environment(pid)]


def _environment(pid: int) -> list[bytes]:
    """Return the environment a process was started with; nothing of one that is gone, or is not ours to look at. Every
    process of the machine is looked at after each run, so this asks the system as little as it can.
    """
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    text = b""
    try:
        while piece := os.read(fd, 1 << 17):
            text += piece
    except OSError:
        return []
    finally:
        os.close(fd)
    return text.split(b"\0")


def leftovers(top: Path, end: Callable[[RunFolder, list[str]], str | None] | None = None) -> ReapReport:
    """End runs below *top* whose owners are dead. *end* ends a run's processes, adds a line for each, and returns why
    the run must stay; by its mark when None.
    """
    ended: list[str] = []
    failed: list[str] = []
    for path in sorted(top.iterdir()):
        folder = RunFolder(path, path.name)
        try:
            if not is_leftover(json.loads((path / "owner.json").read_text(encoding="utf-8"))):
                continue
            problem = None
            if end is None:
                ended += [f"process {pid}" for pid in end_marked(path.name)]
            else:
                problem = end(folder, ended)
        except FileNotFoundError:
            continue  # being made, or being removed
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            failed.append(f"run {path.name}: {problem}")
            continue
        folder.remove()
        ended.append(f"run {path.name}")
    return ReapReport(tuple(dict.fromkeys(ended)), tuple(failed))


def host_argv(plan: RunPlan, skill_folders: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the argument list with the script's place on this host; the caller's own arguments stay as they are."""
    script = plan.request.script
    if script is None:
        return plan.argv
    inside, host_path = f"/skills/{script.skill}/{script.path}", f"{skill_folders[script.skill]}/{script.path}"
    count = len(plan.argv) - len(script.args)
    return (*(word.replace(inside, host_path) for word in plan.argv[:count]), *script.args)


def environment_folder(request: ExecRequest) -> str:
    """Return where the request's environment lies on this host; empty without one."""
    return "" if request.environment is None else str(request.environment.root)


def host_variables(plan: RunPlan, skill_folders: Mapping[str, Path], work: Path, **own: str) -> dict[str, str]:
    """Return every variable of the program, the engine's *own* among them; those that name folders name them on this host."""
    env = dict(plan.request.env)
    for name in FOLDER_VARIABLES & env.keys():
        _, top, skill, *_ = (*env[name].split("/"), "", "", "")
        if top == "work" or (top == "skills" and skill in skill_folders):
            env[name] = host_path_of(env[name], skill_folders, work).rstrip("/")
    return program_variables(replace(plan.request, env=env), environment_folder(plan.request), **own)


def host_path_of(inside: str, skill_folders: Mapping[str, Path], work: Path) -> str:
    """Return the host's path of a path below /work or /skills."""
    top, _, relative = inside.lstrip("/").partition("/")
    if top == "skills":
        skill, _, relative = relative.partition("/")
        return str(skill_folders[skill] / relative)
    return str(work / relative)
