"""The audit log: every change says who made it, from where and to what; it is read in pages, and nobody writes into it."""

from __future__ import annotations

import base64
import io
import json
import secrets
import zipfile
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host
from kdskills.app.identity import LOCAL, SCOPES, Identity
from kdskills.app.operations import OPERATIONS, Context
from kdskills.doors.cli.main import build_cli
from kdskills.errors import BadRequest, CallRefused, KdskillsError, NotFound
from kdskills.jobs.client import JobsClient
from kdskills.projects.records import AUDIT
from kdskills.storage.database import utc_now

TOKEN = "0123456789abcdef"  # the public id of one
BOTH = pytest.mark.parametrize(
    "host", ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))], indirect=True
)


@pytest.fixture
async def host(make_host: Callable[..., Host], request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    """A Host whose work nobody runs, over the database the test is parametrized with, else SQLite."""
    url = None
    if getattr(request, "param", "sqlite") == "postgresql":
        url = request.getfixturevalue("cluster").create(f"kd_{secrets.token_hex(6)}")
    made = make_host(database_url=url)
    settings = made.settings
    made.work.__dict__["client"] = JobsClient(settings.work_database, settings.state_dir, settings.jobs)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


def caller(agent: str = "op", project: str = "local", **more: Any) -> Context:
    """Return the context of a caller with a token, from an address."""
    identity = Identity(project=project, agent=agent, scopes=frozenset(SCOPES), token=TOKEN, door="http", tools=None)
    return Context(identity=identity, request_id="r1", address="192.0.2.7", **more)


def archive(name: str = "brief", text: str = "Text.") -> str:
    """Return an uploaded skill as base64."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as zipped:
        zipped.writestr("SKILL.md", f"---\nname: {name}\ndescription: Words.\n---\n{text}\n")
    return base64.b64encode(data.getvalue()).decode()


async def log(host: Host, context: Context | None = None, **asked: Any) -> Any:
    """Return a page of the log."""
    return await host.invoke("audit_log.list", asked, context or Context())


async def told(host: Host, **asked: Any) -> list[tuple[str, str]]:
    """Return action and subject of what the log tells, the first change first."""
    return [(event.action, event.subject) for event in reversed((await log(host, **asked)).events)]


@BOTH
async def test_every_kind_of_change_says_who_and_from_where(host: Host) -> None:
    """Projects, skills, tokens, tasks and jobs: each change is one row with token, agent, address, request and skill."""
    await host.invoke("projects.create", {"project": "local"}, Context())
    version = (await host.invoke("project_skills.upload", {"data": archive()}, caller())).version
    await host.invoke("project_skills.patch", {"skill": "brief", "enabled": False}, caller())
    await host.invoke("project_skills.patch", {"skill": "brief", "enabled": True}, caller())
    made = await host.invoke("tokens.create", {"agent": "writer", "scopes": ["skills:read"]}, caller())
    await host.invoke("tokens.revoke", {"id": made.id}, caller())
    work = {"skill_name": "lone", "command": "true"}
    task = await host.invoke("skills.run_cmd_async", work, caller())
    steps = [{"name": "a", "command": "true"}]
    job = await host.invoke("skills.start_job", {"skill_name": "lone", "session_id": "s", "steps": steps}, caller())
    await host.invoke("skills.task_cancel", {"task_id": task.task_id}, caller())
    await host.invoke("skills.job_cancel", {"job_id": job.job_id}, caller())
    await host.invoke("project_skills.delete", {"skill": "brief"}, caller())
    assert await told(host) == [
        ("project.create", "local"),
        ("skill.upload", "brief"),
        ("skill.patch", "brief"),
        ("skill.patch", "brief"),
        ("token.create", made.id),
        ("token.revoke", made.id),
        ("task.start", task.task_id),
        ("job.start", job.job_id),
        ("task.cancel", task.task_id),
        ("job.cancel", job.job_id),
        ("skill.delete", "brief"),
    ]
    *rest, first = (await log(host)).events
    assert (first.who, first.token, first.agent, first.address) == ("library:local", None, "local", "")
    for event in rest:
        assert (event.who, event.token, event.agent) == (f"http:token:{TOKEN}", TOKEN, "op"), event
        assert (event.address, event.request_id, event.project) == ("192.0.2.7", "r1", "local"), event
    skills = {event.action: event.skill for event in rest}
    assert (skills["skill.upload"], skills["skill.delete"], skills["token.create"]) == ("public.brief",) * 2 + (None,)
    assert skills["task.start"] == skills["job.cancel"] == "public.lone"
    assert rest[-1].facts == {"active": version, "before": None, "created": True, "version": version}


@BOTH
async def test_filters_and_pages(host: Host) -> None:
    """Who, what, which skill and since when; pages lead from the latest change to the first, each told once."""
    began = utc_now()
    for number in range(3):
        data = archive("brief", f"Text {number}.")
        await host.invoke("project_skills.upload", {"data": data}, caller(f"a{number}"))
    await host.invoke("project_skills.upload", {"data": archive("other")}, Context())
    token = await host.invoke("tokens.create", {"agent": "x", "scopes": ["skills:read"]}, caller("a1"))
    uploads, created = ("skill.upload", "brief"), ("token.create", token.id)
    assert await told(host, who="a1") == [uploads, created]
    assert await told(host, who=TOKEN) == [uploads, uploads, uploads, created]
    assert await told(host, who="library:local") == [("skill.upload", "other")]
    assert await told(host, action="token") == await told(host, action="token.create") == [created]
    assert await told(host, action="tok") == await told(host, action="%") == await told(host, action="_") == []
    assert await told(host, skill="brief") == await told(host, skill="public.brief") == [uploads] * 3
    assert await told(host, skill=token.id) == []
    assert await told(host, subject=token.id) == [created]
    assert len(await told(host, since=began.isoformat())) == 5
    assert await told(host, since=(utc_now() + timedelta(hours=1)).isoformat()) == []
    ids, cursor = [], None
    while True:
        page = await log(host, limit=2, cursor=cursor)
        ids += [event.id for event in page.events]
        cursor = page.next_cursor
        if cursor is None:
            break
        # what comes meanwhile belongs to pages before this one
        await host.invoke("tokens.revoke", {"id": token.id}, Context())
    assert (len(ids), ids) == (5, sorted(ids, reverse=True))


async def test_callers_elsewhere_read_their_own_project(host: Host, tmp_path: Path) -> None:
    """A token sees its project's changes and no path of the machine; another project is not found, and `admin` it takes."""
    await host.invoke("projects.create", {"project": "acme", "bundle": str(tmp_path)}, Context())
    await host.invoke("projects.create", {"project": "other"}, Context())
    mine = caller(project="acme")
    (event,) = (await log(host, mine)).events
    assert (event.subject, event.facts) == ("acme", {})
    with pytest.raises(NotFound):
        await log(host, mine, project="other")
    lesser = Identity(project="acme", scopes=SCOPES - {"admin"}, door="http", token=TOKEN)
    with pytest.raises(CallRefused) as refused:
        await log(host, Context(lesser))
    assert refused.value.code == "scope_missing"
    everything = (await log(host)).events
    assert [event.subject for event in everything] == ["other", "acme"]
    assert everything[1].facts == {"bundle": str(tmp_path)}
    page = Identity(project="acme", scopes=frozenset({"admin"}), door="console")
    assert len((await log(host, Context(page))).events) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("cursor", word) for word in ("", "x", "W10", "WyJhIl0", "WzEsMl0", "Wzk5OTk5OTk5OTk5OTk5OTk5OTk5XQ")),
        *(("since", word) for word in ("", "yesterday", "2026-13-01", "9999-12-31T23:59:59-23:59", "1 OR 1=1")),
        *(("who", "\0"), ("action", "x" * 81), ("skill", "\ud800"), ("limit", 501), ("limit", 0)),
    ],
)
async def test_words_out_of_shape_are_refused_by_their_name(host: Host, field: str, value: object) -> None:
    """What is no cursor, no time or no text is the caller's to mend."""
    await host.projects.create("local", who="ann")
    with pytest.raises(BadRequest) as refused:
        await log(host, **{field: value})
    assert refused.value.details["errors"][0]["path"] == f"/{field}"


