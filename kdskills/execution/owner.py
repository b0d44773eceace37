"""Who started a run, so that what a dead owner left can be told from what a living one uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kdskills.execution.request import Owner

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
