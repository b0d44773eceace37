"""A Host over a folder of skills, served as MCP on a free port and ready for the SDK's own client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL
from kdskills.doors.mcp import McpHttp


@dataclass
class Bundle:
    """A bundle to serve, and ways to change it."""

    root: Path

    def skill(self, place: str, body: str = "Do it.", frontmatter: str = "", **files: bytes) -> Path:
        """Write a skill below `skills/`; `a__b` in a file's name is a folder."""
        folder = self.root / "skills" / place
        folder.mkdir(parents=True, exist_ok=True)
        head = frontmatter or f"name: {folder.name}\ndescription: About {folder.name}"
        (folder / "SKILL.md").write_text(f"---\n{head}\n---\n\n{body}\n")
        for name, data in files.items():
            file = folder / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return folder

    def settings(self, tmp_path: Path, **more: Any) -> Settings:
        """Return settings that keep everything below the test's folder."""
        return Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=self.root, **more)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    root = tmp_path / "bundle"
    (root / "skills").mkdir(parents=True)
    return Bundle(root)


@pytest.fixture
def serve() -> Callable[[Host], contextlib.AbstractContextManager[str]]:
    """Serve a Host over HTTP while a block runs; its address is `/mcp` on a free port."""
    return serving


@contextlib.contextmanager
def serving(host: Host) -> Iterator[str]:
    async def authenticate(header: str | None) -> Any:
        return LOCAL

    app = McpHttp(host, authenticate)
    star = Starlette(routes=[Route("/mcp", app)], lifespan=lambda _: app.running())
    server = uvicorn.Server(
        uvicorn.Config(star, host="127.0.0.1", port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=2)
    )
    failed: list[BaseException] = []

    async def main() -> None:
        try:
            await server.serve()
        finally:
            await host.work.aclose()
            await host.storage.aclose()

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - told to the test below
            failed.append(error)

    thread = threading.Thread(target=run, name="mcp")
    thread.start()
    waiting = threading.Event()
    for _ in range(600):
        if server.started or failed:
            break
        waiting.wait(0.1)
    try:
        assert server.started, failed
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not failed, failed
