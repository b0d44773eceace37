"""Programs behind Anthropic's sandbox-runtime, for its allow-list of domains.

srt (`@anthropic-ai/sandbox-runtime` from npm) builds a bubblewrap sandbox around a proxy that lets through the named
hosts alone, which no other engine here can. By itself it shows the whole file system of the host read-only; this adapter
closes `/` and opens the prepared tree, the skills, the run's own folders and the host's programs and libraries. Folders
that are closed are empty tmpfs inside, without a bound of size, and its namespaces are not all new: hence the level. Its
system call filter holds back UNIX sockets alone, so ours is set inside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.execution.cgroup import find_parent
from kdskills.execution.check import LIMIT_NAMES, RunPlan, check_request, require_limits
from kdskills.execution.dirs import cache_dir, private_dir, state_dir
from kdskills.execution.landlock.order import environment, host_argv, host_path_of
from kdskills.execution.landlock.run import TreeJob, UidLease, Uids, leftovers, note_uid
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.owner import RunRecords, reap
from kdskills.execution.payload import build_payload, entry_argv
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.processes import require_endings
from kdskills.execution.protocol import ProbeReport, ReapReport
from kdskills.execution.request import MIB, ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.rootfs import Rootfs, build_rootfs
from kdskills.execution.run import FinishedRun, in_thread, skills_mismatch, to_the_end
from kdskills.execution.seccomp import ARCHES, program_bytes, shared_rules
from kdskills.execution.srt import DOMAIN, Files, SrtRun, run_script, settings
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.hooks import hookimpl

if TYPE_CHECKING:
    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory
    from kdskills.hooks import Register

ENGINE: Final = "srt"
LEVEL: Final = IsolationLevel.LANDLOCK
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


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `srt`."""
    register(ENGINE, SrtExecutor)


