"""Work that is over is started again: the same command and version, as new work, through the gate of everything that starts."""

from __future__ import annotations

import base64
import io
import zipfile
from dataclasses import replace
from typing import Any

import pytest

from kdskills.app import Host
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context
from kdskills.app.operations.work_again import start_arguments
from kdskills.errors import BadRequest, CallRefused, Conflict, KdskillsError, NotFound
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import JobHead, Scope, TaskHead
from kdskills.session.approval import Denial

CALLER = replace(LOCAL, local=False, agent="reader", scopes=frozenset({"work:run", "work:read"}), tools=frozenset())


@pytest.fixture
async def host(make_host):
    """A Host whose work nobody runs."""
    made = make_host()
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def ask(this: Host, name: str, identity: Identity = LOCAL, *, key: str | None = None, **arguments: Any) -> Any:
    """Run an operation."""
    return await this.invoke(name, arguments, Context(identity=identity, idempotency_key=key))


async def end(host: Host, item: str) -> str:
    """Let a task or job be over."""
    work = await host.work.client.work()
    for table in (work.tables.tasks, work.tables.jobs):
        change = table.update().where(table.c.id == item).values(status="succeeded", finished_at=1)
        work.database.change(lambda link, change=change: link.execute(change))
    return item


async def over(this: Host, identity: Identity = LOCAL, **arguments: Any) -> str:
    """Return a task that is over."""
    given = {"skill_name": "lone", "command": "true", **arguments}
    return await end(this, (await ask(this, "skills.run_cmd_async", identity, **given)).task_id)


def archive(body: str) -> str:
    """Return a skill `up` as a zip in base64."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        out.writestr("SKILL.md", f"---\nname: up\ndescription: What up does.\n---\n{body}\n")
    return base64.b64encode(data.getvalue()).decode()


GIVEN: dict[str, dict[str, Any]] = {
    "skills.run_cmd_async": {
        "skill_name": "lone",
        "command": ["printf", "%s", "a b", "é", ""],
        "session_id": "s",
        "workdir": "sub/folder",
        "env": {"A": "1", "LANG": "de_DE.UTF-8"},
        "inputs": [{"path": "in.txt", "text": "x\0y"}, {"path": "b/c", "content_base64": "AAE="}],
        "outputs": ["*.txt"],
        "timeout_sec": 7.5,
        "retry_on_lost": True,
    },
    "skills.run_service": {
        "skill_name": "lone",
        "command": "exec serve",
        "session_id": "s",
        "workdir": "session",
        "ready": {"http": {"port": 8000, "path": "/up"}},
        "startup_timeout_sec": 12.0,
        "restart": 3,
        "expose_ports": [8000],
    },
    "skills.start_job": {
        "skill_name": "lone",
        "session_id": "s",
        "steps": [
            {"name": "a", "command": "one", "retry": 2, "timeout_sec": 9.0},
            {"name": "b", "command": ["two"], "needs": ["a"], "continue_on_error": True, "env": {"B": "2"}},
        ],
        "env": {"A": "1"},
        "max_concurrency": 3,
        "max_wall_time_sec": 60.0,
    },
}


@pytest.mark.parametrize("name", sorted(GIVEN))
async def test_it_is_the_same_work(host: Host, name: str) -> None:
    """The new specification is that of the first, whatever was said; only who repeats what is new, and whose request it was."""
    first = await ask(host, name, **GIVEN[name])
    kind, head_kind = ("job", JobHead) if name == "skills.start_job" else ("task", TaskHead)
    item = await end(host, getattr(first, f"{kind}_id"))
    answer = await ask(host, f"{kind}s.again", **{f"{kind}_id": item})
    again = getattr(answer, f"{kind}_id")
    assert again not in {item, None}
    assert (answer.repeat_of, answer.status, answer.skill_name) == (item, "queued", "public.lone")
    before, after = [await host.work.client.head(head_kind, Scope(), each) for each in (item, again)]
    assert after.spec == before.spec.model_copy(update={"traceparent": after.spec.traceparent})
    assert after.spec.trace_id not in {None, before.spec.trace_id}
    assert (before.repeat_of, after.repeat_of) == (None, item)
    assert start_arguments(after) == start_arguments(before)
    told = await ask(host, f"skills.{kind}_status", **{f"{kind}_id": again})
    assert told.repeat_of == item
    rows = getattr(await ask(host, f"{kind}s.list"), f"{kind}s")
    assert [row.repeat_of for row in rows] == [item, None]


async def test_ready_in_each_of_its_forms(host: Host) -> None:
    """A service's readiness comes back as it was said."""
    for ready in ({"pattern": "^up$"}, {"tcp_port": 80}, {"http": {"port": 80, "path": "/"}}, None):
        started = await ask(host, "skills.run_service", skill_name="lone", command="x", session_id="s", ready=ready)
        head = await host.work.task(LOCAL, started.task_id)
        told = start_arguments(head).model_dump(mode="json")["ready"]
        assert (told and {name: value for name, value in told.items() if value is not None}) == ready


