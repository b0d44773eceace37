"""Getting code and skills into a sandbox: archives named by their digest, verified there, unpacked whole."""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import shlex
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.builtin.executors.e2b.sdk import Machine, Trouble
from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.payload import host_entry
from kdskills.execution.rootfs import ground_floor_files

if TYPE_CHECKING:
    from kdskills.execution.seccomp import Arch

HOME: Final = "/opt/kdskills"
UNPACK: Final = f"{HOME}/unpack.py"
OLDEST_PYTHON: Final = (3, 11)
DELIVERY_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar that is the same for the same files, and its digest."""

    data: bytes
    digest: str

    @classmethod
    def from_files(cls, files: list[tuple[str, Path]]) -> Archive:
        """Return the archive of (path inside, file, folder or link of this host)."""
        sink = io.BytesIO()
        with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, path in sorted(files):
                info = tar.gettarinfo(str(path), arcname=name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mtime = 0
                info.mode = 0o755 if info.isdir() or info.mode & 0o111 else 0o644
                if info.isreg():
                    with path.open("rb") as stream:
                        tar.addfile(info, stream)
                else:
                    tar.addfile(info)
        data = sink.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest())


def code_archive() -> Archive:
    """Return the archive of the modules a program may import, and of the init and entry that run it."""
    return Archive.from_files([(str(inside), source) for inside, source in ground_floor_files()])


def tree_archive(folder: Path) -> Archive:
    """Return the archive of a staged skill: its copy was checked against the skill's digest."""
    return Archive.from_files([(str(path.relative_to(folder)), path) for path in folder.rglob("*")])


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """What our init reported about a sandbox: interpreter, architecture, enforceable limits, missing packages."""

    python: str
    arch: Arch
    limits: frozenset[str]
    missing: tuple[str, ...]


@dataclass(slots=True)
class PreparedSandbox:
    """A sandbox with our code in it.

    Attributes:
        machine: The sandbox.
        code: Folder of our code inside.
        facts: What it can hold.
        trees: Digests of the skills that are there.
    """

    machine: Machine
    code: str
    facts: SandboxFacts
    trees: set[str] = field(default_factory=set)

    @property
    def entry(self) -> str:
        """The entry of generated code."""
        return f"{self.code}/kdskills_runtime/py_code_exec_entry.py"

    def command(self, *words: str) -> str:
        """Return the command line of our init with *words*; bash becomes it, so its process id is the init's."""
        init = f"{self.code}/kdskills_runtime/remote_init.py"
        return "exec " + shlex.join([self.facts.python, "-I", init, *words])

    def deliver(self, tree: str, folder: Path) -> str:
        """Copy the staged skill *folder* with the digest *tree* in unless it is there; return its path in the sandbox."""
        name = tree.removeprefix("sha256:")
        target = f"{HOME}/skills/{name}"
        if name not in self.trees:
            unpack(self.machine, tree_archive(folder), target)
            self.trees.add(name)
        return target


def prepare(machine: Machine, code: Archive) -> PreparedSandbox:
    """Bring our code into a sandbox and ask what the sandbox can hold.

    Raises:
        Trouble: E2B or the sandbox failed.
        ExecRefused: The sandbox's template cannot be used, and why.
    """
    machine.write(UNPACK, host_entry().with_name("remote_unpack.py").read_bytes())
    folder = f"{HOME}/code/{code.digest}"
    unpack(machine, code, folder)
    status, out, err = machine.run(f"python3 -I {folder}/kdskills_runtime/remote_init.py facts", DELIVERY_S)
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        facts = SandboxFacts(
            python=str(answer["python"]),
            arch=answer["machine"],
            limits=LIMIT_NAMES & set(answer["limits"]),
            missing=tuple(answer["packages"]),
        )
        version, problem = tuple(answer["version"]), answer["problem"]
        trees = set(answer["skills"])
    except (ValueError, IndexError, KeyError, TypeError):
        raise _unusable(f"python3 does not answer (exit code {status}: {err.strip()[-300:]})") from None
    if version < OLDEST_PYTHON:
        raise _unusable(f"its Python is {'.'.join(map(str, version))}; 3.11 is needed")
    if problem is not None:
        raise _unusable(str(problem)[:300])
    if facts.arch not in {"x86_64", "aarch64"}:
        raise _unusable(f"its machine is {facts.arch}")
    return PreparedSandbox(machine, folder, facts, trees)


def unpack(machine: Machine, archive: Archive, folder: str) -> None:
    """Write *archive* into the sandbox and unpack it as *folder* if what arrived has its digest. Raises Trouble."""
    archive_path = f"{HOME}/in-{secrets.token_hex(8)}.tar"
    machine.write(archive_path, archive.data)
    code, out, err = machine.run(f"python3 -I {UNPACK} {archive_path} {archive.digest} {folder}", DELIVERY_S)
    if code != 0:
        words = (out + err).strip()[-300:]
        raise Trouble("unreachable", f"an archive could not be unpacked in the sandbox (exit code {code}: {words})")


def _unusable(problem: str) -> ExecRefused:
    return ExecRefused(f"the sandbox's template cannot be used: {problem}", engine="e2b")
