"""Programs behind Anthropic's sandbox-runtime, for its allow-list of domains; `docs/reference/isolation.md` says its limits.

srt shows the whole host read-only, takes no descriptor along and mixes its own faults with the program's exit code. So this
adapter closes `/`, and the script inside leaves the exit code in a file that we have had open all the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.dirs import cache_dir
from kdskills.execution.egress import authority, host_rules
from kdskills.execution.landlock import TreeEngine, TreeRun, environment, mounted_folders, order_bytes
from kdskills.execution.local_tree import RunFolder, host_argv, host_path_of
from kdskills.execution.owner import find_parent
from kdskills.execution.payload import BASE_ENV, MAX_REPORT, apply_report, entry_argv
from kdskills.execution.processes import descendants, rlimits
from kdskills.execution.protocol import ExecutorFactory, ProbeCheck
from kdskills.execution.request import MIB, ExecError, ExecRequest, ExecResult, IsolationLevel, Limits
from kdskills.execution.rootfs import Rootfs, build_rootfs
from kdskills.execution.run import ExecutionRun, judge, not_started
from kdskills.execution.seccomp import SHARED_RULES, host_filter
from kdskills.execution.stage import read_inputs
from kdskills.execution.streams import Ending, Pump
from kdskills.hooks import Register, hookimpl

ENGINE: Final = "srt"
PACKAGE: Final = "node_modules/@anthropic-ai/sandbox-runtime"
TOOLS: Final = {
    "node": "nodejs",
    "bwrap": "bubblewrap",
    "socat": "socat",
    "rg": "ripgrep",
    "bash": "bash",
    "du": "coreutils",
}
RESERVE: Final = (256 * MIB, 64)
"""What node and the relays of srt need beside the program: memory and processes."""
SRT_HOME: Final = "s"
"""srt's own folder beside the program's: its home, and its sockets, whose paths must be short."""
LONGEST: Final = 107 - 40
ENFORCED: Final = LIMIT_NAMES - {"memory", "work", "tmp"}
DOMAIN: Final = re.compile(
    r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)+(?::[0-9]{1,5})?"
)
"""A host name, or all names below one, with an optional port: what an allow-list may hold."""

SYSTEM: Final = ("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64")
"""Programs and libraries of the host that srt's own helpers inside need. They stay readable to the program."""

CERTIFICATES: Final = ("/etc/ssl/certs", "/usr/share/ca-certificates")
_PROXY_NAMES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
PROXIES: Final = (*_PROXY_NAMES, *map(str.lower, _PROXY_NAMES))
"""Variables by which programs find srt's proxy; everything else it sets is dropped."""

MISSING, NO_WORKDIR = "missing", "workdir"
"""Words in the exit file of a program that was not started."""


class Files:
    """The script the sandbox runs, and files it may fill, which lie outside the folders it sees read-only."""

    def __init__(self, folder: RunFolder) -> None:
        self.script, self.filter = folder.control / "run.sh", folder.control / "calls.bpf"
        self.answers = [folder.path / "answers" / name for name in ("exit", "pid", "report")]
        self.exit, self.pid, self.report = self.answers


def settings(
    domains: Sequence[str], readable: Iterable[Path], control: Path, writable: Iterable[Path], files: Files
) -> bytes:
    """Return srt's settings: everything closed but the hosts, folders and files that are named."""
    writing = [*map(str, writable), *map(str, files.answers)]
    reading = [*map(str, readable), str(control), *(folder for folder in SYSTEM if Path(folder).exists())]
    if domains:
        reading += [folder for folder in CERTIFICATES if Path(folder).exists()]
    return json.dumps(
        {
            "network": {"allowedDomains": list(domains), "deniedDomains": []},
            "filesystem": {"denyRead": ["/"], "allowRead": reading, "allowWrite": writing, "denyWrite": []},
        }
    ).encode()


