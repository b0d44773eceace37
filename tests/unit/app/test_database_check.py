"""`kdskills db check` finds what does not fit, says each by its code with a cure, and changes nothing."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.app.operations.backups import RULES
from kdskills.doors.cli.main import build_cli
from kdskills.errors import KdskillsError
from kdskills.jobs.artifacts import ArtifactKeeper
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, Placement, Scope, TaskSpec
from kdskills.skills.private_files import remove_tree

SPEC = TaskSpec(
    scope=Scope(project="acme"),
    session_id=None,
    command=Command(argv=("true",)),
    placement=Placement(engine="subprocess", skill_name="x", version_hash="0", unsafe_local=True),
    mode="batch",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A state folder with a project, a version, a token, three tasks and two artifacts, all of which fit."""
    folder = tmp_path_factory.mktemp("whole")

    async def fill() -> None:
        made = Host(Settings(state_dir=folder / "state", index_dir=folder / "index", bundle=None), entry_points=False)
        with zipfile.ZipFile(folder / "brief.zip", "w") as out:
            out.writestr("brief/SKILL.md", "---\nname: brief\ndescription: Makes pages.\n---\nRead.\n")
        await made.projects.upload("acme", folder / "brief.zip", who="test")
        await made.tokens.create("acme", "writer", ["skills:read"], who="test")
        client = JobsClient(made.settings.work_database, made.settings.state_dir)
        work = await client.work()
        keeper = ArtifactKeeper(made.work.artifacts(), work.database, work.tables, made.settings.state_dir / "inputs")
        for _ in range(3):
            await client.submit(SPEC)
        for content in (b"one", b"other"):
            await keeper.keep_input(SPEC.scope, content)
        await client.aclose()
        await made.work.aclose()
        await made.storage.aclose()

    asyncio.run(fill())
    return folder / "state"


@pytest.fixture
def host(whole, tmp_path) -> Host:
    """A Host on a copy of it."""
    shutil.copytree(whole, tmp_path / "state")
    return Host(Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=None), entry_points=False)


def change(host: Host, *statements: str) -> None:
    """Change rows behind everybody's back."""
    with sqlite3.connect(host.settings.state_dir / "work.db") as link:
        for statement in statements:
            link.execute(statement)
    link.close()


async def codes(host: Host, **arguments: bool) -> dict[str, int]:
    """Return findings and how often each was made; every one has words, examples and a cure."""
    answer = await host.invoke("db.check", arguments, Context())
    assert answer.ok == (not answer.findings)
    assert all(row.message and row.cure and row.examples for row in answer.findings)
    return {row.code: row.count for row in answer.findings}


async def test_what_fits_has_no_findings(host):
    """A database in order is in order, and the command exits with 0."""
    assert await codes(host) == {}


FIRST = "(SELECT min(id) FROM kd_tasks)"
BREAKS = {
    "over_without_time": (f"UPDATE kd_tasks SET status = 'failed' WHERE id = {FIRST}",),
    "open_with_time": ("UPDATE kd_tasks SET finished_at = 1",),
    "step_without_job": (f"UPDATE kd_tasks SET job_id = 'job_gone' WHERE id = {FIRST}",),
    "held_by_nobody": (f"UPDATE kd_tasks SET status = 'running', executor = 'gone' WHERE id = {FIRST}",),
    "artifact_without_task": ("UPDATE kd_artifacts SET task_id = 'task_gone'",),
    "artifact_not_listed": (
        f"""UPDATE kd_tasks SET artifacts = '[{{"artifact_id": "art_gone"}}]' WHERE id = {FIRST}""",
    ),
    "artifact_bytes_missing": (f"UPDATE kd_artifacts SET sha256 = '{'0' * 64}'",),
    "artifact_size_differs": ("UPDATE kd_artifacts SET size = size + 1",),
    "skill_without_project": ("DELETE FROM kd_projects",),
    "token_without_project": ("UPDATE kd_tokens SET project = 'gone'",),
    "version_without_skill": ("DELETE FROM kd_project_skills",),
    "active_version_missing": ("UPDATE kd_project_skills SET active = 'sha256:0'",),
    "pin_without_version": ("INSERT INTO kd_skill_pins VALUES ('acme', 'task_1', 'brief', 'sha256:0', 1)",),
    "revision_behind": ("UPDATE kd_alembic SET version_num = 'work_0003' WHERE version_num LIKE 'work%'",),
    "revision_ahead": ("UPDATE kd_alembic SET version_num = 'work_9999' WHERE version_num LIKE 'work%'",),
}
COUNTS = {"open_with_time": 3, "artifact_without_task": 2, "artifact_bytes_missing": 2, "artifact_size_differs": 2}


@pytest.mark.parametrize("code", BREAKS)
async def test_what_does_not_fit_is_found(host, code):
    """Each thing that can be at odds is told by its own code, with how often it is, and stays as it is."""
    change(host, *BREAKS[code])
    found = await codes(host)
    assert found.pop(code) == COUNTS.get(code, 1)
    assert set(found) <= {"token_without_project"}  # what goes with a project that is gone
    assert code in await codes(host)


async def test_folders_are_compared_with_rows(host):
    """A version without its files and a run folder without its task are found."""
    remove_tree(host.settings.state_dir / "projects" / "acme")
    (host.settings.state_dir / "runs" / "task_gone").mkdir(parents=True)
    assert await codes(host, objects=False) == {"version_files_missing": 1, "folder_without_task": 1}


def test_every_rule_is_tested():
    """Whoever adds a rule adds what breaks it."""
    assert set(RULES) == {*BREAKS, "version_files_missing", "folder_without_task"}


def test_the_command_exits_with_one_and_makes_nothing(tmp_path):
    """Findings are exit code 1; where there is no database none is made."""
    host = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)

    def said(*words: str):
        done = CliRunner().invoke(get_command(build_cli(host)), ["db", *words], obj=host)
        return done.exit_code, done.output

    assert said("check")[0] == 2
    assert not (tmp_path / "state").exists()
    assert said("upgrade")[0] == 0
    assert said("check")[0] == 0
    change(host, "INSERT INTO kd_skill_pins VALUES ('acme', 'task_1', 'brief', 'sha256:0', 1)")
    code, words = said("check")
    assert (code, "pin_without_version 1 time" in words, "cure:" in words) == (1, True, True)


async def test_a_database_that_is_not_there_is_said(tmp_path):
    """The operation names the file it missed."""
    host = Host(Settings(state_dir=tmp_path / "state", bundle=None), entry_points=False)
    with pytest.raises(KdskillsError) as caught:
        await host.invoke("db.check", {}, Context())
    assert (caught.value.code, "work.db" in caught.value.message) == ("path_missing", True)
