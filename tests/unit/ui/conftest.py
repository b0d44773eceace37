"""The console as an application, asked without a network."""

from __future__ import annotations

import io
import re
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES
from kdskills.doors.ui.console import Console, mount
from kdskills.doors.ui.sessions import COOKIE
from kdskills.doors.web import build_app

BUNDLES = Path(__file__).parents[3] / "bundles"


class Browser(httpx.AsyncClient):
    """Who looks at a console: with its cookies, and with the proof that its pages hold."""

    def __init__(self, app: Any, **more: Any) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://127.0.0.1:8080", timeout=120, **more)

    async def proof(self, path: str = "/ui/") -> str:
        """Return the proof of this session's forms."""
        found = re.search(r'"X-CSRF-Token": "([^"]+)"', (await self.get(path)).text)
        assert found is not None
        return found[1]

    async def send_form(self, path: str, **fields: str) -> httpx.Response:
        """Send a form with its proof."""
        return await self.post(path, data={"csrf": await self.proof(), **fields})

    async def sign_in(self, token: str, back: str = "/ui/") -> httpx.Response:
        """Sign in with a token."""
        return await self.post("/ui/sign-in", data={"token": token, "back": back})

    @property
    def session(self) -> str | None:
        """What the cookie holds."""
        return self.cookies.get(COOKIE)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of the bundle `press`."""
    shutil.copytree(BUNDLES / "press", tmp_path / "press")
    return tmp_path / "press"


@pytest.fixture
async def host(tmp_path: Path, bundle: Path) -> AsyncIterator[Host]:
    """A Host over the bundle with a state folder of its own."""
    settings = Settings(
        state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=bundle, requests_per_minute=0
    )
    made = Host(settings, entry_points=False)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


@pytest.fixture
def service(host: Host) -> Callable[..., Browser]:
    """Return a browser before a service: `service(open_on_loopback=True)`."""

    def open_browser(listen: str = "127.0.0.1", **more: Any) -> Browser:
        return Browser(build_app(host, listen=listen, **more))

    return open_browser


@pytest.fixture
def token(host: Host) -> Callable[..., Any]:
    """A way to make tokens, which gives their texts."""

    async def make(*scopes: str, project: str = "local", agent: str = "local", **more: Any) -> str:
        return (await host.tokens.create(project, agent, frozenset(scopes) or SCOPES, who="test", **more))[1]

    return make


@pytest.fixture
def own(host: Host, bundle: Path) -> Console:
    """The console that `kdskills ui` serves to the person who started it."""

    async def nobody(header: str | None) -> Any:
        raise AssertionError("nobody is asked for a token here")

    owner = replace(LOCAL, door="console")
    return Console(host, nobody, frozenset(), owner=owner, folder=bundle, trust=True)


@pytest.fixture
async def owner(own: Console) -> AsyncIterator[Browser]:
    """The browser of the person who started `kdskills ui`."""
    async with Browser(own) as browser:
        assert (await browser.get(f"/ui/enter/{own.key}")).status_code == 303
        yield browser


@pytest.fixture
def mounted(host: Host) -> Callable[..., Console]:
    """Return a console that asks *authenticate* who calls."""
    return lambda authenticate: mount(host, authenticate, frozenset())


@pytest.fixture
def archive() -> Callable[..., bytes]:
    """A way to make the archive of a skill."""

    def write(name: str = "brief", *, body: str = "Read, then write.", **files: str) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as stream:
            stream.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes one page.\n---\n{body}\n")
            for path, content in files.items():
                stream.writestr(f"{name}/{path}", content)
        return out.getvalue()

    return write
