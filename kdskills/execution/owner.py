"""Who started a run, and the end of what dead owners left, without touching what living ones use.

A cgroup leaf is named after the process that made it, so it can be judged without any record; it holds every process
of its run. Where there are no cgroups, a small record beside the state names the launcher instead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kdskills.execution.cgroup import Cgroup
from kdskills.execution.dirs import private_dir, write_note
from kdskills.execution.protocol import ReapReport
from kdskills.execution.request import ExecRequest, Owner

RUN_LABEL: Final = "kdskills.run"
_PREFIX: Final = "kdskills."


def boot_id() -> str:
    """Return the kernel's id of this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return when *pid* started, in ticks since boot, or None when there is no such process, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def owner_labels(owner: Owner, request_id: str) -> dict[str, str]:
    """Return the labels of a run of *owner*: whose it is, which process watches it, in which boot."""
    pid = os.getpid()
    return {
        RUN_LABEL: request_id,
        f"{_PREFIX}tenant": owner.tenant,
        f"{_PREFIX}project": owner.project,
        f"{_PREFIX}agent": owner.agent,
        f"{_PREFIX}conversation": owner.conversation,
        f"{_PREFIX}boot": boot_id(),
        f"{_PREFIX}pid": str(pid),
        f"{_PREFIX}started": process_start(pid) or "",
        f"{_PREFIX}pidns": _pid_namespace(),
    }


def is_leftover(labels: Mapping[str, str]) -> bool:
    """Whether nobody watches a run with these labels any more.

    A run of another boot is a leftover. One watched from another pid namespace of this boot cannot be judged from here
    and is left alone.
    """
    if RUN_LABEL not in labels:
        return False
    if labels.get(f"{_PREFIX}boot") != boot_id():
        return True
    if labels.get(f"{_PREFIX}pidns") != _pid_namespace():
        return False
    pid = labels.get(f"{_PREFIX}pid", "")
    return not pid.isdigit() or process_start(int(pid)) != labels.get(f"{_PREFIX}started")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


_LEAF = re.compile(r"(?P<ns>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{16}")

_PROBE = re.compile(r"probe-\d+-(?P<made>\d+)")
PROBE_S = 10
"""Seconds after which a leaf made by a probe counts as forgotten; the probe itself takes milliseconds."""


def leaf_name() -> str:
    """Return a new name for a leaf of this process."""
    return f"{_own_namespace()}-{os.getpid()}-{process_start(os.getpid()) or 0}-{secrets.token_hex(8)}"


def leaf_is_leftover(name: str) -> bool:
    """Whether the process a leaf is named after is gone; leaves of other pid namespaces are not ours to judge."""
    probe = _PROBE.fullmatch(name)
    if probe is not None:
        return time.monotonic_ns() - int(probe["made"]) > PROBE_S * 10**9
    owner = _LEAF.fullmatch(name)
    if owner is None or int(owner["ns"]) != _own_namespace():
        return False
    return process_start(int(owner["pid"])) != owner["start"]


ASIDE_S = 3600
"""Seconds after which a half-written record counts as left by a process that died."""


class RunRecords:
    """Records of runs that have no cgroup, one file each."""

    def __init__(self, state: Path) -> None:
        self._top = state / "runs"

    def write(self, request: ExecRequest, launcher: int) -> Path:
        """Record a run whose launcher is *launcher*; the caller removes the file at its end."""
        labels = owner_labels(request.owner, request.request_id or secrets.token_hex(8))
        facts = {"labels": labels, "launcher": launcher, "started": process_start(launcher)}
        path = private_dir(private_dir(self._top.parent) / self._top.name) / f"{secrets.token_hex(8)}.json"
        write_note(path, json.dumps(facts))
        return path

    def leftovers(self) -> Iterator[tuple[Path, str, int, str]]:
        """Return (file, run, launcher, its start) of every record whose owner is dead; an unreadable record has launcher 0."""
        for path in sorted(self._top.glob("*.json")) if self._top.is_dir() else ():
            try:
                facts = json.loads(path.read_bytes())
                labels = dict(facts["labels"])
                launcher, started = int(facts["launcher"]), str(facts["started"])
            except FileNotFoundError:
                continue  # its run has just ended
            except (OSError, ValueError, KeyError, TypeError):
                yield path, path.stem, 0, ""
                continue
            if is_leftover(labels):
                yield path, labels[RUN_LABEL], launcher, started
        forgotten = time.time() - ASIDE_S
        for path in sorted(self._top.glob("*.new")) if self._top.is_dir() else ():
            with suppress(FileNotFoundError):  # written whole by now
                if path.stat().st_mtime < forgotten:
                    yield path, path.stem, 0, ""


def reap(records: RunRecords, parent: Cgroup | None) -> ReapReport:
    """End what dead owners left behind, and report one line for each."""
    ended: list[str] = []
    failed: list[str] = []
    for leaf in parent.leaves() if parent is not None else ():
        if leaf_is_leftover(leaf.memory.name):
            count = len(leaf.members())
            removed = leaf.remove()
            (ended if removed else failed).append(f"cgroup {leaf.memory.name} with {count} processes")
    for path, run, launcher, started in records.leftovers():
        alive = launcher > 0 and process_start(launcher) == started
        try:
            with suppress(ProcessLookupError):
                if alive:
                    os.kill(launcher, signal.SIGKILL)  # bwrap's sandbox dies with it
        except PermissionError:
            failed.append(f"run {run}: launcher {launcher} cannot be ended")
            continue
        path.unlink(missing_ok=True)
        ended.append(f"run {run}" + (f": launcher {launcher}" if alive else ": its record"))
    return ReapReport(tuple(ended), tuple(failed))


def _own_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
