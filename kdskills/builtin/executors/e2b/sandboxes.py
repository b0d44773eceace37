"""E2B's sandboxes: what the engine needs of the SDK, what each sandbox gets, which one an owner has.

Whether a sandbox is gone is asked of the API, never judged by words a program printed. A lease that a dead or late holder
loses goes on with a higher token, and the far side refuses lower ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.container import Archive, tree_files
from kdskills.execution.dirs import locked, private_dir, write_note
from kdskills.execution.owner import is_leftover
from kdskills.execution.payload import host_entry
from kdskills.execution.request import Owner
from kdskills.execution.rootfs import ground_floor_files
from kdskills.models import Redactor

if TYPE_CHECKING:
    from e2b import Sandbox

    from kdskills.execution.protocol import E2bOptions
    from kdskills.execution.seccomp import Arch


ROOT_USER: Final = "root"
REQUEST_S: Final = 60.0
SLOWEST: Final = 1024 * 1024
"""Bytes a second that a file is at least sent with."""

Code = Literal["unauthorized", "rate_limited", "gone", "file_missing", "unreachable"]


class Trouble(Exception):
    """E2B could not do what was asked; the message is free of keys and tokens."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Cloud:
    """Makes and finds sandboxes; the *key* is kept out of every message. Raises ExecRefused without the SDK."""

    def __init__(self, options: E2bOptions, key: str) -> None:
        try:
            import e2b
        except ImportError:
            words = "the engine e2b needs the package e2b: pip install 'kdskills[e2b]'"
            raise ExecRefused(words, engine="e2b") from None
        self.sdk, self._options, self._redactor = e2b, options, Redactor([key])
        addresses = {"api_url": options.api_url, "sandbox_url": options.sandbox_url}
        self._how: dict[str, Any] = {"api_key": key, "request_timeout": REQUEST_S}
        self._how |= {name: address for name, address in addresses.items() if address is not None}

    def create(self, timeout_s: float, labels: Mapping[str, str]) -> Machine:
        """Make a sandbox that lives *timeout_s* seconds, without access to the internet. Raises Trouble."""
        with self.translated():
            sandbox = self.sdk.Sandbox.create(
                template=self._options.template,
                timeout=round(timeout_s),
                metadata=dict(labels),
                allow_internet_access=False,
                **self._how,
            )
            return Machine(self, sandbox)

    def connect(self, sandbox: str, timeout_s: float) -> Machine:
        """Find a sandbox again. Raises Trouble, `gone` when it is not there any more."""
        with self.translated():
            return Machine(self, self.sdk.Sandbox.connect(sandbox, timeout=round(timeout_s), **self._how))

    def kill(self, sandbox: str) -> bool:
        """End a sandbox; False when it was gone already. Raises Trouble."""
        with self.translated():
            return bool(self.sdk.Sandbox.kill(sandbox, **self._how))

    def living(self, sandbox: str) -> bool:
        """Ask the API whether a sandbox is there. Raises Trouble when it does not say."""
        try:
            with self.translated():
                self.sdk.Sandbox.get_info(sandbox, **self._how)
        except Trouble as trouble:
            if trouble.code == "gone":
                return False
            raise
        return True

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn whatever the SDK raises into Trouble."""
        try:
            yield
        except (Trouble, self.sdk.CommandExitException):
            raise
        except Exception as error:  # noqa: BLE001 - the SDK raises plain Exception, too; each becomes Trouble
            words = self._redactor.text(f"{type(error).__name__}: {error}")[:500]
            later = f"try again later ({words})"
            # The first that fits: a missing file is a kind of what is missing.
            kinds: tuple[tuple[type[Any], Code, str], ...] = (
                (self.sdk.AuthenticationException, "unauthorized", f"E2B refused the API key ({words})"),
                (self.sdk.RateLimitException, "rate_limited", f"E2B's rate limit is reached; {later}"),
                (self.sdk.FileNotFoundException, "file_missing", words),
                (self.sdk.NotFoundException, "gone", words),
                (Exception, "unreachable", words),
            )
            raise next(Trouble(code, words) for kind, code, words in kinds if isinstance(error, kind)) from None


class Machine:
    """One sandbox. Every call may raise Trouble; `gone` is the API's own word, never read from a program's output."""

    def __init__(self, cloud: Cloud, sandbox: Sandbox) -> None:
        self._cloud, self._sandbox = cloud, sandbox
        self.id: str = sandbox.sandbox_id

    def live_for(self, timeout_s: float) -> None:
        """Have the sandbox end after *timeout_s* seconds from now."""
        with self._cloud.translated():
            self._sandbox.set_timeout(round(timeout_s))

    def write(self, path: str, data: bytes) -> None:
        """Write a file as root; a large one, such as an environment, may take longer than other requests."""
        with self._inside():
            self._sandbox.files.write(path, data, user=ROOT_USER, request_timeout=REQUEST_S + len(data) / SLOWEST)

    def read(self, path: str) -> bytes:
        """Read a file as root; `file_missing` when it is not there."""
        with self._inside():
            return bytes(self._sandbox.files.read(path, format="bytes", user=ROOT_USER))

    def run(self, command: str, timeout_s: float = REQUEST_S) -> tuple[int, str, str]:
        """Run a short command as root and return (exit code, stdout, stderr)."""
        with self._inside():
            try:
                result = self._sandbox.commands.run(command, user=ROOT_USER, cwd="/", timeout=timeout_s)
            except self._cloud.sdk.CommandExitException as ended:
                return ended.exit_code, ended.stdout, ended.stderr
            return result.exit_code, result.stdout, result.stderr

    def follow(
        self, command: str, timeout_s: float, started: Callable[[int], None], stdout: Callable[[str], None]
    ) -> tuple[int, str]:
        """Run a command as root to its end and return (exit code, stderr). *started* is told its process id, *stdout*
        gets its output as it comes; the machine itself ends it at *timeout_s*.
        """
        with self._inside():
            handle = self._sandbox.commands.run(command, background=True, user=ROOT_USER, cwd="/", timeout=timeout_s)
            started(handle.pid)
            try:
                result = handle.wait(on_stdout=stdout)
            except self._cloud.sdk.CommandExitException as ended:
                return ended.exit_code, ended.stderr
            return result.exit_code, result.stderr

    def end(self, pid: int) -> bool:
        """KILL a command; False when there is none of that id."""
        with self._inside():
            return bool(self._sandbox.commands.kill(pid))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Translate what goes wrong inside the sandbox; ask the API when the sandbox itself may be what is missing."""
        try:
            with self._cloud.translated():
                yield
        except Trouble as trouble:
            if trouble.code in {"unreachable", "gone"} and not self._cloud.living(self.id):
                raise Trouble("gone", f"the sandbox {self.id} is gone") from None
            raise