async def test_hostile_words_find_nothing_and_break_nothing(host: Host) -> None:
    """Quotes, wildcards and SQL in filters are text like any other."""
    await host.projects.create("local", who="ann")
    for word in ("' OR '1'='1", "%", "_", "\\", "'; DROP TABLE kd_audit; --"):
        assert [await told(host, **{name: word}) for name in ("who", "action", "subject", "skill")] == [[]] * 4
    assert len(await told(host)) == 1


async def test_nothing_secret_is_told(host: Host) -> None:
    """Neither a token's text, nor commands, their environment and inputs, nor why somebody cancelled are in a row."""
    made = await host.invoke("tokens.create", {"agent": "x", "scopes": ["skills:read"], "label": "s3cret"}, caller())
    work = {"skill_name": "lone", "command": "echo s3cret", "env": {"KEY": "s3cret"}}
    work |= {"inputs": [{"path": "a", "text": "s3cret"}]}
    task = await host.invoke("skills.run_cmd_async", work, caller())
    await host.invoke("skills.task_cancel", {"task_id": task.task_id, "reason": "s3cret"}, caller())
    rows = await host.storage.database.read(lambda link: str(link.execute(AUDIT.select()).all()))
    assert ("s3cret" in rows, made.token in rows, made.token[20:] in rows) == (False, False, False)
    assert (task.task_id in rows, made.id in rows) == (True, True)


