"""Tokens that are changed: narrower and never wider, from the next request on; and when each was last used."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES, Identity, TokenLimits
from kdskills.app.operations import Context
from kdskills.app.tokens import Tokens
from kdskills.doors.cli.main import build_cli
from kdskills.errors import BadRequest, CallRefused, Conflict, NotFound
from tests.project_rows import audit

BOTH = pytest.mark.parametrize(
    "host", ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))], indirect=True
)
NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
async def host(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """A Host with a state folder of its own, over the database the test is parametrized with, else SQLite."""
    url = None
    if getattr(request, "param", "sqlite") == "postgresql":
        url = request.getfixturevalue("cluster").create(f"kd_{secrets.token_hex(6)}")
    made = Host(Settings(state_dir=tmp_path / "state", bundle=None, database_url=url), entry_points=False)
    yield made
    await made.storage.aclose()


def boss(**facts: Any) -> Context:
    """Return the context of an administrator of project `acme`."""
    identity = Identity(project="acme", agent="boss", scopes=frozenset({"admin"}), door="http", token="0" * 16)
    return Context(identity=replace(identity, **facts))


@BOTH
async def test_a_token_is_narrowed_from_the_next_request_on(host: Host) -> None:
    """Scopes, operations, limits, end and label become what was said; all else stays, and the secret still opens it."""
    made, text = await host.tokens.create("acme", "writer", ["skills:read", "work:run"], tools=["web"], who="op")
    words = {"scopes": ["skills:read"], "allowed_tools": ["skills.list"], "requests_per_minute": 5, "label": "less"}
    answer = await host.invoke("tokens.change", {"id": made.id, "expires_in_days": 1, **words}, boss())
    assert (answer.scopes, answer.allowed_tools, answer.label) == (("skills:read",), ("skills.list",), "less")
    found = await host.tokens.authenticate(text)
    assert found is not None
    assert found.expires_at is not None
    assert found == replace(
        made.identity,
        scopes=frozenset({"skills:read"}),
        allowed_tools=frozenset({"skills.list"}),
        limits=TokenLimits(requests_per_minute=5),
        expires_at=found.expires_at,
    )
    row = (await audit(host.projects, "acme"))[0]
    assert (row.action, row.subject, row.agent) == ("token.change", made.id, "boss")
    assert row.facts == {"changed": ["allowed_tools", "expires_at", "label", "requests_per_minute", "scopes"]}


@BOTH
@pytest.mark.parametrize(
    ("words", "field"),
    [
        ({"scopes": ["skills:read", "work:run"]}, "scopes"),
        ({"scopes": ["admin"]}, "scopes"),
        ({"allowed_tools": ["skills.list", "tokens.create"]}, "allowed_tools"),
        ({"requests_per_minute": 11}, "requests_per_minute"),
        ({"concurrent_work": 3}, "concurrent_work"),
        ({"body_bytes": 2000}, "body_bytes"),
        ({"expires_in_days": 3}, "expires_at"),
    ],
)
async def test_nothing_widens_a_token(host: Host, words: dict[str, Any], field: str) -> None:
    """More of anything is refused by its name, also for the machine's own account, and leaves the token as it was."""
    limits = TokenLimits(requests_per_minute=10, concurrent_work=2, body_bytes=1000)
    end = datetime.now(UTC) + timedelta(days=2)
    made, text = await host.tokens.create(
        "acme", "a", ["skills:read"], allowed_tools=["skills.list"], limits=limits, expires_at=end, who="op"
    )
    before = await host.tokens.authenticate(text)
    for context in (boss(), Context()):
        with pytest.raises(CallRefused) as refused:
            await host.invoke("tokens.change", {"id": made.id, "label": "more", **words}, context)
        assert (refused.value.code, refused.value.details["fields"]) == ("token_wider", [field])
    assert await host.tokens.authenticate(text) == before
    assert [row.action for row in await audit(host.projects, "acme")] == ["token.create"]


async def test_a_holder_of_admin_may_be_left_with_less(host: Host) -> None:
    """`admin` holds every scope, so that a token of it may be left with some of them, and never gets it back."""
    made, _ = await host.tokens.create("acme", "a", ["admin"], who="op")
    await host.invoke("tokens.change", {"id": made.id, "scopes": sorted(SCOPES - {"admin"})}, boss())
    with pytest.raises(CallRefused):
        await host.invoke("tokens.change", {"id": made.id, "scopes": ["admin"]}, boss())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ({}, "bad_request"),
        ({"scopes": []}, "scope_unknown"),
        ({"scopes": ["everything"]}, "scope_unknown"),
        ({"allowed_tools": ["skills.lst"]}, "tool_unknown"),
        ({"expires_in_days": 0}, "bad_request"),
        ({"requests_per_minute": 0}, "bad_request"),
        ({"person": True}, "bad_request"),
        ({"agent": "other"}, "bad_request"),
        ({"project": "acme", "label": "\0"}, "bad_request"),
    ],
)
async def test_words_no_token_can_have(host: Host, words: dict[str, Any], code: str) -> None:
    """What is out of shape, unknown, or nothing a change may say is refused."""
    made, _ = await host.tokens.create("acme", "a", ["skills:read"], who="op")
    with pytest.raises(BadRequest) as refused:
        await host.invoke("tokens.change", {"id": made.id, **words}, boss())
    assert refused.value.code == code


