"""Judging what the canary saw. The canary itself is `kdskills_runtime/canary.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kdskills.execution.protocol import ProbeCheck

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
        return tuple(_checks(report, sockets=sockets))
    except (ValueError, KeyError, TypeError) as error:
        return (ProbeCheck("canary", ok=False, found=f"the canary did not answer: {error!r}"),)


def failed(checks: Sequence[ProbeCheck]) -> str:
    """Return the failed checks as one line."""
    return "; ".join(f"{check.name}: {check.found}" for check in checks if not check.ok)


def _checks(report: dict[str, Any], *, sockets: bool) -> Iterator[ProbeCheck]:
    yield ProbeCheck("host_files", not report["readable"], f"readable: {report['readable']}")
    yield ProbeCheck(
        "core_pattern", not report["core_pattern_writable"], f"writable: {report['core_pattern_writable']}"
    )
    yield ProbeCheck("uid", report["uid"] != 0, f"uid {report['uid']}")
    yield ProbeCheck("capabilities", report["cap_bounding"] == 0, f"bounding set {report['cap_bounding']:#x}")
    yield ProbeCheck("seccomp", report["seccomp"] == 2, f"mode {report['seccomp']}")
    yield ProbeCheck("no_new_privs", report["no_new_privs"] == 1, str(report["no_new_privs"]))
    if sockets:
        yield ProbeCheck("network", report["interfaces"] == ["lo"], f"interfaces {report['interfaces']}")
    else:
        yield ProbeCheck("network", report["sockets"] == [], f"sockets {report['sockets']}")
    yield ProbeCheck("root_read_only", not report["root_writable"], f"writable: {report['root_writable']}")