@BOTH
async def test_what_changes_nothing_is_not_told(host: Host) -> None:
    """Refused work, a repeated call, and the end of what was over write no row; nor does asking."""
    work = {"skill_name": "lone", "command": "true"}
    first = await host.invoke("skills.run_cmd_async", work, caller(idempotency_key="k"))
    await host.invoke("skills.run_cmd_async", work, caller(idempotency_key="k"))
    with pytest.raises(KdskillsError):
        await host.invoke("skills.run_cmd_async", work | {"skill_name": "acme.banned"}, caller())
    await host.invoke("skills.task_cancel", {"task_id": first.task_id}, caller())
    assert not (await host.invoke("skills.task_cancel", {"task_id": first.task_id}, caller())).canceled
    with pytest.raises(NotFound):
        await host.invoke("skills.task_cancel", {"task_id": "task_nobody"}, caller())
    await host.invoke("tasks.list", {}, caller())
    assert await told(host) == [("task.start", first.task_id), ("task.cancel", first.task_id)]


async def test_an_administrator_who_cancels_anothers_work_is_named(host: Host) -> None:
    """The row tells who cancelled, not whose the task was."""
    task = await host.invoke("skills.run_cmd_async", {"skill_name": "lone", "command": "true"}, caller("reader"))
    await host.invoke("skills.task_cancel", {"task_id": task.task_id}, caller("boss"))
    assert [event.agent for event in (await log(host)).events] == ["boss", "reader"]


async def test_reading_makes_no_database(host: Host) -> None:
    """Where nothing was ever changed there is nothing to tell, and no file comes of asking."""
    assert (await log(host)).events == ()
    assert not (host.settings.state_dir / "work.db").exists()


async def test_only_age_removes_rows(make_host: Callable[..., Host]) -> None:
    """Rows stay for ever by default; with `audit_keep_days` the older ones go, and no operation is for that."""
    host = make_host()
    try:
        await host.projects.create("local", who="ann")
        await host.upkeep.collect()
        old = AUDIT.update().values(at=AUDIT.c.at - 3 * 86_400_000_000)
        await host.storage.database.write(lambda link: link.execute(old))
        await host.projects.create("other", who="ann")
        await host.upkeep.collect()
        assert len(await told(host)) == 2
        await host.projects.forget_audit(keep_days=4)
        assert len(await told(host)) == 2
        object.__setattr__(host.settings, "audit_keep_days", 2.0)
        await host.upkeep.collect()
        assert await told(host) == [("project.create", "other")]
    finally:
        await host.work.aclose()
        await host.storage.aclose()
    assert [name for name in OPERATIONS if name.startswith("audit_log")] == ["audit_log.list"]


def test_the_command_tells_lines_and_how_to_go_on(make_host: Callable[..., Host]) -> None:
    """People see a table without control characters; programs one JSON object a line, and the cursor beside it."""
    cli, runner = get_command(build_cli(make_host())), CliRunner()
    for label in ("a", "b", "c"):
        assert runner.invoke(cli, ["token", "create", "--label", label, "--agent", "ann"]).exit_code == 0
    shown = runner.invoke(cli, ["audit-log"])
    assert (shown.exit_code, shown.stdout.count("token.create")) == (0, 3)
    lines = runner.invoke(cli, ["audit-log", "--jsonl", "-n", "2"])
    events = [json.loads(row) for row in lines.stdout.splitlines()]
    assert [event["facts"]["agent"] for event in events] == ["ann", "ann"]
    assert events[0]["who"] == f"cli:{LOCAL.agent}"
    cursor = lines.stderr.split("--cursor ")[1].split()[0]
    rest = runner.invoke(cli, ["audit-log", "--jsonl", "--cursor", cursor])
    assert (len(rest.stdout.splitlines()), rest.stderr) == (1, "")
    assert runner.invoke(cli, ["audit-log", "--since", "never", "--json"]).exit_code != 0


def test_a_hostile_subject_moves_no_terminal(make_host: Callable[..., Host]) -> None:
    """Control characters and markup in a row are shown as text."""
    host = make_host()

    def hostile(link: Any) -> None:
        host.projects.note(link, "local", Context().author, "x", "\x1b[2J[red]evil[/]\n\N{RIGHT-TO-LEFT OVERRIDE}")

    host.storage.database.change(hostile)
    shown = CliRunner().invoke(get_command(build_cli(host)), ["audit-log"], env={"COLUMNS": "300"})
    assert (shown.exit_code, "\x1b[2J" in shown.stdout, "\N{RIGHT-TO-LEFT OVERRIDE}" in shown.stdout) == (
        0,
        False,
        False,
    )
    assert "[red]evil[/]" in shown.stdout
