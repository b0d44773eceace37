"""Checks of a request before anything is run, and the output globs compiled on the way.

Everything is decided here, without I/O: shapes, names, paths, globs, sizes. What passes is safe to hand to an engine's
argument builder; every problem is listed in one refusal.
"""

from __future__ import annotations

import fnmatch
import math
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from kdskills.errors import ExecRefused
from kdskills.errors.traces import VARIABLE, Trace
from kdskills.execution.egress import MAX_RULES, host_rule
from kdskills.execution.request import MAX_BACKGROUND_S, MAX_WALL_S, ExecRequest, Limits


@dataclass(frozen=True, slots=True)
class OutputGlob:
    """One declared output: `*`, `?`, `[...]` within a part, `**` for any number of folders."""

    pattern: str
    parts: tuple[re.Pattern[str] | None, ...]  # None stands for `**`

    @property
    def literal(self) -> bool:
        """Whether the pattern names exactly one path."""
        return not re.search(r"[*?\[]", self.pattern)

    def matches(self, path: tuple[str, ...]) -> bool:
        """Whether the whole path matches."""
        return len(self.parts) in self._walk(path)

    def may_lie_below(self, folder: tuple[str, ...]) -> bool:
        """Whether something below *folder* could still match, so that the walk must enter it."""
        return min(self._walk(folder), default=len(self.parts)) < len(self.parts)

    def _walk(self, path: tuple[str, ...]) -> set[int]:
        """Return how many parts of the pattern may have been used up after *path*."""
        states = self._skip({0})
        for name in path:
            current = {(state, self.parts[state]) for state in states if state < len(self.parts)}
            states = self._skip({state + (part is not None) for state, part in current if not part or part.match(name)})
        return states

    def _skip(self, states: set[int]) -> set[int]:
        """Add what follows each `**`, which may stand for no folder at all."""
        result = set(states)
        for state in states:
            while state < len(self.parts) and self.parts[state] is None:
                state += 1
                result.add(state)
        return result


def compile_glob(pattern: str) -> OutputGlob:
    """Compile a pattern that `check_request` found clean."""
    parts = (None if part == "**" else re.compile(fnmatch.translate(part)) for part in pattern.split("/"))
    return OutputGlob(pattern, tuple(parts))


LIMIT_NAMES = frozenset(
    {"wall", "cpu", "memory", "pids", "nofile", "fsize", "work", "tmp", "stdout", "stderr", "network"}
)
"""Names used in `limits_enforced` and in an operator's best-effort list."""

