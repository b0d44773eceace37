"""A local server that speaks E2B's wire: the SDK itself is pointed at it, nothing is faked in between.

    with E2bServer() as server:
        engine = E2bExecutor(ExecutionOptions(e2b=server.options()))

REST: `POST /v2/sandboxes` (and without `/v2`), `POST …/{id}/connect`, `GET` and `DELETE /sandboxes/{id}`,
`POST /sandboxes/{id}/timeout`. envd: `GET /health`, `GET` and `POST /files`, `process.Process/` `Start`, `List`, `SendSignal`,
`SendInput`, `CloseStdin` as Connect with JSON. Commands really run, in a `Vm` of this host. Needs root and bubblewrap.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.parser import BytesParser
from email.policy import HTTP
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import SecretStr

from kdskills.execution.protocol import E2bOptions
from kdskills.execution.rootfs import build_rootfs
from kdskills.testing.e2b_vm import USER, Command, Vm

ENVD: Final = "0.6.8"
SWEEP_S: Final = 0.05


@dataclass(slots=True)
class Sandbox:
    """One sandbox of the server."""

    id: str
    vm: Vm
    body: dict[str, Any]
    ends: float
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    started: float = field(default_factory=time.time)
    commands: dict[int, Command] = field(default_factory=dict)

    def brief(self) -> dict[str, Any]:
        """Return what creating and connecting answer."""
        names = {"sandboxID": self.id, "templateID": self.body.get("templateID", ""), "clientID": "local"}
        return {**names, "envdVersion": ENVD, "envdAccessToken": self.token, "domain": None}

    def detail(self) -> dict[str, Any]:
        """Return what asking for it answers."""
        times = {name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in self._times()}
        size = {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": "running"}
        return {**self.brief(), **times, **size, "metadata": self.body.get("metadata", {})}

    def _times(self) -> Iterator[tuple[str, float]]:
        yield "startedAt", self.started
        yield "endAt", self.ends


class E2bServer:
    """The server; a context manager.

    Args:
        key: The one API key it accepts.
        memory: Whether its machines let root make cgroups.

    Attributes:
        requests: Every request so far, as `METHOD path`.
        rate_limited: So many of the next API requests answer 429.
        dropped_streams: So many of the next command streams break off after the start event.
        altered_uploads: So many of the next uploads lose their last byte on the way.
    """

    def __init__(self, key: str | None = None, *, memory: bool = True) -> None:
        self.key = key or f"e2b_{secrets.token_hex(20)}"
        self.requests: list[str] = []
        self.rate_limited = 0
        self.dropped_streams = 0
        self.altered_uploads = 0
        self.sandboxes: dict[str, Sandbox] = {}
        self._memory = memory
        self._tree = build_rootfs()
        self._lock = threading.Lock()
        self._over = threading.Event()
        # bwrap's death with its parent is tied to the thread that started it.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kdskills-vm")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._http.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._sweep, daemon=True),
        ]

    @property
    def url(self) -> str:
        """Where it listens, for the API and for sandboxes alike."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def options(self, **changes: Any) -> E2bOptions:
        """Return the settings that point the engine here."""
        fields = {"api_key": SecretStr(self.key), "api_url": self.url, "sandbox_url": self.url, **changes}
        return E2bOptions(**fields)

    def __enter__(self) -> Self:
        """Start listening."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End every machine and stop."""
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        for name in list(self.sandboxes):
            self.end(name)
        for thread in self._threads:
            thread.join()
        self._spawner.shutdown()

    def create(self, body: dict[str, Any]) -> Sandbox:
        """Make a sandbox."""
        vm = self._spawner.submit(Vm, self._tree, memory=self._memory).result()
        sandbox = Sandbox(f"i{secrets.token_hex(10)}", vm, body, time.time() + float(body.get("timeout", 300)))
        with self._lock:
            self.sandboxes[sandbox.id] = sandbox
        return sandbox

    def end(self, name: str) -> bool:
        """End a sandbox, as a request or its timeout would; False when there is none of that id."""
        with self._lock:
            sandbox = self.sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.vm.end()
        return sandbox is not None

    def take(self, counter: str) -> bool:
        """Whether one of the failures that were asked for is due, and use it up."""
        with self._lock:
            left = getattr(self, counter)
            setattr(self, counter, max(0, left - 1))
            return bool(left > 0)

    def _sweep(self) -> None:
        """End sandboxes over their time."""
        while not self._over.wait(SWEEP_S):
            for name, sandbox in list(self.sandboxes.items()):
                if sandbox.ends <= time.time():
                    self.end(name)


