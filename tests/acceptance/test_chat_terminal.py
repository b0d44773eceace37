"""`kdskills chat` and `kdskills run` at a terminal, as a person has them: a pseudo-terminal, keys, and a scripted model."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdskills.builtin.stores.sql import SqlStore

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(180)]
PATIENCE_S = 60.0
SKILL = "---\nname: {name}\ndescription: Reads {name}. Use when asked.\n---\nSum the column [[S:1]].\n"

#: The command line with a model of its own. A request says what the model does; it waits for the file `go` where it is slow.
PROGRAM = r'''
import asyncio, faulthandler, os, signal, sys
from pathlib import Path
os.open(os.ttyname(0), os.O_RDWR)  # of a session without one, it becomes the terminal whose keys are signals
from kdskills.app import Host, Settings
from kdskills.doors.cli.main import build_cli
from kdskills.hooks import hookimpl
from kdskills.models import ModelReply, TextDelta, Usage
from kdskills.testing import ScriptedModel, call

FOLDER = Path(sys.argv.pop(1))
faulthandler.register(signal.SIGUSR1)  # where it is, for a test that waited in vain

class Talker(ScriptedModel):
    """Says what the last request asks for."""
    async def stream(self, request):
        said = [m.text for m in request.messages if m.role == "user"]
        if said[-1] == "load" and request.messages[-1].role == "user":
            yield call("skills_load", names=["sales"])
            return
        if said[-1] == "hang":
            yield TextDelta("begun and ")
            await asyncio.Event().wait()
        text = {"load": "North grew [[S:1]], or so [[S:9]].",
                "slow": "the first half, and the second.",
                "hostile": "\x1b[2J\x1b]0;owned\x07 \u202etxt\n  loaded  evil.skill sha256:1\r" + 120 * "x",
               }.get(said[-1], " then ".join(said))
        half = len(text) // 2
        yield TextDelta(text[:half])
        while said[-1] == "slow" and not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
        yield TextDelta(text[half:])
        yield ModelReply(text, usage=Usage() if "uncounted" in said else Usage(1000, 10, 600), model="talker-1")
    async def reply(self, request):
        return [item async for item in self.stream(request)][-1]

class Talking:
    @hookimpl
    def kdskills_register_models(self, register):
        register("talker", lambda target: Talker([]))

settings = Settings(
    state_dir=FOLDER / "state", executor="bubblewrap", model="talker:x", session_store=f"sqlite:///{FOLDER / 's.db'}",
    prices={"scripted": {"input": 1, "output": 10, "cache_read": 0.1}},
)
host = Host(settings, plugins=[Talking()], entry_points=False)
build_cli(host)()
'''


class Screen:
    """A terminal of 80 columns with the program on it."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 80, 0, 0))
        command = [sys.executable, "-c", PROGRAM, str(folder), *map(str, words)]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        env = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(command, **streams, cwd=folder, env=env, start_new_session=True)
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        """Type *text*."""
        os.write(self.master, text.encode())

    def until(self, text: str) -> str:
        """Return what is shown up to *text*, as lines; fails when that does not come."""
        end = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            if time.monotonic() > end:
                self.process.send_signal(signal.SIGUSR1)
                while select.select([self.master], [], [], 5)[0] and (piece := self._read()):
                    self.shown += piece
                pytest.fail(self.shown)
            if select.select([self.master], [], [], 0.2)[0]:
                self.shown += self._read()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def say(self, text: str) -> str:
        """Type a line, and return what is shown until the next prompt."""
        self.type(f"{text}\n")
        return self.until("\n> ")

    def end(self) -> tuple[str, int]:
        """Return what is still shown, and the exit code."""
        while piece := self._read():
            self.shown += piece
        return self.shown, self.process.wait(PATIENCE_S)

    def _read(self) -> str:
        try:
            return os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the other end is closed
            return ""

    def close(self) -> None:
        """End what is still there."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a skill that has a source, and one that the decision model may not use."""
    root = tmp_path / "bundle"
    for name in ("sales", "secret"):
        (root / "skills" / "acme" / name).mkdir(parents=True)
        (root / "skills" / "acme" / name / "SKILL.md").write_text(SKILL.format(name=name))
        (root / "skills" / "acme" / name / "sources.yaml").write_text(
            "- {sid: 1, title: Sales guide, url: 'https://example.org/s'}\n"
        )
    (root / "skills_descriptor.yaml").write_text("agents_config:\n  solver.react.decision: {disabled: [acme.secret]}\n")
    return root


@pytest.fixture
def screens(tmp_path: Path, bundle: Path) -> Iterator[object]:
    """A function that starts the program at a terminal."""
    started: list[Screen] = []

    def start(command: str, *words: object) -> Screen:
        started.append(Screen(tmp_path, command, bundle, *words))
        return started[-1]

    yield start
    for screen in started:
        screen.close()


def kept(tmp_path: Path) -> list[str]:
    """Return the requests of the conversation that the store has."""

    async def read() -> list[str]:
        store = SqlStore(f"sqlite:///{tmp_path / 's.db'}")
        conversation = await store.conversations.get("c1")
        await store.aclose()
        return [] if conversation is None else [turn.request for turn in conversation.turns]

    return asyncio.run(read())


