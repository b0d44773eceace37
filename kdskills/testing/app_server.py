"""An emulated Codex app-server, for tests without node or a login.

    with FakeResponses() as model, AppServerEmulator() as emulator:
        process = subprocess.Popen([emulator.binary, "app-server", *model.config_args], env={"CODEX_HOME": …}, …)

`binary` is a launcher in front of a child, as npm's is, and takes the real one's arguments. Contract scripts run on the
emulator and on the real binary, and must agree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kdskills.testing.app_server_profiles import PROFILES

_LISTENING: Final = "listening on: "
_START_S: Final = 60.0


class AppServerEmulator:
    """A program that behaves like a version of the app-server; a context manager that owns its folder.

    Args:
        profile: `0.169`, or `0.105`: no unsubscribe or revert, naming does not write a file, context is ignored.

    Attributes:
        binary: What to start in place of `codex`.
    """

    def __init__(self, profile: str = "0.169") -> None:
        if profile not in PROFILES:
            known = ", ".join(sorted(PROFILES))
            message = f"no emulated version {profile!r}; there are {known}"
            raise ValueError(message)
        self.profile = profile
        self._folder = Path(tempfile.mkdtemp(prefix="kdskills-emulator-"))
        self.binary = self._folder / "codex"
        command = shlex.join([sys.executable, "-m", "kdskills.testing.app_server_main", "--profile", profile])
        self.binary.write_text(f'#!/bin/sh\n{command} "$@"\nexit $?\n', "utf-8")
        self.binary.chmod(0o755)

    def close(self) -> None:
        """Remove the launcher; processes it started go on until their stdin ends."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the launcher."""
        self.close()


@contextmanager
def listening(binary: Path, home: Path, args: Sequence[str] = (), *, token: str | None = None) -> Iterator[str]:
    """Run an app-server, emulated or real, on a free port of loopback, and give its websocket URL.

    Args:
        binary: The program.
        home: Its private `CODEX_HOME` and `HOME`.
        args: Further arguments, such as `FakeResponses.config_args`.
        token: What clients must show as bearer token.
    """
    guarded: list[str] = []
    if token is not None:
        file = home / "capability-token"
        file.write_text(token, "utf-8")
        file.chmod(0o600)
        guarded = ["--ws-auth", "capability-token", "--ws-token-file", str(file)]
    command = [str(binary), "app-server", *args, "--listen", "ws://127.0.0.1:0", *guarded]
    process = subprocess.Popen(
        command,
        env=private_env(home, binary),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    watch = _Watch(process)
    try:
        yield watch.url()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        watch.close()


def private_env(home: Path, binary: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the whole environment of an app-server in a test: nothing of the user's, and a node beside the launcher."""
    path = f"{binary.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"PATH": path, "LANG": "C.UTF-8", "HOME": str(home), "CODEX_HOME": str(home), **(more or {})}


class _Watch:
    """Drains a server's stderr, and finds in it where the server listens."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._found = threading.Event()
        self._url: str | None = None
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, name="app-server-stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for raw in self._process.stderr or ():
            line = raw.decode(errors="replace")
            self._lines.append(line)
            if _LISTENING in line and self._url is None:
                self._url = line.partition(_LISTENING)[2].strip()
                self._found.set()
        self._found.set()

    def url(self) -> str:
        """Wait for the address.

        Raises:
            RuntimeError: The server ended, or did not say it in time.
        """
        if not self._found.wait(_START_S) or self._url is None:
            message = f"the app-server does not listen: {''.join(self._lines)[-2000:]}"
            raise RuntimeError(message)
        return self._url

    def close(self) -> None:
        """End the reader, once the process is gone."""
        self._thread.join()
        if self._process.stderr is not None:
            self._process.stderr.close()
