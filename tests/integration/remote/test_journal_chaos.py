"""Effects happen once: real workers on one journal, killed where it hurts, counted by what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kdskills.remote.journal import JournalUnavailable, SqlJournal, journal_url, sql, statements
from kdskills.testing.journal_storm import journal_storm
from kdskills.testing.journals import JOURNAL_CHECKS, JournalCheck
from kdskills.testing.work import Cluster

UNKNOWN = "remote skill ship failed: outcome unknown: the worker stopped before recording a result"


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=[pytest.mark.needs("postgres"), pytest.mark.xdist_group("postgres")]),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new database of either kind."""
    if request.param == "sqlite":
        return journal_url(tmp_path)
    made: str = request.getfixturevalue("postgres").create(f"journal_{secrets.token_hex(6)}")
    return made


PATIENCE_S = 60.0
LEASE_S = 12.0
"""Long enough that a worker on a busy machine renews in time."""


class Worker:
    """One worker's process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("journal_worker.py")), json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def go(self) -> None:
        """Let it begin."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()

    def hear(self, event: str) -> dict[str, Any]:
        """Return the next line of that kind."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event:
                return said
        pytest.fail(f"{self._order['name']} ended without saying {event}")

    def answers(self) -> list[dict[str, Any]]:
        """Return every answer, when the worker has ended its calls."""
        assert self._child.stdout is not None
        found: list[dict[str, Any]] = []
        for line in self._child.stdout:
            said = json.loads(line)
            if said["event"] == "end":
                return found
            if said["event"] == "answer":
                found.append(said)
        pytest.fail(f"{self._order['name']} ended early")

    def kill(self) -> None:
        """Kill it as the kernel would: nothing of its own runs any more."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(60)

    def stop(self) -> None:
        """End it, and close its pipes."""
        self._child.kill()
        self._child.wait(60)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start workers that are ready; all are ended afterwards."""
    made: list[Worker] = []

    def start(name: str, **order: Any) -> Worker:
        made.append(Worker({"name": name, "effects": str(tmp_path / "effects"), **order}))
        made[-1].hear("ready")
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def effects(tmp_path: Path) -> Callable[[], list[str]]:
    """Read the effects so far, one line each."""

    def read() -> list[str]:
        path = tmp_path / "effects"
        return path.read_text().splitlines() if path.exists() else []

    return read


def test_fifty_calls_two_workers_fifty_effects(url, worker, effects) -> None:
    """Both workers hear of all fifty calls; each call has one effect, and both give the same fifty answers."""
    workers = [
        worker("one", url=url, calls=50, lease=PATIENCE_S),
        worker("two", url=url, calls=50, lease=PATIENCE_S, backwards=True),
    ]
    for one in workers:
        one.go()
    answers = [one.answers() for one in workers]
    assert sorted(Counter(line.split()[1] for line in effects()).items()) == sorted((str(n), 1) for n in range(50))
    texts = [{answer["n"]: answer["text"] for answer in found} for found in answers]
    assert texts[0] == texts[1]
    assert all(answer["success"] for found in answers for answer in found)
    assert sum(not answer["replayed"] for found in answers for answer in found) == 50


def test_without_a_shared_journal_there_are_a_hundred(worker, effects) -> None:
    """The same two workers, each with a memory of its own: what the journal is for."""
    workers = [worker("one", calls=50), worker("two", calls=50)]
    for one in workers:
        one.go()
    for one in workers:
        one.answers()
    assert len(effects()) == 100


def test_killed_after_storing_before_answering(url, worker, effects) -> None:
    """The answer was committed and never sent: the successor gives it, and the effect is not repeated."""
    first = worker("first", url=url, wait=True)
    first.go()
    assert first.hear("answer")["text"] == "parcel 0 by first"
    first.kill()
    second = worker("second", url=url)
    second.go()
    (answer,) = second.answers()
    assert (answer["text"], answer["replayed"], answer["state"]) == ("parcel 0 by first", True, "done")
    assert effects() == ["first 0"]


def test_killed_while_another_waits(url, worker, effects) -> None:
    """Both were told of the call; the one that ran it dies inside; the other says unknown once the lease has run out."""
    first = worker("first", url=url, hang=True)
    second = worker("second", url=url)
    first.go()
    first.hear("inside")
    second.go()
    first.kill()
    killed = time.monotonic()
    (answer,) = second.answers()
    waited = time.monotonic() - killed
    assert (answer["text"], answer["success"], answer["state"]) == (UNKNOWN, False, "unknown")
    assert effects() == ["first 0"]
    assert waited < 60  # about seven seconds on a machine that is not busy; the bench prints it


def test_killed_inside_an_idempotent_handler(url, worker, effects) -> None:
    """What may run twice is run again by the successor, which answers with its own result."""
    first = worker("first", url=url, hang=True, idempotent=True, lease=2.0)
    second = worker("second", url=url, idempotent=True)
    first.go()
    first.hear("inside")
    first.kill()
    second.go()
    (answer,) = second.answers()
    assert (answer["text"], answer["state"]) == ("parcel 0 by second", "done")
    assert effects() == ["first 0", "second 0"]


def test_killed_between_claim_and_start(url, worker, effects) -> None:
    """Nothing ran: the call is taken over and run once, idempotent or not, by one of two that wait for it."""
    first = worker("first", url=url, stall=True, lease=2.0)
    others = [worker(name, url=url, lease=PATIENCE_S) for name in ("second", "third")]
    first.go()
    first.hear("claimed")
    for one in others:
        one.go()
    first.kill()
    answers = [answer for one in others for answer in one.answers()]
    assert len(effects()) == 1
    (line,) = effects()
    assert [answer["text"] for answer in answers] == [f"parcel 0 by {line.split()[0]}"] * 2
    assert sorted(answer["replayed"] for answer in answers) == [False, True]


def test_a_living_worker_is_not_taken_for_dead(url, worker, effects) -> None:
    """A handler runs for longer than its lease: it is renewed all the while, and nobody else runs or gives it up."""
    first = worker("first", url=url, hang=True, lease=LEASE_S)
    second = worker("second", url=url)
    first.go()
    first.hear("inside")
    journal = SqlJournal(url)
    try:
        (row,) = journal.calls("s")
        second.go()
        until = time.monotonic() + 60
        while journal.get(row.key).lease_until < row.lease_until + LEASE_S:  # renewed past the first lease's end
            assert time.monotonic() < until
            time.sleep(0.05)
        assert (journal.get(row.key).state, effects()) == ("running", ["first 0"])
    finally:
        journal.close()


def test_a_stopped_worker_comes_back_late(url, worker, effects) -> None:
    """A worker that sleeps through its lease is answered for; when it wakes it does not run the call, but says the same."""
    first = worker("first", url=url, stall=True, lease=2.0)
    first.go()
    first.hear("claimed")
    os.kill(first._child.pid, signal.SIGSTOP)
    second = worker("second", url=url)
    second.go()
    (answer,) = second.answers()
    assert answer["text"] == "parcel 0 by second"
    os.kill(first._child.pid, signal.SIGCONT)
    first.go()
    (late,) = first.answers()
    assert (late["text"], late["replayed"]) == ("parcel 0 by second", True)
    assert effects() == ["second 0"]


def test_request_ids_begin_again(url, worker, effects) -> None:
    """Three runs of the server, each with request id 0 and equal arguments: three calls, three effects."""
    for turn in ("t1", "t2", "t3"):
        one = worker(turn, url=url, turn=turn)
        one.go()
        (answer,) = one.answers()
        assert (answer["text"], answer["replayed"]) == (f"parcel 0 by {turn}", False)
    assert len(effects()) == 3


def test_a_worker_without_the_skill_does_not_refuse_first(url, worker, effects) -> None:
    """It hears of the call first and leaves it to the one that has the skill."""
    ignorant = worker("ignorant", url=url, ignorant=True, no_skill=120.0)
    able = worker("able", url=url)
    ignorant.go()
    able.go()
    assert [one.answers()[0]["text"] for one in (ignorant, able)] == ["parcel 0 by able"] * 2
    assert effects() == ["able 0"]


def test_four_workers_open_a_new_journal_and_race(url, worker, effects) -> None:
    """Many workers that start together make the tables once, and share twenty calls without a second effect."""
    workers = [worker(f"w{number}", url=url, calls=20, lease=PATIENCE_S) for number in range(4)]
    for one in workers:
        one.go()
    for one in workers:
        assert len(one.answers()) == 20
    assert sorted(Counter(line.split()[1] for line in effects()).values()) == [1] * 20


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize(("keys", "burners"), [(1000, 0), (100, 4)], ids=["low-load", "high-load"])
def test_clients_that_come_and_go_claim_every_key_once(tmp_path, keys, burners) -> None:
    """Three processes of two clients each on the user's own state folder: one claim for each key, and the file stays whole."""
    report = journal_storm(tmp_path, processes=3, clients=2, keys=keys, burners=burners)
    assert report.clean, report


