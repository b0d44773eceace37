"""The table of hostile programs: area, file, what must be true, how the run may end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kdskills.execution.request import MIB, IsolationLevel, Limits, Status

ENDED: Final[frozenset[Status]] = frozenset({"ok"})
STOPPED: Final[frozenset[Status]] = frozenset({"oom", "limit", "nonzero", "timeout"})
ANY: Final[frozenset[Status]] = ENDED | STOPPED

SMALL = Limits(
    wall_s=10, memory=96 * MIB, pids=32, work_size=8 * MIB, tmp_size=8 * MIB, output_size=8 * MIB, fsize=8 * MIB
)
SHORT = Limits(wall_s=2, memory=96 * MIB, pids=32)


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile program.

    Attributes:
        name: Its file below `programs`, without suffix.
        area: Area of spec execution §9.
        must: What must be true, as a sentence.
        statuses: How the run may end.
        says: Words its standard output must hold, when it comes to its end.
        limits: Bounds of the run.
        outputs: Globs collected from it.
        artifacts: Paths that may come back; None when any may.
        level: Weakest engine it is meant for.
        needs: Limits the engine must enforce for the case to mean anything.
    """

    name: str
    area: str
    must: str
    statuses: frozenset[Status] = ENDED
    says: str = "attempts made"
    limits: Limits = SMALL
    outputs: tuple[str, ...] = ()
    artifacts: frozenset[str] | None = field(default_factory=frozenset)
    level: IsolationLevel = IsolationLevel.NAMESPACE
    needs: frozenset[str] = frozenset()


_NONE = IsolationLevel.NONE
_MEMORY = frozenset({"memory"})
_PIDS = frozenset({"pids"})

CASES: Final[tuple[Case, ...]] = (
    Case("host_files", "files", "no file of the host can be read"),
    Case("host_write", "files", "nothing outside the workdir and temporary folders can be written"),
    Case("symlink_out", "files", "links among the outputs are not followed", outputs=("**",), level=_NONE),
    Case("hardlink_out", "files", "files outside cannot be linked into the outputs", outputs=("**",)),
    Case("fifo_out", "files", "collecting never hangs on what is no file", outputs=("*",), level=_NONE),
    Case("device_nodes", "files", "no device but the harmless ones can be made or opened"),
    Case("setuid", "files", "no file gives another uid, and none can be taken on"),
    Case("proc_host", "files", "processes and switches of the host are out of reach"),
    Case("proc_mem_of_others", "files", "the watching process cannot be read or written"),
    Case(
        "odd_names",
        "files",
        "hostile names are collected or named without harm",
        outputs=("**",),
        artifacts=None,
        level=_NONE,
    ),
    Case(
        "closed_folders",
        "files",
        "a folder closed to everybody is cleaned up all the same",
        outputs=("**",),
        artifacts=None,
        level=_NONE,
    ),
    Case(
        "deep_folders",
        "files",
        "bottomless folders end neither collecting nor cleaning up",
        outputs=("**",),
        level=_NONE,
    ),
    Case("work_quota", "quotas", "the workdir has a bound", says="took"),
    Case("tmp_quota", "quotas", "the temporary folder has a bound", says="took"),
    Case("shm_quota", "quotas", "shared memory has a bound", says="took"),
    Case("dev_quota", "quotas", "/dev and / give no room"),
    Case(
        "sparse", "quotas", "a sparse file costs nobody its claimed size", outputs=("*",), artifacts=None, level=_NONE
    ),
    Case(
        "many_files",
        "quotas",
        "files without number stop at the bound",
        says="made",
        outputs=("f1",),
        artifacts=None,
        statuses=ANY,
    ),
    Case("fork_bomb", "processes", "forking without end is stopped", statuses=STOPPED, limits=SHORT, needs=_PIDS),
    Case("thread_bomb", "processes", "threads without end are stopped", says="stopped", statuses=ANY, needs=_PIDS),
    Case("daemon", "processes", "a daemon does not outlive its run", level=_NONE),
    Case(
        "stop_everybody",
        "processes",
        "stopping and killing the others ends nothing but this run",
        statuses=ANY | {"infra_error"},
        limits=SHORT,
    ),
    Case("stopped_child", "processes", "a stopped child does not outlive its run", level=_NONE),
    Case(
        "ignore_everything",
        "processes",
        "a program deaf to signals ends in time",
        statuses=frozenset({"timeout"}),
        limits=SHORT,
        level=_NONE,
    ),
    Case(
        "close_pipes",
        "processes",
        "closed pipes are no end, and no way to stay",
        statuses=frozenset({"timeout"}),
        limits=SHORT,
        level=_NONE,
    ),
    Case("memory_bomb", "memory", "memory without end is stopped", statuses=STOPPED, needs=_MEMORY),
    Case("memory_by_many", "memory", "many processes share one bound", says="", statuses=ANY, needs=_MEMORY),
    Case("memfd_bomb", "memory", "files in memory count", says="stopped", statuses=ANY, needs=_MEMORY),
    Case("network_out", "network", "nothing can be reached, not even the host"),
    Case("sockets_of_other_families", "network", "only UNIX, INET and INET6 sockets can be made"),
    Case("unix_sockets", "network", "no socket of the host can be connected to, by path or abstract name"),
    Case("namespaces", "kernel", "no namespace can be made or entered"),
    Case("mounts", "kernel", "nothing can be mounted"),
    Case("keyring", "kernel", "the kernel's keyrings cannot be used"),
    Case("kernel_calls", "kernel", "calls of use to attackers only are refused"),
    Case("ptrace", "kernel", "no process can be traced"),
    Case("cgroup_writes", "kernel", "limits cannot be lifted from inside"),
    Case("sys_writes", "kernel", "kernel interfaces cannot be written"),
    Case("terminal", "kernel", "there is no terminal to push characters into"),
    Case("leftovers_write", "leftovers", "a run may leave what it likes", level=_NONE),
    Case("leftovers_read", "leftovers", "the next run finds nothing of it"),
    Case(
        "flood_both",
        "output",
        "binary floods are drained, counted, and only their tail is kept",
        says="the end",
        level=_NONE,
    ),
    Case(
        "forge_report",
        "output",
        "a forged report does not change exit code or status",
        statuses=frozenset({"nonzero"}),
        level=_NONE,
    ),
    Case("forge_answer", "output", "nobody can speak for the watching process", statuses=frozenset({"nonzero"})),
    Case(
        "injection",
        "injection",
        "text that looks like commands stays text",
        statuses=frozenset({"nonzero"}),
        outputs=("*",),
        artifacts=None,
        level=_NONE,
    ),
    Case(
        "core_dump",
        "exit codes",
        "a crash is its signal and leaves no core",
        statuses=frozenset({"nonzero"}),
        outputs=("core*",),
        level=_NONE,
    ),
    Case(
        "exit_codes_of_wrappers",
        "exit codes",
        "a program's 125 is a program's result",
        statuses=frozenset({"nonzero"}),
        level=_NONE,
    ),
)
