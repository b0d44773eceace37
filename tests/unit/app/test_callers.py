"""Callers elsewhere get what their project and agent may have, and nothing of this machine."""

from dataclasses import replace

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL, SCOPES, Identity, own_client
from kdskills.app.operations import OPERATIONS, Context
from kdskills.errors import BadRequest, CallRefused


@pytest.fixture
def host(repo):
    """A Host whose project `local` has the press bundle."""
    return Host(Settings(bundle=repo / "bundles/press"), entry_points=False)


#: Tools of the runtime that a caller with the scope `skills:read` holds.
OWN = ("skills.load", "skills.unload", "skills.read")


def remote(**changes):
    """Return the context of a caller with a token."""
    facts = {"agent": "solver.react.decision", "scopes": frozenset({"skills:read"}), "door": "http"} | changes
    return Context(identity=Identity(**facts))


async def test_a_project_needs_no_path(host):
    """Without a bundle named, the project's own skills answer, as the caller's agent sees them."""
    found = await host.invoke("skills.list", {}, remote())
    named = await host.call("skills.list", bundle=host.settings.bundle, consumer="solver.react.decision", tools=OWN)
    listed = [row.full_id for row in named.skills if row.state == "listed"]
    assert [row.full_id for row in found.skills] == listed
    assert (found.bundle, found.visible) == (named.bundle, named.visible)


async def test_a_project_without_bundle_says_so(repo):
    """Nobody sees another project's bundle by accident."""
    bare = Host(Settings(), entry_points=False)
    with pytest.raises(BadRequest) as refused:
        await bare.invoke("skills.list", {}, remote())
    assert refused.value.code == "no_bundle"
    full = Host(Settings(bundle=repo / "bundles/press"), entry_points=False)
    with pytest.raises(BadRequest) as refused:
        await full.invoke("skills.list", {}, remote(project="another"))
    assert refused.value.code == "no_bundle"


@pytest.mark.parametrize("name", sorted(name for name, operation in OPERATIONS.items() if operation.local))
async def test_local_operations_refuse_everybody_else(host, name):
    """Even an administrator elsewhere cannot work on files of this machine; nothing is validated first."""
    with pytest.raises(CallRefused) as refused:
        await host.invoke(name, {"path": "/etc"}, remote(scopes=SCOPES))
    assert refused.value.code == "local_only"


@pytest.mark.parametrize("words", [{"session": "c1"}, {"user": "anna"}])
async def test_a_client_on_this_machine_names_no_conversation(host, words):
    """A model behind a door of this machine goes on with nobody's conversation; the account itself may."""
    with pytest.raises(CallRefused) as refused:
        await host.invoke(
            "solver.run",
            {"bundle": str(host.settings.bundle), "request": "x", **words},
            Context(replace(own_client("author", "local", "local", None), door="mcp")),
        )
    assert refused.value.code == "not_yours_to_say"


@pytest.mark.parametrize("name", ["skills.list", "skills.render"])
async def test_paths_of_this_machine_are_refused_elsewhere(host, name):
    """A path in an argument is not looked at, whether it is there or not."""
    for path in (str(host.settings.bundle), "/nowhere"):
        with pytest.raises(CallRefused) as refused:
            await host.invoke(name, {"bundle": path}, remote())
        assert refused.value.code == "not_yours_to_say"


async def test_no_caller_borrows_anothers_view(host):
    """The consumer comes from the token; only administrators look through other eyes."""
    given = {"consumer": "solver.react.generator"}
    with pytest.raises(CallRefused) as refused:
        await host.invoke("skills.list", given, remote())
    assert refused.value.code == "not_yours_to_say"
    found = await host.invoke("skills.list", given, remote(scopes=frozenset({"admin"})))
    assert found.consumer == "solver.react.generator"


@pytest.mark.parametrize("name", sorted(name for name, operation in OPERATIONS.items() if not operation.local))
async def test_every_operation_wants_its_scope(host, name):
    """Without scopes nothing runs; the refusal names what is missing."""
    with pytest.raises(CallRefused) as refused:
        await host.invoke(name, {}, remote(scopes=frozenset()))
    assert (refused.value.code, refused.value.details["scope"]) == ("scope_missing", OPERATIONS[name].scope)


async def test_allowed_tools_narrow_the_scopes(host):
    """A token for one operation runs that one only."""
    context = remote(allowed_tools=frozenset({"skills.why"}))
    with pytest.raises(CallRefused) as refused:
        await host.invoke("skills.list", {}, context)
    assert refused.value.code == "tool_not_allowed"
    found = await host.invoke("skills.why", {"ref": "press.report"}, context)
    assert found.ref == "press.report"


async def test_places_of_this_machine_stay_here(host):
    """The folder of a skill is told to the own account only."""
    rows = (await host.invoke("skills.list", {}, remote())).skills
    ref = next(row.full_id for row in rows if row.state == "listed")
    assert (await host.invoke("skills.show", {"ref": ref}, remote())).path is None
    assert (await host.invoke("skills.show", {"ref": ref}, Context(identity=LOCAL))).path is not None


async def test_arguments_cannot_pose_as_context(host):
    """Fields named like parts of the context are unknown arguments."""
    for name in ("identity", "emit", "context", "idempotency_key"):
        with pytest.raises(BadRequest) as refused:
            await host.invoke("skills.list", {name: "x"}, remote())
        assert refused.value.details["errors"][0]["path"] == f"/{name}"
