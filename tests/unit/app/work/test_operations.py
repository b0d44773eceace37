"""Operations about work over a Host whose work nobody runs: lists and their pages, inputs, ids of versions."""

from __future__ import annotations

import base64
import io
import zipfile
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from kdskills.app import Host
from kdskills.app.identity import LOCAL, Identity, TokenLimits
from kdskills.app.operations import Context
from kdskills.app.operations.work_run import require_ran
from kdskills.errors import BadRequest, KdskillsError, NotFound
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Scope, TaskHead


@pytest.fixture
async def host(make_host):
    """A Host whose work nobody runs."""
    made = make_host()
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def start(host: Host, **more: Any) -> Any:
    """Start a command in the background."""
    return await host.invoke("skills.run_cmd_async", {"skill_name": "lone", "command": "true", **more}, Context())


async def pages(host: Host, name: str, rows: str, **given: Any) -> list[list[Any]]:
    """Return the pages of a list, from the first to the last."""
    found, cursor = [], None
    while True:
        answer = await host.invoke(name, {**given, "cursor": cursor}, Context())
        found.append(list(getattr(answer, rows)))
        cursor = answer.next_cursor
        if cursor is None:
            return found


async def test_a_session_is_found_at_any_limit(host: Host) -> None:
    """The filter counts before the limit does: the one task of a session is found with room for one."""
    wanted = await start(host, session_id="a")
    for _ in range(3):
        await start(host, session_id="b")
    answer = await host.invoke("tasks.list", {"session_id": "a", "limit": 1}, Context())
    assert ([row.task_id for row in answer.tasks], answer.next_cursor) == ([wanted.task_id], None)


async def test_pages_hold_everything_once(host: Host) -> None:
    """Cursors lead through tasks and jobs, whatever comes meanwhile; the last page has none."""
    tasks = [(await start(host)).task_id for _ in range(5)]
    steps = [{"name": "x", "command": "true"}]
    job = {"skill_name": "lone", "session_id": "s", "steps": steps}
    jobs = [(await host.invoke("skills.start_job", job, Context())).job_id for _ in range(3)]
    found = await pages(host, "tasks.list", "tasks", limit=2)
    assert [[row.task_id for row in page] for page in found] == [tasks[:2:-1], tasks[2:0:-1], tasks[:1]]
    found = await pages(host, "jobs.list", "jobs", limit=2)
    assert [row.job_id for page in found for row in page] == jobs[::-1]
    assert len(await pages(host, "jobs.list", "jobs", limit=3)) == 1


async def test_pages_of_projects_and_their_skills(host: Host) -> None:
    """Projects, uploaded skills, versions and tokens come in pages too."""
    for name in ("c", "a", "b"):
        await host.invoke("project_skills.upload", {"project": name, "data": archive("one")}, Context())
    for number in range(3):
        data = archive("two", f"Text {number}.")
        await host.invoke("project_skills.upload", {"project": "a", "data": data}, Context())
        await host.invoke("tokens.create", {"project": "a", "agent": "x", "scopes": ["skills:read"]}, Context())
    found = await pages(host, "projects.list", "projects", limit=2)
    assert [[row.project for row in page] for page in found] == [["a", "b"], ["c"]]
    found = await pages(host, "project_skills.list", "skills", project="a", limit=1)
    assert [[row.skill for row in page] for page in found] == [["one"], ["two"]]
    found = await pages(host, "project_skills.versions", "versions", project="a", skill="two", limit=2)
    assert [len(page) for page in found] == [2, 1]
    assert len({row.version for page in found for row in page}) == 3
    found = await pages(host, "tokens.list", "tokens", project="a", limit=2)
    assert [len(page) for page in found] == [2, 1]
    assert len({row.id for page in found for row in page}) == 3


