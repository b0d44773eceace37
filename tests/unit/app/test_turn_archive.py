"""Turns that are kept: where, for whom, how long, and what becomes of one whose process dies."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context
from kdskills.app.operations.turn_archive import text_diff
from kdskills.app.settings import TurnsSettings
from kdskills.app.turns import TurnArchive, TurnRow, moment_of_id
from kdskills.errors import BadRequest, CallRefused, FileRefused, KdskillsError, NotFound
from kdskills.models import Redactor
from kdskills.session.core import uuid7
from kdskills.solver.bus import EventBus
from kdskills.solver.events import (
    DiagnosticRaised,
    SkillRefused,
    TurnFinished,
    TurnResult,
    TurnStarted,
    read_transcript,
)

HELLO = Path(__file__).parents[3] / "bundles" / "hello"
HEAD = '{"schema": "kdskills.transcript/1"}\n'
ID = "01a22209-8c0c-7186-a4eb-6dc7b24449b7"

WRITER = """
import asyncio, sys
from pathlib import Path
from kdskills.models import Redactor
from kdskills.solver.bus import EventBus
from kdskills.solver.events import TurnStarted

async def main():
    bus = EventBus(sys.argv[2], "s", redactor=Redactor(), transcripts=[Path(sys.argv[1], sys.argv[2] + ".jsonl")])
    bus.open()
    bus.emit(TurnStarted, request="Wait for me", consumer="bot", model="m")
    print("ready", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.fixture
def host(tmp_path):
    """A Host with a state folder of its own, whose turns are without scripts."""
    return Host(Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index"), entry_points=False)


@pytest.fixture
def archive(tmp_path):
    """An archive with the usual settings."""
    return TurnArchive(TurnsSettings(), tmp_path / "state")


async def run(host, **arguments):
    return await host.call("solver.run", bundle=HELLO, **arguments)


def put(archive, *, age=timedelta(0), size=0, turn_id=None, **facts):
    """Keep a turn that ended, made *age* ago."""
    moment = int((datetime.now(UTC) - age).timestamp() * 1000)
    drawn = uuid7().replace("-", "")
    text = f"{moment:012x}{drawn[12:]}"
    turn_id = turn_id or "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    folder = archive.folder("local")
    (folder / f"{turn_id}.jsonl").write_text(HEAD + "x" * size)
    usual = {"status": "final", "agent": "bot", "started_at": moment_of_id(turn_id)}
    row = TurnRow(turn_id=turn_id, **(usual | facts))
    archive.write("local", row)
    return turn_id


def caller(*scopes, **facts):
    """Return a caller elsewhere."""
    told = {"agent": "bot", "scopes": frozenset(scopes or {"work:read"}), "door": "http", "token": "t"} | facts
    return Context(identity=Identity(**told))


async def ask(host, name, context, **arguments):
    return await host.invoke(name, arguments, context)


async def test_a_turn_leaves_its_transcript_and_its_row(host, tmp_path):
    """A run without an `out` folder can be read afterwards by its id, as it can be from its file."""
    ran = await run(host)
    kept = tmp_path / "state" / "turns" / "local" / f"{ran.result.turn_id}.jsonl"
    assert ran.transcript == str(kept)
    listed = await host.call("turns.list")
    row = listed.turns[0]
    assert (len(listed.turns), row.turn_id) == (1, ran.result.turn_id)
    assert (row.status, row.bundle, row.agent) == ("final", "hello", "local")
    assert (row.request, row.skills, row.usage) == ("Greet Ada in French", ("public.hello",), ran.result.usage)
    assert row.started_at <= row.ended_at
    found = await host.call("turns.get", turn_id=row.turn_id)
    by_file = await host.call("turns.show", transcript=kept)
    assert found.transcript == kept.name
    for name in type(by_file).model_fields.keys() - {"transcript"}:
        assert getattr(found, name) == getattr(by_file, name), name


async def test_steps_have_the_prompts_as_they_were_sent(host):
    """Each step has its prompt by digest, its tokens, the skills it considered and those it loaded."""
    ran = await run(host)
    found = await host.call("turns.get", turn_id=ran.result.turn_id)
    steps = {step.index: step for step in found.steps}
    assert steps.keys() == {step.index for step in ran.result.steps}
    built = [event for event in found.events if event.type == "prompt.built"]
    texts = {event.digest: event.text for event in built if event.text}
    for event in built:
        assert (steps[event.step].prompt, steps[event.step].considered) == (texts[event.digest], event.available)
    assert [step.usage for step in found.steps] == [step.usage for step in ran.result.steps]
    assert [step.duration_ms for step in found.steps] == [step.duration_ms for step in ran.result.steps]
    assert found.steps[0].loaded == ("public.hello",)
    assert (found.steps[0].active, found.steps[1].active) == ((), ("hello",))


async def test_an_out_folder_is_what_it_was(host, tmp_path):
    """With `out` the transcript lies there, too, byte for byte that which is kept."""
    ran = await run(host, out=tmp_path / "out")
    name = f"{ran.result.turn_id}.jsonl"
    assert ran.transcript == str(tmp_path / "out" / name)
    kept = tmp_path / "state" / "turns" / "local" / name
    assert (tmp_path / "out" / name).read_bytes() == kept.read_bytes()
    assert [file.name for file in (tmp_path / "out").iterdir()] == [name]


async def test_nobody_else_reads_what_is_kept(host, tmp_path):
    """Folders are 0700 and files 0600, whatever the umask; a folder that was opened wide is closed again."""
    before = os.umask(0)
    try:
        await run(host)
        (tmp_path / "state" / "turns").chmod(0o755)
        await run(host)
    finally:
        os.umask(before)
    for path in (tmp_path / "state" / "turns").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE((tmp_path / "state" / "turns").stat().st_mode) == 0o700


async def test_keeping_is_switched_off(tmp_path):
    """With `turns.keep` off a run leaves nothing in the state folder, and says of no transcript."""
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", turns={"keep": False})
    host = Host(settings, entry_points=False)
    assert (await run(host)).transcript is None
    assert not (tmp_path / "state").exists()
    assert (await host.call("turns.list")).turns == ()


async def test_a_state_folder_that_cannot_be_made_keeps_no_turn_from_running(tmp_path):
    """The turn runs, and its answer says that it was not kept, and what switches that off."""
    (tmp_path / "file").write_text("in the way")
    settings = Settings(state_dir=tmp_path / "file" / "state", index_dir=tmp_path / "index")
    ran = await run(Host(settings, entry_points=False))
    assert (ran.result.status, ran.transcript) == ("final", None)
    finding = next(finding for finding in ran.diagnostics if finding.code == "turn_not_kept")
    assert "turns.keep" in finding.message


def test_a_turn_whose_process_dies_is_broken_off(archive):
    """While its process lives it runs, for every other process; killed, it is broken off at once, and stays so."""
    folder = archive.folder("local")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), ID], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "ready\n"
        assert archive.row("local", ID).status == "running"
        assert archive.prune("local") == 0
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    row = archive.row("local", ID)
    assert (row.status, row.request, row.consumer, row.ended_at) == ("broken_off", "Wait for me", "bot", None)
    assert json.loads((folder / f"{ID}.json").read_text())["status"] == "broken_off"
    assert archive.row("local", ID) == row


