"""The worker's processes: `main` is the worker, `launcher` starts attempts; here an embedded worker is started, detached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr

from kdskills.app.settings import Settings
from kdskills.errors import OperatorMustAct
from kdskills.skills.private_files import open_private
from kdskills.storage.folder import state_folder

LOG_NAME = "worker.log"
_PATIENCE_S = 30.0


class WorkerNotStarted(OperatorMustAct):
    """A worker of background work could not be started on this host."""

    code = "worker_not_started"


def spawner(settings: Settings) -> Callable[[], None]:
    """Return a function that starts a worker nobody waits for; it outlives its starter and logs into the state folder.

    Settings travel over a pipe, as they may hold secrets. Plugins given to a Host in code do not travel: a worker loads
    the installed ones.
    """

    def spawn() -> None:
        state_folder(settings.state_dir)
        command = ["setsid", "--fork", sys.executable, "-m", "kdskills.app.worker.main"]
        try:
            with open_private(settings.state_dir / LOG_NAME, "ab") as log:
                subprocess.run(
                    command,
                    input=settings_line(settings) + b"\n",
                    stdout=log,
                    stderr=log,
                    check=True,
                    timeout=_PATIENCE_S,
                    cwd="/",
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise WorkerNotStarted(f"no worker could be started: {error}") from None

    return spawn


def settings_line(settings: Settings) -> bytes:
    """Return *settings* as one line for a process of ours, secrets in clear."""
    return json.dumps(settings.model_dump(), default=_plain).encode()


def _plain(value: object) -> object:
    """Return what JSON has for a value of a settings model."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be told to another process")
