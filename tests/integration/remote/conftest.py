"""Clients of emulated and real app-servers, each with a fake model and a private empty home."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kdskills.remote import AsyncCodexClient, CodexClient
from kdskills.remote.labmodel import FakeResponses
from kdskills.testing import AppServerEmulator


@dataclass(frozen=True)
class Lab:
    """A program, a fake model, and folders of this test's own; what was probed is shared."""

    binary: str
    model: FakeResponses
    home: Path
    state: Path
    probes: Path

    @property
    def _how(self) -> dict[str, Any]:
        return {"home": self.home, "binary": self.binary, "state": self.probes, "config": self.model.config}

    async def client(self, **options: Any) -> AsyncCodexClient:
        """Start the server and return its client."""
        return await AsyncCodexClient.spawn(**{**self._how, **options})

    def blocking(self, **options: Any) -> CodexClient:
        """Start the server and return a client without an event loop."""
        return CodexClient.spawn(**{**self._how, **options})

    def shown(self, at: int = -1) -> list[str]:
        """The tools of ours the model saw: what the server brings by itself is left out."""
        own = {"create_goal", "exec_command", "get_goal", "request_user_input", "update_goal", "view_image"}
        own |= {"web_search", "write_stdin"}
        return [name for name in self.model.visible_tools(at) if name not in own and not name.startswith("multi_")]


def installed_codex() -> str | None:
    """Where `.ci/codex` put the launcher, else the one in PATH."""
    folder = Path(os.environ.get("KDSKILLS_CODEX_DIR") or "/tmp/kdskills-codex")
    installed = folder / "node_modules" / ".bin" / "codex"
    return str(installed) if installed.exists() else shutil.which("codex")


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where probes are kept, so that each program is asked once."""
    return tmp_path_factory.mktemp("probes")


@pytest.fixture(params=["emulator", pytest.param("codex", marks=[pytest.mark.needs("codex"), pytest.mark.codex_real])])
def lab(request: pytest.FixtureRequest, tmp_path: Path, probes: Path) -> Iterator[Lab]:
    """What is promised of clients holds on the emulator and on the real binary."""
    with FakeResponses() as model, AppServerEmulator() as emulator:
        binary = str(emulator.binary) if request.param == "emulator" else installed_codex()
        assert binary is not None
        yield Lab(binary, model, tmp_path / "home", tmp_path / "state", probes)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test keeps calls in the state folder of whoever runs it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
