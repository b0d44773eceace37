"""How many files a reader walks through: `python -m tests.arch.walks` prints those that two values really pass.

A task's command is followed from the HTTP request to the shim that runs it, and the argument of a remote call from the server's
message to the handler and back. A profiler in every process notes the product files in which a call's locals hold the value. Files
that only answer questions about the task later, and the engine behind the shim, are not part of the walk: they are printed apart.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKER = "walkmarker7531"
AFTER_THE_SHIM = ("kdskills/execution/", "kdskills/builtin/executors/", "runtime/")
PROFILER = """
import os, sys, threading
MARKER, SEEN = "walkmarker7531", set()
def holds(value, depth=0):
    if isinstance(value, str):
        return MARKER in value
    if isinstance(value, (bytes, bytearray)):
        return MARKER.encode() in value
    if depth > 4:
        return False
    if isinstance(value, dict):
        return len(value) < 200 and any(holds(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return len(value) < 200 and any(holds(item, depth + 1) for item in value)
    if not type(value).__module__.startswith("kdskills"):
        return False
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    fields = {**{name: getattr(value, name, None) for name in slots}, **getattr(value, "__dict__", {})}
    return any(holds(item, depth + 1) for item in list(fields.values()))
def note(frame, event, value):
    path = frame.f_code.co_filename
    if event not in ("call", "return") or path in SEEN or frame.f_code.co_name == "<module>" or not path.startswith(PREFIXES):
        return
    try:
        seen = any(holds(item, name == "self") for name, item in list(frame.f_locals.items()))
        seen = seen or (event == "return" and holds(value))
    except Exception:  # a local that cannot be looked at, such as one half made, must not change what is followed
        return
    if seen:
        SEEN.add(path)
        with open(os.environ["WALK_FILES"], "a") as files:
            files.write(path + "\\n")
if "WALK_FILES" in os.environ:
    PREFIXES = tuple(os.path.join(os.environ["WALK_ROOT"], room) for room in ("kdskills/", "runtime/"))
    sys.setprofile(note)
    threading.setprofile(note)
"""
REMOTE = '''
import sys, tempfile
from contextlib import ExitStack
from pathlib import Path
from kdskills.remote import CodexClient
from kdskills.testing import AppServerEmulator, FakeResponses
profiler = sys.getprofile()
sys.setprofile(None)
with ExitStack() as stack:
    top = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model, emulator = stack.enter_context(FakeResponses()), stack.enter_context(AppServerEmulator())
    client = stack.enter_context(
        CodexClient.spawn(home=top / "home", state=top / "state", binary=str(emulator.binary), config=model.config)
    )
    def register(draft):
        @draft.skill()
        def ship_order(order: str) -> str:
            """Book a parcel."""
            return f"order {order} is on its way"
    created, session = client.remote_skills.create_session(register=register, cwd=str(top))
    sys.setprofile(profiler)
    session.send_and_handle('!call ship_order {"order": "walk\\\\u006darker7531"}', timeout_seconds=60)
    sys.setprofile(None)
'''


def passed_files(notes: Path) -> list[str]:
    """Return the product files that were noted, sorted; packages' `__init__` that only hand names on are none."""
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    return sorted({str(Path(line).relative_to(ROOT)) for line in lines})


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a process that is followed; its notes are `files` in *folder*."""
    (folder / "sitecustomize.py").write_text(PROFILER, encoding="utf-8")
    state = {"KDSKILLS_STATE_DIR": str(folder / "state"), "WALK_FILES": str(folder / "files"), "WALK_ROOT": str(ROOT)}
    return {**os.environ, **state, "PYTHONPATH": f"{folder}:{ROOT}"}


def remote_walk(folder: Path) -> list[str]:
    """Return the files that the argument of a remote call passes."""
    subprocess.run([sys.executable, "-c", REMOTE], env=environment(folder), check=True, timeout=120)
    return [name for name in passed_files(folder / "files") if not name.startswith("kdskills/testing/")]


def task_walk(folder: Path, seconds: float = 60) -> list[str]:
    """Return the files that a task's command passes, from the HTTP request until the task has ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project = f"http://127.0.0.1:{port}/projects/local"
    command = [str(Path(sys.executable).with_name("kdskills")), "serve", "--no-auth", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, env=environment(folder), stderr=subprocess.DEVNULL) as service:
        try:
            _wait(f"http://127.0.0.1:{port}/healthz", seconds)
            _post(f"{project}/skills:upload", _form(), "multipart/form-data; boundary=walk")
            body = {"skill_name": "brief", "command": ["true", MARKER]}
            _post(f"{project}/tools/skills.run_cmd_async", json.dumps(body).encode(), "application/json")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not _shim_ran(folder):
                time.sleep(0.2)
            return passed_files(folder / "files")
        finally:
            service.send_signal(signal.SIGTERM)


def _shim_ran(folder: Path) -> bool:
    return any(name.startswith("kdskills/execution/bwrap/run") for name in passed_files(folder / "files"))


def _form() -> bytes:
    """Return the upload of a skill as a multipart form."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(
            "brief/SKILL.md", "---\nname: brief\ndescription: Turns long material into one page.\n---\nRead.\n"
        )
    head = b'--walk\r\nContent-Disposition: form-data; name="file"; filename="brief.zip"\r\n\r\n'
    return head + buffer.getvalue() + b"\r\n--walk--\r\n"


def _post(url: str, body: bytes, kind: str) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()


def _wait(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=5):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(url)
        time.sleep(0.2)


def main() -> None:
    """Print both walks."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        remote, task = remote_walk(folders[0]), task_walk(folders[1])
    to_shim = [name for name in task if not name.startswith(AFTER_THE_SHIM)]
    behind = [name for name in task if name not in to_shim]
    for title, names in (("a remote call", remote), ("a task to its shim", to_shim), ("behind the shim", behind)):
        sys.stdout.write("\n  ".join([f"{title}: {len(names)} files", *names]) + "\n")


if __name__ == "__main__":
    main()
