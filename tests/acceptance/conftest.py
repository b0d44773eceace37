"""The command line in this process: a process of its own takes ten times as long, and tells more in few tests only."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kdskills.doors.cli import main

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command: `run("list", folder, stdin=…, NAME="value of a variable")`; streams are pipes as a shell gives them."""

    def run(*words: object, stdin: Any = None, **env: str) -> subprocess.CompletedProcess[str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
        code: object = 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
        ):
            patch.setattr(sys, "argv", ["kdskills", *map(str, words)])
            if stdin is not None:
                patch.setattr(sys, "stdin", stdin)
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                main()
            except SystemExit as ended:
                code = ended.code
        out, err = (stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(words, int(str(code or 0)), out.decode("utf-8", "replace"), err.decode())

    return run


@pytest.fixture(scope="session")
def answer(run: Run) -> Callable[..., Any]:
    """Run a command with `--json` and read its answer."""
    return lambda *words: json.loads(run(*words, "--json").stdout)