async def test_a_turn_that_ended_before_its_row_was_written_has_its_result(archive):
    """A process that dies between the last event and the row loses nothing: the transcript tells."""
    folder = archive.folder("local")
    bus = EventBus(ID, "s", redactor=Redactor(), transcripts=[folder / f"{ID}.jsonl"])
    bus.open()
    bus.emit(TurnStarted, request="r", consumer="bot", model="m")
    archive.write("local", TurnRow(turn_id=ID, status="running", agent="bot", started_at=moment_of_id(ID)))
    assert archive.row("local", ID).status == "running"
    result = TurnResult(turn_id=ID, session_id="s", status="budget", stop_reason="wall_s")
    bus.emit(TurnFinished, result=result)
    await bus.aclose()
    row = archive.row("local", ID)
    assert (row.status, row.stop_reason, row.agent) == ("budget", "wall_s", "bot")


HOSTILE = ["../local/" + ID, "..", ID + "/..", ID.upper(), ID + "\n", "x" * 128, "%2e%2e", f"{ID}.jsonl", "é", " " + ID]


@pytest.mark.parametrize("turn_id", HOSTILE)
@pytest.mark.parametrize("operation", ["turns.get", "turns.compare"])
async def test_what_is_no_id_is_no_turn(host, operation, turn_id):
    """Paths and other texts read as ids that are not there, whatever lies in the folder."""
    put(host.turns)
    arguments = {"turn_id": turn_id} | ({"second_id": turn_id} if operation == "turns.compare" else {})
    with pytest.raises(NotFound):
        await host.call(operation, **arguments)


