"""What 0.1.0 wrote is read: journals of calls, indexes, snapshots of sessions, descriptors under way, folders of runs.

The fixtures were written by 0.1.0 itself, over the skills beside them: a journal with a call in every state, the index and the
descriptor of a view of consumer `desk`, a session of it with `acme.brief` loaded, and the state folder of two commands of
which one had ended and one was still running. Databases with work in them are the matter of `integration/jobs/test_upgrade.py`.
"""

import contextvars
import json
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from kdskills.jobs.attempts import Attempts
from kdskills.remote.journal import SqlJournal
from kdskills.remote.ports import CallIdentity
from kdskills.session import SkillRuntime
from kdskills.skills import SkillRegistry
from kdskills.skills.index import IndexStore
from kdskills.skills.roots import SkillRoot
from kdskills.turn import SkillsSubsystem, get_active_skills_subsystem, get_active_view, set_skills_descriptor

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.fixture
def bundle(tmp_path):
    """Return a copy of the bundle that 0.1.0 worked on."""
    shutil.copytree(FIXTURES / "skills", tmp_path / "bundle" / "skills")
    return tmp_path / "bundle"


@pytest.fixture
def journal(tmp_path):
    """Return today's journal over the file of 0.1.0; its owners are dead, its calls too young to be purged."""
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as link:
        link.executescript((FIXTURES / "journal.sql").read_text())
        link.execute(
            "UPDATE remote_calls SET created_at = ?", (round(time.time() * 1_000_000),)
        )  # else they are purged
    link.close()
    journal = SqlJournal(f"sqlite:///{path}")
    yield journal
    journal.close()


def test_every_call_of_an_old_journal_is_where_it_was(journal):
    """States, answers, late answers and receipts are read as they were written."""
    rows = {row.key: row for row in journal.calls("thread-1")}
    assert {key: row.state for key, row in rows.items()} == {
        "key-claimed": "claimed",
        "key-done": "done",
        "key-late": "overdue",
        "key-overdue": "overdue",
        "key-running": "running",
        "key-unknown": "unknown",
    }
    assert rows["key-done"].answer.payload == {"output": [{"type": "text", "text": "posted"}]}
    assert rows["key-late"].late.payload == {"output": [{"type": "text", "text": "posted after all"}]}
    assert [json.loads(text) for text in journal.receipts("thread-1")] == [{"turn_id": "turn-1"}]


def test_calls_of_an_old_journal_happen_once(journal):
    """What was done or may have been done is not run again; what had only been claimed by the dead is."""
    mine = {}
    for row in journal.calls("thread-1"):
        identity = journal_identity(row)
        mine[row.tool] = journal.claim(row.key, identity, "w2", 60.0, idempotent=row.idempotent).mine
    assert mine == {
        "claimed": True,
        "done": False,
        "late": False,
        "overdue": False,
        "running": True,  # its handler may run again, and its owner is dead
        "unknown": False,
    }


def journal_identity(row):
    """Return the identity of a call as it is delivered again."""
    return CallIdentity(
        session_id=row.session_id,
        tool=row.tool,
        arguments_sha256="0" * 64,
        thread_id=row.thread_id,
        turn_id=row.turn_id,
        call_id=row.call_id,
        namespace=row.namespace,
    )


def test_an_old_index_is_replaced(bundle, tmp_path):
    """An index of another format is told, not believed, and written anew; skills are the same with and without it."""
    root = SkillRoot("bundle://skills", bundle / "skills", "bundle", "bundle")
    folder = tmp_path / "index"
    folder.mkdir(mode=0o700)
    path = IndexStore(folder).file(root, str(bundle / "skills"))
    path.write_text((FIXTURES / "index.json").read_text().replace("/home/alice/bundle", str(bundle)))
    path.chmod(0o600)
    skills, codes = registry_skills(root, folder)
    assert (skills, codes) == (registry_skills(root, None)[0], ["index_ignored"])
    assert registry_skills(root, folder) == (skills, [])
    assert sorted(skills) == ["acme.brief", "acme.low"]


def registry_skills(root, folder):
    """Return the digests of all skills, and the codes of what is said about the index."""
    snapshot = SkillRegistry([root], index_dir=folder).snapshot()
    digests = {full_id: skill.digest for full_id, skill in snapshot.skills.items()}
    return digests, [note.code for note in snapshot.diagnostics if note.code.startswith("index")]


async def test_an_old_snapshot_comes_back(bundle):
    """A session that 0.1.0 took down has its skill, with the text that was loaded."""
    subsystem = SkillsSubsystem({"agents_config": {"desk": {"enabled": ["acme.*"]}}}, bundle_root=bundle, roots=())
    runtime = SkillRuntime(subsystem=subsystem, consumer="desk")
    session = await runtime.restore(json.loads((FIXTURES / "snapshot.json").read_text()), consumer="desk")
    assert [(skill.name, skill.receipt.stale) for skill in await session.active()] == [("brief", False)]
    text = (await session.instructions()).active
    assert ("A brief has a question" in text, "Say what is so." in text) == (True, True)


def test_an_old_descriptor_under_way_is_understood(bundle):
    """A program started by 0.1.0 and run by today's library sees the view that was exported."""
    text = (FIXTURES / "descriptor.json").read_text().replace("/home/alice/bundle", str(bundle))
    context = contextvars.copy_context()  # what a program activates holds to its end
    subsystem = context.run(set_skills_descriptor, json.loads(text))
    view = context.run(get_active_view)
    assert (context.run(get_active_skills_subsystem) is subsystem, sorted(view.skills), view.consumer) == (
        True,
        ["acme.brief", "acme.low"],
        "desk",
    )


def test_folders_of_old_runs_are_read(tmp_path):
    """An ended run tells its end, output and file; one whose shim is gone is lost, and its output is still there."""
    shutil.copytree(FIXTURES / "runs", tmp_path / "runs")
    for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    attempts = Attempts(tmp_path)
    assert sorted(attempts.tasks()) == ["ended", "running"]
    ended, running = attempts.find("ended", 1), attempts.find("running", 1)
    verdict = ended.verdict()
    assert (ended.state(), verdict.status, verdict.exit_code) == ("ended", "nonzero", 3)
    assert (ended.logs("stdout").data, (ended.folder / verdict.artifacts[0].file).read_bytes()) == (
        b"said\n",
        b"kept\n",
    )
    assert (running.state(), running.logs("stdout").data) == ("lost", b"begun\n")