@pytest.mark.parametrize(
    "cursor", ["", "x", "W10", "WzEsMl0", "WyJhIiwiYiJd", "Wzk5OTk5OTk5OTk5OTk5OTk5OTksImEiXQ", "WzEsIlx1MDAwMCJd"]
)
@pytest.mark.parametrize("name", ["tasks.list", "jobs.list", "projects.list", "tokens.list"])
async def test_no_cursor_is_a_bad_request(host: Host, name: str, cursor: str) -> None:
    """What no list gave out is refused by the argument's name."""
    await start(host)
    await host.projects.create("p", who="ann")
    with pytest.raises(BadRequest) as caught:
        await host.invoke(name, {"cursor": cursor}, Context())
    assert caught.value.details["errors"][0]["path"] == "/cursor"


def foreign(host: Host, operation: str, item: str) -> tuple[str, dict[str, Any]]:
    """Return an operation with an artifact as input."""
    inputs = [{"path": "f", "artifact_id": item}]
    if operation == "skills.start_job":
        steps = [{"name": "x", "command": "true", "inputs": inputs}]
        return operation, {"skill_name": "lone", "session_id": "s", "steps": steps}
    return operation, {"skill_name": "lone", "command": "true", "session_id": "s", "inputs": inputs}


@pytest.mark.parametrize(
    "operation", ["skills.run_cmd", "skills.run_cmd_async", "skills.run_service", "skills.start_job"]
)
@pytest.mark.parametrize("whose", ["nobody", "elsewhere"])
async def test_inputs_that_are_not_there_are_not_found(host: Host, operation: str, whose: str) -> None:
    """An unknown artifact, and another project's, are refused when the work is submitted; nothing is kept of it."""
    keeper = await host.work.keeper()
    item = await keeper.keep_input(Scope(project=whose), b"secret") if whose == "elsewhere" else "art_nobody"
    with pytest.raises(NotFound) as caught:
        await host.invoke(*foreign(host, operation, item), Context())
    assert (caught.value.code, caught.value.who) == ("not_found", "caller")
    assert (await host.invoke("tasks.list", {}, Context())).tasks == ()
    assert (await host.invoke("jobs.list", {}, Context())).jobs == ()


async def test_a_repeated_call_needs_no_inputs(host: Host) -> None:
    """A key whose work was submitted gives the first answer though its input is gone by now."""
    keeper = await host.work.keeper()
    item = await keeper.keep_input(Scope(), b"mine")
    call = foreign(host, "skills.run_cmd_async", item)
    first = await host.invoke(*call, Context(idempotency_key="k"))
    work = await host.work.client.work()
    work.database.change(lambda link: link.execute(work.tables.artifacts.delete()))
    assert (await host.invoke(*call, Context(idempotency_key="k"))).task_id == first.task_id
    with pytest.raises(NotFound):
        await host.invoke(*call, Context(idempotency_key="other"))


@pytest.mark.parametrize(
    ("code", "who", "kind"),
    [
        ("not_found", "caller", "NotFound"),
        ("artifact_missing", "caller", "NotFound"),
        ("root_changed", "caller", "Conflict"),
        ("bad_request", "caller", "BadRequest"),
        ("engine_unavailable", "operator", "ExecRefused"),
        ("environment_missing", "operator", "ExecRefused"),
        ("artifact_store_unavailable", "operator", "ExecRefused"),
    ],
)
async def test_who_must_act_when_a_command_could_not_start(host: Host, code: str, who: str, kind: str) -> None:
    """The code a task failed with decides whether the caller or the operator must act."""
    started = await start(host)
    head: TaskHead = await host.work.task(LOCAL, started.task_id)
    with pytest.raises(KdskillsError) as caught:
        require_ran(replace(head, status="failed", error_code=code, error_message="so"))
    error = caught.value
    assert (error.code, error.who, type(error).__name__, error.message) == (code, who, kind, "so")


def archive(name: str, body: str = "Do it.") -> str:
    """Return a skill as a zip in base64; one of its files may be executed, which its version knows and its digest does not."""
    data = io.BytesIO()
    program = zipfile.ZipInfo("scripts/run.sh")
    program.external_attr = 0o100755 << 16
    with zipfile.ZipFile(data, "w") as out:
        out.writestr("SKILL.md", f"---\nname: {name}\ndescription: What {name} does.\n---\n{body}\n")
        out.writestr(program, "#!/bin/sh\n")
    return base64.b64encode(data.getvalue()).decode()


