"""Logs are JSON lines with the request's id and without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app.logs import MASK, in_request, json_logs, without_secrets

TOKEN = "kd_0123456789abcdef_" + "Ab-_" * 10 + "xyz"


def logged(*args, name="kdskills.test", level=logging.INFO, **more):
    """Return the lines that one call writes."""
    out = io.StringIO()
    with json_logs(out):
        logging.getLogger(name).log(level, *args, **more)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_says_when_what_and_where():
    """Time, level, logger and message are always there."""
    (line,) = logged("took %d ms", 3, extra={"facts": {"path": "/x", "status": 200}})
    assert (line["level"], line["logger"], line["message"]) == ("info", "kdskills.test", "took 3 ms")
    assert (line["path"], line["status"], line["time"].endswith("+00:00")) == ("/x", 200, True)


def test_facts_never_replace_what_a_line_is():
    """A fact called `message` does not forge the message."""
    (line,) = logged("true", extra={"facts": {"message": "forged", "level": "debug"}})
    assert (line["message"], line["level"]) == ("true", "info")


async def test_requests_keep_their_ids_apart():
    """Fifty requests at one time each write their own id."""
    out = io.StringIO()

    async def one(number):
        with in_request(f"r{number}"):
            await asyncio.sleep(0)
            logging.getLogger("kdskills.test").info("m%d", number)

    with json_logs(out):
        await asyncio.gather(*(one(number) for number in range(50)))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert {(line["request_id"], line["message"]) for line in lines} == {(f"r{n}", f"m{n}") for n in range(50)}


def test_a_forged_line_stays_one_line():
    """Line breaks of what others sent cannot begin a line of their own."""
    (line,) = logged("path %s", 'x\n{"level": "error"}')
    assert line["message"] == 'path x\n{"level": "error"}'


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"token {TOKEN} refused", TOKEN),
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("postgresql://kd:s3cr3t-word@db/kd is away", "s3cr3t-word"),
        ("password=hunter2222 given", "hunter2222"),
        ('{"api_key": "sk-123456789"}', "sk-123456789"),
        ("KDSKILLS_E2B_API_KEY=e2b_abcdef123", "e2b_abcdef123"),
    ],
)
def test_secrets_are_masked(text, secret):
    """What looks like a secret is not written, in messages, facts and tracebacks."""
    (line,) = logged("%s", text, extra={"facts": {"given": text}}, exc_info=ValueError(text))
    assert MASK in line["message"]
    assert secret not in json.dumps(line)


def test_a_tokens_public_id_stays():
    """Audit rows name it, so the log does."""
    assert without_secrets(TOKEN) == f"kd_0123456789abcdef_{MASK}"


@given(st.text(alphabet="abcXYZ012-_", min_size=43, max_size=43))
def test_no_token_is_ever_written(secret):
    """Whatever a token's secret is, and wherever it stands, it is masked."""
    text = f"x kd_0123456789abcdef_{secret} y"
    assert secret not in without_secrets(text)


def test_others_are_heard_from_warnings_on():
    """Libraries' chatter is left out, and their warnings are not."""
    assert logged("chatter", name="alembic") == []
    assert [line["level"] for line in logged("beware", name="alembic", level=logging.WARNING)] == ["warning"]


def test_logging_is_as_before_afterwards():
    """Nothing of it stays when the service ends."""
    before = list(logging.getLogger().handlers), logging.getLogger("kdskills").level
    logged("x")
    assert (list(logging.getLogger().handlers), logging.getLogger("kdskills").level) == before