HOME: Final = "/opt/kdskills"
UNPACK: Final = f"{HOME}/unpack.py"
OLDEST_PYTHON: Final = (3, 11)
DELIVERY_S: Final = 120.0


def code_archive() -> Archive:
    """Return the archive of the modules a program may import, and of the init and entry that run it."""
    return Archive.from_files([(str(inside), source) for inside, source in ground_floor_files()])


def tree_archive(folder: Path) -> Archive:
    """Return the archive of a staged skill, whose copy was checked against its digest, or of an environment."""
    return Archive.from_files(tree_files(folder))


class SandboxFacts(NamedTuple):
    """What our init reported about a sandbox: interpreter, architecture, enforceable limits, missing packages."""

    python: str
    arch: Arch
    limits: frozenset[str]
    missing: tuple[str, ...]


@dataclass(slots=True)
class PreparedSandbox:
    """A sandbox with our code in it."""

    machine: Machine
    code: str  # folder of our code inside
    facts: SandboxFacts
    trees: set[str] = field(default_factory=set)  # `skills/<digest>` and `env/<digest>` that are there

    @property
    def entry(self) -> str:
        """The entry of generated code."""
        return f"{self.code}/kdskills_runtime/py_code_exec_entry.py"

    def command(self, *words: str) -> str:
        """Return the command line of our init with *words*; bash becomes it, so its process id is the init's."""
        init = f"{self.code}/kdskills_runtime/remote_init.py"
        return "exec " + shlex.join([self.facts.python, "-I", init, *words])

    def deliver(self, name: str, folder: Path) -> str:
        """Copy *folder* in as *name*, `skills/<digest>` or `env/<digest>`, unless it is there; return its path in the sandbox."""
        target = f"{HOME}/{name}"
        if name not in self.trees:
            unpack(self.machine, tree_archive(folder), target)
            self.trees.add(name)
        return target