async def test_half_characters_and_nul_are_refused(host):
    """They are refused before anything looks for a file."""
    for turn_id in ("\0", ID + "\0", "\ud800"):
        with pytest.raises(BadRequest):
            await host.call("turns.get", turn_id=turn_id)


async def test_projects_are_names_and_no_paths(host):
    """A project that is no name is refused, and another project's turns are not there for a caller elsewhere."""
    for project in ("../local", "..", "a/b", ""):
        with pytest.raises(BadRequest):
            await host.call("turns.list", project=project)
    with pytest.raises(NotFound):
        await ask(host, "turns.list", caller(), project="acme")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "folder_link"])
async def test_what_is_no_file_of_ours_is_not_read(host, tmp_path, kind):
    """A link, a pipe or a folder in a transcript's place is no turn: nothing is followed, and nobody waits."""
    folder = host.turns.folder("local")
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / f"{ID}.jsonl"
    target.write_text(HEAD)
    if kind == "link":
        (folder / f"{ID}.jsonl").symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(folder / f"{ID}.jsonl")
    elif kind == "folder":
        (folder / f"{ID}.jsonl").mkdir()
    else:
        folder.rmdir()
        folder.symlink_to(target.parent)
    assert (await host.call("turns.list")).turns == ()
    with pytest.raises(NotFound):
        await host.call("turns.get", turn_id=ID)
    assert target.read_text() == HEAD


async def test_a_transcript_of_rubbish_is_told_as_one(host):
    """A file that is no transcript is an error of its own, and stands in the list as broken off."""
    folder = host.turns.folder("local")
    (folder / f"{ID}.jsonl").write_bytes(b"\xff\0rubbish" * 1000)
    (folder / f"{ID}.json").write_bytes(b'{"turn_id": [')
    assert [row.status for row in (await host.call("turns.list")).turns] == ["broken_off"]
    with pytest.raises(BadRequest) as refused:
        await host.call("turns.get", turn_id=ID)
    assert refused.value.code == "transcript_invalid"


def test_a_row_of_another_turn_is_not_believed(archive):
    """A row that names another id than its file says nothing."""
    turn_id = put(archive)
    other = put(archive)
    folder = archive.folder("local")
    (folder / f"{turn_id}.json").write_bytes((folder / f"{other}.json").read_bytes())
    assert (archive.row("local", turn_id).turn_id, archive.row("local", turn_id).agent) == (turn_id, "")


async def test_pages_are_newest_first_and_read_no_more_than_they_show(host, monkeypatch):
    """Pages follow each other without gaps, and a page of ten among many opens eleven rows and no transcript."""
    ids = [put(host.turns, age=timedelta(minutes=number)) for number in range(60)]
    reads = []
    written = TurnArchive._written
    monkeypatch.setattr(TurnArchive, "_written", lambda *words: reads.append(words[2]) or written(*words))
    monkeypatch.setattr(TurnArchive, "opened", None)
    seen, cursor = [], None
    while True:
        page = await host.call("turns.list", limit=10, **({} if cursor is None else {"cursor": cursor}))
        seen += [row.turn_id for row in page.turns]
        assert len(reads) <= 11
        reads.clear()
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids
    with pytest.raises(BadRequest):
        await host.call("turns.list", cursor="bm9uZQ")


