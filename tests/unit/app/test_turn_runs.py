"""Turns in the background: who may start which, what is told while they run, and how they end."""

import asyncio
import base64
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import Identity
from kdskills.app.operations import OPERATIONS, Context
from kdskills.app.operations.calling import host_words
from kdskills.errors import BadRequest, CallRefused, Conflict, KdskillsError, NotFound
from kdskills.hooks import hookimpl
from kdskills.solver.events import read_transcript
from kdskills.testing.models import ScriptedModel, call, say

HELLO = Path(__file__).parents[3] / "bundles" / "hello"
SCOPES = ("work:run", "work:read")


class Waiting(ScriptedModel):
    """A model that answers when it is let."""

    def __init__(self, gate):
        super().__init__([])
        self.gate = gate

    async def reply(self, request):
        """Wait, then answer."""
        await self.gate.wait()
        return say("Bonjour")


class Models:
    """A plugin with models for tests: `slow:` waits for the gate, `loads:` loads a skill and answers."""

    def __init__(self):
        self.gate = asyncio.Event()

    @hookimpl
    def kdskills_register_models(self, register):
        """Register the models."""
        register("slow", lambda name: Waiting(self.gate))
        register("loads", lambda name: ScriptedModel([call("skills_load", names=[name]), say("done")]))


def make(tmp_path, plugin=None, **turns):
    settings = Settings(
        state_dir=tmp_path / "state",
        index_dir=tmp_path / "index",
        bundle=HELLO,
        turns={"models": ("replay", "slow:one"), **turns},
    )
    return Host(settings, plugins=() if plugin is None else (plugin,), entry_points=False)


@pytest.fixture
async def models():
    """The models of the tests."""
    return Models()


@pytest.fixture
async def host(tmp_path, models):
    """A Host of the bundle `hello`; what runs is ended with the test."""
    made = make(tmp_path, models)
    yield made
    await made.turn_runs.aclose()
    await made.storage.aclose()


def caller(*scopes, **facts):
    """Return a caller elsewhere."""
    told = {"agent": "bot", "scopes": frozenset(scopes or SCOPES), "door": "http", "token": "t"} | facts
    return Context(identity=Identity(**told))


async def start(host, context=None, **arguments):
    return (await host.invoke("turns.start", arguments, context or caller())).turn_id


async def watch(host, turn_id, context=None, **arguments):
    """Return the end of a watch, and what was told."""
    events = []
    context = context or caller()
    told = Context(identity=context.identity, emit=events.append)
    return await host.invoke("turns.watch", {"turn_id": turn_id, **arguments}, told), events


async def refusal(host, context=None, **arguments):
    with pytest.raises(KdskillsError) as refused:
        await start(host, context, **arguments)
    return refused.value


async def test_a_turn_runs_while_its_caller_goes_on(host, models):
    """The id comes before the answer; the turn runs, is told as it happens, and ends as any other."""
    turn_id = await start(host, model="slow:one", request="Wait")
    assert (await host.call("turns.list")).turns[0].status == "running"
    end, before = await watch(host, turn_id, timeout_sec=0.2)
    assert (end.status, end.watch_timeout) == ("running", True)
    assert [event.type for event in before][:2] == ["turn.started", "prompt.built"]
    models.gate.set()
    end, after = await watch(host, turn_id, after_seq=before[-1].seq)
    assert (end.status, end.watch_timeout, end.agent, end.consumer) == ("final", False, "bot", "bot")
    assert [event.seq for event in (*before, *after)] == list(range(1, after[-1].seq + 1))
    assert (after[-1].type, after[-1].kind, after[-1].id) == ("turn.finished", "event", turn_id)
    assert after[-1].event.result.text == "Bonjour"
    found = await host.invoke("turns.get", {"turn_id": turn_id}, caller())
    assert (found.result.text, found.row.turn_id) == ("Bonjour", turn_id)