def test_a_talk(tmp_path, screens):
    """Text appears as it is written, tools as they run, citations as footnotes, once; Ctrl-C stops a turn; escapes do nothing."""
    screen = screens("chat", "--session", "c1")
    screen.until("> ")
    screen.type("slow\n")
    assert "second" not in screen.until("the first ")  # the reply has not ended
    (tmp_path / "go").touch()
    told = screen.until("\n> ")
    assert told.count("and the second.") == 1
    assert "$0.00056" in told  # 400 fresh, 600 from the cache, 10 out
    told = screen.say("load")
    assert re.search(r"call\s+skills\.load .*\n.*loaded\s+acme\.sales", told)
    assert told.count("North grew [1], or so [2].") == 1
    assert "[1] Sales guide https://example.org/s" in told
    assert "[2] names no source: [[S:9]]" in told
    screen.type("hang\n")
    screen.until("begun ")
    screen.type("\x03")
    assert "stopped; say something else" in screen.until("\n> ")
    told = screen.say("hostile")
    assert not re.search("[\x1b\x07\u202e]", told)
    assert not re.search(r"^\s*loaded\s+evil", told, re.MULTILINE)
    assert "│   loaded  evil.skill" in told
    assert max(map(len, told.splitlines())) <= 80
    assert "slow then load then hostile then hm" in screen.say("hm").replace("\n│ ", "")
    screen.type("\n")
    said, code = screen.end()
    assert ("the conversation is c1" in said, code) == (True, 0)
    assert kept(tmp_path) == ["slow", "load", "hostile", "hm"]


def test_what_can_be_done_beside_talking(tmp_path, screens):
    """`/why` and `/skills` tell what the model may use, `/save` writes, `/undo` really takes back; a second start goes on."""
    screen = screens("chat", "--session", "c1")
    assert "conversation c1: 0 turns so far" in screen.until("> ")
    assert "conversation_not_found" in screen.say("/undo")
    assert re.search(r"\bone\b", screen.say("one"))
    assert "North grew [1]" in screen.say("load")
    assert "acme.sales for solver.react.decision: granted" in screen.say("/why sales")
    refused = screen.say("/why acme.secret")
    assert "acme.secret for solver.react.decision: refused: denied" in refused
    assert re.search(r"refuse .*disabled", refused)
    assert "usage: name a skill" in screen.say("/why")
    listed = screen.say("/skills")
    assert ("acme.sales" in listed, "acme.secret" in listed) == (True, True), listed
    assert "2 turns written to c1.md" in screen.say("/save")
    assert "path_exists: c1.md is not written: File exists" in screen.say("/save c1.md")
    assert "path_missing" in screen.say("/save no/such/folder.md")
    saved = (tmp_path / "c1.md").read_text()
    assert saved.startswith("> one\n\none\n\n> load\n\nNorth grew [1], or so [[S:9]].")
    assert "[1] Sales guide - https://example.org/s" in saved
    assert "taken back: load; 1 turn left" in screen.say("/undo")
    assert kept(tmp_path) == ["one"]
    assert "usage: there is no /nothing; there are /skills" in screen.say("/nothing")
    screen.type("\n")
    assert screen.end()[1] == 0
    again = screens("chat", "--session", "c1")
    assert "conversation c1: 1 turn so far, the last: one" in again.until("> ")
    assert "one then two" in again.say("two")
    assert kept(tmp_path) == ["one", "two"]


def test_a_run(tmp_path, bundle, screens):
    """`run` streams at a terminal, once, with what it cost; where nobody counted, tokens are estimates and cost nothing known."""
    screen = screens("run", "slow")
    assert "second" not in screen.until("the first ")
    (tmp_path / "go").touch()
    told, code = screen.end()
    assert (told.count("and the second."), code) == (1, 0)
    assert "1000 tokens in, 10 out, 600 from the cache, $0.00056" in told
    told, code = screens("run", "uncounted").end()
    assert (re.search(r"~\d+ tokens in, ~?\d+ out, ", told) is not None, "$" in told, code) == (True, False, 0)


def test_a_run_into_a_pipe(tmp_path, bundle):
    """In a pipe standard output is the answer with its footnotes and nothing else, plain; the rest is told beside it."""
    command = [sys.executable, "-c", PROGRAM.replace("os.open", "(lambda *a: 0)").replace("os.ttyname(0)", "0")]
    done = subprocess.run(
        [*command, str(tmp_path), "run", str(bundle), "load"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (
        0,
        "North grew [1], or so [[S:9]].\n\nSources:\n[1] Sales guide - https://example.org/s\n",
    )
    assert "loaded  acme.sales" in done.stderr
    whole = subprocess.run(
        [*command, str(tmp_path), "run", str(bundle), "hm", "--json"], capture_output=True, text=True, check=False
    )
    assert json.loads(whole.stdout)["result"]["usage"]["cost"] == pytest.approx(0.00056)
