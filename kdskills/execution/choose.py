"""Choosing an engine: the first whose probe passed and which is strong enough, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence

from kdskills.errors import ExecRefused
from kdskills.execution.protocol import Executor, ProbeReport
from kdskills.execution.request import ExecRequest, IsolationLevel

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
        engine = engines_by_name.get(candidate)
        if engine is None:
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
    if engine.level > IsolationLevel.NONE:
        return
    if not allow_unisolated or request.profile != UNSAFE_PROFILE:
        raise ExecRefused(
            f"{engine.name} runs programs without isolation: the operator's settings must say allow_unisolated = true"
            f" and the call profile={UNSAFE_PROFILE!r}",
            code="policy_denied",
            engine=engine.name,
        )


def unavailable(reports: Sequence[ProbeReport]) -> ExecRefused:
    """Return the refusal that lists every probe and what would cure it."""
    lines = [f"{report.engine}: {report.cure or 'its probe failed'}" for report in reports]
    return ExecRefused(
        "no isolation engine works here" + (f" ({'; '.join(lines)})" if lines else ": none is installed"),
        code="engine_unavailable",
        probes=[
            {
                "engine": report.engine,
                "cure": report.cure,
                "failed": [f"{check.name}: {check.found}" for check in report.checks if not check.ok],
            }
            for report in reports
        ],
    )


async def _engine_by_name(
    engines: Sequence[Executor], name: str, min_isolation: IsolationLevel, *, allow_unisolated: bool
) -> Executor:
    engine = next((engine for engine in engines if engine.name == name), None)
    if engine is None:
        names = ", ".join(sorted(engine.name for engine in engines)) or "none"
        raise ExecRefused(f"no engine is named {name!r}; there are: {names}", engine=name)
    if engine.level == IsolationLevel.NONE:
        if not allow_unisolated:
            raise ExecRefused(
                f"{name} runs programs without isolation: the operator's settings must say allow_unisolated = true",
                code="policy_denied",
                engine=name,
            )
        return engine
    if engine.level < min_isolation:
        raise ExecRefused(
            f"{name} isolates at level {engine.level.name}, below {min_isolation.name}",
            code="isolation_too_weak",
            engine=name,
        )
    report = await engine.probe()
    if not report.ok:
        raise unavailable([report])
    return engine
