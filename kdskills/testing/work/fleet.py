"""A fleet under a storm: hosts that are killed, cut off or out of room while they share one PostgreSQL, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from kdskills.errors import OperatorMustAct
from kdskills.jobs.model import TaskHead
from kdskills.testing.work.lab import WorkLab, cut_power

DISK_BYTES: Final = 48 * 2**20
ROOM_BYTES: Final = 16 * 2**20
PROGRAM_S: Final = (0.0, 0.1, 0.5, 1.0, 1.0)
"""Seconds that most programs take, by chance; others take twice a lease, so that they outlast that of a host cut off."""
LISTENING: Final = {"fleet": {"listen": "127.0.0.1:0"}}
_CHUNK: Final = 65536


class NetworkPath:
    """A TCP path to a server that can be cut: while it is, bytes of its connections go nowhere and nobody is told.

    Args:
        host: Of the server.
        port: Of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server_address = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        """Begin to forward, and return the port on 127.0.0.1."""
        self._listener = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        """Let nothing through from now on."""
        self._open.clear()

    def mend(self) -> None:
        """Let everything through again, also what was held back."""
        self._open.set()

    async def aclose(self) -> None:
        """Close it and every connection over it."""
        if self._listener is not None:
            self._listener.close()
        self._open.set()
        for writer in list(self._writers):
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._server_address)
            both = (self._copy(reader, far_writer), self._copy(far_reader, writer))
            self._writers |= {writer, far_writer}
            await asyncio.gather(*both)
            self._writers -= {far_writer}
        self._writers.discard(writer)
        writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_CHUNK):
                await self._open.wait()
                writer.write(piece)
                await writer.drain()
        writer.close()


@dataclass(frozen=True, slots=True)
class FleetHostLab:
    """One host of the fleet: its workers, its path to the database, and its own small disk where one could be mounted."""

    lab: WorkLab
    path: NetworkPath
    disk: Path | None

    @property
    def ballast(self) -> Path:
        """A file that takes what room there is."""
        return self.lab.settings.state_dir / "ballast"


@dataclass(slots=True)
class FleetReport:
    """What a storm over a fleet did, and what came of it.

    Attributes:
        submitted: Tasks.
        deeds: How often each kind of harm was done: `worker`, `launcher`, `host`, `partition`, `disk`.
        begun: How many programs began, of all tasks together.
        again: How often a program began that had begun before, as its task allowed.
        told_lost: Tasks that ended as lost with their host, as they must where they allow no second attempt.
        unfinished: Ids that were not over at the deadline.
        failed: Ids that ended in another way than promised, each with why.
        doubled: Names of programs that began more often than their task allows.
        missing: Names of programs of succeeded tasks that never began or ended.
        unread: `(door, id)` of logs of succeeded tasks that a door did not tell from the files of their host.
        seconds: How long it took.
    """

    submitted: int = 0
    deeds: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    again: int = 0
    told_lost: int = 0
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, doubled or unreadable beyond what is promised."""
        return not (self.unfinished or self.failed or self.doubled or self.missing or self.unread)


@contextlib.asynccontextmanager
async def fleet(url: str, hosts: int, **jobs: Any) -> AsyncIterator[tuple[WorkLab, list[FleetHostLab]]]:
    """Give a door without workers and *hosts* hosts, which reach the PostgreSQL database at *url* over paths of their own.

    The last host has a disk of `DISK_BYTES`, where this process may mount one. Everything of them is ended.
    """
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 5432)
    given = {"lease_s": 5.0, "beat_s": 1.0, "room_bytes": ROOM_BYTES, "slots": 4} | jobs
    async with contextlib.AsyncExitStack() as ends:
        top = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kdskills-fleet-")))
        door = WorkLab(top, url, host="door", engine_settings=LISTENING, **given)
        ends.push_async_callback(door.client.aclose)
        members = []
        for number in range(hosts):
            path = NetworkPath(*address)
            ends.push_async_callback(path.aclose)
            netloc = f"{parts.username}@127.0.0.1:{await path.start()}"
            query = "&".join(filter(None, (parts.query, "connect_timeout=3")))
            own_url = urlunsplit(parts._replace(netloc=netloc, query=query))
            disk = _mounted(ends, top / f"state-h{number}") if number == hosts - 1 else None
            lab = WorkLab(top, own_url, host=f"h{number}", engine_settings=LISTENING, **given)
            ends.push_async_callback(_end, lab)
            members.append(FleetHostLab(lab, path, disk))
        yield door, members


async def _end(lab: WorkLab) -> None:
    with contextlib.suppress(OperatorMustAct):
        await lab.aclose()


def _mounted(ends: contextlib.AsyncExitStack, folder: Path) -> Path | None:
    """Mount a small disk at *folder*; None where that is not allowed."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode:
        return None
    ends.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
    return folder


