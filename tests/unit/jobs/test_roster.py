"""Who is alive: locks on one host, leases between hosts, and no way back from the dead."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from kdskills.jobs.queue import Roster, Work, hold_slot, slot_file, slot_taken
from kdskills.storage.database import micros, utc_now
from kdskills.storage.folder import host_id


def live(work):
    """Return the names of the living."""
    return sorted(row.executor for row in work.database.ask(Roster(work).live))


def test_a_slot_has_one_holder(place):
    """The lock is taken once, and free again when its holder lets go."""
    assert not slot_taken(place, 0)
    with hold_slot(place, 0) as first, hold_slot(place, 0, 0.0) as second:
        assert (first, second) == (True, False)
        assert slot_taken(place, 0)
        assert not slot_taken(place, 1)
    assert not slot_taken(place, 0)


def test_a_look_at_a_slot_keeps_no_worker_out(place):
    """Who takes a slot at the moment at which somebody looks whether it is taken waits for the end of that look."""
    looking = os.open(slot_file(place, 0), os.O_RDWR | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, (looking,)).start()
    with hold_slot(place, 0, 60.0) as held:
        assert held


def test_a_killed_holder_holds_nothing(place):
    """The kernel gives the lock back, however the holder died; its file stays and means nothing."""
    script = place / "hold.py"
    script.write_text(
        "import sys, pathlib\n"
        "from kdskills.jobs.queue import hold_slot\n"
        "with hold_slot(pathlib.Path(sys.argv[1]), 0) as held:\n"
        "    print(held, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, str(script), str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "True\n"
        assert slot_taken(place, 0)
        holder.kill()
        holder.wait(60)
    assert not slot_taken(place, 0)
    assert slot_file(place, 0).exists()


def test_entering_buries_who_had_the_slot(work):
    """Who holds the lock knows that the one before is dead; other slots and hosts are left alone."""
    roster = Roster(work)
    roster.enter("old", 0)
    roster.enter("other", 1)
    roster.enter("new", 0)
    assert live(work) == ["new", "other"]


def test_the_dead_do_not_come_back(work):
    """A buried worker's beat is refused."""
    roster = Roster(work)
    roster.enter("one", 0)
    assert roster.beat("one") == []
    roster.leave("one")
    assert roster.beat("one") is None
    assert live(work) == []


def test_a_worker_without_its_lock_is_buried(work):
    """On one host liveness is the lock: no clock is asked, however long a worker has been silent."""
    roster = Roster(work)
    roster.enter("dead", 3)
    roster.enter("me", 0)
    roster.enter("alive", 1)
    with hold_slot(work.state_dir, 1):
        assert roster.bury("me") == ["dead"]
        assert live(work) == ["alive", "me"]
        assert roster.bury("me") == []


def test_silence_kills_nobody_without_leases(work):
    """A laptop that slept for a week keeps its work."""
    roster = Roster(work)
    roster.enter("sleeper", 0)
    table = work.tables.workers
    work.database.change(lambda link: link.execute(table.update().values(beat_at=1)))
    with hold_slot(work.state_dir, 0):
        assert roster.bury() == []
    assert live(work) == ["sleeper"]


def test_another_hosts_lease_is_its_life(work):
    """A worker of another host lives until its lease is over, and not a moment longer."""
    table, now = work.tables.workers, micros(utc_now())
    row = {"host": "far", "pid": 1, "name": "far", "state": "live", "started_at": now, "beat_at": now}
    for executor, slot, until in (
        ("over", 0, now - 6_000_000),
        ("late", 2, now - 1_000_000),
        ("good", 1, now + 600_000_000),
    ):
        work.database.change(
            lambda link, e=executor, s=slot, u=until: link.execute(
                table.insert().values(executor=e, slot=s, lease_until=u, **row)
            )
        )
    roster = Roster(work)
    roster.enter("me", 0)
    with hold_slot(work.state_dir, 0):
        roster.bury("me")
    assert live(work) == ["good", "late", "me"]
    hosts = work.database.ask(lambda link: {row.host for row in roster.live(link)})
    assert hosts == {"far", work.host}


def test_old_rows_are_forgotten(work):
    """Rows of the dead go after a while, rows of the living never."""
    roster = Roster(work)
    roster.enter("dead", 0)
    roster.enter("live", 1)
    roster.leave("dead")
    roster.forget(micros(utc_now()) + 1)
    table = work.tables.workers
    assert work.database.ask(lambda link: list(link.execute(table.select()).scalars())) == ["live"]


def test_a_host_is_its_state_folder(tmp_path):
    """The id is made once per folder, random, and the same for everybody who opens it."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert host_id(one) == host_id(one) != host_id(two)
    assert not [path for path in one.iterdir() if path.name != "host"]


def test_what_is_kept_is_private(tmp_path):
    """Nobody else reads the database, nor the files SQLite keeps beside it, nor writes into the folder."""
    folder = tmp_path / "made"
    work = Work(f"sqlite:///{folder / 'work.db'}", folder)
    kept = {path.name: path.stat().st_mode & 0o777 for path in folder.glob("work.db*")}
    work.close()
    assert set(kept.values()) == {0o600}
    assert folder.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("name", ["sqlalchemy", "alembic", "psycopg"])
def test_the_room_is_light(name):
    """`import kdskills.jobs`, its model, its settings and its client import no engine and no database."""
    code = "import sys, kdskills.jobs, kdskills.jobs.model, kdskills.jobs.settings, kdskills.jobs.client, kdskills.app.settings; sys.exit(sys.argv[1] in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, name]).returncode == 0