async def test_the_version_of_a_task_is_one_that_can_be_activated(host: Host) -> None:
    """What a task tells as its version is what archives and activation know; the digest of its files has its own name."""
    first = await host.invoke("project_skills.upload", {"data": archive("up")}, Context())
    task = await host.invoke("skills.run_cmd_async", {"skill_name": "up", "command": "true"}, Context())
    await host.invoke("project_skills.upload", {"data": archive("up", "Newer.")}, Context())
    told = await host.invoke("skills.task_status", {"task_id": task.task_id}, Context())
    assert told.version_hash == first.version != told.tree_digest
    versions = await host.invoke("project_skills.versions", {"skill": "up"}, Context())
    (mine,) = [row for row in versions.versions if row.version == first.version]
    assert (mine.tree_digest, mine.pins) == (told.tree_digest, 1)
    again = {"skill": "up", "version_hash": told.version_hash}
    assert (await host.invoke("project_skills.activate", again, Context())).active == first.version
    given = {"skill": "up", "version": told.version_hash}
    assert (await host.invoke("project_skills.archive", given, Context())).version == first.version
    activated = await host.invoke("skills.activate", {"skill_name": "up"}, Context())
    assert activated.version_hash == first.version


async def test_work_and_what_it_holds_are_one_change(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """Work that is refused at the end holds no version, and work whose version is gone is started all the same."""
    await host.invoke("project_skills.upload", {"data": archive("up")}, Context())
    given = {"skill_name": "up", "command": "true", "session_id": "s"}
    held = await host.invoke("skills.run_cmd_async", given, Context())
    assert list(await host.projects.holders()) == [(LOCAL.project, held.task_id)]
    work = await host.work.client.work()
    announce = work.queue.announce

    def breaks(*_: object) -> None:
        raise BadRequest("not now")

    work.queue.announce = breaks  # type: ignore[method-assign]
    with pytest.raises(BadRequest):
        await host.invoke("skills.run_cmd_async", given, Context())
    work.queue.announce = announce  # type: ignore[method-assign]
    assert list(await host.projects.holders()) == [(LOCAL.project, held.task_id)]
    placed = (await host.work.task(LOCAL, held.task_id)).spec
    gone = placed.placement.model_copy(update={"uploaded": {"up": "sha256:gone"}})
    free = await host.work.submit(Context(), placed.model_copy(update={"placement": gone}), None, "")
    assert list(await host.projects.holders()) == [(LOCAL.project, held.task_id)]
    assert f"{free.id} does not hold up" in caplog.text


async def test_a_submission_asks_the_database_twice(host: Host) -> None:
    """One transaction finds the skill, one writes the task, counts it and holds its versions; a look at it takes one."""
    await host.invoke("project_skills.upload", {"data": archive("up")}, Context())
    given = {"skill_name": "up", "command": "true"}
    who = Identity(agent="writer", scopes=LOCAL.scopes, token="kd_1", limits=TokenLimits(concurrent_work=50))
    context = Context(identity=who)
    first = await host.invoke("skills.run_cmd_async", given, context)
    begun: list[object] = []
    work = await host.work.client.work()
    for engine in (work.database.engine, host.storage.database.engine):
        sa.event.listen(engine, "begin", begun.append)
    await host.invoke("skills.run_cmd_async", given, context)
    assert len(begun) == 2
    begun.clear()
    await host.invoke("skills.task_status", {"task_id": first.task_id}, context)
    assert len(begun) == 1


async def test_a_skill_nobody_uploaded_has_its_digest_as_version(host: Host) -> None:
    """Skills of a bundle have no archive: their version is the digest of their files."""
    task = await start(host)
    told = await host.invoke("skills.task_status", {"task_id": task.task_id}, Context())
    assert told.version_hash == told.tree_digest != ""