def prepare(machine: Machine, code: Archive) -> PreparedSandbox:
    """Bring our code into a sandbox and ask what the sandbox can hold. Raises Trouble: E2B or the sandbox failed;
    ExecRefused: the sandbox's template cannot be used, and why.
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
        trees = set(answer["trees"])
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


LEASE_POLL_S: Final = 0.02
RECORD_VERSION: Final = 1


def owner_key(owner: Owner, *further_parts: str) -> str:
    """Return the owner's name in records: a hash over length-prefixed parts, so that no two owners meet."""
    parts = [owner.tenant, owner.project, owner.agent, owner.conversation, *further_parts]
    text = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode("utf-8", "surrogatepass") for part in parts)
    return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one owner's sandbox; times are by the wall clock."""

    token: int = 0  # the highest fencing token given out
    sandbox: str | None = None
    created: float = 0.0
    used: float = 0.0
    until: float = 0.0  # when the lease is over, whoever holds it; 0 when nobody does
    holder: Mapping[str, str] = field(default_factory=dict)  # labels of the process that holds the lease

    def is_held(self, now: float) -> bool:
        """Whether a living process holds the lease and its time is not over."""
        return self.until > now and not is_leftover(self.holder)


@dataclass(slots=True)
class SandboxLease:
    """The right to use an owner's sandbox, and what is written down of it."""

    key: str
    token: int
    record: Record


class SandboxLeases:
    """The records below the folder *top*, shared by every process of this account."""

    def __init__(self, top: Path) -> None:
        self._top = top

    def acquire(
        self, key: str, labels: Mapping[str, str], hold_s: float, given_up: threading.Event
    ) -> SandboxLease | None:
        """Wait for the lease of *key* and take it for *hold_s* seconds; None when *given_up* was set first."""
        while not given_up.is_set():
            now = time.time()
            with self._locked(key):
                record = self._read(key)
                # The token rises with every lease: the sandbox refuses a former holder that comes back late.
                if not record.is_held(now):
                    renewed = replace(record, token=record.token + 1, until=now + hold_s, holder=dict(labels))
                    self._write(key, renewed)
                    return SandboxLease(key, renewed.token, renewed)
            given_up.wait(LEASE_POLL_S)
        return None

    def note(self, lease: SandboxLease, sandbox: str | None, created: float) -> bool:
        """Record the sandbox that the holder uses now; False when another run holds the lease by now."""
        return self._change(lease, sandbox=sandbox, created=created, used=time.time())

    def release(self, lease: SandboxLease) -> bool:
        """Release the lease; False when another run holds it by now."""
        return self._change(lease, until=0.0, holder={}, used=time.time())

    def leftovers(self, idle_s: float, hard_s: float) -> Iterator[tuple[str, Record, str]]:
        """Return (key, record, reason) of records nobody will use again: dead holders, sandboxes over their time."""
        for path in sorted(self._top.glob("*.json")) if self._top.is_dir() else ():
            record, now = self._read(path.stem), time.time()
            expired = now - record.used > idle_s or now - record.created > hard_s
            if record.until and is_leftover(record.holder):
                yield path.stem, record, "its owner is dead"
            elif record.sandbox is not None and not record.is_held(now) and expired:
                yield path.stem, record, "its time is over"

    def forget(self, key: str, record: Record) -> bool:
        """Remove a leftover's sandbox from its record, unless it changed; its token stays, for tokens only rise."""
        with self._locked(key):
            if self._read(key) != record:
                return False
            self._write(key, Record(token=record.token))
        return True

    def _change(self, lease: SandboxLease, **changes: object) -> bool:
        with self._locked(lease.key):
            record = self._read(lease.key)
            if record.token != lease.token:
                return False
            lease.record = replace(record, **changes)  # type: ignore[arg-type]  # names of Record's own fields
            self._write(lease.key, lease.record)
        return True

    def _locked(self, key: str) -> AbstractContextManager[None]:
        private_dir(self._top)
        return locked(self._top / f"{key}.lock")

    def _read(self, key: str) -> Record:
        """Return the record; a malformed one counts as unused, with a token above any that was given out."""
        try:
            facts = json.loads((self._top / f"{key}.json").read_bytes())
            if facts.pop("version") == RECORD_VERSION:
                return Record(**facts)
        except FileNotFoundError:
            return Record()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return Record(token=time.time_ns() // 1_000_000)

    def _write(self, key: str, record: Record) -> None:
        write_note(self._top / f"{key}.json", json.dumps({"version": RECORD_VERSION, **asdict(record)}))
