"""Subjects, and who calls by them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app.operations import OPERATIONS
from kdskills.app.settings import BusSettings
from kdskills.doors.nats.messages import (
    CallAddress,
    StreamsDisagree,
    filters,
    identity_of,
    overlaps,
    parse,
    plan,
    streams_with,
    tool_of,
)
from kdskills.errors import CallRefused

TOKENS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(TOKENS, TOKENS, TOKENS, st.sampled_from(["cmd", "req"]), st.sampled_from(sorted(OPERATIONS)))
def test_every_operation_has_one_subject(version, project, channel, kind, operation):
    """A subject leads back to what it was made of."""
    address = CallAddress(version, project, channel, kind, operation)
    assert parse(address.subject(kind)) == address


def test_no_two_operations_share_a_subject():
    """Subjects tell operations apart."""
    assert len({tool_of(name) for name in OPERATIONS}) == len(OPERATIONS)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "cg.v1.p.c.cmd.tool.skills",
        "cg.v1.p.c.cmd.tool.list",
        "cg.v1.p.c.cmd.tool.other.list",
        "cg.v1.p.c.cmd.tool.kd.skills.list",
        "cg.v1.p.c.evt.tool.skills.list",
        "cg.v1.p.c.cmd.agent.skills.list",
        "xx.v1.p.c.cmd.tool.skills.list",
        "cg.v1..c.cmd.tool.skills.list",
        "cg.v1.p.c.cmd.tool.skills.",
        "cg.v1.p.*.cmd.tool.skills.list",
        "cg.v1.p.c.cmd.tool.skills.>",
        "cg.v1.é.c.cmd.tool.skills.list",
        "cg.v1.p c.c.cmd.tool.skills.list",
        f"cg.v1.{'p' * 65}.c.cmd.tool.skills.list",
    ],
)
def test_other_subjects_mean_nothing(subject):
    """What is no subject of an operation is none."""
    assert parse(subject) is None


def caller(project="local", channel="main", **settings):
    return identity_of(CallAddress("v1", project, channel, "cmd", "skills.list"), BusSettings(**settings))


def test_the_subject_and_settings_say_who_calls():
    """Project and channel are the subject's; agent and scopes the operator's; never the local account."""
    found = caller(channel="web", channels={"web": "writer"}, scopes=("skills:read",))
    assert (found.project, found.agent, found.alias, found.door) == ("local", "writer", "web", "nats")
    assert (found.scopes, found.local) == (frozenset({"skills:read"}), False)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"project": "other"}, "project_not_open"),
        ({"channel": "x", "channels": {"web": "writer"}}, "channel_not_open"),
        ({"channel": "local"}, "channel_not_open"),
    ],
    ids=["project", "channel", "account"],
)
def test_what_is_not_open_is_refused(given, code):
    """Projects and channels nobody opened are refused; a channel's name does not make it the local account."""
    with pytest.raises(CallRefused) as caught:
        caller(**given)
    assert caught.value.code == code


def test_the_operator_may_say_otherwise():
    """A setting of its own makes a channel the local agent."""
    assert caller(channel="local", channels={"local": "local"}).agent == "local"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.c", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("*.b", "a.*", True),
        (">", "a", True),
        ("a.*", "a.b.c", False),
        ("cg.>", "cg.v1.*.*.cmd.tool.skills.>", True),
        ("cg.v1.p.*.evt.>", "cg.v1.*.*.cmd.tool.skills.>", False),
    ],
)
def test_overlaps(one, other, expected):
    """Two patterns overlap when one subject matches both, whichever comes first."""
    assert (overlaps(one, other), overlaps(other, one)) == (expected, expected)


SKILLS, OTHERS = filters("v1", "cmd")


def test_streams_that_are_there_are_used():
    """One stream is read as far as it goes; none is none."""
    assert plan({}, "v1") is None
    assert plan({"X": ["orders.>"]}, "v1") is None
    assert plan({"ALL": ["cg.>"]}, "v1").subjects == (SKILLS, OTHERS)
    assert plan({"TOOLS": [SKILLS], "X": ["orders.>"]}, "v1").subjects == (SKILLS,)
    assert streams_with({"TOOLS": [SKILLS]}, OTHERS) == []


def test_commands_in_two_streams_are_refused():
    """No one consumer reads two streams."""
    with pytest.raises(StreamsDisagree, match="A, B"):
        plan({"A": [SKILLS], "B": [OTHERS]}, "v1")
