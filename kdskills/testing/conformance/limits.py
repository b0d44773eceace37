"""What a wall holds back: limits, identity, network."""

from __future__ import annotations

import dataclasses

import kdskills.execution.request as shapes
from kdskills.errors import ExecRefused
from kdskills.execution import Executor, IsolationLevel, Limits
from kdskills.testing.conformance.common import Promise, ask, program, run, same, sh

MIB = shapes.MIB


async def probe_is_functional(executor: Executor) -> None:
    """The probe answers for this engine, with its checks, and twice the same."""
    report = await executor.probe()
    assert report.ok, f"the probe failed: {report}"
    assert report.engine == executor.name
    assert report.level == executor.level
    assert report.checks, "a probe shows what it looked at"
    assert await executor.probe() == report


async def consent_is_needed(executor: Executor) -> None:
    """An engine without a wall refuses a call that does not ask for it by profile."""
    if executor.level > IsolationLevel.NONE:
        return
    request = dataclasses.replace(ask(executor, argv=("true",)), profile=None)
    try:
        await executor.run(request)
    except ExecRefused as error:
        assert error.code == "policy_denied", error.code
        return
    raise AssertionError("it ran without being asked for by profile")


async def processor_time(executor: Executor) -> None:
    """A program over its processor time ends as `limit`."""
    result = await run(executor, code=program("spin.py"), limits=Limits(wall_s=20, cpu_s=1))
    same("limit", result.status, result)


async def open_files(executor: Executor) -> None:
    """Open files are bounded."""
    result = await run(executor, code=program("files.py"), limits=Limits(nofile=64))
    assert isinstance(result.value, int), result
    assert 0 < result.value <= 64, result


async def file_size(executor: Executor) -> None:
    """One file cannot grow beyond its bound."""
    result = await run(executor, code=program("bigfile.py"), limits=Limits(fsize=MIB), outputs=("big.bin",))
    assert result.status in {"nonzero", "limit"}, result
    assert all(item.size <= MIB for item in result.artifacts), result


async def memory_of_one(executor: Executor) -> None:
    """A program that takes memory without end is stopped and the host is not."""
    result = await run(executor, code=program("memory.py"), globals={"CHILDREN": 0}, limits=Limits(memory=64 * MIB))
    assert result.status in {"oom", "nonzero"}, result


async def memory_of_all(executor: Executor) -> None:
    """Many processes share one memory limit, where totals are enforced."""
    if "memory" not in (await executor.probe()).limits:
        return
    result = await run(
        executor, code=program("memory.py"), globals={"CHILDREN": 4}, limits=Limits(memory=96 * MIB, wall_s=20)
    )
    assert result.status in {"oom", "nonzero", "timeout"}, result


async def processes(executor: Executor) -> None:
    """Processes are bounded."""
    result = await run(executor, code=program("forks.py"), globals={"LIMIT": 500}, limits=Limits(pids=32))
    if "pids" in result.limits_enforced:
        assert int(result.stdout.text or "0") < 40, result


async def folder_sizes(executor: Executor) -> None:
    """The workdir, the temporary folder and shared memory are bounded."""
    limits = Limits(work_size=4 * MIB, tmp_size=4 * MIB)
    for folder in ("/work", "/tmp", "/dev/shm"):  # noqa: S108 - of the sandbox
        result = await run(
            executor, code=program("fill.py"), globals={"FOLDER": folder, "STOP": 64 * MIB}, limits=limits
        )
        assert isinstance(result.value, int), result
        assert result.value <= 4 * MIB, f"{folder}: {result!r}"


async def nothing_else_is_writable(executor: Executor) -> None:
    """No other folder can be written to."""
    script = "for d in / /usr /usr/local /etc /dev /proc /sys /skills /var /var/tmp /run /home /root /opt; do touch $d/x 2>/dev/null && echo $d; done; :"
    result = await sh(executor, script)
    same(b"", result.stdout.data, result)


async def identity(executor: Executor) -> None:
    """A program is not root, has no network but loopback, and starts in an empty workdir."""
    result = await run(executor, code=program("see.py"))
    assert isinstance(result.value, dict), result
    assert result.value["uid"] != 0, result
    same([], result.value["routes"], result)
    same(False, result.value["root_writable"], result)
    same([], result.value["work"], result)


async def host_is_out_of_sight(executor: Executor) -> None:
    """Files of the host are not there."""
    result = await run(executor, argv=("cat", __file__, "/etc/shadow", "/etc/machine-id"))
    same((1, b""), (result.exit_code, result.stdout.data), result)


async def allow_list_is_never_ignored(executor: Executor) -> None:
    """An engine that cannot restrict traffic to an allow-list refuses one."""
    try:
        result = await run(executor, argv=("true",), network=("example.org",))
    except ExecRefused as error:
        assert error.code in {"limit_not_enforceable", "policy_denied", "bad_request"}, error.code
        return
    assert "network" in result.limits_enforced, result


PROMISES = (
    Promise("probe_is_functional", "Engines", probe_is_functional),
    Promise("consent_is_needed", "Engines", consent_is_needed),
    Promise("processor_time", "Limits", processor_time),
    Promise("open_files", "Limits", open_files),
    Promise("file_size", "Limits", file_size),
    Promise("memory_of_one", "Limits", memory_of_one, IsolationLevel.LANDLOCK),
    Promise("memory_of_all", "Limits", memory_of_all, IsolationLevel.LANDLOCK),
    Promise("processes", "Limits", processes, IsolationLevel.LANDLOCK),
    Promise("folder_sizes", "Limits", folder_sizes, IsolationLevel.NAMESPACE),
    Promise("nothing_else_is_writable", "Limits", nothing_else_is_writable, IsolationLevel.NAMESPACE),
    Promise("identity", "Limits", identity, IsolationLevel.NAMESPACE),
    Promise("host_is_out_of_sight", "Engines", host_is_out_of_sight, IsolationLevel.NAMESPACE),
    Promise("allow_list_is_never_ignored", "Engines", allow_list_is_never_ignored),
)