async def test_whose_tokens_may_be_changed(host: Host) -> None:
    """Another project's, or nobody's, is not found; a revoked one stays as it is; `admin` is what it takes."""
    other, _ = await host.tokens.create("other", "a", ["skills:read"], who="op")
    for word in (other.id, "nobody", "' OR 1=1"):
        with pytest.raises(NotFound):
            await host.invoke("tokens.change", {"id": word, "label": "x"}, boss())
    mine, _ = await host.tokens.create("acme", "a", ["skills:read"], who="op")
    with pytest.raises(CallRefused):
        await host.invoke("tokens.change", {"id": mine.id, "label": "x"}, boss(scopes=SCOPES - {"admin"}))
    await host.tokens.revoke(mine.id, who="op")
    with pytest.raises(Conflict):
        await host.invoke("tokens.change", {"id": mine.id, "label": "x"}, boss())
    assert (await host.invoke("tokens.change", {"id": other.id, "label": "x"}, Context())).label == "x"


async def test_pages_of_the_console_may_keep_tokens(host: Host) -> None:
    """A page of somebody with `admin` makes, lists, narrows and revokes tokens; nobody else's does."""
    page = boss(door="console")
    made = await host.invoke("tokens.create", {"agent": "a", "scopes": ["skills:read"]}, page)
    await host.invoke("tokens.change", {"id": made.id, "label": "x"}, page)
    await host.invoke("tokens.revoke", {"id": made.id}, page)
    assert len((await host.invoke("tokens.list", {}, page)).tokens) == 1
    with pytest.raises(CallRefused):
        await host.invoke("tokens.list", {}, boss(door="console", scopes=SCOPES - {"admin"}))


@BOTH
async def test_last_use_is_written_once_a_minute(host: Host) -> None:
    """A token tells when it was last used; of many requests in a minute one writes, also over several processes."""
    clock = [NOW]
    one, two = (Tokens(host.storage.database, lambda: clock[0]) for _ in range(2))
    _, text = await one.create("acme", "a", ["skills:read"], who="op")
    assert (await one.list("acme"))[0].last_used_at is None
    statements: list[str] = []

    def note(*arguments: Any) -> None:
        statements.append(arguments[2])

    sa.event.listen(host.storage.database.engine, "before_cursor_execute", note)
    await asyncio.gather(*(tokens.authenticate(text) for tokens in (one, two) for _ in range(10)))
    assert sum(words.startswith("UPDATE") for words in statements) <= 2
    assert (await two.list("acme"))[0].last_used_at == NOW
    statements.clear()
    for seconds in (1, 30, 59):
        clock[0] = NOW + timedelta(seconds=seconds)
        await one.authenticate(text)
    assert [words for words in statements if words.startswith("UPDATE")] == []
    clock[0] = NOW + timedelta(seconds=61)
    await two.authenticate(text)
    assert (await one.list("acme"))[0].last_used_at == clock[0]


async def test_only_what_opens_is_a_use(host: Host) -> None:
    """A wrong secret, and a token that is revoked, are no uses."""
    made, text = await host.tokens.create("acme", "a", ["skills:read"], who="op")
    await host.tokens.authenticate(text[:-1] + ("A" if text[-1] != "A" else "B"))
    await host.tokens.revoke(made.id, who="op")
    await host.tokens.authenticate(text)
    assert (await host.tokens.list("acme"))[0].last_used_at is None


async def test_a_database_that_takes_no_writes_keeps_nobody_out(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """Where the use cannot be kept, as on a full disk, the caller is let in and the log says so, once a minute."""
    _, text = await host.tokens.create("acme", "a", ["skills:read"], who="op")
    sa.event.listen(host.storage.database.engine, "connect", _reads_only)
    host.storage.database.engine.dispose()
    assert await host.tokens.authenticate(text) is not None
    assert await host.tokens.authenticate(text) is not None
    assert len([record for record in caplog.records if "is not kept" in record.getMessage()]) == 1


def _reads_only(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA query_only = ON").close()


def test_the_command_narrows_and_leaves_the_rest(tmp_path: Path) -> None:
    """Only what was said changes: without `--tool` a token may run what it could."""
    host = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    cli, runner = get_command(build_cli(host)), CliRunner()
    assert runner.invoke(cli, ["token", "create", "--label", "x"]).exit_code == 0
    listed = runner.invoke(cli, ["token", "list"], env={"COLUMNS": "300"})
    token = listed.stdout.splitlines()[-1].split()[0]
    done = runner.invoke(cli, ["token", "change", token, "--scope", "skills:read", "--days", "2"])
    assert (done.exit_code, f"token {token} has skills:read until " in done.stdout) == (0, True), done.output
    found = asyncio.run(host.tokens.list())[0]
    assert (found.identity.allowed_tools, found.label) == (None, "x")
    assert runner.invoke(cli, ["token", "change", token]).exit_code != 0
    assert runner.invoke(cli, ["token", "change", token, "--scope", "admin", "--json"]).exit_code != 0
