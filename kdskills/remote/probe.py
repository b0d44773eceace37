"""The probe: finds out what a server does from the requests its model gets, and caches the result.

It runs the binary with an empty private home against the fake model: no login, no tokens, nothing of the user's. Answers of the
server prove nothing here; a way of changing the catalog is proven when the next model request has the new tool and not the
old one, a call of the new tool arrives, history remains, and a restarted server still shows it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.jobs.settings import user_state_dir
from kdskills.remote import probe_steps as steps
from kdskills.remote.labmodel import FakeResponses
from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject, ServerProfile, WaitTimeoutError
from kdskills.remote.probe_cache import fingerprint, profile_from_json, profile_to_json, read_object, write_object
from kdskills.remote.probe_steps import Lab, ServerFinding, ServerFindings
from kdskills.remote.wire.stdio import StdioTransport

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer

PROBE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ServerProbeReport:
    """The result of a probe.

    Attributes:
        binary: The launcher, resolved.
        fingerprint: SHA-256 over launcher, running executables and user agent.
        profile: The lint rules and strategies that follow.
        findings: Each question and its answer.
        cached: Whether an earlier probe answered.
        seconds: How long it took.
        complete: Whether every question was asked; an incomplete probe is not cached.
    """

    binary: Path
    fingerprint: str
    profile: ServerProfile
    findings: tuple[ServerFinding, ...]
    cached: bool
    seconds: float
    complete: bool

    def to_json(self) -> JsonObject:
        """Return the report as JSON."""
        return {
            "binary": str(self.binary),
            "fingerprint": self.fingerprint,
            "profile": profile_to_json(self.profile),
            "findings": [{"name": item.name, "proven": item.proven, "seen": item.evidence} for item in self.findings],
            "cached": self.cached,
            "seconds": round(self.seconds, 3),
            "complete": self.complete,
        }


def probes_dir(state: Path) -> Path:
    """Return the folder of cached probes below a state folder."""
    return state / "remote" / "probes"


def find_binary(binary: str, path: str | None = None) -> Path:
    """Return the absolute path of a program, by name or path.

    Raises:
        AppServerGone: There is no such program.
    """
    program_path = shutil.which(binary, path=path)
    if program_path is None:
        raise AppServerGone(f"there is no program {binary!r}", code="codex_missing", binary=binary)
    return Path(program_path).absolute()  # the server is started in another folder


async def probe(
    binary: str = "codex", *, state: Path, force: bool = False, timeout_s: float = PROBE_SECONDS
) -> ServerProbeReport:
    """Probe a binary, or return the cached report of an earlier probe.

    Args:
        binary: The program, by name or path.
        state: The folder of durable state.
        force: Probe again although a report is cached.
        timeout_s: Bound of the whole probe.

    Raises:
        AppServerGone: The program is missing, or does not start.
    """
    program = await asyncio.to_thread(find_binary, binary)
    began = time.monotonic()
    home = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="kdskills-probe-"))
    try:
        with FakeResponses() as model:
            lab = Lab(str(program), home, model)
            try:
                await lab.open()
                server = lab.client.server
                mark = await fingerprint_of(server, program, state)
                cached_report = None if force else await asyncio.to_thread(_read, state, mark)
                if cached_report is not None:
                    return replace(cached_report, binary=program, cached=True, seconds=time.monotonic() - began)
                findings = _start(server.user_agent)
                complete = await _ask_all(lab, findings, home, timeout_s)
            finally:
                await lab.close()
    finally:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
    seconds = time.monotonic() - began
    profile = replace(findings.profile, probed=complete)
    report = ServerProbeReport(program, mark, profile, tuple(findings.list), False, seconds, complete)
    if complete:
        await asyncio.to_thread(write_object, _file(state, mark), report.to_json())
    return report


async def profile_for(server: AppServer, binary: str, *, state: Path) -> ServerProfile:
    """Return the profile of a running server, from the cache or by probing its binary.

    Args:
        server: An open server that was started here.
        binary: What it was started from.
        state: The folder of durable state.
    """
    program = await asyncio.to_thread(find_binary, binary)
    mark = await fingerprint_of(server, program, state)
    cached_report = await asyncio.to_thread(_read, state, mark)
    if cached_report is not None:
        return cached_report.profile
    return (await probe(str(program), state=state)).profile


async def probed_profile(
    binary: str, *, env: Mapping[str, str] | None = None, state: Path | None = None
) -> ServerProfile:
    """Return the profile of a binary that is about to be started (`spawn(probe="auto")`).

    Args:
        binary: The program, by name or path.
        env: Variables of the server; their `PATH` is where a name is looked for.
        state: The folder of durable state; the account's own otherwise.

    Raises:
        AppServerGone: The program is missing, or does not start.
    """
    program = await asyncio.to_thread(find_binary, binary, (env or {}).get("PATH"))
    return (await probe(str(program), state=state or user_state_dir())).profile


async def fingerprint_of(server: AppServer, program: Path, state: Path) -> str:
    """Return the fingerprint of a server that runs."""
    transport = server.transport
    group = transport.pid if isinstance(transport, StdioTransport) else None
    return await asyncio.to_thread(fingerprint, program, group, server.user_agent, probes_dir(state))


def _start(user_agent: str) -> ServerFindings:
    version = steps.version_of(user_agent)
    return ServerFindings(ServerProfile(name=version, user_agent=user_agent, unsubscribe=False))


async def _ask_all(lab: Lab, findings: ServerFindings, home: Path, timeout_s: float) -> bool:
    """Ask every question; False when the time was up, or the server went away, before the last."""
    questions: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("unsubscribe", lambda: steps.ask_words(lab, findings)),
        ("namespaces", lambda: steps.ask_namespaces(lab, findings)),
        ("materialise", lambda: steps.ask_materialising(lab, findings)),
        ("context", lambda: steps.ask_context(lab, findings)),
        ("rewind", lambda: steps.ask_rewind(lab, findings)),
        ("extra_roots", lambda: steps.ask_roots(lab, findings, home / "kdskills-probe-roots")),
        ("native", lambda: steps.ask_change(lab, findings, "native")),
        ("reload", lambda: steps.ask_change(lab, findings, "reload")),
    ]
    try:
        async with asyncio.timeout(timeout_s):
            for name, question in questions:
                try:
                    await question()
                except AppServerError as error:
                    findings.add(name, False, str(error))
                except WaitTimeoutError as error:
                    findings.add(name, False, str(error))
                    return False
    except TimeoutError:
        findings.add("time", False, f"not finished within {timeout_s:g} s")
        return False
    except AppServerGone as error:
        findings.add("server", False, str(error))
        return False
    return True


def _file(state: Path, mark: str) -> Path:
    return probes_dir(state) / f"{mark}.json"


def _read(state: Path, mark: str) -> ServerProbeReport | None:
    """Return a cached report; None when there is none that this version can read."""
    stored = read_object(_file(state, mark)) or {}
    profile = profile_from_json(stored.get("profile"))
    if profile is None or stored.get("fingerprint") != mark or not isinstance(stored.get("findings"), list):
        return None
    findings = tuple(
        ServerFinding(str(entry.get("name")), bool(entry.get("proven")), str(entry.get("seen")))
        for entry in stored["findings"]
        if isinstance(entry, dict)
    )
    return ServerProbeReport(Path(str(stored.get("binary"))), mark, profile, findings, True, 0.0, True)
