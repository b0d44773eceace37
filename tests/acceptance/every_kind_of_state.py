"""A program that makes kdskills keep something of every kind in a state folder: run it as `every_kind_of_state.py FOLDER`."""

import asyncio
import base64
import io
import sys
import zipfile
from pathlib import Path

from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.builtin.stores.sql import SqlStore
from kdskills.doors.cli.main import build_cli
from kdskills.remote.dispatch import Spool
from kdskills.remote.journal import SqlJournal, journal_url
from kdskills.remote.probe import write_object
from kdskills.testing.work import end_attempts

BUNDLE = Path(__file__).parents[2] / "bundles" / "hello"


def archive():
    """Return a skill's archive in base64."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as out:
        out.writestr(
            "brief/SKILL.md", "---\nname: brief\ndescription: Turns long material into one page.\n---\nRead.\n"
        )
        out.writestr("brief/scripts/run.sh", "#!/bin/sh\n")
    return base64.b64encode(data.getvalue()).decode()


async def work(host):
    """Projects, versions, tasks with inputs and outputs, and what a session leaves; an embedded worker starts by itself."""
    await host.invoke("projects.create", {"project": "acme"}, Context())
    await host.invoke("project_skills.upload", {"project": "acme", "data": archive()}, Context())
    await host.invoke("skills.load", {"session_id": "s", "names": ["hello"]}, Context())
    wanted = {
        "skill_name": "hello",
        "session_id": "s",
        "command": "echo kept > f",
        "workdir": "session",
        "outputs": ["f"],
    }
    ran = await host.invoke("skills.run_cmd", wanted, Context())
    assert ran.status == "succeeded", ran
    await host.work.aclose()
    await host.storage.aclose()


def main():
    """Use every part that keeps something."""
    state = Path(sys.argv[1])
    host = Host(
        Settings(
            state_dir=state, bundle=BUNDLE, executor="bubblewrap", jobs={"idle_s": 1.0}, index_dir=state / "index",
            session_store=f"sqlite:///{state / 'sessions.db'}",
        )
    )  # fmt: skip
    for words in (["db", "upgrade"], ["token", "create", "-s", "skills:read"], ["check", str(BUNDLE)], ["doctor"]):
        CliRunner().invoke(get_command(build_cli(host)), words, obj=host)
    asyncio.run(work(host))
    journal = SqlJournal(journal_url(state))
    journal.keep_receipt("s", "t", "{}")
    Spool(state / "remote" / "spool").keep("long")
    write_object(state / "remote" / "probes" / "x.json", {})
    store = SqlStore(f"sqlite:///{state / 'sessions.db'}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # databases are looked at while they are open: their logs lie beside them
    journal.close()
    asyncio.run(store.aclose())
    end_attempts(state)


if __name__ == "__main__":
    main()
