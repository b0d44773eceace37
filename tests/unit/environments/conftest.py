"""Wheels made for a test, and an index of our own on loopback that serves them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kdskills.environments.model import EnvironmentSpec, LockedEnvironment
from kdskills.environments.resolve import PackageIndex, platform_name, resolve


def record_of(files: Mapping[str, bytes], info: str) -> bytes:
    """Return the RECORD of a wheel's files."""
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for path, data in files.items()
    ]
    return "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()


def wheel_bytes(
    name: str,
    version: str = "1.0",
    files: Mapping[str, bytes] | None = None,
    *,
    requires: tuple[str, ...] = (),
    entry_points: str = "",
    record: bytes | None = None,
    change: Callable[[zipfile.ZipFile], None] = lambda _: None,
) -> bytes:
    """Return a wheel with one module of the package's name, or with *files*; *change* adds to the zip what it likes."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    content = dict(files if files is not None else {f"{module}.py": f"VERSION = {version!r}\n".encode()})
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if entry_points:
        content[f"{info}/entry_points.txt"] = entry_points.encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record_of(content, info) if record is None else record)
        change(archive)
    return out.getvalue()


def tarball(files: Mapping[str, str | bytes], *entries: tarfile.TarInfo) -> bytes:
    """Return a gzipped tar archive of *files*, by path, and of further *entries* without bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for entry in entries:
            archive.addfile(entry)
    return out.getvalue()


@dataclass
class LoopIndex:
    """An index of packages on loopback, and what it was asked for.

    `lies` gives other bytes than the page's digest says, `yanked` names files, `cut` those whose bytes end too early, `status` answers every request with an error,
    `delay_s` makes it slow.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    lies: dict[str, bytes] = field(default_factory=dict)
    yanked: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    status: int = 200
    delay_s: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    logins: set[str] = field(default_factory=set)

    @property
    def indexes(self) -> tuple[PackageIndex, ...]:
        """The index as the operator's settings name it."""
        return (PackageIndex("loop", f"{self.url}/simple"),)

    def add(self, name: str, version: str = "1.0", *, tag: str = "py3-none-any", **facts: object) -> str:
        """Serve a wheel of a package, and return its file name."""
        file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
        self.files[file] = wheel_bytes(name, version, **facts)
        return file

    def add_source(self, name: str, version: str = "1.0", files: Mapping[str, str | bytes] | None = None) -> str:
        """Serve a source distribution with *files*, by their path in its folder, and return its file name."""
        file = f"{name}-{version}.tar.gz"
        self.files[file] = tarball({f"{name}-{version}/{path}": text for path, text in (files or {}).items()})
        return file

    def add_node(
        self, name: str, files: Mapping[str, str], version: str = "1.0.0", /, **row: object
    ) -> dict[str, object]:
        """Serve a package of Node, and return its row of a lock file."""
        short = f"{name.rpartition('/')[2]}-{version}.tgz"
        manifest = {"package.json": json.dumps({"name": name, "version": version})}
        self.files[short] = tarball({f"package/{path}": text for path, text in {**manifest, **files}.items()})
        digest = base64.b64encode(hashlib.sha512(self.files[short]).digest()).decode()
        address = f"https://registry.npmjs.org/{name}/-/{short}"
        return {"version": version, "resolved": address, "integrity": f"sha512-{digest}", **row}

    def locked(self, *requirements: str, key: str = "lab/skill") -> LockedEnvironment:
        """Return what these requirements are locked to."""
        packages = resolve(EnvironmentSpec(requirements), self.indexes)
        return LockedEnvironment(key, requirements, "", platform_name(), packages)

    def page(self, name: str) -> bytes:
        """Return the page of a package; empty when there is none."""
        rows = []
        for file, data in self.files.items():
            if file.partition("-")[0].replace("_", "-") == name:
                yanked = ' data-yanked="broken"' if file in self.yanked else ""
                digest = hashlib.sha256(data).hexdigest()
                rows.append(f'<a href="/files/{file}#sha256={digest}"{yanked}>{file}</a><br>')
        return ("<!DOCTYPE html><html><body>" + "\n".join(rows) + "</body></html>").encode() if rows else b""


@pytest.fixture
def open_cache() -> Iterator[Path]:
    """A folder for built environments alone, which programs of another uid can pass, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="kdskills-env-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def index() -> Iterator[LoopIndex]:
    """An index that serves what a test adds."""
    loop = LoopIndex()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(loop.delay_s)
            loop.logins.add(self.headers.get("Authorization", ""))
            _, top, name, *_ = (*self.path.split("/"), "", "")
            name = self.path.rpartition("/")[2] if top == "npm" else name
            loop.asked[f"{top}/{name}"] += 1
            body = loop.page(name) if top == "simple" else loop.lies.get(name, loop.files.get(name, b""))
            self.send_response(loop.status if loop.status != 200 else 200 if body else 404)
            self.send_header("Content-Type", "text/html" if top == "simple" else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if name in loop.cut else body)

        do_HEAD = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        loop.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield loop
        server.shutdown()