class SrtExecutor:
    """Runs every program through srt, with the request's hosts as its allow-list.

    As root srt itself runs under a uid of its own, never as root. As an ordinary user it runs as that user.

    Args:
        options: The operator's settings. `memory`, `work` and `tmp` cannot be held and must be listed as best effort.
    """

    name = ENGINE
    level = LEVEL

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options
        self._probed: tuple[tuple[object, ...], ProbeReport] | None = None

    async def probe(self) -> ProbeReport:
        """Run the canary; cached by srt's version, the kernel and our uid."""
        package = find_srt(self._options.cache_dir)
        key = (package and (package / "package.json").stat().st_mtime_ns, platform.release(), os.geteuid())
        if self._probed is None or self._probed[0] != key:
            self._probed = (key, await self._probe())
        return self._probed[1]

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end. Raises as the protocol says."""
        return await to_the_end(self, request)

    async def start(self, request: ExecRequest) -> SrtRun | FinishedRun:
        """Start and return at once. Raises as `run`."""
        try:
            return await in_thread(partial(self._start, request), undo=lambda run: run.cancel())
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)
        except (ExecFailed, OSError) as error:
            raise ExecRefused(f"what a run needs cannot be prepared: {error}", engine=self.name) from error

    async def reap(self) -> ReapReport:
        """End processes, cgroups and folders of dead owners; an ordinary user's runs end with their watcher."""
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> ReapReport:
        runs = leftovers(self._runs(), self._uids())
        groups = reap(RunRecords(self._options.state_dir or state_dir()), find_parent())
        return ReapReport(runs.ended + groups.ended, runs.failed + groups.failed)

    def _runs(self) -> Path:
        top = private_dir(self._options.state_dir or state_dir(), passable=os.geteuid() == 0)
        return private_dir(top / "srt-runs", passable=os.geteuid() == 0)

    def _uids(self) -> Uids:
        return Uids(self._options.sandbox_uid, private_dir(state_dir(), passable=True) / "uids")

    def _start(self, request: ExecRequest) -> SrtRun:
        require_endings(self.name)
        plan = check_request(request)
        domains = _domains(request)
        require_limits(ENFORCED, self._options.best_effort, self.name)
        package = _package(self._options.cache_dir)
        rootfs = build_rootfs(self._options.cache_dir, packages=self._options.image_packages)
        cache = self._options.cache_dir or cache_dir()
        skill_folders = {
            mount.id: str(stage_skill(mount, cache, passable=os.geteuid() == 0)) for mount in request.skills
        }
        inputs = read_inputs(request.inputs, request.limits)
        lease = self._uids().lease() if os.geteuid() == 0 else None
        folder = None
        try:
            folder = RunFolder.make(self._runs(), request)
            files = _furnish(folder, inputs, plan, lease)
            readable = [
                rootfs.path,
                *map(Path, skill_folders.values()),
                package / "vendor" / "seccomp",
                folder.path / SRT_HOME,
            ]
            (folder.control / "settings.json").write_bytes(
                settings(domains, readable, folder.control, (folder.work, folder.tmp), files)
            )
            files.script.write_bytes(_script(plan, rootfs, folder, skill_folders, files, proxy=bool(domains)))
            files.filter.write_bytes(_filter())
            for path in folder.control.iterdir():
                path.chmod(path.stat().st_mode | 0o044)
            run = self._spawned(plan, package, folder, files, lease, skill_folders)
        except BaseException:  # raised again: no folder and no leased uid stays behind
            if folder is not None:
                folder.remove()
            if lease is not None:
                lease.close()
            raise
        return run

    def _spawned(self, plan: RunPlan, package: Path, folder: RunFolder, files: Files, lease: UidLease | None, skill_folders: dict[str, str]) -> SrtRun:  # fmt: skip
        request = plan.request
        stdin = request.stdin
        if request.code is not None:
            stdin = build_payload(
                request, program_path=str(folder.control / "main.py"), with_source=False, skill_folders=skill_folders,
                work_dir=str(folder.work),
            )  # fmt: skip

        def order(_payload_fd: int, _report_fd: int, cgroups: Sequence[str]) -> bytes:
            return _order(plan, package, folder, files, None if lease is None else lease.uid, cgroups)

        run = SrtRun(
            TreeJob(
                engine=self.name, level=self.level, plan=plan, folder=folder, lease=lease, order=order, payload=None, stdin=stdin,
                cgroups=find_parent(), reserve=RESERVE, enforced=ENFORCED,
            ),
            files,
            code=request.code is not None,
        )  # fmt: skip
        try:
            run.spawn()
        except BaseException:  # raised again: the run's folder and uid are released
            run.close()
            raise
        return run

    async def _probe(self) -> ProbeReport:
        try:
            rootfs = await asyncio.to_thread(
                build_rootfs, self._options.cache_dir, packages=self._options.image_packages
            )
            argv = canary_argv(f"{rootfs.path}{rootfs.python}", f"{rootfs.path}{rootfs.entry}")
            result = await self.run(ExecRequest(argv=argv))
        except (ExecRefused, ExecFailed) as error:
            return ProbeReport(self.name, self.level, ok=False, cure=error.message)
        except OSError as error:
            return ProbeReport(self.name, self.level, ok=False, cure=f"make what a run needs accessible: {error}")
        # Closed folders are empty tmpfs inside, / among them, and the bounding set is that of a user namespace of its
        # own: neither reaches the host, and neither is promised at this level.
        checks = tuple(
            check for check in judge(result.stdout.data) if check.name not in {"capabilities", "root_read_only"}
        )
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        cure = None if ok else f"look into the sandbox's set-up: {words}"
        return ProbeReport(self.name, self.level, ok, checks, result.limits_enforced, cure)


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
        raise ExecRefused(
            f"srt not found: npm install --prefix {prefix} @anthropic-ai/sandbox-runtime",
            engine=ENGINE,
            missing=["srt"],
        )
    return package


def _filter() -> bytes:
    """Return the system call filter every program gets within srt's own. Raises ExecRefused."""
    arch = ARCHES.get(platform.machine())
    if arch is None:
        raise ExecRefused(f"no system call filter for {platform.machine()}", engine=ENGINE)
    return program_bytes(arch, shared_rules())