async def fleet_storm(
    door: WorkLab,
    members: Sequence[FleetHostLab],
    *,
    seconds: float,
    rate: float,
    pause_s: tuple[float, float] = (1.0, 4.0),
    seed: int = 6,
    deadline_s: float = 300.0,
) -> FleetReport:
    """Submit *rate* tasks a second for *seconds* while hosts come to harm, each at least once a kind, and count.

    Of two tasks one may be begun again when its host is lost. Harm is: a worker killed; worker and launcher killed; a host
    that loses its programs, too, as by power; a path to the database cut for longer than the lease; a disk that is full.

    Args:
        door: Submits, and waits; has no worker.
        members: The hosts; their workers are started here.
        seconds: How long work is submitted.
        rate: Tasks a second.
        pause_s: Between two deeds, at least and at most.
        seed: A storm with the same one does the same deeds.
        deadline_s: Seconds after the last submission until which everything must be over.
    """
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311 - a storm is repeatable, not secret
    report, names = FleetReport(), dict[str, str]()
    for member in members:
        member.lab.start()
    away = set[str]()
    supervisor = asyncio.create_task(_supervise(members))
    harm = asyncio.create_task(_harm(members, chance, report, seconds, pause_s, away))
    while time.monotonic() < began + seconds:
        name = f"f{len(names)}"
        script = (
            door.ledger.script(name, chance.choice((*PROGRAM_S, 2 * door.settings.jobs.lease_s)))
            + f"; echo 'log of {name}'"
        )
        head = await door.client.submit(door.task(script, retry_on_lost=len(names) % 2 == 0), key=name)
        names[head.id] = name
        await asyncio.sleep(max(0.0, began + len(names) / rate - time.monotonic()))
    await harm
    report.submitted = len(names)
    end = time.monotonic() + deadline_s
    heads = [await door.client.wait(TaskHead, door.scope, item, max(0.0, end - time.monotonic())) for item in names]
    begun, endings = door.ledger.begun(), {name for mark, name in door.ledger.lines() if mark == "e"}
    for lab in (door, *(member.lab for member in members)):
        report.unread += await _unread(lab, [head for head in heads if head.status == "succeeded"], names, end)
    supervisor.cancel()
    report.begun = sum(begun[name] for name in names.values())
    for head in heads:
        _judge(report, head, names[head.id], begun[names[head.id]], names[head.id] in endings)
    report.seconds = time.monotonic() - began
    return report


async def _unread(lab: WorkLab, heads: Sequence[TaskHead], names: dict[str, str], end: float) -> list[tuple[str, str]]:
    """Return (door, id) of those whose log the host of *lab*, as a door, cannot read whole by *end*: hosts may just start again."""
    unread = []
    for head in heads:
        text = f"log of {names[head.id]}\n".encode()
        while (piece := await lab.client.piece(head, "stdout", 0, _CHUNK)).elsewhere is not None:
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
        if piece.elsewhere is not None or piece.log.data != text:
            unread.append((lab.log.stem, head.id))
    return unread


def _judge(report: FleetReport, head: TaskHead, name: str, begun: int, ended: bool) -> None:
    """Count one task."""
    allowed = head.attempt if head.spec.retry_on_lost else 1
    if begun > allowed:
        report.doubled.append(name)
    report.again += max(0, begun - 1)
    if not head.terminal:
        report.unfinished.append(head.id)
    elif head.error_code == "lost" and not head.spec.retry_on_lost:
        report.told_lost += 1
    elif head.status != "succeeded":
        report.failed[head.id] = f"{head.status} {head.error_code} with attempt {head.attempt}: {head.error_message}"
    elif not begun or not ended:
        report.missing.append(name)


async def _harm(
    members: Sequence[FleetHostLab],
    chance: random.Random,
    report: FleetReport,
    seconds: float,
    pause_s: tuple[float, float],
    away: set[str],
) -> None:
    """Do every kind of harm in turn, to a member by chance, until the time is over; everything is mended at the end.

    Those that are *away* for a while are named there, and come to no other harm.
    """
    end = time.monotonic() + seconds
    disks = [member for member in members if member.disk is not None]
    kinds = ["worker", "partition", "launcher", "host", *(["disk"] if disks else [])]
    async with asyncio.TaskGroup() as long:
        number = 0
        while time.monotonic() < end:
            await asyncio.sleep(chance.uniform(*pause_s))
            kind = kinds[number % len(kinds)]
            free = [member for member in (disks if kind == "disk" else members) if member.lab.log.name not in away]
            if not free:
                number += 1
                continue
            member = chance.choice(free)
            report.deeds[kind] += 1
            number += 1
            if kind in {"worker", "launcher"}:
                await asyncio.to_thread(_killed, member.lab, with_launcher=kind == "launcher")
                member.lab.start()
                continue
            away.add(member.lab.log.name)
            deed = long.create_task(_long_harm(kind, member, chance))
            deed.add_done_callback(partial(_back, away, member.lab.log.name))


def _back(away: set[str], name: str, _: asyncio.Task[None]) -> None:
    away.discard(name)


async def _supervise(members: Sequence[FleetHostLab]) -> None:
    """Start workers again that ended by themselves, as the system's service manager does; not of a host that is off."""
    while True:
        await asyncio.sleep(0.2)
        for member in members:
            process = member.lab.workers.get(0)
            if process is not None and process.poll() is not None:
                member.lab.start()


def _killed(lab: WorkLab, *, with_launcher: bool) -> None:
    if with_launcher:
        lab.kill_with_launcher()
    else:
        lab.kill()


async def _long_harm(kind: str, member: FleetHostLab, chance: random.Random) -> None:
    """Harm a member for a while, and mend it."""
    lease_s = member.lab.settings.jobs.lease_s
    if kind == "partition":
        member.path.cut()
        await asyncio.sleep(lease_s * chance.uniform(0.5, 2.5))
        member.path.mend()
    elif kind == "disk":
        await asyncio.to_thread(_fill, member.ballast)
        await asyncio.sleep(lease_s)
        member.ballast.unlink(missing_ok=True)
    else:
        await asyncio.to_thread(_killed, member.lab, with_launcher=True)
        await asyncio.to_thread(cut_power, member.lab.settings.state_dir)
        await asyncio.sleep(lease_s * chance.uniform(0.0, 2.5))
        member.lab.start()


def _fill(path: Path) -> None:
    """Let a file grow until nothing fits beside it."""
    more = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        while True:
            os.write(more, bytes(4096))
    os.close(more)
