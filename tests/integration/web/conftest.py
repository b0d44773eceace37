"""A service with a state folder of its own, in a thread, and archives to upload."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES
from kdskills.doors.web import build_app


@dataclass
class Service:
    """A running service, and ways to make tokens for it."""

    host: Host
    url: str
    app: Any
    loop: asyncio.AbstractEventLoop

    def run(self, doing: Any) -> Any:
        """Await something in the service's own loop."""
        return asyncio.run_coroutine_threadsafe(doing, self.loop).result(60)

    def token(self, project: str = "local", agent: str = "local", scopes: Any = SCOPES, **more: Any) -> str:
        """Make a token and return its text."""
        return self.run(self.host.tokens.create(project, agent, scopes, who="test", **more))[1]

    def client(self, token: str | None = None, **more: Any) -> httpx.Client:
        """Return a client with a token."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **more)


@contextlib.contextmanager
def serving(host: Host, *, open_on_loopback: bool = False) -> Iterator[Service]:
    """Serve *host* on a free port until the block ends."""
    app = build_app(host, open_on_loopback=open_on_loopback, listen="127.0.0.1")
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    loop, failed = asyncio.new_event_loop(), []

    def main() -> None:
        async def whole() -> None:
            try:
                await server.serve()
            finally:
                await host.work.aclose()
                await host.storage.aclose()

        try:
            loop.run_until_complete(whole())
        except Exception as error:  # noqa: BLE001 - told to the test below
            failed.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    thread = threading.Thread(target=main, name="service")
    thread.start()
    waited = threading.Event()
    for _ in range(600):
        if server.started or failed:
            break
        waited.wait(0.1)
    try:
        assert server.started, failed
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Service(host, f"http://127.0.0.1:{port}", app, loop)
    finally:
        server.should_exit = True
        thread.join(60)
    assert not failed, failed


@pytest.fixture
def settings(tmp_path: Path, repo: Path) -> Settings:
    """Settings of a service that keeps everything below the test's folder."""
    return Settings(
        state_dir=tmp_path / "state",
        index_dir=tmp_path / "index",
        bundle=repo / "bundles" / "press",
        requests_per_minute=0,
        jobs={"idle_s": 1.0},
    )


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    """A service with tokens."""
    with serving(Host(settings, entry_points=False)) as made:
        yield made


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Service]]:
    """Serve a Host of the test's own."""
    return serving


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Write an archive: `archive("brief", body="…", **{"a.txt": "…"})`."""
    made = iter(range(10_000))

    def write(name: str = "brief", *, body: str = "Read, then write.", **files: str) -> Path:
        place = tmp_path / f"upload-{next(made)}.zip"
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as out:
            out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes one page.\n---\n{body}\n")
            for path, content in files.items():
                out.writestr(f"{name}/{path}", content)
        return place

    return write