async def test_turns_are_listed_by_status(host):
    """Only those in the state asked for are listed."""
    final, stuck = put(host.turns), put(host.turns, status="stuck")
    assert [row.turn_id for row in (await host.call("turns.list", status="stuck")).turns] == [stuck]
    assert [row.turn_id for row in (await host.call("turns.list", status="final")).turns] == [final]
    with pytest.raises(BadRequest):
        await host.call("turns.list", status="asleep")


def test_turns_that_cannot_be_read_or_removed_are_told(tmp_path, monkeypatch):
    """A folder that may not be opened is no empty one, and a turn that cannot be removed is named, after all others went."""
    archive = TurnArchive(TurnsSettings(most=1), tmp_path)
    ids = [put(archive, age=timedelta(days=days)) for days in (1, 2, 3)]
    stuck = archive.folder("local") / f"kdskills-turn-{ids[1]}"
    stuck.symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"):
        archive.prune("local")
    assert [row.turn_id for row in archive.rows("local")] == ids[:2]
    assert list(archive.rows("nobody")) == []

    def refuses(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuses)
    for look in (lambda: list(archive.rows("local")), lambda: archive.prune("local")):
        with pytest.raises(FileRefused, match="cannot be read: Permission denied"):
            look()


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"most": 2}, [0, 1]),
        ({"days": 3}, [0, 1, 2]),
        ({"mb": 2}, [0, 1]),
        ({"most": 0, "days": 0, "mb": 0}, [0, 1, 2, 3]),
    ],
)
def test_the_oldest_go_first(tmp_path, settings, left):
    """By number, by age and by bytes the oldest turns go, with their files; 0 bounds nothing."""
    archive = TurnArchive(TurnsSettings(**settings), tmp_path / "state")
    ids = [put(archive, age=timedelta(days=number, minutes=1), size=900_000) for number in range(4)]
    for turn_id in ids:
        files = archive.folder("local") / f"kdskills-turn-{turn_id}"
        files.mkdir()
        (files / "report.md").write_text("x")
        (files / "away").symlink_to(tmp_path)
    assert archive.prune("local") == 4 - len(left)
    assert [row.turn_id for row in archive.rows("local")] == [ids[number] for number in left]
    assert len(list(archive.folder("local").iterdir())) == 3 * len(left)
    assert tmp_path.is_dir()


async def test_ending_a_turn_lets_older_ones_go(tmp_path):
    """Each turn that ends leaves no more than the settings allow; its own stays, however large."""
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", turns={"most": 2, "mb": 1})
    host = Host(settings, entry_points=False)
    put(host.turns, age=timedelta(days=1), size=5_000_000)
    ids = [(await run(host)).result.turn_id for _ in range(3)]
    assert [row.turn_id for row in (await host.call("turns.list")).turns] == ids[:0:-1]


@pytest.mark.parametrize("turns", [{"most": -1}, {"days": -1}, {"mb": "many"}, {"kept": True}])
def test_settings_out_of_bounds_are_refused(turns):
    """Numbers below zero, words and unknown names are no settings."""
    with pytest.raises(ValidationError):
        Settings(turns=turns)


async def test_a_caller_elsewhere_sees_the_turns_of_its_agent(host):
    """Others' turns are not there for it; an administrator of the project sees all, of its tenant alone."""
    mine, others, foreign = put(host.turns), put(host.turns, agent="other"), put(host.turns, tenant="else")
    lost = put(host.turns, agent="")
    listed = await ask(host, "turns.list", caller())
    assert [row.turn_id for row in listed.turns] == [mine]
    for turn_id in (others, foreign, lost):
        for name, more in (("turns.get", {}), ("turns.compare", {"second_id": mine})):
            with pytest.raises(NotFound):
                await ask(host, name, caller(), turn_id=turn_id, **more)
    seen = {row.turn_id for row in (await ask(host, "turns.list", caller("admin"))).turns}
    assert seen == {mine, others, lost}
    assert len((await host.call("turns.list")).turns) == 4