def _domains(request: ExecRequest) -> tuple[str, ...]:
    """Return the allow-list. Raises ExecRefused for what is no plain host name."""
    domains = () if request.network == "none" else tuple(request.network)
    odd = [name for name in domains if not DOMAIN.fullmatch(name) or name.rpartition(".")[2].split(":")[0].isdigit()]
    if odd:
        raise ExecRefused(
            f"{', '.join(map(repr, odd))} cannot be in an allow-list: name hosts, such as example.org or *.example.org",
            code="bad_request",
            who="caller",
            engine=ENGINE,
        )
    return domains


def _furnish(folder: RunFolder, inputs: list[tuple[str, bytes]], plan: RunPlan, lease: UidLease | None) -> Files:
    """Fill the run's folders and give the program's uid those it may write; the program has not started yet."""
    if len(os.fsencode(folder.path / SRT_HOME)) > LONGEST:
        raise ExecRefused("the state folder's path is too long for srt's sockets: choose a shorter one", engine=ENGINE)
    files = Files.in_folder(folder)
    folder.write_inputs(inputs, plan.cwd, frozenset(plan.request.executable))
    if plan.request.code is not None:
        (folder.control / "main.py").write_bytes(plan.request.code.encode("utf-8", "surrogatepass"))
    srt_home = folder.path / SRT_HOME
    srt_home.mkdir(mode=0o700)
    files.exit.parent.mkdir(mode=0o755)
    for path in files.answers:
        path.touch(mode=0o600)
    if lease is not None:
        note_uid(folder, lease.uid)
        folder.path.chmod(0o711)
        folder.control.chmod(0o755)
        program_paths = [name for top in (folder.work, folder.tmp) for name in (top, *top.rglob("*"))]
        for path in (srt_home, *program_paths, *files.answers):
            os.chown(path, lease.uid, lease.uid, follow_symlinks=False)
    return files


def _script(
    plan: RunPlan, rootfs: Rootfs, folder: RunFolder, skill_folders: dict[str, str], files: Files, *, proxy: bool
) -> bytes:
    """Return the script srt runs."""
    code = plan.request.code is not None
    python, entry = f"{rootfs.path}{rootfs.python}", f"{rootfs.path}{rootfs.entry}"
    argv = entry_argv(python, entry, payload_fd=0, report_fd=3) if code else host_argv(plan, skill_folders)
    env = environment(rootfs.path, plan, folder)
    return run_script(
        [os.fsencode(word) for word in argv],
        {os.fsencode(name): value.encode("utf-8", "surrogateescape") for name, value in env.items()},
        os.fsencode(host_path_of(plan.cwd, skill_folders, folder.work)),
        plan.request.limits,
        files,
        launcher=[os.fsencode(word) for word in (python, "-I", f"{entry.rpartition('/')[0]}/filtered.py")],
        proxy=proxy,
        code=code,
    )


def _order(
    plan: RunPlan, package: Path, folder: RunFolder, files: Files, uid: int | None, cgroups: Sequence[str]
) -> bytes:
    """Return the launcher's order: srt under a uid of its own, without a wall of ours around it."""
    limits = plan.request.limits
    home = str(folder.path / SRT_HOME)
    node = str(shutil.which("node"))
    command = f"exec bash {files.script}"  # a path of our own making, without anything a shell could mistake
    order = {
        "argv": [
            node,
            str(package / "dist/cli.js"),
            "--settings",
            str(folder.control / "settings.json"),
            "-c",
            command,
        ],
        "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "TMPDIR": home},
        "cwd": home,
        "uid": uid,
        "limits": {"core": (0, 0)},
        "ruleset": None,
        "rules": [],
        "proc": [],
        "seccomp": None,
        "keep": [],
        "cgroups": list(cgroups),
        "guard": [(str(folder.work), limits.work_size + 16 * MIB), (str(folder.tmp), limits.tmp_size + 16 * MIB)],
    }
    return json.dumps(order).encode()