class Answered(Exception):
    """An error answer: status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, server: E2bServer, *args: Any) -> None:
        self.e2b = server
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        """Say nothing: tests read `requests`."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self._serve()

    def do_POST(self) -> None:
        """Answer a POST."""
        self._serve()

    def do_DELETE(self) -> None:
        """Answer a DELETE."""
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.e2b.requests.append(f"{self.command} {url.path}")
        body = self._body()
        try:
            if match := re.fullmatch(r"(?:/v2)?/sandboxes(?:/([^/]+)(?:/(connect|timeout))?)?", url.path):
                self._api(match[1], match[2], json.loads(body or b"{}"))
            else:
                self._envd(url.path, {name: values[0] for name, values in parse_qs(url.query).items()}, body)
        except Answered as error:
            self._json(error.status, {"code": error.status, "message": str(error)})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # nobody listens any more

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _api(self, name: str | None, verb: str | None, body: dict[str, Any]) -> None:
        """Answer the control plane."""
        if self.headers.get("X-API-KEY") != self.e2b.key:
            raise Answered(401, "Invalid API key")
        if self.e2b.take("rate_limited"):
            raise Answered(429, "Too many requests")
        if name is None:
            self._json(201, self.e2b.create(body).brief())
            return
        sandbox = self.e2b.sandboxes.get(name)
        if sandbox is None:
            raise Answered(404, f"Sandbox {name} not found")
        if self.command == "GET":
            self._json(200, sandbox.detail())
        elif self.command == "DELETE":
            self.e2b.end(name)
            self._json(204, None)
        else:
            ends = time.time() + float(body.get("timeout", 300))
            sandbox.ends = max(sandbox.ends, ends) if verb == "connect" else ends
            self._json(200 if verb == "connect" else 204, sandbox.brief() if verb == "connect" else None)

    def _envd(self, path: str, query: dict[str, str], body: bytes) -> None:
        """Answer as the agent inside a sandbox."""
        name, token = self.headers.get("E2b-Sandbox-Id"), self.headers.get("X-Access-Token", "")
        if name is None:  # older SDKs count on the host name after connecting; here only the token tells
            sandbox = next((one for one in list(self.e2b.sandboxes.values()) if one.token == token), None)
        else:
            sandbox = self.e2b.sandboxes.get(name)
        if sandbox is None:
            raise Answered(502, f"The sandbox {name} was not found")
        if token != sandbox.token:
            raise Answered(401, "invalid access token")
        if path == "/health":
            self._json(204, None)
        elif path == "/files" and self.command == "GET":
            self._download(sandbox, query)
        elif path == "/files":
            self._upload(sandbox, query, body)
        elif path == "/process.Process/Start":
            self._start(sandbox, json.loads(body[5:]))
        elif path.startswith("/process.Process/"):
            self._unary(sandbox, path.rpartition("/")[2], json.loads(body or b"{}"))
        else:
            raise Answered(404, "unknown path")

    def _user(self, given: str | None) -> int:
        header = self.headers.get("Authorization", "")
        basic = base64.b64decode(header[6:]).decode().rstrip(":") if header.startswith("Basic ") else "user"
        return 0 if (given or basic) == "root" else USER

    def _download(self, sandbox: Sandbox, query: dict[str, str]) -> None:
        data = sandbox.vm.read(query["path"], self._user(query.get("username")))
        if data is None:
            raise Answered(404, f"path '{query['path']}' does not exist")
        self._send(200, "application/octet-stream", data)

    def _upload(self, sandbox: Sandbox, query: dict[str, str], body: bytes) -> None:
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/"):
            message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
            part = next(part for part in message.iter_parts() if part.get_filename() is not None)
            content = part.get_payload(decode=True)
            body = content if isinstance(content, bytes) else b""
        if self.e2b.take("altered_uploads"):
            body = body[:-1]
        if not sandbox.vm.write(query["path"], body, self._user(query.get("username"))):
            raise Answered(400, "the file cannot be written")
        self._json(200, [{"name": query["path"].rpartition("/")[2], "type": "file", "path": query["path"]}])

    def _start(self, sandbox: Sandbox, asked: dict[str, Any]) -> None:
        """Run a command and stream its events."""
        process = asked["process"]
        argv = [process["cmd"], *process.get("args", [])]
        command = sandbox.vm.start(
            argv,
            process.get("envs") or {},
            process.get("cwd", ""),
            user=self._user(None),
            stdin=bool(asked.get("stdin")),
        )
        sandbox.commands[command.pid] = command
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        deadline = self.headers.get("Connect-Timeout-Ms")
        events = command.events(int(deadline) / 1000 if deadline else None)
        try:
            self._frame(0, {"event": {"start": {"pid": command.pid}}})
            if self.e2b.take("dropped_streams"):
                self.close_connection = True
                return
            for kind, value in events:
                event: dict[str, Any]
                if isinstance(value, bytes):
                    event = {"data": {kind: base64.b64encode(value).decode("ascii")}}
                else:
                    status = f"exit status {value}"
                    event = {"end": {"exitCode": value, "exited": True, "status": status}}
                self._frame(0, {"event": event})
            self._frame(2, {})
            self.wfile.write(b"0\r\n\r\n")
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator: its deadline lives on, it does not

    def _frame(self, flag: int, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        frame = bytes([flag]) + len(data).to_bytes(4, "big") + data
        self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")

    def _unary(self, sandbox: Sandbox, name: str, asked: dict[str, Any]) -> None:
        """Answer the calls about a running command."""
        if name == "List":
            running = [{"pid": pid, "config": {"cmd": ""}} for pid, one in sandbox.commands.items() if not one.over]
            self._json(200, {"processes": running})
            return
        pid = int(asked["process"]["pid"])
        command = sandbox.commands.get(pid)
        if command is None or command.over:
            self._json(404, {"code": "not_found", "message": f"process with pid {pid} not found"})
            return
        actions: dict[str, Callable[[], object]] = {
            "SendSignal": lambda: sandbox.vm.kill(pid, asked["signal"].removeprefix("SIGNAL_SIG")),
            "SendInput": lambda: command.feed(base64.b64decode(asked["input"]["stdin"])),
            "CloseStdin": command.close_stdin,
        }
        if name not in actions:
            raise Answered(404, "unknown call")
        actions[name]()
        self._json(200, {})

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", b"" if status == 204 else json.dumps(value).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
