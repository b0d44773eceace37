"""Where a caller's commands run: the policy gate decides first, for every caller and every way in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.work import _mounts
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import write_lock
from kdskills.environments.store import EnvironmentStore
from kdskills.errors import BadRequest, CallRefused, ExecRefused, NotFound
from kdskills.execution import IsolationLevel
from kdskills.session.approval import Denial
from tests.unit.environments.conftest import LoopIndex, index

__all__ = ["index"]
READER = Identity(agent="reader", scopes=frozenset({"work:run"}))
CALL = ("skills.run_cmd", "s", {"command": "frobnicate"})


async def test_a_place_names_skill_version_and_engine(make_host, bundle: Path) -> None:
    """The place says which version of which skill, with what it imports, on which engine."""
    placed = await make_host().work.run_place(READER, "acme.main", *CALL)
    found = placed.placement
    assert (found.engine, found.skill_name, placed.level, placed.has_files) == (
        "wall", "acme.main", IsolationLevel.NAMESPACE, True,
    )  # fmt: skip
    assert {mount.id: mount.tree for mount in found.skills}["acme.main"] == found.version_hash
    assert found.version_hash.startswith("sha256:")


async def test_a_version_is_pinned(make_host, bundle: Path) -> None:
    """Editing the skill afterwards changes neither the version nor the files that will be mounted."""
    placed = await make_host().work.run_place(READER, "acme.main", *CALL)
    script = bundle / "skills" / "acme" / "main" / "scripts" / "run.sh"
    script.write_text("echo edited\n")
    (mount,) = [mount for mount in placed.placement.skills if mount.id == "acme.main"]
    assert (mount.root / "scripts" / "run.sh").read_text() == "echo run\n"
    later = await make_host().work.run_place(READER, "acme.main", *CALL)
    assert later.placement.version_hash != placed.placement.version_hash


async def test_a_pool_mounts_the_originals(make_host, bundle: Path) -> None:
    """Hosts that share the work do not share this host's copies."""
    view = (await make_host().project_skills("local")).subsystem.view("reader")
    skill = view.skills["acme.main"]
    assert [(mount.id, mount.root) for mount in _mounts((skill,), shared=True)] == [
        ("acme.main", bundle / "skills" / "acme" / "main")
    ]
    assert _mounts((skill,), shared=False)[0].root != bundle / "skills" / "acme" / "main"


async def test_packages_of_the_skill_are_placed(make_host, bundle: Path, tmp_path: Path, index: LoopIndex) -> None:
    """What is locked and built for the skill stands beside its commands; what is locked and not built refuses them."""
    index.add("one")
    environment, cache = index.locked("one", key="acme.main"), tmp_path / "cache"
    work = make_host(environment_cache_dir=cache).work
    assert (await work.run_place(READER, "acme.main", *CALL)).placement.environment is None
    write_lock(bundle / "kdskills.lock", {environment.key: environment})
    with pytest.raises(EnvironmentFailed) as refused:
        await work.run_place(READER, "acme.main", *CALL)
    assert refused.value.code == "environment_missing"
    mount = EnvironmentStore(cache).build(environment, index.indexes)
    assert (await work.run_place(READER, "acme.main", *CALL)).placement.environment == mount
    off = make_host(environments="off").work
    assert (await off.run_place(READER, "acme.main", *CALL)).placement.environment is None


@pytest.mark.parametrize(
    ("grants", "rules"),
    [({}, ()), ({"acme": ("pypi.org",)}, ("pypi.org",)), ({"acme.helper": ("pypi.org",)}, ())],
    ids=["nothing", "namespace", "import"],
)
async def test_hosts_of_the_skill_are_placed(make_host, grants: dict[str, tuple[str, ...]], rules: object) -> None:
    """Commands reach what the settings grant their skill; what a skill it imports is granted is not theirs."""
    placed = await make_host(network=grants).work.run_place(READER, "acme.main", *CALL)
    assert placed.placement.network == rules


@pytest.mark.parametrize("name", ["acme.banned", "beta.other", "nothing.here", "", "../acme", "SK99"])
async def test_what_a_caller_may_not_have_does_not_exist(make_host, name: str) -> None:
    """Disabled for all, not enabled for the caller, or not there: one error, the same words but for the name."""
    with pytest.raises(NotFound) as refused:
        await make_host().work.run_place(READER, name, *CALL)
    assert refused.value.code == "unknown_skill"
    assert refused.value.message == f"there is no skill {name!r}"


async def test_the_local_account_is_anonymous(make_host) -> None:
    """Without an agent nothing is enabled by name, and what is disabled for all stays so."""
    placed = await make_host().work.run_place(LOCAL, "beta.other", *CALL)
    assert placed.placement.skill_name == "beta.other"
    with pytest.raises(NotFound):
        await make_host().work.run_place(LOCAL, "acme.banned", *CALL)


async def test_plugins_are_asked_with_what_is_about_to_happen(make_host, engines) -> None:
    """A policy plugin sees who runs what; values of arguments stay out of it."""
    host = make_host()
    await host.work.run_place(READER, "acme.main", *CALL)
    (request,) = engines.asked
    assert (request.kind, request.consumer, request.skill, request.tool, request.session_id) == (
        "run", "reader", "acme.main", "skills.run_cmd", "s",
    )  # fmt: skip
    assert request.arguments_digest.startswith("sha256:")
    assert "frobnicate" not in repr(request)


async def test_a_denial_denies(make_host, engines) -> None:
    """One denial refuses, in the words the plugin has for the caller."""
    engines.denial = Denial("the boss said no", "not today")
    with pytest.raises(CallRefused) as refused:
        await make_host().work.run_place(READER, "acme.main", *CALL)
    assert (refused.value.code, refused.value.message) == ("skill_denied", "not today")
    assert "boss" not in str(refused.value.to_json())


async def test_other_projects_have_no_skills(make_host) -> None:
    """The bundle of the settings is the local project's; another project has none."""
    with pytest.raises(BadRequest) as refused:
        await make_host().work.run_place(replace(READER, project="other"), "acme.main", *CALL)
    assert refused.value.code == "no_bundle"


async def test_work_without_a_wall_is_refused(make_host) -> None:
    """The bare engine is not for background work, even when the operator allows it."""
    with pytest.raises(ExecRefused):
        await make_host(executor="bare").work.run_place(READER, "acme.main", *CALL)
    with pytest.raises(ExecRefused) as refused:
        await make_host(executor="bare", allow_unisolated=True).work.run_place(READER, "acme.main", *CALL)
    assert refused.value.code == "isolation_too_weak"


async def test_an_engine_that_is_not_there(make_host) -> None:
    """A name no plugin registered is told with those there are."""
    with pytest.raises(ExecRefused) as refused:
        await make_host(executor="magic").work.run_place(READER, "acme.main", *CALL)
    assert refused.value.code == "engine_unavailable"


async def test_limits_come_from_the_settings(make_host) -> None:
    """What is kept of the output in a result is the operator's number."""
    placed = await make_host(jobs={"result_bytes": 1000}).work.run_place(READER, "acme.main", *CALL)
    assert (placed.placement.limits.stdout, placed.placement.limits.stderr) == (1000, 1000)