async def test_what_is_not_over_is_not_started_again(host: Host) -> None:
    """A queued task is a conflict of a code of its own, and nothing is submitted."""
    started = await ask(host, "skills.run_cmd_async", skill_name="lone", command="true")
    with pytest.raises(Conflict) as refused:
        await ask(host, "tasks.again", task_id=started.task_id)
    assert refused.value.code == "work_not_over"
    assert len((await ask(host, "tasks.list")).tasks) == 1


@pytest.mark.parametrize("item", ["task_nothing", "job_x", "", "x" * 129, "a\0b", "' --"])
async def test_what_is_not_there(host: Host, item: str) -> None:
    """Unknown and malformed ids are refused."""
    for name, field in (("tasks.again", "task_id"), ("jobs.again", "job_id")):
        with pytest.raises((NotFound, BadRequest)):
            await ask(host, name, **{field: item})


async def test_whose_work_it_is(host: Host) -> None:
    """Another agent's task is not found; an administrator's repeat is the administrator's own."""
    item = await over(host, CALLER)
    with pytest.raises(NotFound):
        await ask(host, "tasks.again", replace(CALLER, agent="stranger"), task_id=item)
    boss = replace(CALLER, agent="local", scopes=frozenset({"admin"}))
    answer = await ask(host, "tasks.again", boss, task_id=item)
    assert (await host.work.task(boss, answer.task_id)).scope.agent == "local"
    with pytest.raises(NotFound):
        await ask(host, "tasks.again", replace(boss, project="acme"), task_id=item)


async def test_the_gate_is_that_of_starting(host: Host, engines) -> None:
    """Scope, allowed tools, what the caller is shown and policy plugins decide as for a command that is started."""
    item = await over(host, CALLER, skill_name="lone")
    told = await ask(host, "skills.run_cmd_async", CALLER, skill_name="public.lone", command="true")
    asked = engines.asked[-1]
    assert told.task_id
    refusals = {
        "scope_missing": replace(CALLER, scopes=frozenset({"work:read"})),
        "tool_not_allowed": replace(CALLER, allowed_tools=frozenset({"tasks.again", "skills.task_status"})),
    }
    for code, identity in refusals.items():
        with pytest.raises(CallRefused) as refused:
            await ask(host, "tasks.again", identity, task_id=item)
        assert refused.value.code == code
    allowed = replace(CALLER, allowed_tools=frozenset({"tasks.again", "skills.run_cmd_async"}))
    await ask(host, "tasks.again", allowed, task_id=item)
    assert replace(engines.asked[-1], arguments_digest="") == replace(
        asked, arguments_digest=""
    )  # its timeout is said now
    engines.denial = Denial("not today", "not today")
    with pytest.raises(CallRefused) as refused:
        await ask(host, "tasks.again", CALLER, task_id=item)
    assert refused.value.code == "skill_denied"
    engines.denial = None
    boss = replace(CALLER, scopes=frozenset({"admin"}))
    theirs = await over(host, skill_name="beta.other")
    with pytest.raises(NotFound) as missing:
        await ask(host, "tasks.again", boss, task_id=theirs)
    assert missing.value.code == "unknown_skill"


async def test_edited_files_are_another_version(host: Host, bundle) -> None:
    """A skill of a bundle that was edited has the version it was no more; with `active` it runs as it is now."""
    item = await over(host)
    (bundle / "skills" / "lone" / "scripts" / "run.sh").write_text("echo other\n")
    with pytest.raises(Conflict) as refused:
        await ask(host, "tasks.again", task_id=item)
    assert refused.value.code == "version_gone"
    before = await host.work.task(LOCAL, item)
    answer = await ask(host, "tasks.again", task_id=item, version="active")
    assert answer.version_hash != before.spec.placement.version_hash
    with pytest.raises(BadRequest):
        await ask(host, "tasks.again", task_id=item, version="sha256:0")