MAX_ARGS = 4096
MAX_ARG_TOTAL = 1024 * 1024
MAX_CODE = 8 * 1024 * 1024
MAX_ENV = 256
MAX_ENV_TOTAL = 256 * 1024
MAX_INPUTS = 256
MAX_BACKGROUND_INPUTS = 4096
MAX_SKILLS = 256
MAX_GLOBS = 64
MAX_PATH = 1024

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGEST = re.compile(r"[0-9a-f]{16,64}")
_MOUNT_ID = re.compile(r"[^\s/\\\x00-\x1f\x7f]{1,255}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DIRECTION = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
_NO_TEXT = re.compile(r"[\ud800-\udfff]")

HOOK_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC_", "GIT_", "DOCKER_", "MALLOC_", "NPM_CONFIG_", "KDSKILLS_")
"""Prefixes of variables that load code into, or steer, programs started before or below the payload."""

HOOK_NAMES = frozenset(
    {
        *("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "PS4", "PROMPT_COMMAND", "IFS", "CDPATH", "ZDOTDIR", "FPATH"),
        *("PYTHONSTARTUP", "PYTHONHOME", "PYTHONPATH", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONUSERBASE"),
        *("PYTHONEXECUTABLE", "PYTHONPLATLIBDIR", "PYTHONWARNINGS", "PYTHONPYCACHEPREFIX", "PYTHONCASEOK"),
        *("NODE_OPTIONS", "NODE_PATH", "NODE_EXTRA_CA_CERTS", "PERL5OPT", "PERL5LIB", "PERLLIB", "PERL5DB"),
        *("RUBYOPT", "RUBYLIB", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH"),
        *("GCONV_PATH", "LOCPATH", "NLSPATH", "GLIBC_TUNABLES", "HOSTALIASES", "RES_OPTIONS", "GETCONF_DIR"),
        *("LUA_INIT", "LUA_PATH", "LUA_CPATH", "R_PROFILE", "R_PROFILE_USER", "R_ENVIRON", "PHPRC", "PHP_INI_SCAN_DIR"),
        *("CONTAINER_HOST", "KUBECONFIG", "EDITOR", "VISUAL", "PAGER", "BROWSER", "LESSOPEN", "LESSCLOSE", "OPENSSL_CONF"),
    }
)  # fmt: skip
"""Loader, interpreter and client hooks refused by name."""

FOLDER_VARIABLES = frozenset({"SKILL_DIR", "KDSKILLS_SKILL_DIR", "KDSKILLS_TURN_DIR"})
"""Variables the runtime tools set for a script, folders below /skills and /work; a model's call may not set them."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A request that passed every check."""

    request: ExecRequest
    argv: tuple[str, ...]  # empty for `code`
    cwd: str  # absolute, inside the sandbox
    env: tuple[tuple[bytes, bytes], ...]
    globs: tuple[OutputGlob, ...]


def check_request(request: ExecRequest) -> RunPlan:
    """Check *request* and return its plan. Raises ExecRefused (`bad_request`), whose `details["errors"]` lists each problem."""
    errors = [
        *_limit_errors(request.limits, MAX_BACKGROUND_S if request.background else MAX_WALL_S),
        *_program_errors(request),
        *_env_errors(request),
        *_name_errors(request),
        *_environment_errors(request),
        *_input_errors(request),
        *_path_errors(request),
    ]
    if errors:
        summary = "; ".join(errors[:5]) + (f"; and {len(errors) - 5} more" if len(errors) > 5 else "")
        raise ExecRefused(f"the request cannot be run: {summary}", code="bad_request", who="caller", errors=errors)
    return RunPlan(
        request=request,
        argv=_argv(request),
        cwd=posixpath.normpath(posixpath.join("/work", request.workdir)),
        env=tuple((name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in request.env.items()),
        globs=tuple(compile_glob(pattern) for pattern in request.outputs),
    )


def require_limits(can: frozenset[str], best_effort: frozenset[str], engine: str) -> None:
    """Refuse when a limit is neither enforceable nor listed as best effort. Raises ExecRefused:
    `limit_not_enforceable`; `details["limits"]` names them.
    """
    missing = sorted(LIMIT_NAMES - can - best_effort)
    if missing:
        cure = "give it what it needs, or list these as best effort"
        words = f"{engine} cannot enforce {', '.join(missing)} here; {cure}"
        raise ExecRefused(words, code="limit_not_enforceable", limits=missing, engine=engine)


def path_problem(path: str) -> str | None:
    """Return why *path* is no clean relative posix path, or None."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > MAX_PATH:
        return "is empty or longer than 1024 bytes"
    if path.startswith("/"):
        return "is absolute"
    if _CONTROL.search(path) or "\\" in path:
        return "has control characters or backslashes"
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return "has empty, '.' or '..' parts"
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return "has a part longer than 255 bytes"
    return None


def output_problem(path: str) -> str | None:
    """Return why a file of this path never leaves a run, or None.

    Programs choose the names of their outputs. Every engine refuses names with control or direction characters, which a
    terminal would obey or show in another order, and names that are not text.
    """
    if _DIRECTION.search(path):
        return "has characters that turn the direction of text"
    if _NO_TEXT.search(path):
        return "is no UTF-8 text"
    return path_problem(path)


def shown_path(path: str) -> str:
    """Return *path* on one line for people: what is not printable, or no UTF-8, is written as escapes."""

    def escaped(char: str) -> str:
        if "\udc80" <= char <= "\udcff":  # a byte that is no UTF-8, as the system's calls hand it over
            return f"\\x{ord(char) - 0xDC00:02x}"
        return char.encode("unicode_escape").decode("ascii")

    return "".join(char if char.isprintable() else escaped(char) for char in path)


def env_problem(name: str) -> str | None:
    """Return why an environment variable of this name is refused, or None."""
    if not _ENV_NAME.fullmatch(name):
        return "is no variable name"
    if name in FOLDER_VARIABLES:
        return None
    if name in HOOK_NAMES or any(name[: len(prefix)] == prefix for prefix in HOOK_PREFIXES):
        return "steers loaders or interpreters and is refused by name"
    return None


def _argv(request: ExecRequest) -> tuple[str, ...]:
    if request.argv is not None:
        return request.argv
    if request.script is None:
        return ()
    path = f"/skills/{request.script.skill}/{request.script.path}"
    words = request.interpreter or ("python3", "{path}")
    return (*(word.replace("{path}", path) for word in words), *request.script.args)


def _limit_errors(limits: Limits, longest: float) -> Iterator[str]:
    for item in fields(limits):
        value = getattr(limits, item.name)
        if item.name == "cpu_s" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"limit {item.name} must be a number that is not negative"
        elif item.name in {"wall_s", "cpu_s"} and not 0 < value <= longest:
            yield f"limit {item.name} must be above 0 and at most {longest:g}"
        elif item.name in {"memory", "pids", "nofile", "work_size", "tmp_size"} and value < 1:
            yield f"limit {item.name} must be at least 1"
        elif not item.name.endswith("_s") and not isinstance(value, int):
            yield f"limit {item.name} must be a whole number"


def _program_errors(request: ExecRequest) -> Iterator[str]:
    program_fields = [name for name in ("argv", "script", "code") if getattr(request, name) is not None]
    if len(program_fields) != 1:
        yield f"exactly one of argv, script and code must be given, not {' and '.join(program_fields) or 'none'}"
        return
    if len(request.stdin) > request.limits.stdin:
        yield f"stdin has {len(request.stdin)} bytes, more than {request.limits.stdin}"
    if request.code is not None:
        if len(request.code.encode("utf-8", "surrogatepass")) > MAX_CODE:
            yield f"code is longer than {MAX_CODE} bytes"
        return
    if request.script is not None:
        problem = path_problem(request.script.path)
        if problem or request.script.path.split("/")[0] != "scripts":
            yield f"script path {request.script.path!r} must be a clean relative path below scripts/"
        if request.script.skill not in {mount.id for mount in request.skills}:
            yield f"script skill {request.script.skill!r} is not among the mounted skills"
        if request.interpreter is not None and not any("{path}" in word for word in request.interpreter):
            yield "interpreter must hold {path}"
    yield from _argv_errors(_argv(request), request.limits)


def _argv_errors(argv: tuple[str, ...], limits: Limits) -> Iterator[str]:
    if not argv or not argv[0]:
        yield "argv is empty"
        return
    if len(argv) > MAX_ARGS:
        yield f"argv has more than {MAX_ARGS} arguments"
    total = 0
    for number, word in enumerate(argv):
        if "\x00" in word:
            yield f"argument {number} holds NUL"
            continue
        size = len(word.encode("utf-8", "surrogatepass"))
        total += size + 1
        if size >= limits.arg_size:
            yield f"argument {number} has {size} bytes, {limits.arg_size} or more"
    if total > MAX_ARG_TOTAL:
        yield f"argv has more than {MAX_ARG_TOTAL} bytes in all"


def _env_errors(request: ExecRequest) -> Iterator[str]:
    count = total = 0
    for name, value in request.env.items():
        problem = env_problem(name)
        if problem:
            yield f"environment variable {name!r} {problem}"
        size = len(value.encode("utf-8", "surrogatepass"))
        if (
            name != VARIABLE or Trace.read(value) is None
        ):  # what a run is told beside its caller's costs the caller no room
            count, total = count + 1, total + len(name) + size + 2
        if "\x00" in value or size >= request.limits.arg_size:
            yield f"the value of {name!r} holds NUL or is too long"
    if count > MAX_ENV or total > MAX_ENV_TOTAL:
        yield f"the environment has more than {MAX_ENV} variables or {MAX_ENV_TOTAL} bytes"


def _name_errors(request: ExecRequest) -> Iterator[str]:
    mounted_ids: set[str] = set()
    if len(request.skills) > MAX_SKILLS:
        yield f"more than {MAX_SKILLS} skills are mounted"
    for mount in request.skills:
        if not _MOUNT_ID.fullmatch(mount.id) or mount.id in {".", ".."}:
            yield f"skill id {mount.id!r} is no safe folder name"
        if mount.id in mounted_ids:
            yield f"skill id {mount.id!r} is mounted twice"
        mounted_ids.add(mount.id)
    owner = request.owner
    for label in (owner.tenant, owner.project, owner.agent, owner.conversation, request.request_id):
        if len(label) > 256 or _CONTROL.search(label):
            yield f"label {label[:40]!r} is too long or has control characters"
    if request.network == "none":
        return
    if not 0 < len(request.network) <= MAX_RULES:
        yield f"network is an empty allow-list, or one of more than {MAX_RULES} rules; say 'none' for none"
    for rule in request.network:
        try:
            host_rule(rule)
        except ValueError as error:
            yield f"network: {error}"


def _environment_errors(request: ExecRequest) -> Iterator[str]:
    mount = request.environment
    if mount is None:
        return
    if not _DIGEST.fullmatch(mount.digest):
        yield f"environment digest {mount.digest[:80]!r} is not 16 to 64 hexadecimal digits"
    root = str(mount.root)
    # some engines put the folder into PATH, whose parts a colon separates
    if (
        not mount.root.is_absolute()
        or ".." in mount.root.parts
        or ":" in root
        or _CONTROL.search(root)
        or _NO_TEXT.search(root)
    ):
        yield f"environment root {shown_path(root)[:200]!r} is no absolute path without '..', colons and control characters"


def _input_errors(request: ExecRequest) -> Iterator[str]:
    max_inputs = MAX_BACKGROUND_INPUTS if request.background else MAX_INPUTS
    if len(request.inputs) > max_inputs:
        yield f"more than {max_inputs} inputs are given"
    files: set[str] = set()
    total = 0
    for item in request.inputs:
        problem = path_problem(item.path)
        if problem:
            yield f"input path {item.path!r} {problem}"
        if item.path in files:
            yield f"input path {item.path!r} is given twice"
        files.add(item.path)
        if isinstance(item.content, bytes):
            total += len(item.content)
        elif not item.content.is_absolute():
            yield f"input {item.path!r} must be bytes or an absolute host path"
    if total > request.limits.work_size:
        yield f"the inputs have {total} bytes, more than the workdir's {request.limits.work_size}"
    for path in files:
        parents = {str(parent) for parent in Path(path).parents}
        for clash in sorted(parents & files):
            yield f"input path {clash!r} is both a file and a folder"


def _path_errors(request: ExecRequest) -> Iterator[str]:
    if len(request.outputs) > MAX_GLOBS:
        yield f"more than {MAX_GLOBS} outputs are declared"
    for pattern in request.outputs:
        problem = path_problem(pattern)
        if problem:
            yield f"output {pattern!r} {problem}"
    if request.workdir == ".":
        return
    inside_skills = request.workdir.startswith("/skills/")
    problem = path_problem(request.workdir.removeprefix("/skills/") if inside_skills else request.workdir)
    if problem:
        yield f"workdir {request.workdir!r} {problem}"
    elif inside_skills and request.workdir.split("/")[2] not in {mount.id for mount in request.skills}:
        yield f"workdir {request.workdir!r} is below no mounted skill"
