"""Cassettes: their form, and the comparison of a request with what was recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ReplayError
from kdskills.models import Message, ModelRequest, ToolCall, ToolSpec
from kdskills.models.cassette import (
    Cassette,
    CassetteEntry,
    RecordedCall,
    RecordedReply,
    When,
    check_fit,
    describe,
    parse_cassette,
    read_cassette,
    request_digest,
    stable_text,
    write_cassette,
)

LOAD = ToolSpec("skills_load", "Load skills.", {"type": "object"}, "skills.load")

SPEC_EXAMPLE = """
schema: kdskills.cassette/1
match: shape                      # exact | shape | order
replies:
  - {role: solver.react.decision, when: {user: "Which region grew?", results: [], active: []},
     reply: {calls: [{tool: skills.load, arguments: {names: [sales]}}], usage: {input: 900, output: 21}}}
"""


def request(*messages, active=(), tools=(LOAD,), instructions="rules", role="solver.react.decision"):
    return ModelRequest(role, instructions, messages or (Message("user", "Which region grew?"),), tools, tuple(active))


def entry(reply=None, **when):
    return CassetteEntry(role="solver.react.decision", when=When(**when), reply=reply or RecordedReply(text="ok"))


def test_the_form_of_the_specification_is_read():
    """The cassette printed in the specification is one."""
    cassette = parse_cassette(SPEC_EXAMPLE)
    reply = cassette.replies[0].reply.to_reply(1, "replay")
    assert (cassette.match, reply.calls, reply.usage.total) == (
        "shape",
        (ToolCall("call_1_1", "skills.load", '{"names": ["sales"]}'),),
        921,
    )


def test_a_demo_may_say_its_request_files_and_expectations():
    """A demo file holds more than replies, and all of it is kept."""
    text = "schema: kdskills.cassette/1\nrequest: Do it\nfiles: [data/a.csv]\nexpect: {skills: [acme.brief]}\nreplies: []\n"
    cassette = parse_cassette(text)
    assert (cassette.request, cassette.files, cassette.expect) == ("Do it", ("data/a.csv",), {"skills": ["acme.brief"]})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("schema: kdskills.cassette/2\nreplies: []\n", "schema"),
        ("replies: []\n", "schema"),
        ("[]", "top"),
        ("", "top"),
        ("schema: kdskills.cassette/1\nmatch: maybe\n", "match"),
        ("schema: kdskills.cassette/1\nreplys: []\n", "replys"),
        ("schema: kdskills.cassette/1\nreplies: [{role: a, reply: {txt: b}}]\n", "replies/0/reply/txt"),
    ],
)
def test_what_is_no_cassette_is_refused_with_the_place(text, place):
    """A malformed cassette names the place that is wrong."""
    with pytest.raises(ReplayError) as caught:
        parse_cassette(text)
    assert (caught.value.code, caught.value.details["place"]) == ("cassette_invalid", place)


def test_broken_yaml_and_missing_files_are_replay_errors(tmp_path):
    """Neither YAML errors nor file errors escape as themselves."""
    with pytest.raises(ReplayError, match="is not YAML"):
        parse_cassette("a: [")
    with pytest.raises(ReplayError) as caught:
        read_cassette(tmp_path / "none.yaml")
    assert caught.value.code == "cassette_missing"


def test_yaml_tags_build_no_objects():
    """A cassette cannot run code."""
    with pytest.raises(ReplayError):
        parse_cassette("!!python/object/apply:os.system ['true']")


@pytest.mark.parametrize(
    ("when", "field"),
    [({"user": "Other?"}, "user"), ({"results": ("skills.load",)}, "results"), ({"active": ("sales",)}, "active")],
)
def test_each_field_of_the_shape_is_compared(when, field):
    """Another user text, other results or other active skills diverge, and the error says which."""
    with pytest.raises(ReplayError) as caught:
        check_fit(entry(**when), request(), "shape", 3)
    assert (caught.value.code, caught.value.details["index"], caught.value.details["field"]) == (
        "replay_diverged",
        3,
        field,
    )


def test_a_field_left_out_is_not_compared():
    """A hand-written cassette need not say everything."""
    check_fit(entry(), request(active=("anything",)), "shape", 0)


def test_order_compares_nothing():
    """`match: order` takes the replies as they come."""
    check_fit(entry(RecordedReply(calls=(RecordedCall(tool="gone"),)), user="Other?"), request(), "order", 0)


def test_a_called_tool_must_be_offered_in_either_spelling():
    """A recorded call of a tool that is not offered diverges; the dotted spelling of an offered one does not."""
    check_fit(entry(RecordedReply(calls=(RecordedCall(tool="skills.load"),))), request(), "shape", 0)
    with pytest.raises(ReplayError) as caught:
        check_fit(entry(RecordedReply(calls=(RecordedCall(tool="exec.python"),))), request(), "shape", 0)
    assert caught.value.details["field"] == "tools"


def test_results_say_tool_and_outcome():
    """Results so far are compared by tool and outcome, whatever their text."""
    messages = (
        Message("user", "u"),
        Message("assistant", calls=(ToolCall("1", "skills_load", "{}"), ToolCall("2", "skills_load", "{}"))),
        Message("tool", "one", call_id="1", tool="skills_load"),
        Message("tool", "two", call_id="2", tool="skills_load", ok=False),
    )
    assert describe(request(*messages)).results == ("skills.load", "skills.load failed")
    check_fit(entry(results=("skills_load", "skills.load failed")), request(*messages), "shape", 0)
    check_fit(
        entry(results=[["skills.load", True], {"tool": "skills.load", "ok": False}]), request(*messages), "shape", 0
    )


def test_exact_compares_instructions_and_messages_too():
    """`match: exact` sees a change of the instructions that the shape does not."""
    recorded = When(**describe(request(), exact=True).model_dump())
    check_fit(CassetteEntry(role="r", when=recorded, reply=RecordedReply()), request(), "exact", 0)
    with pytest.raises(ReplayError) as caught:
        check_fit(
            CassetteEntry(role="r", when=recorded, reply=RecordedReply()), request(instructions="new"), "exact", 0
        )
    assert caught.value.details["field"] == "digest"


def test_the_digest_forgets_ids_times_and_workspace_paths():
    """Two runs that differ only in what is made anew each time have one digest."""

    def run(call_id, text):
        return request(
            Message("user", "u"),
            Message("assistant", calls=(ToolCall(call_id, "skills_load", "{}"),)),
            Message("tool", text, call_id=call_id, tool="skills_load"),
        )

    one = run("a1", '{"duration_ms": 12, "at": "2026-01-02T03:04:05.6Z", "path": "/tmp/x/kdskills-turn-abc/out.txt"}')
    two = run("zz", '{"duration_ms": 9, "at": "2027-01-02T03:04:05Z", "path": "/var/kdskills-turn-qrs/out.txt"}')
    assert request_digest(one) == request_digest(two)
    assert request_digest(one) != request_digest(run("a1", "another"))


@given(st.text())
def test_stable_text_is_idempotent(text):
    """Replacing what changes twice is replacing it once."""
    assert stable_text(stable_text(text)) == stable_text(text)


@given(st.text(max_size=40), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_a_written_cassette_reads_back_equal(text, arguments):
    """Whatever a model says survives the file."""
    import tempfile
    from pathlib import Path

    reply = RecordedReply(text=text, calls=(RecordedCall(tool="t", arguments=arguments),))
    cassette = Cassette(
        schema_="kdskills.cassette/1", replies=(CassetteEntry(role="r", when=When(user=text), reply=reply),)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        write_cassette(path, cassette)
        assert read_cassette(path) == cassette
        assert [p.name for p in Path(folder).iterdir()] == ["c.yaml"]
