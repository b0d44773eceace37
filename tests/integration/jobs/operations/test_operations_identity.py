"""Whose work it is: another project's ids do not exist, and no two scopes ever share a session."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kdskills.errors import Conflict, NotFound
from kdskills.jobs.model import Scope, TaskHead

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(300), pytest.mark.xdist_group("operations")]


@pytest.mark.parametrize(
    "other",
    [{"project": "elsewhere"}, {"tenant": "elsewhere"}, {"agent": "stranger"}],
    ids=["project", "tenant", "agent"],
)
async def test_ids_of_others_do_not_exist(local, caller, other) -> None:
    """Status, watch, logs and cancel of somebody else's task or job read like ids nobody has."""
    mine = caller()
    task = await mine.start("echo secret; sleep 600", session_id=f"mine-{next(iter(other))}")
    await mine.until(task, lambda seen: seen.stdout_tail == "secret\n")
    job = await mine(
        "start_job",
        skill_name="tool",
        session_id=f"job-{next(iter(other))}",
        steps=[{"name": "a", "command": "sleep 600"}],
    )
    theirs = caller(**other)
    for operation in ("task_status", "task_watch", "task_logs", "task_cancel"):
        with pytest.raises(NotFound) as hidden:
            await theirs(operation, task_id=task)
        with pytest.raises(NotFound) as nothing:
            await theirs(operation, task_id="task_nothing")
        assert hidden.value.code == nothing.value.code == "not_found"
        assert str(hidden.value).replace(task, "task_nothing") == str(nothing.value)
    for operation in ("job_status", "job_watch", "job_cancel"):
        with pytest.raises(NotFound):
            await theirs(operation, job_id=job.job_id)
    assert (await mine("task_status", task_id=task)).status in {"starting", "running"}
    listed = await theirs.host.invoke("tasks.list", {}, _context(theirs))
    assert task not in [row.task_id for row in listed.tasks]
    await mine("task_cancel", task_id=task)
    await mine("job_cancel", job_id=job.job_id)


def _context(who):
    from kdskills.app.operations import Context

    return Context(identity=who.identity)


async def test_artifacts_stay_in_their_project(local, caller) -> None:
    """Another project can neither read an artifact nor feed it to a command."""
    made = await local.cmd("echo secret > f", outputs=["f"])
    item = made.created_artifacts[0].artifact_id
    theirs = caller(project="elsewhere")
    with pytest.raises(NotFound):
        await theirs.host.invoke("artifacts.get", {"artifact_id": item}, _context(theirs))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"agent": "a_b", "alias": "c"}, {"agent": "a", "alias": "b_c"}),
        ({"agent": "a", "alias": "bc"}, {"agent": "ab", "alias": "c"}),
        ({"agent": "x", "alias": ""}, {"agent": "x", "alias": "x"}),
    ],
)
async def test_sessions_of_two_scopes_never_meet(local, caller, one, two) -> None:
    """However agent and alias are spelt, two callers with one session id have two folders."""
    first, second = (caller(scopes=local.identity.scopes, **who) for who in (one, two))
    # Agents no rule names see what everybody may; the test is about folders.
    await first.cmd("echo mine > f", session_id="same")
    assert (await second.cmd("ls", session_id="same")).stdout == ""
    assert (await first.cmd("cat f", session_id="same")).stdout == "mine\n"


async def test_keys_belong_to_a_project(local, caller) -> None:
    """A key another agent of the project used with the same body is taken, and never hands out that agent's work."""
    task = await local.start("echo one", key="shared-key")
    for other in (caller(agent="x"), caller(alias="x"), caller()):
        with pytest.raises(Conflict) as refused:
            await other.start("echo one", key="shared-key")
        assert (refused.value.code, task in str(refused.value.to_json())) == ("conflict", False)
    assert (
        await caller(project="elsewhere", agent="x").host.work.client.heads(TaskHead, Scope(project="elsewhere")) == []
    )


async def test_ids_cannot_be_guessed(local) -> None:
    """Ids made without a key have no order and nothing in common."""
    ids = [await local.start("true") for _ in range(4)]
    bodies = [item.removeprefix("task_") for item in ids]
    assert {len(body) for body in bodies} == {26}
    assert len({body[:6] for body in bodies}) == 4
    await asyncio.gather(*(local.over(item) for item in ids))


async def test_an_administrator_sees_the_project(local, caller) -> None:
    """Who administers a project sees and ends the work of each of its agents, and of no other project."""
    task = await caller().start("sleep 600", session_id="admin")
    boss = caller(agent="boss", scopes=frozenset({"admin"}))
    assert (await boss("task_status", task_id=task)).task_id == task
    with pytest.raises(NotFound):
        await caller(agent="boss", scopes=frozenset({"admin"}), project="elsewhere")("task_status", task_id=task)
    assert (await boss("task_cancel", task_id=task)).canceled is True


async def test_a_disabled_skill_runs_nothing(local, caller) -> None:
    """A consumer whom the policy gives nothing cannot run, activate or ask through that skill."""
    stranger = caller(agent="stranger")
    for operation, more in (
        ("run_cmd", {"command": "true"}),
        ("run_cmd_async", {"command": "true"}),
        ("run_service", {"command": "true", "session_id": "s"}),
        ("start_job", {"session_id": "s", "steps": [{"name": "a", "command": "true"}]}),
        ("activate", {}),
        ("task_status", {"provider": "cmd", "query_command": "true"}),
    ):
        with pytest.raises(NotFound) as refused:
            await stranger(operation, skill_name="tool", **more)
        assert refused.value.code == "unknown_skill"
    assert replace(stranger.identity, agent="reader").consumer == "reader"
