"""What travels to the in-sandbox entry: one JSON work order, never in argv or the environment.

The other side is `runtime/kdskills_runtime/py_code_exec_entry.py`, whose docstring is the protocol.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from kdskills.errors import ExecRefused
from kdskills.execution.request import ExecRequest, SkillMount

VERSION: Final = 1
MAX_PAYLOAD: Final = 64 * 1024 * 1024
SKILLS_DIR: Final = "/skills"
WORK_DIR: Final = "/work"
PROGRAM_PATH: Final = "/tmp/program/main.py"  # noqa: S108 - inside the sandbox, whose /tmp is fresh for every run
DESCRIPTOR_NAME: Final = "SKILLS_DESCRIPTOR"

Verify = Literal["catalog", "tree", "none"]


def build_payload(
    request: ExecRequest,
    *,
    program_path: str = PROGRAM_PATH,
    with_source: bool = True,
    skill_folders: Mapping[str, str] | None = None,
    work_dir: str = WORK_DIR,
    rlimits: Mapping[str, int] | None = None,
    verify: Verify = "tree",
) -> bytes:
    """Return the payload of a `code` request as JSON bytes.

    Args:
        request: A request whose `code` is given.
        program_path: Where the program's own file is, or is written to, on the far side.
        with_source: False when the engine has put the program there itself.
        skill_folders: Folder of each mounted skill inside the sandbox, by full id; `/skills/<full id>` when None.
        work_dir: The far side's `/work`.
        rlimits: Limits the entry sets for itself, by its names (`cpu`, `as`, `nproc`, `nofile`, `fsize`, `core`).
        verify: How thoroughly skills are checked against the descriptor before the program starts.

    Raises:
        ExecRefused: `bad_request` for a name that cannot be a global, a value that is not JSON, or too much of it.
    """
    if request.code is None:
        raise ExecRefused("only generated code has a payload", code="bad_request")
    names = {name: value for name, value in request.globals.items() if usable_name(name)}
    descriptor = names.get(DESCRIPTOR_NAME)
    if descriptor is not None:
        if not isinstance(descriptor, Mapping):
            raise ExecRefused("SKILLS_DESCRIPTOR is not a mapping", code="bad_request")
        names[DESCRIPTOR_NAME] = remap_descriptor(
            descriptor, sandbox_folders(request.skills) if skill_folders is None else skill_folders
        )
    program: dict[str, str] = {"path": program_path}
    if with_source:
        program["source"] = request.code
    order = {
        "version": VERSION,
        "program": program,
        "workdir": str(PurePosixPath(work_dir) / request.workdir),
        "globals": names,
        "limits": dict(rlimits or {}),
        "verify": verify,
    }
    try:
        data = json.dumps(order, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ExecRefused(f"the globals of generated code are not JSON: {error}", code="bad_request") from error
    if len(data) > MAX_PAYLOAD:
        raise ExecRefused(f"code and globals take {len(data)} bytes; {MAX_PAYLOAD} are allowed", code="bad_request")
    return data


def usable_name(name: str) -> bool:
    """Say whether *name* may be set in a program.

    Raises:
        ExecRefused: `bad_request`: not an identifier, a keyword, or a name the interpreter keeps for itself.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        raise ExecRefused(f"{name!r} cannot be the name of a global", code="bad_request", name=name)
    return True


def sandbox_folders(skills: Sequence[SkillMount]) -> dict[str, str]:
    """Return the folders at which an engine with a mount namespace shows *skills*, by full id."""
    return {mount.id: f"{SKILLS_DIR}/{mount.id}" for mount in skills}


def remap_descriptor(descriptor: Mapping[str, Any], skill_folders: Mapping[str, str]) -> dict[str, Any]:
    """Return the export *descriptor* with the URI of every skill in *skill_folders* mounted there.

    Host paths stand only in the export's `mounts`; they are dropped, so that nothing of the host's layout travels.
    A skill of the export without a folder is reported as missing by the far side.
    """
    mounts = {
        row["uri"]: skill_folders[row["id"]] for row in descriptor.get("skills", ()) if row["id"] in skill_folders
    }
    return {**descriptor, "mounts": mounts}


def host_entry() -> Path:
    """Return the entry file of this installation: the host starts it, but never imports it."""
    spec = importlib.util.find_spec("kdskills_runtime")
    package = (
        Path(spec.origin).parent if spec and spec.origin else Path(__file__).parents[2] / "runtime/kdskills_runtime"
    )
    return package / "py_code_exec_entry.py"


def entry_argv(python: str, entry: str, *, payload_fd: int, report_fd: int) -> tuple[str, ...]:
    """Return the argument list that starts the entry file *entry* with the interpreter *python*."""
    return (python, "-I", entry, "--payload-fd", str(payload_fd), "--report-fd", str(report_fd))
