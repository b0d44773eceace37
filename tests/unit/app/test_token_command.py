"""`kdskills token`: made, listed and revoked from the command line."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.tokens import TOKEN
from kdskills.doors.cli.main import build_cli


@pytest.fixture
def host(tmp_path):
    """A Host with a state folder of its own."""
    made = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    yield made
    asyncio.run(made.storage.aclose())


def kdskills(host, *words, code=0):
    """Run a command."""
    done = CliRunner().invoke(get_command(build_cli(host)), ["token", *words], obj=host)
    assert done.exit_code == code, done.output
    return done


def test_a_token_alone_is_on_standard_output(host):
    """So that a script can keep it; it opens what was asked for and no more."""
    done = kdskills(
        host, "create", "-p", "acme", "-a", "writer", "-s", "skills:read", "-t", "skills.list", "--days", "2"
    )
    text = done.stdout.strip()
    assert TOKEN.fullmatch(text)
    assert "shown this once" in done.stderr
    identity = asyncio.run(host.tokens.authenticate(text))
    assert (identity.project, identity.agent, identity.scopes) == ("acme", "writer", {"skills:read"})
    assert identity.allowed_tools == {"skills.list"}


def test_limits_are_kept(host):
    """What a token may use is said when it is made."""
    words = ("--requests-per-minute", "7", "--concurrent-work", "3", "--body-bytes", "999")
    made = json.loads(kdskills(host, "create", *words, "--json").stdout)
    identity = asyncio.run(host.tokens.authenticate(made["token"]))
    limits = identity.limits
    assert (limits.requests_per_minute, limits.concurrent_work, limits.body_bytes) == (7, 3, 999)
    assert identity.scopes == {"skills:read", "work:run", "work:read"}


def test_the_list_tells_state_and_never_the_text(host):
    """Good, ended and revoked tokens are told apart; secrets are in no list."""
    text = kdskills(host, "create", "--label", "one").stdout.strip()
    listed = json.loads(kdskills(host, "list", "--json").stdout)["tokens"]
    assert [row["label"] for row in listed] == ["one"]
    assert "good" in kdskills(host, "list").stdout
    revoked = kdskills(host, "revoke", listed[0]["id"])
    assert "opens nothing" in revoked.stdout
    assert "revoked" in kdskills(host, "list").stdout
    assert text not in kdskills(host, "list", "--json").stdout
    assert asyncio.run(host.tokens.authenticate(text)) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("create", "-s", "everything"), "scope_unknown"),
        (("create", "-p", "Not A Project"), "project_invalid"),
        (("create", "-a", "a b"), "agent_invalid"),
        (("revoke", "nothing"), "not_found"),
    ],
)
def test_refusals_have_their_code(host, words, error):
    """A wrong word is one clear line, or its JSON form, with the exit code for the caller."""
    assert error in kdskills(host, *words, code=2).stderr
    assert json.loads(kdskills(host, *words, "--json", code=2).stdout)["error"]["code"] == error