@pytest.mark.parametrize("name", ["turns.list", "turns.get", "turns.compare"])
async def test_turns_need_the_scope_to_read_work(host, name):
    """A token for skills alone reads no turn."""
    with pytest.raises(CallRefused) as refused:
        await ask(host, name, caller("skills:read"), turn_id=ID, second_id=ID)
    assert refused.value.code == "scope_missing"


async def test_what_the_gate_keeps_is_kept_in_turns_too(host):
    """Reasons of refusals, findings and places of files are told to who sees everything, on this machine."""
    folder = host.turns.folder("local")
    turn_id = put(host.turns)
    (folder / f"{turn_id}.jsonl").unlink()
    bus = EventBus(turn_id, "s", redactor=Redactor(), transcripts=[folder / f"{turn_id}.jsonl"])
    bus.open()
    bus.emit(TurnStarted, request="r", consumer="bot", model="m")
    bus.emit(SkillRefused, ref="secret", code="denied", reason="REASONWORDS")
    finding = {"code": "scripts_off", "severity": "warning", "message": "FINDINGWORDS"}
    bus.emit(DiagnosticRaised, diagnostic=finding)
    file = {"path": "a", "size": 1, "digest": "d", "media_type": "m", "location": "/PLACEWORDS/a"}
    result = TurnResult(
        turn_id=turn_id, session_id="s", status="final", stop_reason="answer", files=(file,), diagnostics=(finding,)
    )
    bus.emit(TurnFinished, result=result)
    await bus.aclose()
    wanted = ("REASONWORDS", "FINDINGWORDS", "PLACEWORDS")
    for context, told in ((caller(), ()), (caller("admin"), wanted[:2]), (Context(identity=LOCAL), wanted)):
        found = (await ask(host, "turns.get", context, turn_id=turn_id)).model_dump_json()
        assert tuple(word for word in wanted if word in found) == told


async def test_two_turns_side_by_side(host):
    """Alike turns differ in nothing; what differs is told by name, texts line by line."""
    first, second = await run(host), await run(host)
    pair = {"turn_id": first.result.turn_id, "second_id": second.result.turn_id}
    assert (await host.call("turns.compare", **pair)).differences == ()
    folder = host.turns.folder("local")
    path = folder / f"{pair['second_id']}.jsonl"
    path.write_text(path.read_text().replace("Greet Ada", "Greet Bob"))
    found = {item.name: item for item in (await host.call("turns.compare", **pair)).differences}
    assert "-Greet Ada in French\n+Greet Bob in French" in found["request"].diff
    assert read_transcript(path).started.request == "Greet Bob in French"


def test_texts_too_large_are_not_compared():
    """Comparing ends in time, whatever it is given."""
    began = time.monotonic()
    assert text_diff("a\n" * 100_000, "b\n" * 100_000) == ""
    assert text_diff("a" * 300_000, "b") == ""
    assert "+b" in text_diff("a", "b")
    assert time.monotonic() - began < 20


async def test_a_run_that_fails_is_kept_as_failed(host, tmp_path):
    """A recording that does not fit ends the turn with an error, and its row says so."""
    demo = tmp_path / "other.yaml"
    demo.write_text((HELLO / "demo.yaml").read_text().replace("Greet Ada in French", "Something else"))
    with pytest.raises(KdskillsError):
        await run(host, request="Nothing recorded for this", model=f"replay:{HELLO / 'demo.yaml'}", skills=("hello",))
    rows = (await host.call("turns.list")).turns
    assert [row.status for row in rows] == ["failed"]
    assert rows[0].stop_reason.startswith("replay_")


def test_callers_of_one_account_are_told_apart_by_project(host):
    """A client that works for one project sees the turns of that project alone."""
    context = Context(identity=replace(LOCAL, door="mcp", project="acme"))
    put(host.turns)
    assert list(host.turns.rows(context.identity.project)) == []
