"""Putting an engine through a hostile program, and looking at the host afterwards."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.execution import EnvironmentMount, ExecRequest, ExecResult, Executor, InputFile, IsolationLevel
from kdskills.testing.abuse.cases import CASES, Case

if TYPE_CHECKING:
    import pytest

_HERE = Path(__file__).parent
MAX_WORDS = 256 * 1024
_HELPERS = ("attempt.py", "fill.py")
_PACKED = ["PYTHONPATH", "NODE_PATH"]
_FACTS = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe", "/etc/passwd")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case: `problems` is empty when what must be true is."""

    case: Case
    result: ExecResult
    problems: tuple[str, ...]


def abuse(level: IsolationLevel) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for every case meant for engines of *level*, as argument `case`."""
    import pytest

    cases = [case for case in CASES if case.level <= level]
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


async def run_case(executor: Executor, case: Case, environment: EnvironmentMount | None = None) -> Verdict | None:
    """Run *case*, with *environment* in place; None when the engine does not enforce the limits that give it meaning."""
    if not case.needs <= (await executor.probe()).limits:
        return None
    before = _host_facts()
    with _bait() as bait:
        request = ExecRequest(
            code=(_HERE / "programs" / f"{case.name}.py").read_text(encoding="utf-8"),
            globals={**bait, "GIVEN": dict(case.env), "PACKED": [] if environment is None else _PACKED},
            env=case.env,
            environment=environment,
            inputs=tuple(InputFile(name, (_HERE / name).read_bytes()) for name in _HELPERS),
            outputs=case.outputs,
            limits=case.limits,
            profile="unsafe-local" if executor.level is IsolationLevel.NONE else None,
        )
        started = time.monotonic()
        result = await executor.run(request)
        took = time.monotonic() - started
    return Verdict(case, result, tuple(_problems(case, result, took, before)))


def _problems(case: Case, result: ExecResult, took: float, before: dict[str, bytes]) -> Iterator[str]:
    text = result.stdout.text
    yield from (line for line in text.splitlines() if line.startswith("ESCAPED"))
    if result.status not in case.statuses:
        yield f"ended as {result.status} ({result.error}), expected {sorted(case.statuses)}: {result.stderr.text[-500:]}"
    if result.status == "ok" and case.says not in text:
        yield f"did not come to its end: {text[-200:]!r} {result.stderr.text[-500:]}"
    if took > case.limits.wall_s + 4:
        yield f"took {took:.1f} s, {case.limits.wall_s} s are allowed"
    names = {item.path for item in result.artifacts} - set(_HELPERS)
    if case.artifacts is not None and names - case.artifacts:
        yield f"collected {sorted(names)}"
    if any(b"root:" in item.content for item in result.artifacts):
        yield "collected a file of the host"
    if case.code is not None and result.exit_code != case.code:
        yield f"has exit code {result.exit_code}, not {case.code}"
    if result.error is not None and len(repr(result.error)) > MAX_WORDS:
        yield f"its error has {len(repr(result.error))} characters"
    if _host_facts() != before:
        yield "the host is not as it was"


@contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """Put out things of the host that a hostile program would like, and give their names."""
    abstract = f"kdskills-abuse-{secrets.token_hex(4)}"
    secret = f"secret-{secrets.token_hex(8)}"
    with (
        tempfile.NamedTemporaryFile(prefix="kdskills-bait-") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind("\0" + abstract)
        unix.listen()
        file.write(b"bait")
        file.flush()
        os.chmod(file.name, 0o644)  # noqa: PTH101 - an open file's name
        os.environ["ABUSE_SECRET"] = secret
        try:
            yield {
                "HOST_FILE": file.name,
                "HOST_PORT": server.getsockname()[1],
                "HOST_ABSTRACT": abstract,
                "HOST_SECRET": secret,
            }
        finally:
            del os.environ["ABUSE_SECRET"]


def _host_facts() -> dict[str, bytes]:
    """Return what no program may change on the host."""
    return {path: Path(path).read_bytes() for path in _FACTS if Path(path).is_file()}