@pytest.fixture(scope="module")
def database(postgres: Cluster) -> str:
    """A database of PostgreSQL for checks that clear the journal themselves."""
    return postgres.create(f"journal_{secrets.token_hex(6)}")


@pytest.mark.needs("postgres")
@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("check", JOURNAL_CHECKS, ids=lambda check: check.name)
def test_postgres_keeps_every_promise(check: JournalCheck, database: str) -> None:
    """Every check of the conformance suite holds on PostgreSQL, whose clock measures the leases."""
    journal = SqlJournal(database)
    try:
        with journal.engine.begin() as link:
            link.exec_driver_sql("DELETE FROM remote_calls")
        check.run(journal)
    finally:
        journal.close()


@pytest.mark.needs("postgres")
@pytest.mark.xdist_group("postgres")
def test_migrations_make_what_the_code_reads_on_postgres(database: str) -> None:
    """The tables of the newest revision are the described ones there, too."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    journal = SqlJournal(database)
    try:
        with journal.engine.connect() as link:
            options = {
                "version_table": sql.VERSION_TABLE,
                "include_name": lambda name, kind, _: kind != "table" or name in statements.metadata.tables,
            }
            context = MigrationContext.configure(link, opts=options)
            assert compare_metadata(context, statements.metadata) == []
    finally:
        journal.close()


def test_a_server_that_went_away_is_told() -> None:
    """A journal that cannot be reached is an error for the operator, without the driver's words."""
    with pytest.raises(JournalUnavailable) as told:
        SqlJournal("postgresql://kd:hunter2@127.0.0.1:9/none")
    assert "hunter2" not in str(told.value)
