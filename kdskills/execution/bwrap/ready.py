"""Sandboxes that are up and whose program has not started yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kdskills.execution.bwrap.args import Fds, Launcher, command_line, rlimit_words, rlimits, run_arguments
from kdskills.execution.bwrap.box import BoxFailed, BwrapBox, Pipes, launch
from kdskills.execution.cgroup import CgroupLeaf, CgroupParent
from kdskills.execution.check import RunPlan
from kdskills.execution.children import within_own_limits
from kdskills.execution.lifecycle import RunRecords, leaf_name
from kdskills.execution.request import ExecRequest, Limits

OWN_PROCESSES = 2
"""Processes bwrap itself needs, beside the program's."""


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """What every run of one engine shares."""

    launcher: Launcher
    rootfs: Path
    seccomp: bytes
    spawner: ThreadPoolExecutor
    cgroups: CgroupParent | None
    nproc: bool
    records: RunRecords


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """One checked and staged run.

    `argv` builds the program's arguments from the payload's and the report's descriptor; both are -1 without payload.
    """

    plan: RunPlan
    argv: Callable[[int, int], Sequence[str]]
    payload: bytes | None
    skills: tuple[tuple[str, Path], ...]
    inputs: tuple[tuple[str, bytes], ...]
    enforced: frozenset[str]

    @property
    def limits(self) -> Limits:
        """Bounds of the run."""
        return self.plan.request.limits


@dataclass(frozen=True, slots=True)
class ReadySandbox:
    """A sandbox that is up.

    Attributes:
        box: The sandbox.
        pipes: Our ends of its pipes.
        leaf: Its cgroup.
        feeds: Bytes to write once its program starts, by the pipe's name.
        waiting: Whether its program waits behind bwrap's gate; one of the pool waits for its order instead.
    """

    box: BwrapBox
    pipes: Pipes
    leaf: CgroupLeaf | None
    feeds: tuple[tuple[str, bytes], ...]
    waiting: bool


def make_sandbox(setup: SandboxSetup, job: SandboxJob, stack: ExitStack) -> ReadySandbox:
    """Make a sandbox for *job*; *stack* ends it and closes its descriptors.

    Raises:
        BoxFailed: It did not come up.
    """
    pipes = Pipes.make(code=job.payload is not None)
    stack.callback(pipes.close)
    leaf = make_leaf(setup, job.limits, stack)
    bounds = rlimit_words(within_own_limits(rlimits(job.limits, memory=setup.cgroups is None)))
    argv = job.argv(pipes.theirs.get("payload", -1), pipes.theirs.get("report", -1))
    with ExitStack() as launch_stack:  # the launcher's copies of what it only reads; ours are closed once it has them
        seccomp = memory_file(launch_stack, setup.seccomp)
        inputs = [(path, memory_file(launch_stack, data)) for path, data in job.inputs]
        fds = Fds(pipes.theirs["args"], pipes.theirs["status"], pipes.theirs["block"], seccomp)
        command = command_line(setup.launcher, setup.rootfs, job.limits, job.plan.cwd, argv, fds, bounds)
        box = launch(setup.spawner, command, pipes, [seccomp, *(fd for _, fd in inputs)])
        stack.callback(box.close)
    if leaf is None:
        keep_record(setup, job.plan.request, box, stack)
    arguments = run_arguments(job.plan.cwd, job.skills, inputs, job.plan.env, frozenset(job.plan.request.executable))
    box.bring_up(arguments, setup.rootfs, leaf, job.limits.pids + 1 if setup.nproc else None)
    feeds = [("stdin", job.plan.request.stdin)]
    if job.payload is not None:
        feeds.append(("payload", job.payload))
    return ReadySandbox(box, pipes, leaf, tuple(feeds), waiting=True)


def make_leaf(setup: SandboxSetup, limits: Limits, stack: ExitStack) -> CgroupLeaf | None:
    """Make a cgroup leaf with these bounds, where there are any. Raises BoxFailed."""
    if setup.cgroups is None:
        return None
    try:
        leaf = setup.cgroups.leaf(leaf_name(), limits.memory, limits.pids + OWN_PROCESSES)
    except OSError as error:
        raise BoxFailed(f"no cgroup could be made: {error}") from error
    stack.callback(leaf.remove)
    return leaf


def keep_record(setup: SandboxSetup, request: ExecRequest, box: BwrapBox, stack: ExitStack) -> None:
    """Record the launcher for `reap`, until *stack* ends."""
    record = setup.records.write(request, box.pid)
    stack.callback(record.unlink, missing_ok=True)


def memory_file(stack: ExitStack, data: bytes) -> int:
    """Return a descriptor of a file in memory holding *data*, at its beginning; *stack* closes it."""
    fd = os.memfd_create("kdskills", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
