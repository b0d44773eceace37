"""Debian's Chromium before the console: what a page does is watched, whatever the test is about."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

playwright_api = pytest.importorskip("playwright.sync_api")

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 60_000  # for what a busy machine does in a moment
playwright_api.expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for the tests of a module. While it runs its loop runs in this thread: no other test could have one."""
    with playwright_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield chromium
        chromium.close()


@dataclass
class Watch:
    """What pages did that none of them may do."""

    faults: list[str] = field(default_factory=list)


@pytest.fixture
def window(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a window: `window(url, width=…, scheme=…, scripts=…)` gives a page at *url*.

    At the end of the test no page may have opened a dialog, asked another origin, broken its policy or thrown an error.
    """
    contexts, watch = [], Watch()

    def open_window(
        url: str, *, width: int = 1280, scheme: str = "light", scripts: bool = True, zoom: float = 1.0
    ) -> Any:
        context = browser.new_context(
            viewport={"width": int(width / zoom), "height": int(900 / zoom)},
            device_scale_factor=zoom,
            color_scheme=scheme,
            java_script_enabled=scripts,
            reduced_motion="reduce",
            accept_downloads=True,
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        origin = "://".join(urlsplit(url)[:2])

        def told(message: Any) -> None:
            if message.type == "error" and "Failed to load resource" not in message.text:
                watch.faults.append(f"console: {message.text}")

        def asked(request: Any) -> None:
            if not request.url.startswith((origin, "data:", "blob:")):
                watch.faults.append(f"asked {request.url}")

        def talked(dialog: Any) -> None:
            if dialog.type == "confirm" and getattr(page, "agrees", False):
                dialog.accept()
                return
            watch.faults.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("console", told)
        page.on("request", asked)
        page.on("dialog", talked)
        page.on("pageerror", lambda error: watch.faults.append(f"threw {error}"))
        page.goto(url)
        return page

    yield open_window
    for context in contexts:
        context.close()
    assert not watch.faults, watch.faults


@dataclass(frozen=True)
class FolderConsole:
    """A console over a bundle's folder, as `kdskills ui` serves it."""

    url: str
    folder: Path
    state: Path

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return self.url.split("/ui/")[0]


@contextlib.contextmanager
def showing(folder: Path, state: Path) -> Iterator[FolderConsole]:
    """Run `kdskills ui` over *folder* until the block ends."""
    env = {**os.environ, "KDSKILLS_STATE_DIR": str(state), "KDSKILLS_INDEX_DIR": str(state / "index")}
    words = [str(Path(sys.executable).with_name("kdskills")), "ui", str(folder), "--no-open", "--trust"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            link = re.search(r"http://\S+", program.stdout.readline())
            assert link is not None
            yield FolderConsole(link[0], folder, state)
        finally:
            program.send_signal(signal.SIGINT)
            program.communicate(timeout=60)


@pytest.fixture(scope="module")
def press() -> Iterator[FolderConsole]:
    """A console over a copy of the bundle `press`, one for all tests of a module; its path is short, for pictures."""
    with tempfile.TemporaryDirectory(prefix="desk-") as place:
        folder = Path(place) / "press"
        shutil.copytree(Path(__file__).parents[4] / "bundles" / "press", folder)
        with showing(folder, Path(place) / "state") as console:
            yield console


@pytest.fixture
def show() -> Callable[..., contextlib.AbstractContextManager[FolderConsole]]:
    """Serve a console over a folder of the test's own."""
    return showing


@pytest.fixture
def sign_in(window: Callable[..., Any]) -> Callable[..., Any]:
    """Open a window of a service's console and sign in: `sign_in(service, path="/ui/work", token=…, scripts=…)`."""

    def signed_in(service: Any, path: str = "/ui/", *, token: str | None = None, **more: Any) -> Any:
        page = window(service.url + path, **more)
        page.get_by_label("Token").fill(token or service.token(agent="boss"))
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Sign out").wait_for()
        return page

    return signed_in


@pytest.fixture
def examine(axe_source: str) -> Callable[..., list[str]]:
    """Return what keeps anybody from reading the page that is open: `examine(page, "home")`.

    It is judged by axe-core in light and in dark, and may not scroll sideways on 360 pixels, or at 200 % on a screen of 1,280.
    Where KDSKILLS_SCREENSHOTS names a folder, a picture of it is kept there under the name given; `dark=True` keeps a dark one.
    """

    def examined(page: Any, name: str = "", *, dark: bool = False) -> list[str]:
        faults = []
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            faults += [f"{scheme}: {each}" for each in _findings(page, axe_source)]
            if name and (scheme == "light" or dark):
                _picture(page, name if scheme == "light" else f"{name}-dark")
        for width in (360, 640):
            page.set_viewport_size({"width": width, "height": 800})
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                faults.append(f"{width} pixels: scrolls sideways")
        page.set_viewport_size({"width": 1280, "height": 800})
        return faults

    return examined


def _picture(page: Any, name: str) -> None:
    folder = os.environ.get("KDSKILLS_SCREENSHOTS")
    if folder:
        page.set_viewport_size({"width": 1280, "height": 800})
        picture = page.screenshot(animations="disabled")
        small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(96)  # a third of its bytes
        small.save(Path(folder) / f"{name}.png", optimize=True)


def _findings(page: Any, axe_source: str) -> list[str]:
    page.evaluate(f"() => {{ if (!window.axe) {{ {axe_source} }} }}")
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{each['id']} ({each['impact']}): {node['target']} {node['failureSummary']}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]