def run_script(argv: Sequence[bytes], env: Mapping[bytes, bytes], cwd: bytes, limits: Limits, files: Files, *, launcher: Sequence[bytes], proxy: bool, code: bool) -> bytes:  # fmt: skip
    """Return the script bash runs inside, byte-exact.

    The program has exactly the variables *env*, beside those that name srt's proxy when *proxy*; for *code* descriptor 3 is
    the report. *launcher* is the argument list of `kdskills_runtime.filtered`, which sets the filter.
    """
    cpu, cpu_kill = rlimits(limits)["cpu"]
    bounds = f"ulimit -c 0 && ulimit -Sn {limits.nofile} && ulimit -Hn {limits.nofile} && ulimit -f {-(-limits.fsize // 1024)}"
    bounds += f" && ulimit -St {cpu} && ulimit -Ht {cpu_kill} && ulimit -v {limits.memory // 1024} && ulimit -u {limits.pids + 3}"
    variables = b" ".join(_quoted(name + b"=" + value) for name, value in env.items())
    # The name localhost is not known inside, where the file that says so is closed.
    proxy_variables = b" ".join(b'${%s+"%s=${%s//localhost:/127.0.0.1:}"}' % ((name.encode(),) * 3) for name in PROXIES)
    program = b" ".join(_quoted(word) for word in (*launcher, bytes(files.filter), *argv))
    exit_file = _quoted(bytes(files.exit))
    return b"\n".join(
        [
            b"exec 4>&2 2>/dev/null",  # what bash says of a killed child is no output of the program
            b"cd -- %s || { printf %s >%s; exit 127; }" % (_quoted(cwd), NO_WORKDIR.encode(), exit_file),
            b"PATH=%s type -P -- %s >/dev/null || { printf %s >%s; exit 127; }"
            % (_quoted(env[b"PATH"]), _quoted(argv[0]), MISSING.encode(), exit_file),
            b"( " + bounds.encode() + b" || exit 126",
            b"  printf %%s $BASHPID >%s" % _quoted(bytes(files.pid)),
            b"  exec env -i %s %s %s 2>&4 4>&-" % (variables, proxy_variables if proxy else b"", program) + (b" 3>%s" % _quoted(bytes(files.report)) if code else b""),
            b")",
            b"printf %%s $? >%s" % exit_file,
            b"",
        ]
    )  # fmt: skip


def _quoted(word: bytes) -> bytes:
    """Return *word* as bash reads it back byte for byte."""
    return b"'" + word.replace(b"'", b"'\\''") + b"'"


