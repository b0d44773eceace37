"""What the HTTP service costs: requests a second, latency, and memory after many requests (spec service §5).

    python tests/benchmarks/service.py [--requests 2000] [--clients 8] [--memory 10000] [--json]

A real `kdskills serve` runs on loopback with SQLite; clients are threads of this process, each with its own connection. Three
requests are measured: `status` (`skills.task_status` of a task), `read` (one file of an uploaded skill) and `submit` (a
command in the background; a worker runs what it can meanwhile). Memory is the service's resident set before and after.
Figures are of this machine: the bounds held are those that a busy one holds, too.
"""

from __future__ import annotations

import argparse
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

GROWTH_MIB = 64.0
"""Most the service may grow by over the memory run."""
TOKEN = re.compile(r"kd_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")
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


class Service:
    """`kdskills serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("KDSKILLS_")}
        env |= {
            "KDSKILLS_STATE_DIR": str(folder / "state"),
            "KDSKILLS_INDEX_DIR": str(folder / "index"),
            "KDSKILLS_REQUESTS_PER_MINUTE": "0",
            "KDSKILLS_CONCURRENT_WORK": "0",
            "KDSKILLS_JOBS__IDLE_S": "1",
        }
        command = [str(Path(sys.executable).with_name("kdskills")), "serve", "--listen", "127.0.0.1:0"]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        said = self._until(re.compile(r"Uvicorn running on http://([0-9.]+):(\d+)"))
        self.host, self.port = said.group(1), int(said.group(2))
        token = TOKEN.search(self._log.read_text(encoding="utf-8"))
        assert token is not None
        self.headers = {"Authorization": f"Bearer {token.group()}"}

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


def main() -> int:
    """Measure, print, and return 1 when a bound is not held."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--requests", type=int, default=2000)
    given.add_argument("--submits", type=int, default=200)
    given.add_argument("--clients", type=int, default=8)
    given.add_argument("--memory", type=int, default=10_000)
    given.add_argument("--json", action="store_true")
    chosen = given.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        service = Service(folder)
        try:
            task = prepared(service, folder)
            status = Ask("status", "GET", f"tasks/{task}?tail_bytes=0")
            read = Ask("read", "GET", "skills/brief/files/SKILL.md")
            command = json.dumps({"skill_name": "brief", "command": ["true"]}).encode()
            rows = [load(service, ask, chosen.requests, chosen.clients) for ask in (status, read)]
            before = service.resident_mib()
            load(service, status, chosen.memory, chosen.clients)
            after = service.resident_mib()
            submit = Ask("submit", "POST", "tools/skills.run_cmd_async", command)
            rows.append(load(service, submit, chosen.submits, chosen.clients))
        finally:
            service.stop()
    grown = after - before
    held = grown <= GROWTH_MIB and not any(row.failed for row in rows)
    if chosen.json:
        memory = {"requests": chosen.memory, "before_mib": before, "after_mib": after}
        print(json.dumps({"rows": [asdict(row) for row in rows], "memory": memory, "held": held}, indent=2))
        return int(not held)
    print(f"{'request':8} {'count':>7} {'per s':>8} {'median':>9} {'p95':>9} {'p99':>9} {'failed':>7}")
    for row in rows:
        times = f"{row.median_ms:7.1f}ms {row.p95_ms:7.1f}ms {row.p99_ms:7.1f}ms"
        print(f"{row.name:8} {row.requests:7} {row.per_second:8.0f} {times} {row.failed:7}")
    print(
        f"memory: {before:.0f} MiB, after {chosen.memory} more requests {after:.0f} MiB (bound: {GROWTH_MIB:.0f} more)"
    )
    return int(not held)


if __name__ == "__main__":
    raise SystemExit(main())
