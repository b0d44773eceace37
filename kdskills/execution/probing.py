"""Probing engines, and choosing the first whose probe passed and which is strong enough.

A probe runs a canary, `kdskills_runtime/canary.py`, through the engine's real argument builder and judges what it saw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kdskills.errors import ExecRefused
from kdskills.execution.protocol import Executor, ProbeCheck, ProbeReport
from kdskills.execution.request import ExecRequest, IsolationLevel

CANARY_FILES: Final = ("/etc/shadow", "/etc/machine-id")
"""Host files a sandbox must not be able to read, beside the engine's own sources."""


def canary_argv(python: str, entry: str) -> tuple[str, ...]:
    """Return the argument list of the canary, which lies beside the entry file *entry*."""
    return (python, "-I", entry.rpartition("/")[0] + "/canary.py", *CANARY_FILES, str(Path(__file__).resolve()))


def judge(output: bytes, *, sockets: bool = True) -> tuple[ProbeCheck, ...]:
    """Return one check per promise of the probe, from the canary's own words; garbage fails as `canary`.

    Args:
        output: What the canary printed.
        sockets: Whether sockets may be made. Then the only interface must be `lo`; else no socket at all, as an engine
            without a network namespace promises.
    """
    try:
        report = json.loads(output)
        network = "interfaces" if sockets else "sockets"
        rows = {
            "host_files": (not report["readable"], f"readable: {report['readable']}"),
            "core_pattern": (not report["core_pattern_writable"], f"writable: {report['core_pattern_writable']}"),
            "uid": (report["uid"] != 0, f"uid {report['uid']}"),
            "capabilities": (report["cap_bounding"] == 0, f"bounding set {report['cap_bounding']:#x}"),
            "seccomp": (report["seccomp"] == 2, f"mode {report['seccomp']}"),
            "no_new_privs": (report["no_new_privs"] == 1, str(report["no_new_privs"])),
            "network": (report[network] == (["lo"] if sockets else []), f"{network} {report[network]}"),
            "root_read_only": (not report["root_writable"], f"writable: {report['root_writable']}"),
        }
        return tuple(ProbeCheck(name, ok, words) for name, (ok, words) in rows.items())
    except (ValueError, KeyError, TypeError) as error:
        return (ProbeCheck("canary", ok=False, found=f"the canary did not answer: {error!r}"),)


def failed(checks: Sequence[ProbeCheck]) -> str:
    """Return the failed checks as one line."""
    return "; ".join(f"{check.name}: {check.found}" for check in checks if not check.ok)


AUTO_ORDER = ("bubblewrap", "docker", "landlock")
"""Engines `auto` may take, in this order; every other engine must be asked for by name."""

UNSAFE_PROFILE = "unsafe-local"


async def choose(
    engines: Sequence[Executor],
    name: str = "auto",
    *,
    min_isolation: IsolationLevel = IsolationLevel.NAMESPACE,
    allow_unisolated: bool = False,
) -> Executor:
    """Return the engine to use; nothing is ever degraded silently.

    Args:
        engines: The engines there are.
        name: `auto`, or the name of one engine.
        min_isolation: Weakest level to accept. `landlock` is accepted below NAMESPACE under `auto` only when no
            stronger engine is there, as it is meant for the inside of ordinary containers.
        allow_unisolated: The operator's own consent to engines of level NONE. Every call must also say
            `profile="unsafe-local"`, which `require_consent` checks.

    Raises:
        ExecRefused: `engine_unavailable` with every probe and its cure, `isolation_too_weak`, or `policy_denied`.
    """
    if name != "auto":
        return await _engine_by_name(engines, name, min_isolation, allow_unisolated=allow_unisolated)
    engines_by_name = {engine.name: engine for engine in engines}
    reports: list[ProbeReport] = []
    for candidate in AUTO_ORDER:
        if (engine := engines_by_name.get(candidate)) is None:
            continue
        lowest = min(min_isolation, IsolationLevel.LANDLOCK) if candidate == "landlock" else min_isolation
        if min_isolation > IsolationLevel.NAMESPACE:
            lowest = min_isolation
        if engine.level < lowest:
            reports.append(ProbeReport(candidate, engine.level, ok=False, cure=f"its level is below {lowest.name}"))
            continue
        report = await engine.probe()
        if report.ok:
            return engine
        reports.append(report)
    raise unavailable(reports)


def require_consent(engine: Executor, request: ExecRequest, *, allow_unisolated: bool) -> None:
    """Refuse a run without a wall unless operator and call both asked for it.

    Raises:
        ExecRefused: `policy_denied`.
    """
    if engine.level == IsolationLevel.NONE and not (allow_unisolated and request.profile == UNSAFE_PROFILE):
        raise _without_consent(engine, f" and the call profile={UNSAFE_PROFILE!r}")


def _without_consent(engine: Executor, further: str = "") -> ExecRefused:
    words = f"{engine.name} runs programs without isolation: the operator's settings must say allow_unisolated = true"
    return ExecRefused(words + further, code="policy_denied", engine=engine.name)


def unavailable(reports: Sequence[ProbeReport]) -> ExecRefused:
    """Return the refusal that lists every probe and what would cure it."""
    lines = "; ".join(f"{report.engine}: {report.cure or 'its probe failed'}" for report in reports)
    words = "no isolation engine works here" + (f" ({lines})" if lines else ": none is installed")
    probes = [
        {"engine": one.engine, "cure": one.cure, "failed": [f"{c.name}: {c.found}" for c in one.checks if not c.ok]}
        for one in reports
    ]
    return ExecRefused(words, code="engine_unavailable", probes=probes)


async def _engine_by_name(
    engines: Sequence[Executor], name: str, min_isolation: IsolationLevel, *, allow_unisolated: bool
) -> Executor:
    engine = next((engine for engine in engines if engine.name == name), None)
    if engine is None:
        names = ", ".join(sorted(engine.name for engine in engines)) or "none"
        raise ExecRefused(f"no engine is named {name!r}; there are: {names}", engine=name)
    if engine.level == IsolationLevel.NONE:
        if not allow_unisolated:
            raise _without_consent(engine)
        return engine
    if engine.level < min_isolation:
        words = f"{name} isolates at level {engine.level.name}, below {min_isolation.name}"
        raise ExecRefused(words, code="isolation_too_weak", engine=name)
    report = await engine.probe()
    if not report.ok:
        raise unavailable([report])
    return engine
