"""A program on a system that has not what only Linux has; run by `test_elsewhere.py`.

What is hidden: `openat2` and every other call by number, `O_PATH`, `/proc` and `/sys`, `fcntl`, pidfds, namespaces, and
constants of sockets and `os` that other systems do not know.
"""

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from runpy import run_path

HIDDEN = {
    os: (
        "O_PATH O_TMPFILE P_PIDFD memfd_create pidfd_open eventfd splice copy_file_range posix_fadvise posix_fallocate "
        "getrandom unshare setns sched_getaffinity sched_setaffinity pipe2 getxattr setxattr listxattr removexattr"
    ),
    signal: "pidfd_send_signal SIGPWR SIGSTKFLT",
    socket: "SO_PEERCRED SO_PASSCRED SCM_CREDENTIALS AF_NETLINK AF_VSOCK AF_PACKET AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK",
}
PREFIXES = ("CLONE_", "MFD_", "EFD_", "RWF_")
CALLS = {"syscall", "prctl", "unshare", "setns", "syncfs", "fallocate", "openat2", "mount", "clone"}


def is_hidden(path: object) -> bool:
    """Whether a path is of a file system that only Linux has."""
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(("/proc", "/sys"))


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse what the interpreter is about to do."""
    if event in {"open", "os.listdir", "os.scandir"} and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])
    if event == "ctypes.dlsym" and str(arguments[1]) in CALLS:
        raise AttributeError(arguments[1])


def narrowed(call, path, *arguments, **options):
    """Call a function of `os` that no audit hook hears of."""
    if is_hidden(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    return call(path, *arguments, **options)


def hide() -> None:
    """Take all of it away from this process."""
    for module, names in HIDDEN.items():
        for name in [name for name in dir(module) if name in names.split() or name.startswith(PREFIXES)]:
            delattr(module, name)
    sys.modules["fcntl"] = None
    sys.addaudithook(refuse)
    for name in ("stat", "lstat", "readlink", "access"):
        setattr(os, name, partial(narrowed, getattr(os, name)))


async def library(top: Path) -> dict[str, object]:
    """Find, show, load and search skills, work on a request with file tools, and keep a session in SQLite."""
    from kdskills import ReactSolver, SkillRuntime, SkillsSubsystem, SolverSystem, load_bundle
    from kdskills.builtin.models import pydantic_ai  # noqa: F401 - it speaks to models over HTTP
    from kdskills.builtin.stores.sql import SqlStore
    from kdskills.errors import KdskillsError
    from kdskills.skills.safe_open import read_file
    from kdskills.solver import SolverSettings
    from kdskills.testing import ScriptedModel, call, say

    answers: dict[str, object] = {}
    bundle = load_bundle(top / "bundle")
    subsystem = SkillsSubsystem(descriptor=bundle.descriptor, bundle_root=bundle.root, index_dir=top / "index")
    view = subsystem.view("solver.react.decision")
    answers["skills"] = list(view.listed)
    answers["hits"] = [hit.full_id for hit in view.search("greets somebody").hits]
    answers["rendered"] = "greeting" in view.catalog().text
    for path in ("link/passwd", "../secret", "linked"):
        try:
            read_file(top / "bundle", path, limit=100)
        except KdskillsError as error:
            answers[path] = error.code
    store = SqlStore(f"sqlite:///{top / 'sessions.db'}")
    async with SkillRuntime(subsystem=subsystem, store=store) as runtime:
        session = await runtime.create_session("s1")
        answers["loaded"] = (await session.call("skills.load", {"names": ["greeting"]})).ok
        answers["instructions"] = "Say hello to" in (await session.instructions()).text
    async with SkillRuntime(subsystem=subsystem, store=SqlStore(f"sqlite:///{top / 'sessions.db'}")) as runtime:
        answers["kept"] = "Say hello to" in (await (await runtime.get_session("s1")).instructions()).text
    steps = [
        call("react_write", path="a/note.txt", text="one two"),
        call("files_edit", path="a/note.txt", old="one", new="three"),
        call("files_grep", pattern="thr.e"),
        call("files_read", path="a/note.txt"),
        call("files_read", path="../../bundle/SECRET"),
        call("files_read", path="/etc/passwd"),
        say("It is in a/note.txt."),
    ]
    engine = run_path(str(Path(__file__).parents[1] / "unit" / "solver" / "conftest.py"))["FakeExecutor"]()
    settings = SolverSettings(work_dir=top / "turns")
    async with SolverSystem(bundle=bundle, model=ScriptedModel(steps), executor=engine, settings=settings) as system:
        result = await ReactSolver(system).run("Write a note")
    answers["turn"] = [
        result.status,
        *(f"{made.tool} {made.error or 'ok'}" for step in result.steps for made in step.calls),
    ]
    answers["files"] = [file.path for file in result.files]
    return answers


async def engines() -> dict[str, object]:
    """Ask each engine that starts programs of this host for a run, however it is allowed to."""
    from kdskills import Host, Settings
    from kdskills.errors import ExecRefused
    from kdskills.execution import ExecRequest

    answers: dict[str, object] = {}
    host = Host(Settings(allow_unisolated=True), entry_points=False)
    for engine in host.engines():
        if engine.name not in {"docker", "e2b", "kubernetes"}:
            try:
                await engine.run(ExecRequest(argv=("/bin/true",), profile="unsafe-local"))
            except ExecRefused as error:
                answers[engine.name] = [error.code, "Docker is the wall here" in error.message]
    return answers


if __name__ == "__main__":
    import asyncio
    import json

    hide()
    if sys.argv[1] == "doctor":
        from kdskills.doors.cli import main

        main()
    else:
        answers = asyncio.run(library(Path(sys.argv[2])) if sys.argv[1] == "library" else engines())
        sys.stdout.write(json.dumps(answers))
