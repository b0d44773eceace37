"""Replaying and recording providers."""

import pytest

from kdskills.builtin.models import decisions, record, replay
from kdskills.builtin.models.record import RecordingModel
from kdskills.builtin.models.replay import ReplayModel, open_replay
from kdskills.errors import BadRequest, ReplayError
from kdskills.hooks import Register
from kdskills.models import Message, ModelReply, ModelRequest, TextDelta, ToolSpec, Usage, open_model
from kdskills.models.cassette import Cassette, parse_cassette, read_cassette
from kdskills.testing.models import ScriptedModel, call, call_raw, say, together

LOAD = ToolSpec("skills_load", "Load skills.", {"type": "object"}, "skills.load")


def request(text="u", role="solver.react.decision", active=()):
    return ModelRequest(role, "rules", (Message("user", text),), (LOAD,), tuple(active))


def cassette(*entries, match="shape"):
    return Cassette.model_validate({"schema": "kdskills.cassette/1", "match": match, "replies": list(entries)})


def entry(text, role="solver.react.decision", **when):
    return {"role": role, "when": when, "reply": {"text": text}}


async def test_replies_are_used_in_order_per_role():
    """A generator's replies and the decisions do not mix."""
    model = ReplayModel(cassette(entry("a"), entry("g", role="gen"), entry("b")))
    got = [
        (await model.reply(request(role=role))).text
        for role in ("gen", "solver.react.decision", "solver.react.decision")
    ]
    await model.aclose()
    assert got == ["g", "a", "b"]


async def test_one_request_too_many_is_exhausted():
    """There is no fallback when the recording is at its end."""
    with pytest.raises(ReplayError) as caught:
        await ReplayModel(cassette()).reply(request())
    assert caught.value.code == "replay_exhausted"


async def test_leftover_replies_are_told_at_the_end_and_only_once():
    """A recording that holds more than the run asked for is no fit."""
    model = ReplayModel(cassette(entry("a"), entry("b")))
    await model.reply(request())
    with pytest.raises(ReplayError) as caught:
        await model.aclose()
    await model.aclose()
    assert (caught.value.code, caught.value.details["entries"]) == ("replay_unused", [1])


async def test_divergence_is_loud_and_uses_nothing_up():
    """Another question gets no answer."""
    model = ReplayModel(cassette(entry("a", user="this")))
    with pytest.raises(ReplayError) as caught:
        await model.reply(request("that"))
    assert caught.value.details | {} == {"index": 0, "field": "user", "expected": "this", "got": "that"}
    assert (await model.reply(request("this"))).text == "a"


async def test_a_replayed_stream_ends_with_the_reply():
    """Streaming a recording gives its text, then the whole reply."""
    items = [item async for item in ReplayModel(cassette(entry("a"))).stream(request())]
    assert (items[0], items[-1].text) == (TextDelta("a"), "a")


def test_replay_needs_a_file():
    """`replay` alone is for bundles with a demo."""
    with pytest.raises(BadRequest):
        open_replay("")


async def test_a_recording_replays_equal(tmp_path):
    """What was recorded answers the same requests the same way."""
    path = tmp_path / "deep" / "cassette.yaml"
    done = say("done \u0085 é", usage=Usage(9, 8, 3, 2, 1))
    model = RecordingModel(ScriptedModel([call("skills_load", names=["sales"]), done]), path)
    first = await model.reply(request())
    items = [item async for item in model.stream(request("v", active=["sales"]))]
    await model.aclose()
    again = ReplayModel(read_cassette(path))
    assert await again.reply(request()) == first
    assert await again.reply(request("v", active=["sales"])) == items[-1]
    assert again.replayed is True
    assert model.replayed is False


async def test_a_recording_holds_no_secret(tmp_path):
    """Values of a call's env are masked, also where the text repeats them."""
    path = tmp_path / "c.yaml"
    replies = [
        together(say("using sesame-open"), call("skills_run_script", path="scripts/a.py", env={"KEY": "sesame-open"})),
        call_raw("skills_run_script", '{"env": sesame-open'),
    ]
    model = RecordingModel(ScriptedModel(replies), path)
    await model.reply(request())
    await model.reply(request("it was sesame-open"))
    assert "sesame-open" not in path.read_text()
    assert read_cassette(path).replies[1].when.user == "it was ***"


async def test_prefixes_nest():
    """`record:` and `json:` find the provider they wrap in the same register."""
    register = Register("model")
    for plugin in (record, replay, decisions):
        plugin.kdskills_register_models(register)
    register("fake", lambda rest: ScriptedModel([say(rest)]))
    opened = open_model(register, "record:json:fake:x>out.yaml")
    assert (opened.name, str(opened.path)) == ("json:scripted", "out.yaml")
    assert str(open_model(register, "record:fake:x").path) == "recording.yaml"


async def test_the_scripted_model_fails_alike():
    """Too few and too many replies are the errors of a recording."""
    model = ScriptedModel([say("a"), RuntimeError("boom"), lambda asked: say(asked.role)], roles={"gen": [say("g")]})
    assert (await model.reply(request())).text == "a"
    with pytest.raises(RuntimeError):
        await model.reply(request())
    with pytest.raises(ReplayError, match="2 replies"):
        await model.aclose()
    assert (await model.reply(request())).text == "solver.react.decision"
    assert (await model.reply(request(role="gen"))).text == "g"
    with pytest.raises(ReplayError) as caught:
        await model.reply(request())
    assert (caught.value.code, len(model.requests)) == ("replay_exhausted", 5)


async def test_scripted_calls_get_ids_of_their_own():
    """Each call of a script can be paired with its result."""
    model = ScriptedModel([together(call("a", x=1), call("b")), call("c")])
    one, two = await model.reply(request()), await model.reply(request())
    assert [c.id for c in one.calls + two.calls] == ["call_1", "call_2", "call_3"]
    assert isinstance(one, ModelReply)


def test_a_parsed_cassette_may_be_empty():
    """A cassette without replies is one; it answers nothing."""
    assert parse_cassette("schema: kdskills.cassette/1\n").replies == ()