class SrtRun(TreeRun):
    """A run in srt, which the launcher starts under a uid of its own and without a wall of ours around it."""

    engine: SrtExecutor
    reserve = RESERVE

    _answers: Mapping[str, int] = MappingProxyType({})

    def prepare(self) -> None:
        """Fill the run's folders and write srt's settings, the script and our filter."""
        engine, request = self.engine, self.request
        self.plan = engine.checked(request)
        domains = _domains(request)
        engine.require(ENFORCED)
        self._package = _package(engine.options.cache_dir)
        self._rootfs = engine.rootfs()
        skills = engine.stage(request, passable=os.geteuid() == 0)
        engine.environment(request, passable=os.geteuid() == 0)
        self.settle(read_inputs(request.inputs, request.limits))
        self._srt_home = self.folder.path / SRT_HOME
        if len(os.fsencode(self._srt_home)) > LONGEST:
            words = "the state folder's path is too long for srt's sockets: choose a shorter one"
            raise ExecRefused(words, engine=ENGINE)
        self._files = files = Files(self.folder)
        self._srt_home.mkdir(mode=0o700)
        files.exit.parent.mkdir(mode=0o755)
        for path in files.answers:
            path.touch(mode=0o600)
        # The payload has no descriptor of its own here: it is what the entry finds on standard input.
        self.inputs = {"stdin": request.stdin if request.code is None else self.code_payload(skills, self._rootfs.path)}
        seccomp = self._package / "vendor" / "seccomp"
        readable = [self._rootfs.path, *mounted_folders(self.plan, skills), seccomp, self._srt_home]
        rules = settings(domains, readable, self.folder.control, (self.folder.work, self.folder.tmp), files)
        (self.folder.control / "settings.json").write_bytes(rules)
        files.script.write_bytes(self._script(skills, proxy=bool(domains)))
        files.filter.write_bytes(host_filter(SHARED_RULES, ENGINE))
        for path in self.folder.control.iterdir():
            path.chmod(path.stat().st_mode | 0o044)
        self.hand_over(self._srt_home, *files.answers)
        self.cgroups = find_parent()
        self.enforced = ENFORCED

    def spawn(self) -> Pump:
        """Open what the sandbox writes, before it starts and never by name again; then start the launcher."""
        answers: dict[str, int] = {}
        for path in self._files.answers:
            answers[path.name] = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self.stack.callback(os.close, answers[path.name])
        self.stack.callback(answers.clear)
        self._answers = answers
        return super().spawn()

    def order(self, cgroups: Sequence[str]) -> bytes:
        """Return the launcher's order; the script's path is of our own making, without anything a shell could mistake."""
        home, node, cli = str(self._srt_home), str(shutil.which("node")), str(self._package / "dist/cli.js")
        settings_path = str(self.folder.control / "settings.json")
        return order_bytes(
            self.folder,
            self.request.limits,
            argv=[node, cli, "--settings", settings_path, "-c", f"exec bash {self._files.script}"],
            env={**BASE_ENV, "HOME": home, "TMPDIR": home},
            cwd=home,
            uid=None if self.lease is None else self.lease.uid,
            limits={"core": (0, 0)},
            cgroups=cgroups,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to srt around it."""
        inner, launcher = self._answer("pid", 16), self.launcher_pid
        if inner.isdigit() and launcher is not None:
            for pid in _inside(launcher, int(inner)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def result_of(self, ending: Ending, facts: Mapping[str, Any]) -> ExecResult:
        """Return the result: srt's own exit code says only whether it worked at all."""
        word = self._answer("exit", 16).decode("ascii", "replace")
        program_facts = {**facts, "code": None}
        program_facts.pop("signal", None)
        if facts.get("event") == "ended":
            program_facts["code"] = int(word) if word.isdigit() else facts.get("code")
            if word.isdigit() and 128 < int(word) <= 192:
                program_facts |= {"code": None, "signal": int(word) - 128}
        result = super().result_of(ending, program_facts)
        if ending.reason != "exited" or result.status in {"infra_error", "limit", "oom"}:
            return result
        if not word.isdigit():
            end = f"exit code {facts['code']}" if "code" in facts else f"signal {facts.get('signal')}"
            message = f"srt ended with {end} before the program did: {self.last_words(2000)}"
            error = {
                MISSING: not_started(self.plan, "exec", "not found"),
                NO_WORKDIR: not_started(self.plan, "workdir", "cannot be entered"),
            }.get(word, ExecError("setup", "setup_failed", message))
            return replace(result, status="infra_error", exit_code=None, signal=None, error=error)
        return result if self.request.code is None else apply_report(result, self._answer("report", MAX_REPORT + 1))

    def _script(self, skills: Mapping[str, Path], *, proxy: bool) -> bytes:
        plan, rootfs, folder = self.plan, self._rootfs, self.folder
        python, entry = rootfs.on_host()
        code = self.request.code is not None
        argv = entry_argv(python, entry, payload_fd=0, report_fd=3) if code else host_argv(plan, skills)
        env = environment(rootfs.path, plan, folder, skills)
        return run_script(
            [os.fsencode(word) for word in argv],
            {os.fsencode(name): value.encode("utf-8", "surrogateescape") for name, value in env.items()},
            os.fsencode(host_path_of(plan.cwd, skills, folder.work)),
            self.request.limits,
            self._files,
            launcher=[*map(os.fsencode, (python, "-I", f"{rootfs.path}{rootfs.beside_entry('filtered.py')}"))],
            proxy=proxy,
            code=code,
        )

    def _answer(self, name: str, limit: int) -> bytes:
        fd = self._answers.get(name)
        return b"" if fd is None else os.pread(fd, limit, 0)


def _inside(launcher: int, inner: int) -> Iterator[int]:
    """Return processes below *launcher* whose pid in their innermost namespace is *inner*."""
    for pid in (launcher, *descendants(launcher)):
        with contextlib.suppress(OSError, ValueError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            spaces = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(spaces) > 1 and int(spaces[-1]) == inner:
                yield pid


class SrtExecutor(TreeEngine):
    """Runs every program through srt, with the request's hosts as its allow-list.

    As root srt itself runs under a uid of its own, never as root. As an ordinary user it runs as that user. `memory`, `work`
    and `tmp` cannot be held and must be listed as best effort.
    """

    name = ENGINE
    level = IsolationLevel.LANDLOCK
    run_type = SrtRun
    environments = True
    networks: ClassVar[bool] = True

    def probe_key(self) -> tuple[object, ...]:
        """Return srt's version beside the kernel and our uid."""
        package = find_srt(self.options.cache_dir)
        return package and (package / "package.json").stat().st_mtime_ns, *super().probe_key()

    def rootfs(self) -> Rootfs:
        """Return the prepared tree."""
        return build_rootfs(self.options.cache_dir, **self.options.image)

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry in the prepared tree."""
        return self.rootfs().on_host()

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the canary's checks but two that neither reach the host nor are promised at this level. Closed folders
        are empty tmpfs inside, / among them, and the bounding set is that of a user namespace of its own.
        """
        without = {"capabilities", "root_read_only"}
        return tuple(check for check in judge(result.stdout.data) if check.name not in without)


def find_srt(cache: Path | None = None) -> Path | None:
    """Return the installed package: in the cache's folder `srt`, or where the command `srt` leads to."""
    local = (cache or cache_dir()) / "srt" / PACKAGE
    if (local / "dist/cli.js").is_file():
        return local
    command = shutil.which("srt")
    package = Path(command).resolve().parents[1] if command else None
    return package if package is not None and (package / "dist/cli.js").is_file() else None


def _package(cache: Path | None) -> Path:
    """Return srt's folder. Raises ExecRefused with what is missing and how to get it."""
    missing = sorted(debian_package for tool, debian_package in TOOLS.items() if shutil.which(tool) is None)
    if missing:
        raise ExecRefused(f"srt needs {', '.join(missing)}: install these packages", engine=ENGINE, missing=missing)
    package = find_srt(cache)
    if package is None:
        prefix = (cache or cache_dir()) / "srt"
        words = f"srt not found: npm install --prefix {prefix} @anthropic-ai/sandbox-runtime"
        raise ExecRefused(words, engine=ENGINE, missing=["srt"])
    return package


def _domains(request: ExecRequest) -> tuple[str, ...]:
    """Return the allow-list in srt's words. Raises ExecRefused for what is no plain host name."""
    domains = () if request.network == "none" else tuple(request.network)
    odd = [name for name in domains if not DOMAIN.fullmatch(name) or name.rpartition(".")[2].split(":")[0].isdigit()]
    if odd:
        names = ", ".join(map(repr, odd))
        words = f"{names} cannot be in an allow-list: name hosts, such as example.org or *.example.org"
        raise ExecRefused(words, code="bad_request", who="caller", engine=ENGINE)
    # A name alone is any port to srt, and with us those of HTTP and TLS.
    rules = host_rules(domains)
    return tuple(
        f"{'*.' if rule.below else ''}{authority(rule.host, port)}" for rule in rules for port in sorted(rule.ports)
    )


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `srt`."""
    register(ENGINE, SrtExecutor)
