"""`doctor`: the self-checks of every part this machine would use, each with what would cure it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import yaml

from kdskills.app.operations.extras import EXTRAS
from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import ExecRefused

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.execution import ProbeReport


class DoctorInput(Input):
    """Nothing to say."""


class Check(Output):
    """One self-check."""

    name: str
    ok: bool
    found: str
    cure: str | None = None


class Engine(Output):
    """One engine's probe: every question its canary answered."""

    name: str
    level: str
    ok: bool
    cure: str | None
    limits: tuple[str, ...]
    checks: tuple[Check, ...]


class DoctorOutput(Output):
    """`ok` means that skills load and `auto` finds an engine."""

    ok: bool
    chosen: str | None
    refusal: str | None
    checks: tuple[Check, ...]
    engines: tuple[Engine, ...]
    interpreters: dict[str, tuple[str, ...]]
    plugins: tuple[str, ...]


def _basics() -> list[Check]:
    found = [
        Check(
            name="python",
            ok=sys.version_info >= (3, 11),
            found=f"{platform.python_implementation()} {platform.python_version()}",
            cure="install Python 3.11 or newer",
        ),
        Check(
            name="libyaml",
            ok=yaml.__with_libyaml__,
            found="C loader" if yaml.__with_libyaml__ else "pure Python loader: correct, but slow",
            cure="reinstall PyYAML from a wheel",
        ),
    ]
    for extra, distribution in EXTRAS.items():
        try:
            found.append(Check(name=f"extra {extra}", ok=True, found=f"{distribution} {version(distribution)}"))
        except PackageNotFoundError:
            cure = f"pip install 'kdskills[{extra}]'"
            found.append(Check(name=f"extra {extra}", ok=False, found="not installed; only needed if used", cure=cure))
    return found


def _engine(report: ProbeReport) -> Engine:
    return Engine(
        name=report.engine,
        level=report.level.name,
        ok=report.ok,
        cure=report.cure,
        limits=tuple(sorted(report.limits)),
        checks=tuple(Check(name=c.name, ok=c.ok, found=c.found) for c in report.checks),
    )


async def doctor(host: Host, given: DoctorInput, context: Context) -> DoctorOutput:
    """Run every self-check."""
    engines = [_engine(await engine.probe()) for engine in host.engines()]
    chosen = refusal = None
    try:
        chosen = (await host.wiring.executor(host.settings.executor)).name
    except ExecRefused as error:
        refusal = error.message
    checks = _basics()
    return DoctorOutput(
        ok=chosen is not None and checks[0].ok,
        chosen=chosen,
        refusal=refusal,
        checks=tuple(checks),
        engines=tuple(engines),
        interpreters={suffix: tuple(command) for suffix, command in host.interpreters().items()},
        plugins=tuple(sorted(name for name, _ in host.plugins.list_name_plugin())),
    )


DOCTOR = Implementation(DoctorInput, DoctorOutput, (), doctor)