async def test_an_uploaded_version_runs_while_it_is_there(host: Host) -> None:
    """The version it had runs although another is active; of a skill that was deleted none does."""
    first = await ask(host, "project_skills.upload", data=archive("One."))
    item = await over(host, skill_name="up")
    second = await ask(host, "project_skills.upload", data=archive("Two."))
    same = await ask(host, "tasks.again", task_id=item)
    head = await host.work.task(LOCAL, same.task_id)
    assert (same.version_hash, head.spec.placement) == (
        first.version,
        (await host.work.task(LOCAL, item)).spec.placement,
    )
    assert "One." in (head.spec.placement.skills[0].root / "SKILL.md").read_text()
    active = await ask(host, "tasks.again", task_id=item, version="active")
    assert active.version_hash == second.version
    await ask(host, "project_skills.patch", skill="up", enabled=False)
    with pytest.raises(KdskillsError) as refused:
        await ask(host, "tasks.again", task_id=item)
    assert refused.value.code == "unknown_skill"
    await ask(host, "project_skills.patch", skill="up", enabled=True)
    await ask(host, "project_skills.delete", skill="up")
    with pytest.raises(NotFound):
        await ask(host, "tasks.again", task_id=item)


async def test_inputs_that_are_gone(host: Host) -> None:
    """A file that is not kept any more is told by its path and a code of its own; one that came with the call is kept."""
    large = base64.b64encode(b"x" * 200_000).decode()
    item = await over(host, inputs=[{"path": "large.bin", "content_base64": large}])
    assert (await ask(host, "tasks.again", task_id=item)).repeat_of == item
    work = await host.work.client.work()
    work.database.change(lambda link: link.execute(work.tables.artifacts.delete()))
    with pytest.raises(NotFound) as refused:
        await ask(host, "tasks.again", task_id=item)
    assert (refused.value.code, refused.value.details["path"]) == ("inputs_gone", "large.bin")


async def test_a_key_makes_it_once(host: Host) -> None:
    """Under one key there is one repeat; of another task it is a conflict."""
    one, two = await over(host), await over(host)
    first = await ask(host, "tasks.again", key="k", task_id=one)
    assert (await ask(host, "tasks.again", key="k", task_id=one)).task_id == first.task_id
    with pytest.raises(Conflict):
        await ask(host, "tasks.again", key="k", task_id=two)


async def test_the_command_is_told_without_secrets(host: Host) -> None:
    """Status and lists show what was run; what looks like a secret is masked there, and nowhere in what runs again."""
    words = ["curl", "-H", "Authorization: Bearer abcdef123456", "https://ann:hush-hush@example.org", "token=abcdefgh"]
    item = await over(host, command=words)
    status = await ask(host, "skills.task_status", task_id=item)
    (row,) = (await ask(host, "tasks.list")).tasks
    for shown in (status.command, row.command):
        assert shown[0] == "curl"
        assert not {"abcdef123456", "hush-hush", "abcdefgh"} & set(
            " ".join(shown).replace("@", " ").replace("=", " ").split()
        )
    again = await ask(host, "tasks.again", task_id=item)
    assert (await host.work.task(LOCAL, again.task_id)).spec.command.argv == tuple(words)


async def test_lists_by_skill(host: Host) -> None:
    """The filter is the full id, counts before the limit does, and goes together with a state and a cursor."""
    ours = [await over(host, skill_name="acme.main") for _ in range(3)]
    await over(host, skill_name="lone")
    waiting = (await ask(host, "skills.run_cmd_async", skill_name="acme.main", command="true")).task_id
    seen, cursor = [], None
    while True:
        page = await ask(host, "tasks.list", skill_name="acme.main", status="succeeded", limit=2, cursor=cursor)
        seen += [row.task_id for row in page.tasks]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ours[::-1]
    listed = await ask(host, "tasks.list", skill_name="acme.main", limit=1)
    assert [row.task_id for row in listed.tasks] == [waiting]
    for nothing in ("acme", "main", "%", "acme.main' --"):
        assert (await ask(host, "tasks.list", skill_name=nothing)).tasks == ()
        assert (await ask(host, "jobs.list", skill_name=nothing)).jobs == ()