async def test_a_watch_of_an_ended_turn_tells_all_of_it(host):
    """Whoever comes late hears the same events as the transcript has, and whoever knows them hears none."""
    turn_id = await start(host)
    await host.turn_runs.wait()
    end, events = await watch(host, turn_id)
    path = host.turns.folder("local") / f"{turn_id}.jsonl"
    assert [event.seq for event in events] == [event.seq for event in read_transcript(path).events]
    assert (await watch(host, turn_id, after_seq=events[-1].seq)) == (end, [])


async def test_silence_is_told_by_heartbeats(host):
    """A heartbeat repeats the number of the last event."""
    turn_id = await start(host, model="slow:one", request="Wait")
    _, events = await watch(host, turn_id, timeout_sec=0.5, heartbeat_sec=0.1)
    beats = [event for event in events if event.kind == "heartbeat"]
    last = max(event.seq for event in events if event.kind == "event")
    assert beats
    assert {(beat.seq, beat.event, beat.id) for beat in beats} == {(last, None, turn_id)}


async def test_a_turn_is_stopped(host):
    """It ends failed, `cancelled`, its transcript whole; stopping it again changes nothing."""
    turn_id = await start(host, model="slow:one", request="Wait")
    ended = await host.invoke("turns.stop", {"turn_id": turn_id}, caller())
    assert (ended.stopped, ended.status) == (True, "failed")
    end, events = await watch(host, turn_id)
    assert (end.stop_reason, events[-1].type) == ("cancelled", "turn.finished")
    again = await host.invoke("turns.stop", {"turn_id": turn_id}, caller())
    assert (again.stopped, again.status) == (False, "failed")


async def test_a_process_runs_no_more_than_it_may(tmp_path, models):
    """One more than the setting is refused at once; when one has ended there is room again."""
    host = make(tmp_path, models, running=2)
    ids = [await start(host, model="slow:one", request="Wait") for _ in range(2)]
    error = await refusal(host, model="slow:one", request="Wait")
    assert (error.code, error.details["limit"]) == ("too_many_turns", 2)
    await host.invoke("turns.stop", {"turn_id": ids[0]}, caller())
    assert await start(host, model="slow:one", request="Wait")
    await host.turn_runs.aclose()
    assert {row.status for row in (await host.call("turns.list")).turns} == {"failed"}


async def test_what_cannot_begin_takes_no_room(tmp_path, models):
    """A turn that is refused leaves no task, no transcript, and its place."""
    host = make(tmp_path, models, running=1)
    for _ in range(3):
        assert (await refusal(host, skills=("nothing",))).code == "unknown_skill"
        assert (await refusal(host, request="x" * 300_000)).who == "caller"
    assert (await host.call("turns.list")).turns == ()
    assert await start(host)
    await host.turn_runs.wait()


@pytest.mark.parametrize(
    "model",
    ["openai:gpt-5", "slow:two", "replay:/etc/passwd", "slow:one ", "SLOW:one", "", "json-schema:slow:one", "loads:x"],
)
@pytest.mark.parametrize("scopes", [SCOPES, ("admin",)])
async def test_callers_elsewhere_name_listed_models_alone(host, model, scopes):
    """A model is listed by its whole name or it is refused, for administrators elsewhere, too; empty means the default."""
    if model == "":
        assert (await host.invoke("turns.start", {}, caller(*scopes))).model == "replay"
        return
    error = await refusal(host, caller(*scopes), model=model, request="x")
    assert (type(error), error.code) == (CallRefused, "model_not_allowed")
    assert (await host.call("turns.list")).turns == ()


async def test_without_listed_models_callers_elsewhere_start_nothing(tmp_path, models):
    """An empty list refuses, whatever the setting `model` is; the account itself starts turns."""
    host = make(tmp_path, models, models=())
    assert (await refusal(host)).code == "model_not_allowed"
    assert (await refusal(host, model="replay")).code == "model_not_allowed"
    assert (await host.call("turns.start", bundle=HELLO)).model == "replay"
    await host.turn_runs.wait()


