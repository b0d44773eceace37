"""`kdskills mcp published` and `kdskills mcp accept`: what an operator sees and says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES
from kdskills.app.operations import Context
from kdskills.builtin.roots.mcp.listing import McpListing
from kdskills.doors.cli.main import build_cli
from kdskills.errors import CallRefused, Conflict, KdskillsError
from kdskills.hooks import hookimpl
from kdskills.skills import SkillRoot


class FakeRoots:
    """A plugin whose addresses `fake:LABEL` are the test's server."""

    def __init__(self, server):
        self.server = server

    @hookimpl
    def kdskills_open_skill_root(self, uri, base):
        """Open a root over the test's server."""
        if not uri.startswith("fake:"):
            return None
        label = uri.removeprefix("fake:")
        listing = McpListing(label, self.server, base / "mcp" / label)
        return SkillRoot(uri, base / "nowhere", label, "user", namespace=f"mcp-{label}", listing=listing)


@pytest.fixture
def start(tmp_path, server):
    """Make a Host; another one is the next start of the program."""
    bundle = tmp_path / "bundle"
    for name in ("tidy", "odd_name"):
        folder = bundle / "skills" / "public" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}\n---\n\nDo it.\n")
    settings = Settings(
        state_dir=tmp_path / "state",
        index_dir=tmp_path / "index",
        bundle=bundle,
        skill_roots=("fake:acme", "fake:other"),
    )
    return lambda: Host(settings, plugins=[FakeRoots(server)], entry_points=False)


@pytest.fixture
def host(start):
    """The Host of the first start."""
    return start()


@pytest.fixture
def changed(host, server):
    """A Host whose server has other files of one skill than those that were accepted."""
    server.put("skill://a/tidy", guide=b"one", old=b"x")
    server.put("skill://a/sweep")
    assert used(host) == {"mcp-acme.sweep", "mcp-acme.tidy"}
    server.skills["skill://a/tidy"] |= {"guide": b"two", "scripts/[new].py": b"z"}
    del server.skills["skill://a/tidy"]["old"]
    return host


def used(host):
    """Return which of the server's skills a program has."""
    return {name for name in host.subsystem(None).registry if name.startswith("mcp-acme")}


def run(host, *words):
    """Run a command line, and return its exit code and what it printed."""
    done = CliRunner().invoke(get_command(build_cli(host)), ["mcp", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_an_operator_accepts_a_change(changed, start):
    """A dry run shows what changed and accepts nothing; the yes takes exactly that, and the skill is back."""
    assert used(start()) == {"mcp-acme.sweep"}
    code, said = run(changed, "accept", "acme", "--dry-run")
    assert code == 0
    assert [line.strip() for line in said.splitlines() if line.startswith("  ")] == [
        "+ scripts/[new].py", "- old", "~ guide",
    ]  # fmt: skip
    assert "would be accepted" in said
    assert used(start()) == {"mcp-acme.sweep"}
    code, said = run(changed, "accept", "acme")
    assert (code, "1 changed skill of acme accepted" in said) == (0, True)
    assert used(start()) == {"mcp-acme.sweep", "mcp-acme.tidy"}
    assert run(changed, "accept", "acme") == (0, "nothing of acme waits for approval\n")


def test_another_server_is_another_matter(changed, start):
    """A yes to one label says nothing of another, even where both are one machine."""
    run(changed, "accept", "other")
    assert used(start()) == {"mcp-acme.sweep"}


def test_as_json(changed):
    """With --json the answer is the operation's, and errors have their one form."""
    code, said = run(changed, "accept", "acme", "--dry-run", "--json")
    answer = json.loads(said)
    (row,) = answer["skills"]
    assert (code, answer["dry_run"], row["full_id"], row["known"]) == (0, True, "mcp-acme.tidy", True)
    assert (row["added"], row["removed"], row["changed"]) == (["scripts/[new].py"], ["old"], ["guide"])
    code, said = run(changed, "accept", "nobody", "--json")
    assert (code, json.loads(said)["error"]["code"]) == (2, "mcp_server_unknown")
    assert "acme, other" in said


def test_a_digest_binds_the_yes_to_what_was_shown(changed, server, start):
    """What changed again after the dry run is not accepted with its digest, and nothing else is."""
    _, said = run(changed, "accept", "acme", "--dry-run", "--json")
    digest = json.loads(said)["digest"]
    server.skills["skill://a/tidy"]["guide"] = b"evil"
    code, said = run(changed, "accept", "acme", "--digest", digest, "--json")
    assert (code, json.loads(said)["error"]["code"]) == (2, "mcp_set_changed")
    assert used(start()) == {"mcp-acme.sweep"}
    server.skills["skill://a/tidy"]["guide"] = b"two"
    assert run(changed, "accept", "acme", "--digest", digest)[0] == 0
    assert used(start()) == {"mcp-acme.sweep", "mcp-acme.tidy"}


def test_a_server_that_is_down_is_told(changed, server):
    """Nothing is accepted from memory."""
    server.down = True
    code, said = run(changed, "accept", "acme", "--json")
    assert (code, json.loads(said)["error"]["code"]) == (4, "mcp_server_failed")


@pytest.mark.parametrize("name", ["mcp.accept", "mcp.published"])
async def test_only_the_operator(changed, name):
    """Callers elsewhere cannot approve, whatever their scopes."""
    context = Context(identity=replace(LOCAL, local=False, scopes=SCOPES, door="http"))
    with pytest.raises(CallRefused) as caught:
        await changed.invoke(name, {"server": "acme"}, context)
    assert caught.value.code == "local_only"


async def test_a_change_between_look_and_yes(changed, server, monkeypatch):
    """A server that answers another thing while the operator's yes is under way gains nothing by it."""
    real = McpListing.accept

    def late(listing, changes):
        server.skills["skill://a/tidy"]["guide"] = b"evil"
        listing.changes()
        real(listing, changes)

    monkeypatch.setattr(McpListing, "accept", late)
    with pytest.raises(Conflict):
        await changed.call("mcp.accept", server="acme")


def test_what_is_not_published_is_shown(host):
    """The listing names what clients see, and what they do not, with the reason and the skill."""
    code, said = run(host, "published", "--json")
    answer = json.loads(said)
    assert (code, [row["uri"] for row in answer["published"]]) == (0, ["skill://public/tidy/SKILL.md"])
    assert (answer["published"][0]["files"], answer["published"][0]["size"] > 0) == (1, True)
    (note,) = answer["diagnostics"]
    assert (note["code"], note["ref"], note["severity"]) == ("mcp_unpublishable", "public.odd_name", "info")
    code, said = run(host, "published")
    assert code == 0
    assert "skill://public/tidy/SKILL.md" in said
    assert "mcp_unpublishable" in said


def test_what_a_project_without_skills_publishes(host):
    """A project nobody knows is an error, not an empty list."""
    code, said = run(host, "published", "--project", "nobody", "--json")
    assert (code, json.loads(said)["error"]["code"]) == (2, "no_bundle")


@pytest.mark.parametrize("given", [{}, {"server": 7}, {"server": "a" * 65}, {"server": "acme", "all": True}])
async def test_arguments_out_of_shape(host, given):
    """Arguments are checked as at every operation."""
    with pytest.raises(KdskillsError) as caught:
        await host.call("mcp.accept", **given)
    assert caught.value.code == "bad_request"
