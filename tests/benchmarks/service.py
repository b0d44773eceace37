"""What the HTTP service costs: what a request takes, requests a second, and memory after many requests.

    python tests/benchmarks/service.py [--rounds 200] [--rows 100000] [--requests 2000] [--clients 8] [--memory 10000] [--json] [--postgres]

A real `kdskills serve` runs on loopback with SQLite, or a private PostgreSQL server, in a process of its own; clients are threads of this process, each with
its own connection, and send a token. First one connection asks in turn for `/healthz`, a submit (`skills.run_cmd_async` of an
uploaded skill) and a status (of a task), and then four submit at one time: with an empty database, and with many finished
tasks in it. No worker runs meanwhile, so that it is the gateway that is measured. Then come requests under load, with a
worker: `status`, `read` (one file of an uploaded skill) and `submit`. Memory is the service's resident set before and after.
Of the times, hold those against their bounds that come from a machine that does nothing else; processor time tells on any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kdskills.doors.web.application import FIRST_TOKEN
from kdskills.jobs.queue import hold_slot
from kdskills.storage.database import Database
from kdskills.testing.work import keep_finished, private_cluster

OVER_HEALTH_MS = 5.0
"""Most milliseconds that a submit may take more than `/healthz`."""
SUBMIT_CPU_MS = 6.0
"""Most milliseconds of the service's processor time for a submit."""
STATUS_CPU_MS = 1.5
"""Most milliseconds of the service's processor time for a status."""
SUBMITS = 100.0
"""Fewest submits a second over four connections."""
AT_ONCE = 4
GROWTH_MIB = 64.0
"""Most the service may grow by over the memory run."""
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Row:
    """What one kind of request did: rate, and latency in milliseconds."""

    name: str
    requests: int
    per_second: float
    median_ms: float
    p95_ms: float
    p99_ms: float
    failed: int


@dataclass(frozen=True)
class Bounded:
    """One figure, and the bound it is held against; none for what is there to compare with."""

    name: str
    measured: str
    bound: str
    held: bool


class Service:
    """`kdskills serve` in a process of its own."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self._log = folder / "log"
        self.state = folder / "state"
        self.url = url or f"sqlite:///{self.state / 'work.db'}"
        env = {name: value for name, value in os.environ.items() if not name.startswith("KDSKILLS_")}
        env |= {
            "KDSKILLS_STATE_DIR": str(self.state),
            "KDSKILLS_INDEX_DIR": str(folder / "index"),
            "KDSKILLS_REQUESTS_PER_MINUTE": "0",
            "KDSKILLS_JOBS__IDLE_S": "1",
        }
        if url is not None:
            env["KDSKILLS_DATABASE_URL"] = url
        command = [str(Path(sys.executable).with_name("kdskills")), "serve", "--listen", "127.0.0.1:0"]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        said = self._until(re.compile(r"Uvicorn running on http://([0-9.]+):(\d+)"))
        self.host, self.port = said.group(1), int(said.group(2))
        token = (self.state / FIRST_TOKEN).read_text(encoding="ascii").strip()
        self.headers = {"Authorization": f"Bearer {token}"}

    def _until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        for _ in range(600):
            found = pattern.search(self._log.read_text(encoding="utf-8"))
            if found is not None:
                return found
            time.sleep(0.1)
        raise SystemExit(self._log.read_text(encoding="utf-8"))

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection of a client's own."""
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def ask(
        self, link: http.client.HTTPConnection, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Send one request and read its answer."""
        link.request(method, f"/projects/local/{path}", body, {**self.headers, **headers})
        answer = link.getresponse()
        return answer.status, answer.read()

    def resident_mib(self) -> float:
        """Return the memory the service has."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+)", text)
        assert found is not None
        return int(found.group(1)) / 1024

    def processor_ms(self) -> float:
        """Return the processor time the service has used, in milliseconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def clear(self) -> None:
        """Have everything submitted be over, as if a worker had run it: what is open counts against the token."""
        over = "UPDATE kd_tasks SET status = 'succeeded', finished_at = created_at WHERE finished_at IS NULL"
        with contextlib.closing(Database(self.url)) as database:
            database.change(lambda link: link.exec_driver_sql(over))

    def stop(self) -> None:
        """Stop it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@dataclass(frozen=True)
