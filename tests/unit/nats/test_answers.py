"""Kept answers: what a call gets that comes again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.errors import BucketNotFoundError, KeyNotFoundError
from pydantic import JsonValue, RootModel

from kdskills.doors.nats.messages import (
    RECORDED,
    AnswerBucket,
    CallAddress,
    CallAnswer,
    CallCommand,
    ResultTooLarge,
    body_of,
    read_command,
)
from kdskills.errors import Conflict

WHERE = CallAddress("v1", "local", "main", "cmd", "tokens.create")


class Bucket:
    """A bucket of the bus, in memory; its key-value store is itself."""

    def __init__(self):
        self.rows = {}
        self.made = 0
        self.there = False

    async def key_value(self, name):
        if not self.there:
            raise BucketNotFoundError
        return self

    async def create_key_value(self, config):
        self.made += 1
        self.there = True
        return self

    async def get(self, key):
        if key not in self.rows:
            raise KeyNotFoundError
        return SimpleNamespace(value=self.rows[key])

    async def put(self, key, value):
        self.rows[key] = value


class Output(RootModel[JsonValue]):
    """An operation's answer."""


def answered(value, call="c1"):
    return CallAnswer(call, WHERE.operation, output=Output(value))


async def test_the_first_answer_is_given_again():
    """A call that comes again gets what it got; another call gets nothing; the bucket is made once."""
    bucket = Bucket()
    answers = AnswerBucket(bucket, "v1")
    assert await answers.answer_of(WHERE, "c1", "body") is None
    await answers.keep(WHERE, answered({"id": 1}), "body")
    again = await answers.answer_of(WHERE, "c1", "body")
    assert again.to_bytes() == answered({"id": 1}).to_bytes()
    assert await answers.answer_of(WHERE, "c2", "body") is None
    assert bucket.made == 1


@pytest.mark.parametrize("field", ["project", "channel"])
async def test_calls_of_others_are_others(field):
    """The same id in another project or channel is another call."""
    bucket = Bucket()
    answers = AnswerBucket(bucket, "v1")
    await answers.keep(WHERE, answered(1), "body")
    other = {"project": WHERE.project, "channel": WHERE.channel, field: "other"}
    assert (
        await answers.answer_of(CallAddress("v1", other["project"], other["channel"], "cmd", "x"), "c1", "body") is None
    )


async def test_another_body_is_a_conflict():
    """An id that was used for something else is told so."""
    answers = AnswerBucket(Bucket(), "v1")
    await answers.keep(WHERE, answered(1), "body")
    with pytest.raises(Conflict) as caught:
        await answers.answer_of(WHERE, "c1", "another")
    assert (caught.value.code, caught.value.details) == ("conflict", {"reason": "idempotency_key"})


async def test_an_answer_too_large_for_the_bus_is_kept_as_such():
    """A call whose answer the bus cannot carry has run: when it comes again it is told the same, and does not run."""
    answers = AnswerBucket(Bucket(), "v1")
    answer, data = answered("x" * 5000).within(1000)
    await answers.keep(WHERE, answer, "body")
    again = await answers.answer_of(WHERE, "c1", "body")
    assert again.to_bytes() == data
    assert isinstance(again.error, ResultTooLarge)


async def test_errors_are_not_kept():
    """A call that was refused may be tried again."""
    bucket = Bucket()
    answers = AnswerBucket(bucket, "v1")
    await answers.keep(WHERE, CallAnswer("c1", WHERE.operation, error=Conflict("no")), "body")
    assert bucket.rows == {}


async def test_a_bucket_that_was_deleted_is_made_again():
    """After `forget` nothing is believed of what was there before."""
    bucket = Bucket()
    answers = AnswerBucket(bucket, "v1")
    await answers.keep(WHERE, answered(1), "body")
    bucket.rows, bucket.there = {}, False
    answers.forget()
    assert await answers.answer_of(WHERE, "c1", "body") is None
    await answers.keep(WHERE, answered(2), "body")
    assert bucket.made == 2


def test_what_is_kept():
    """Operations that change something and have no record of their own; nothing for what is unknown."""
    from kdskills.app.operations import OPERATIONS

    kept = {name for name, row in OPERATIONS.items() if AnswerBucket.keeps(row, {})}
    assert kept & RECORDED == set()
    assert {"tokens.create", "tokens.revoke", "project_skills.upload"} <= kept
    assert not any(OPERATIONS[name].reads for name in kept)
    assert not AnswerBucket.keeps(None, {})
    query = {"provider": "cmd", "query_command": "true", "skill_name": "public.open"}
    assert AnswerBucket.keeps(OPERATIONS["skills.task_status"], query)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), JSON, max_size=4))
def test_a_body_does_not_depend_on_how_it_is_written(arguments):
    """The same arguments are the same body, in whatever order they come; through the wire, too."""
    command = CallCommand(tool_call_id="c", tool_name="tokens.create", arguments=arguments)
    turned = CallCommand(tool_call_id="d", tool_name="tokens.create", arguments=dict(reversed(arguments.items())))
    sent = read_command(WHERE, command.model_dump_json().encode())
    assert body_of(command) == body_of(turned) == body_of(sent)
    assert body_of(command) != body_of(command.model_copy(update={"tool_name": "tokens.revoke"}))
