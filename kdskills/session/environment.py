"""The environment of a script: empty, then ours, then the operator's, then the call's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kdskills.execution.check import env_problem
from kdskills.session.codes import invalid
from kdskills.session.limits import MAX_ENV_NAME, MAX_ENV_TOTAL, MAX_ENV_VALUE
from kdskills.session.scope import TurnScope

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS: Final = frozenset({"PATH", "HOME", "PYTHONPATH", "PYTHONHOME"})


def call_env_problems(env: Mapping[str, str], max_count: int) -> list[tuple[str, str]]:
    """Return `(JSON pointer, problem)` for everything a call may not set; values are never repeated."""
    problems: list[tuple[str, str]] = []
    total = 0
    if len(env) > max_count:
        problems.append(("/env", f"holds more than {max_count} variables"))
    for name, value in env.items():
        pointer = "/env/" + name[:64].replace("~", "~0").replace("/", "~1")
        size = len(value.encode("utf-8", "surrogatepass"))
        total += len(name.encode("utf-8", "surrogatepass")) + size
        if not _NAME.fullmatch(name):
            problems.append((pointer, "is no variable name"))
        elif len(name) > MAX_ENV_NAME:
            problems.append((pointer, f"has a name longer than {MAX_ENV_NAME} bytes"))
        elif name in _OURS or name.startswith("KDSKILLS_") or env_problem(name):
            problems.append((pointer, "may not be set by a call"))
        if "\0" in value:
            problems.append((pointer, "holds NUL"))
        elif size > MAX_ENV_VALUE:
            problems.append((pointer, f"has a value longer than {MAX_ENV_VALUE} bytes"))
    if total > MAX_ENV_TOTAL:
        problems.append(("/env", f"has more than {MAX_ENV_TOTAL} bytes in all"))
    return problems


def script_environment(
    skill_id: str, scope: TurnScope, operator: Mapping[str, str], call: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a run.

    `PATH`, `HOME` and `TMPDIR` are the engine's own and added by it; nothing of the host process is.
    """
    env = {
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "KDSKILLS_SKILL_DIR": f"/skills/{skill_id}",
    }
    if scope.workspace is not None:
        env["KDSKILLS_TURN_DIR"] = "/work"
    return {**env, **operator, **call}


def check_call_env(env: Mapping[str, str], max_count: int) -> None:
    """Raise `invalid_argument` when a call sets what it may not."""
    problems = call_env_problems(env, max_count)
    if problems:
        raise invalid(
            "the env of this call is not allowed: " + "; ".join(f"{p} {t}" for p, t in problems[:5]), *problems
        )
