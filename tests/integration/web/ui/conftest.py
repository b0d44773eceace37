"""Debian's Chromium before the console: what a page does is watched, whatever the test is about."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

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


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of this worker."""
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


@pytest.fixture
def press(tmp_path: Path, repo: Path) -> Iterator[FolderConsole]:
    """A console over a copy of the bundle `press`."""
    folder = tmp_path / "press"
    shutil.copytree(repo / "bundles" / "press", folder)
    with showing(folder, tmp_path / "state") as console:
        yield console


@pytest.fixture
def show() -> Callable[..., contextlib.AbstractContextManager[FolderConsole]]:
    """Serve a console over a folder of the test's own."""
    return showing


@pytest.fixture
def judge(axe_source: str) -> Callable[[Any], list[str]]:
    """Return what axe-core finds serious or critical on a page."""
    return lambda page: _findings(page, axe_source)


def _findings(page: Any, axe_source: str) -> list[str]:
    page.evaluate(axe_source)
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [
        f"{each['id']} ({each['impact']}): {node['target']} {node['failureSummary']}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]