class Ask:
    """One kind of request."""

    name: str
    method: str
    path: str
    body: bytes | None = None


def one_by_one(service: Service, asks: dict[str, Ask], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Ask one after the other over one connection; return medians and the service's processor time a request, in ms."""
    medians: dict[str, float] = {}
    processor: dict[str, float] = {}
    link = service.connect()
    for name, ask in asks.items():
        took: list[float] = []
        before = service.processor_ms()
        for _ in range(rounds):
            began = time.perf_counter()
            if ask.path == "/healthz":
                link.request("GET", ask.path)
                status = link.getresponse()
                status.read()
                code = status.status
            else:
                code, _ = service.ask(link, ask.method, ask.path, ask.body, JSON if ask.body else {})
            took.append((time.perf_counter() - began) * 1000)
            assert code == 200, f"{name}: {code}"
        medians[name] = statistics.median(took)
        processor[name] = (service.processor_ms() - before) / rounds
    link.close()
    return medians, processor


def gateway(service: Service, task: str, submit: Ask, rounds: int, when: str) -> list[Bounded]:
    """Measure what the gateway adds to a request and costs for it, and how many submits it takes a second."""
    asks = {
        "healthz": Ask("healthz", "GET", "/healthz"),
        "submit": submit,
        "status": Ask("status", "GET", f"tasks/{task}?tail_bytes=0"),
    }
    one_by_one(service, asks, 10)
    medians, processor = one_by_one(service, asks, rounds)
    service.clear()
    rate = load(service, submit, rounds, AT_ONCE)
    service.clear()
    over = {name: medians[name] - medians["healthz"] for name in asks}
    return [
        Bounded(f"/healthz, p50, {when}", f"{medians['healthz']:.1f} ms", "", held=True),
        Bounded(f"/healthz, processor, {when}", f"{processor['healthz']:.1f} ms", "", held=True),
        Bounded(f"submit, p50, {when}", f"{medians['submit']:.1f} ms", "", held=True),
        _most(f"submit above /healthz, {when}", over["submit"], OVER_HEALTH_MS),
        _most(f"submit, processor, {when}", processor["submit"], SUBMIT_CPU_MS),
        Bounded(
            f"submits over {AT_ONCE} connections, {when}",
            f"{rate.per_second:.0f}/s",
            f"{SUBMITS:.0f}/s",
            held=rate.per_second >= SUBMITS and not rate.failed,
        ),
        Bounded(f"status above /healthz, {when}", f"{over['status']:.1f} ms", "", held=True),
        _most(f"status, processor, {when}", processor["status"], STATUS_CPU_MS),
    ]


def _most(name: str, measured: float, bound: float) -> Bounded:
    return Bounded(name, f"{measured:.1f} ms", f"{bound:g} ms", held=measured <= bound)


def load(service: Service, ask: Ask, requests: int, clients: int) -> Row:
    """Send *requests* by *clients* at one time and return what came of it."""
    took: list[float] = []
    failed = 0
    lock = threading.Lock()

    def client(share: int) -> None:
        nonlocal failed
        link, mine, wrong = service.connect(), [], 0
        for _ in range(share):
            began = time.perf_counter()
            status, _ = service.ask(link, ask.method, ask.path, ask.body, JSON if ask.body else {})
            mine.append((time.perf_counter() - began) * 1000)
            wrong += status >= 300
        link.close()
        with lock:
            took.extend(mine)
            failed += wrong

    threads = [threading.Thread(target=client, args=(requests // clients,)) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = time.perf_counter() - began
    cuts = statistics.quantiles(took, n=100)
    return Row(ask.name, len(took), len(took) / whole, statistics.median(took), cuts[94], cuts[98], failed)


def prepared(service: Service, folder: Path) -> str:
    """Upload a skill, run a task, and return its id."""
    place = folder / "brief.zip"
    with zipfile.ZipFile(place, "w") as out:
        out.writestr("brief/SKILL.md", "---\nname: brief\ndescription: Makes one page.\n---\n" + "Read.\n" * 400)
    boundary = "kdskills"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="brief.zip"\r\n\r\n'.encode()
    body = head + place.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    link = service.connect()
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    status, said = service.ask(link, "POST", "skills:upload", body, kind)
    assert status == 201, said
    command = json.dumps({"skill_name": "brief", "command": ["true"]}).encode()
    status, said = service.ask(link, "POST", "tools/skills.run_cmd_async", command, JSON)
    assert status == 200, said
    return str(json.loads(said)["task_id"])


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--rounds", type=int, default=200)
    given.add_argument("--rows", type=int, default=100_000)
    given.add_argument("--requests", type=int, default=2000)
    given.add_argument("--submits", type=int, default=200)
    given.add_argument("--clients", type=int, default=8)
    given.add_argument("--memory", type=int, default=10_000, help="0 leaves out what is measured under load")
    given.add_argument("--json", action="store_true")
    given.add_argument("--postgres", action="store_true")
    return given.parse_args()


def main() -> int:
    """Measure, print, and return 1 when a bound is not held."""
    chosen = arguments()
    rows: list[Row] = []
    before = after = 0.0
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kdskills-bench-")))
        folder.chmod(0o755)
        url = ends.enter_context(private_cluster()).create("service") if chosen.postgres else None
        service = Service(folder, url)
        try:
            command = json.dumps({"skill_name": "brief", "command": ["true"]}).encode()
            submit = Ask("submit", "POST", "tools/skills.run_cmd_async", command)
            with hold_slot(service.state, 0):  # a lock of a worker that does not run: nobody starts another
                task = prepared(service, folder)
                service.clear()
                bounds = gateway(service, task, submit, chosen.rounds, "empty")
                with contextlib.closing(Database(service.url)) as database:
                    asyncio.run(keep_finished(database, task, chosen.rows))
                bounds += gateway(service, task, submit, chosen.rounds, f"{chosen.rows:,} finished")
            if chosen.memory:
                status = Ask("status", "GET", f"tasks/{task}?tail_bytes=0")
                read = Ask("read", "GET", "skills/brief/files/SKILL.md")
                rows += [load(service, ask, chosen.requests, chosen.clients) for ask in (status, read)]
                before = service.resident_mib()
                load(service, status, chosen.memory, chosen.clients)
                after = service.resident_mib()
                rows.append(load(service, submit, chosen.submits, chosen.clients))
        finally:
            service.stop()
    held = after - before <= GROWTH_MIB and not any(row.failed for row in rows) and all(row.held for row in bounds)
    if chosen.json:
        memory = {"requests": chosen.memory, "before_mib": before, "after_mib": after}
        gate = [asdict(row) for row in bounds]
        print(
            json.dumps(
                {"gateway": gate, "rows": [asdict(row) for row in rows], "memory": memory, "held": held}, indent=2
            )
        )
    else:
        show(bounds, rows)
        if chosen.memory:
            words = f"after {chosen.memory} more requests {after:.0f} MiB (bound: {GROWTH_MIB:.0f} more)"
            print(f"memory: {before:.0f} MiB, {words}")
    return int(not held)


def show(bounds: list[Bounded], rows: list[Row]) -> None:
    """Print the tables."""
    for bound in bounds:
        word = "" if not bound.bound else "held" if bound.held else "BROKEN"
        print(f"{bound.name:<48} {bound.measured:>12}   {bound.bound:>8}   {word}".rstrip())
    if not rows:
        return
    print(f"\n{'request':8} {'count':>7} {'per s':>8} {'median':>9} {'p95':>9} {'p99':>9} {'failed':>7}")
    for row in rows:
        times = f"{row.median_ms:7.1f}ms {row.p95_ms:7.1f}ms {row.p99_ms:7.1f}ms"
        print(f"{row.name:8} {row.requests:7} {row.per_second:8.0f} {times} {row.failed:7}")


if __name__ == "__main__":
    raise SystemExit(main())