async def test_the_default_is_listed_or_not_used(tmp_path):
    """Where the setting `model` is not listed, callers elsewhere get the first that is."""
    settings = Settings(state_dir=tmp_path / "s", index_dir=tmp_path / "i", bundle=HELLO, model="openai:dear")
    host = Host(settings, entry_points=False)
    assert (await host.invoke("turns.start", {}, caller())).model == "replay"
    await host.turn_runs.wait()


async def test_other_words_of_the_host_stay_the_hosts(host):
    """Bundles by path and other consumers are refused as everywhere; `model` alone is judged by the operation."""
    assert dict(host_words(OPERATIONS["turns.start"])) == {"bundle": "machine", "consumer": "view"}
    assert "model" in host_words(OPERATIONS["solver.run"])
    for words in ({"bundle": str(HELLO)}, {"consumer": "solver.react.decision"}):
        assert (await refusal(host, **words)).code == "not_yours_to_say"
    assert (await host.invoke("turns.start", {"consumer": "bot"}, caller())).consumer == "bot"


@pytest.mark.parametrize("name", ["turns.start", "turns.stop"])
async def test_starting_and_stopping_need_the_scope_to_run(host, name):
    """Who reads work does not run it; a bundle's reader neither."""
    for scopes in (("work:read",), ("skills:read",)):
        with pytest.raises(CallRefused) as refused:
            await host.invoke(name, {}, caller(*scopes))
        assert refused.value.details["scope"] == "work:run"


async def test_turns_of_others_are_not_there(host):
    """Another agent neither watches nor stops a turn, and no id of a path is one."""
    turn_id = await start(host, model="slow:one", request="Wait")
    for name in ("turns.watch", "turns.stop", "turns.get"):
        for wanted in (turn_id, "../" + turn_id, "nothing"):
            context = caller(agent="other") if wanted == turn_id else caller()
            with pytest.raises(NotFound):
                await host.invoke(name, {"turn_id": wanted}, context)
    assert host.turns.running("local", turn_id)


@pytest.fixture
def gated(tmp_path):
    """A bundle with a skill of each kind that a gate tells apart."""
    heads = {"open": "", "denied": "", "veiled": "disclosure: hidden\n", "people": "disable-model-invocation: true\n"}
    for name, head in heads.items():
        folder = tmp_path / "gated" / "skills" / "public" / name
        folder.mkdir(parents=True)
        text = f"---\nname: {name}\ndescription: Skill {name}.\n{head}---\nBODY of {name}\n"
        (folder / "SKILL.md").write_text(text)
    rules = "agents_config:\n  bot:\n    disabled: [public.denied]\n"
    (tmp_path / "gated" / "skills_descriptor.yaml").write_text(rules)
    return tmp_path / "gated"


async def test_the_policy_of_the_caller_holds_in_its_turns(tmp_path, gated, models):
    """What the agent may not start is loaded neither by the caller nor by the model; all else is."""
    turns = {"models": tuple(f"loads:{name}" for name in ("open", "denied", "people"))}
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "i", bundle=gated, turns=turns)
    host = Host(settings, plugins=(models,), entry_points=False)
    for ref in ("public.denied", "public.veiled", "public.people", "denied", "../open"):
        assert (await refusal(host, request="x", skills=(ref,))).code == "unknown_skill"
    for name in ("denied", "people", "open"):
        turn_id = await start(host, model=f"loads:{name}", request="x")
        end, events = await watch(host, turn_id)
        assert end.skills == (("public.open",) if name == "open" else ())
        assert ("BODY of" in "".join(event.model_dump_json() for event in events)) == (name == "open")
    turn_id = await start(host, model="loads:open", request="x", skills=("public.open",))
    assert (await watch(host, turn_id))[0].skills == ("public.open",)


