"""What travels to the in-sandbox entry, one JSON work order that is never in argv or the environment, and its report.

The other side is `runtime/kdskills_runtime/py_code_exec_entry.py`, whose docstring is the protocol.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

from kdskills.errors import ExecRefused
from kdskills.execution.request import ExecError, ExecRequest, ExecResult

VERSION: Final = 1
MAX_PAYLOAD: Final = 64 * 1024 * 1024
SKILLS_DIR: Final = "/skills"
ENVIRONMENTS_DIR: Final = "/env"
WORK_DIR: Final = "/work"
PROGRAM_PATH: Final = "/tmp/program/main.py"  # noqa: S108 - inside the sandbox, whose /tmp is fresh for every run
DESCRIPTOR_NAME: Final = "SKILLS_DESCRIPTOR"
MODULE_HOOK: Final = "esm.cjs"
"""File of an environment by which ES modules find its packages of Node; they do not look at `NODE_PATH`."""

BASE_ENV: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK_DIR,
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",  # noqa: S108 - inside the sandbox
}
"""Variables of every program, unless its request says otherwise."""


def package_variables(request: ExecRequest, folder: str = "", path: str = BASE_ENV["PATH"]) -> dict[str, str]:
    """Return the variables by which a program finds the packages of *request*'s environment; those it sets itself aside.

    *folder* is where the environment lies on the far side, `/env/<digest>` when empty. *path* is searched after its programs.
    """
    if request.environment is None:
        return {}
    root, folder = request.environment.root, folder or f"{ENVIRONMENTS_DIR}/{request.environment.digest}"
    variables = {
        "PATH": ("bin", f"{folder}/bin:{path}"),
        "PYTHONPATH": ("python", f"{folder}/python"),
        "NODE_PATH": ("node_modules", f"{folder}/node_modules"),
        "NODE_OPTIONS": (MODULE_HOOK, f'--require "{folder}/{MODULE_HOOK}"'),
    }
    return {
        name: value
        for name, (part, value) in variables.items()
        if ((root / part).is_file() if part == MODULE_HOOK else (root / part).is_dir()) and name not in request.env
    }


def program_variables(request: ExecRequest, folder: str = "", **own: str) -> dict[str, str]:
    """Return every variable of *request*'s program: the engine's *own*, then its packages' (*folder* as in
    `package_variables`), then the request's. Generated code is told of its packages by its payload, as its entry must not
    import any of them.
    """
    variables = BASE_ENV | own
    if request.code is None:
        variables |= package_variables(request, folder, variables["PATH"])
    return {**variables, **request.env}


def build_payload(
    request: ExecRequest,
    *,
    program_path: str = PROGRAM_PATH,
    with_source: bool = True,
    skill_folders: Mapping[str, str] | None = None,
    work_dir: str = WORK_DIR,
    packages: Mapping[str, str] | None = None,
) -> bytes:
    """Return the payload of a `code` request as JSON bytes.

    *program_path* and *work_dir* are the far side's; without *with_source* the engine has put the program there itself.
    *skill_folders* lie inside the sandbox, by full id; `/skills/<full id>` when None. *packages* are the variables of its
    environment, those of `/env/<digest>` when None. Raises ExecRefused: `bad_request` for a name that cannot be a global, a
    value that is not JSON, or too much of it.
    """
    if request.code is None:
        raise ExecRefused("only generated code has a payload", code="bad_request")
    for name in request.globals:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
            raise ExecRefused(f"{name!r} cannot be the name of a global", code="bad_request", name=name)
    names = dict(request.globals)
    descriptor = names.get(DESCRIPTOR_NAME)
    if descriptor is not None:
        if not isinstance(descriptor, Mapping):
            raise ExecRefused("SKILLS_DESCRIPTOR is not a mapping", code="bad_request")
        if skill_folders is None:
            skill_folders = {mount.id: f"{SKILLS_DIR}/{mount.id}" for mount in request.skills}
        names[DESCRIPTOR_NAME] = remap_descriptor(descriptor, skill_folders)
    if packages is None:
        packages = package_variables(request)
    order: dict[str, Any] = {
        "version": VERSION,
        "program": {"path": program_path} | ({"source": request.code} if with_source else {}),
        "workdir": str(PurePosixPath(work_dir) / request.workdir),
        "globals": names,
        "limits": {},
        "verify": "tree",
    }
    if packages:
        order |= {"variables": packages, "paths": [packages[name] for name in ("PYTHONPATH",) if name in packages]}
    try:
        data = json.dumps(order, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ExecRefused(f"the globals of generated code are not JSON: {error}", code="bad_request") from error
    if len(data) > MAX_PAYLOAD:
        raise ExecRefused(f"code and globals take {len(data)} bytes; {MAX_PAYLOAD} are allowed", code="bad_request")
    return data


def remap_descriptor(descriptor: Mapping[str, Any], skill_folders: Mapping[str, str]) -> dict[str, Any]:
    """Return the export *descriptor* with the URI of every skill in *skill_folders* mounted there.

    Host paths stand only in the export's `mounts`; they are dropped, so that nothing of the host's layout travels.
    A skill of the export without a folder is reported as missing by the far side.
    """
    skills = descriptor.get("skills", ())
    mounts = {row["uri"]: skill_folders[row["id"]] for row in skills if row["id"] in skill_folders}
    return {**descriptor, "mounts": mounts}


def host_entry() -> Path:
    """Return the entry file of this installation: the host starts it, but never imports it."""
    spec = importlib.util.find_spec("kdskills_runtime")
    checkout = Path(__file__).parents[2] / "runtime/kdskills_runtime/__init__.py"
    return Path(spec.origin if spec and spec.origin else checkout).with_name("py_code_exec_entry.py")


def framed(order: Mapping[str, object], *bodies: bytes) -> bytes:
    """Return an order as far sides read it: its length, itself as JSON, and the bytes it announces."""
    head = json.dumps(order).encode("ascii")
    return b"".join([len(head).to_bytes(8, "big"), head, *bodies])


def entry_argv(
    python: str, entry: str, *, payload_fd: int | str = "{payload_fd}", report_fd: int | str = "{report_fd}"
) -> tuple[str, ...]:
    """Return the argument list that starts the entry file *entry*; far sides put descriptors for the words in braces."""
    return (python, "-I", entry, "--payload-fd", str(payload_fd), "--report-fd", str(report_fd))


MAX_REPORT: Final = 2 * 1024 * 1024
"""An engine keeps at most this many bytes of the report, from its beginning."""

_TEXT = 64 * 1024

Start = Literal["started", "failed", "refused"]


class CodeReport(NamedTuple):
    """What the entry and the program reported. The program writes everything after `started`, so none of it is trusted."""

    start: Start | None = None  # None: the entry itself did not run
    error: ExecError | None = None  # why the program did not start, or the exception it ended with
    value: Any = None  # None when the program was killed, or left by `os._exit`


def read_report(data: bytes) -> CodeReport:
    """Read the report lines and check their form; never raises."""
    lines = [_line(raw) for raw in data[:MAX_REPORT].split(b"\n") if raw]
    first = lines[0] if lines else {}
    match first.get("event"):
        case "failed":
            stage, code = _text(first, "stage") or "entry", _text(first, "code") or "entry_failed"
            return CodeReport(start="failed", error=ExecError(stage, code, _text(first, "message")))
        case "refused":
            code = _text(first, "code") or "skills_mismatch"
            return CodeReport(start="refused", error=ExecError("skills", code, _text(first, "message")))
        case "started":
            line, error = next((line for line in lines[1:] if line.get("event") == "ended"), {}), None
            if line.get("outcome") == "exception":
                words = (_text(line, key) for key in ("message", "exception", "traceback"))
                error = ExecError("program", "exception", *words)
            return CodeReport(start="started", error=error, value=line.get("value"))
    return CodeReport()


def apply_report(result: ExecResult, data: bytes) -> ExecResult:
    """Return the engine's *result* with what the report adds to it.

    * Started: status and exit code are the engine's; an exception becomes `error`, a reported value `value`.
    * `skills_mismatch` and other refusals: status `refused`, and no exit code, as no program ran.
    * The entry failed, or reported nothing although the engine saw it exit: `infra_error`.
    """
    report = read_report(data)
    if report.start == "started":
        return replace(result, error=result.error or report.error, value=report.value)
    if result.status not in {"ok", "nonzero"}:
        return result
    if report.start == "refused":
        return replace(result, status="refused", exit_code=None, signal=None, error=report.error)
    words = result.stderr.text.strip()[-500:]
    message = "the entry ended before the program started" + (f": {words}" if words else "")
    error = report.error or ExecError("entry", "entry_failed", message)
    return replace(result, status="infra_error", exit_code=None, signal=None, error=error)


def _line(raw: bytes) -> dict[str, Any]:
    """Parse one line; a line that is not a JSON object counts as an empty one."""
    try:
        line = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are not JSON and would not survive the way to the caller."""
    raise ValueError(name)


def _text(line: dict[str, Any], key: str) -> str:
    """Return the text under *key*, bounded and free of lone surrogates."""
    value = line.get(key)
    return value[:_TEXT].encode("utf-8", "replace").decode() if isinstance(value, str) else ""
