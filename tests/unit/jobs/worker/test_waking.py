"""What wakes a worker on SQLite: each commit, at once; and nothing at all while nobody commits."""

import queue
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from kdskills.jobs.worker import CHANGED, QueueWatch
from kdskills.storage.database import Database

UNWATCHED = """
import sys
from kdskills.storage.database import Database
from kdskills.jobs.worker import QueueWatch
QueueWatch(Database(sys.argv[1]), lambda word: print(word, flush=True), 0.01).start()
sys.stdin.read()
"""


@pytest.fixture
def database(place):
    """A database of this test's own."""
    with closing(Database(f"sqlite:///{place / 'work.db'}")) as opened:
        opened.change(lambda link: link.exec_driver_sql("CREATE TABLE t (x)"))
        yield opened


@pytest.fixture
def words(database):
    """Words told of commits, the first of them taken."""
    told = queue.SimpleQueue()
    watch = QueueWatch(database, told.put, 0.02)
    watch.start()
    assert told.get(timeout=10) == CHANGED
    yield told
    watch.close()


def commit(database):
    """Commit a change."""
    database.change(lambda link: link.exec_driver_sql("INSERT INTO t VALUES (1)"))


def waits():
    """Return how often the watching thread went to sleep."""
    thread = next(one for one in threading.enumerate() if one.name == "queue-watch")
    lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


def test_each_commit_is_told(database, words):
    """A commit after a time of rest is told, however many there were before it."""
    for _ in range(20):
        time.sleep(0.05)
        commit(database)
        assert words.get(timeout=1) == CHANGED


def test_commits_without_rest_are_told_to_the_last(database, words):
    """Of many commits in a row none is left untold: whoever looks after the last word sees every row."""
    for _ in range(200):
        commit(database)
    seen = 0
    while seen < 200:
        assert words.get(timeout=1) == CHANGED
        seen = database.ask(lambda link: link.execute(sa.text("SELECT count(*) FROM t")).scalar())


def test_a_commit_of_another_process_is_told(database, words, place):
    """A commit is told whoever made it."""
    program = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('INSERT INTO t VALUES (1)'); db.commit()"
    )
    subprocess.run([sys.executable, "-c", program, place / "work.db"], check=True)
    assert words.get(timeout=1) == CHANGED


def test_nothing_runs_while_nobody_commits(database, words):
    """The watch sleeps until there is something to tell."""
    commit(database)
    words.get(timeout=1)
    end, before = time.monotonic() + 10, None
    while before != (now := waits()):
        assert time.monotonic() < end
        before = now
        time.sleep(0.2)
    assert words.empty()


def test_its_end_ends_its_thread(database):
    """A watch that is closed leaves no thread behind, though nothing is written any more."""
    watch = QueueWatch(database, lambda word: None, 0.02)
    watch.start()
    thread = next(one for one in threading.enumerate() if one.name == "queue-watch")
    watch.close()
    watch.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_folder_that_comes_back_is_watched(place):
    """A file that is away when the watch begins is waited for, and the watch can be ended at any time."""
    away = place.rename(place.with_name("away"))
    told = queue.SimpleQueue()
    with closing(Database(f"sqlite:///{place / 'work.db'}")) as database:
        watch = QueueWatch(database, told.put, 0.02)
        watch.start()
        with pytest.raises(queue.Empty):
            told.get(timeout=0.2)
        away.rename(place)
        assert told.get(timeout=10) == CHANGED
        watch.close()


@pytest.mark.needs("bubblewrap")  # namespaces of a user's own
def test_a_file_nobody_can_watch_is_looked_at(database, place):
    """Where the kernel watches no file for this user, each commit is told all the same."""
    url = f"sqlite:///{place / 'work.db'}"
    script = 'echo 0 > /proc/sys/user/max_inotify_instances && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", script, "sh", sys.executable, "-c", UNWATCHED, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for _ in range(3):
            assert process.stdout.readline() == b"changed\n"
            commit(database)
        _, complaint = process.communicate()
    assert b"looked for all the time" in complaint