def archived(name):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes one page.\n---\nUPLOADED body.\n")
    return base64.b64encode(made.getvalue()).decode()


async def test_uploaded_skills_are_in_turns_until_they_are_disabled(tmp_path, models):
    """A turn elsewhere has the project's skills as they are in use, of a project without a bundle, too."""
    turns = {"models": ("loads:brief",)}
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "i", turns=turns)
    host = Host(settings, plugins=(models,), entry_points=False)
    await host.call("projects.create", project="acme")
    member = caller(project="acme")
    editor = caller("skills:write", project="acme")
    await host.invoke("project_skills.upload", {"data": archived("brief")}, editor)
    turn_id = await start(host, member, request="x")
    assert (await watch(host, turn_id, member))[0].skills == ("public.brief",)
    await host.invoke("project_skills.patch", {"skill": "brief", "enabled": False}, editor)
    turn_id = await start(host, member, request="x")
    assert (await watch(host, turn_id, member))[0].skills == ()
    with pytest.raises(NotFound):
        await watch(host, turn_id)
    with pytest.raises(BadRequest) as refused:
        await start(host, member)
    assert refused.value.code == "request_missing"
    await host.storage.aclose()


async def test_turns_that_are_not_kept_are_not_started(tmp_path):
    """They could not be watched: the operator is told what to do."""
    error = await refusal(make(tmp_path, keep=False))
    assert (error.code, error.who) == ("turns_not_kept", "operator")
    (tmp_path / "state").write_text("in the way")
    assert (await refusal(make(tmp_path))).code == "turns_not_kept"


STARTER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_turn_runs import Models, make, start

async def main():
    host = make(Path(sys.argv[1]), Models())
    print(await start(host, model="slow:one", request="Wait"), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


async def test_a_turn_that_dies_with_its_process_is_broken_off(host, tmp_path):
    """Another process sees it run and cannot stop it; a watch of it ends when its process is killed."""
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", STARTER, str(tmp_path), folder]
    other = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    turn_id = (await other.stdout.readline()).decode().strip()
    with pytest.raises(Conflict) as refused:
        await host.invoke("turns.stop", {"turn_id": turn_id}, caller())
    assert refused.value.code == "turn_elsewhere"
    watching = asyncio.create_task(watch(host, turn_id, timeout_sec=60))
    end, _ = await watch(host, turn_id, timeout_sec=0.1)
    assert end.status == "running"
    other.kill()
    end, events = await watching
    await other.wait()
    assert (end.status, end.watch_timeout, end.request, end.agent) == ("broken_off", False, "Wait", "bot")
    assert events[0].type == "turn.started"
    row = (await host.call("turns.list")).turns[0]
    assert (row.turn_id, row.status) == (turn_id, "broken_off")
    assert (await host.invoke("turns.stop", {"turn_id": turn_id}, caller())).status == "broken_off"


async def test_a_caller_who_goes_before_the_turn_begins_takes_it_along(host):
    """Nobody knows the id of such a turn: it ends with the call."""
    starting = asyncio.create_task(start(host, model="slow:one", request="Wait"))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await host.turn_runs.wait()
    assert {row.status for row in (await host.call("turns.list")).turns} <= {"failed"}


async def test_a_hostile_transcript_ends_a_watch(host):
    """Lines that are no events are passed over, and a transcript that is taken away ends the watch."""
    turn_id = await start(host)
    await host.turn_runs.wait()
    path = host.turns.folder("local") / f"{turn_id}.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([rows[0], b"\xff\0\n", b"[" * 100_000 + b"\n", b'{"type": "x"}\n', b"{}\n", *rows[1:], b'{"ty'])
    )
    _, events = await watch(host, turn_id)
    assert [event.seq for event in events] == list(range(1, len(rows)))
    host.turns.remove("local", turn_id)
    with pytest.raises(NotFound):
        await watch(host, turn_id)
