"""A storm on one journal of calls: several processes, each with several clients, claim the same keys at the same time.

In every process but the last the first client stays and the others come and go beside it, as those of a program do that
opens one for each of its users; the last process comes and goes as a whole, as commands do.
`journal_storm` starts the processes; run as a program this module is one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kdskills.jobs.settings import user_state_dir
from kdskills.remote.journal import SqlJournal, journal_url
from kdskills.remote.ports import CallIdentity

REOPEN_EVERY = 40
"""Claims after which a client that comes and goes closes its journal and opens it anew."""


@dataclass(frozen=True, slots=True)
class StormReport:
    """What became of the keys.

    Attributes:
        keys: How many there were.
        unclaimed: Keys nobody claimed.
        claimed_twice: Keys more than one client claimed.
        faults: What clients died of.
        integrity: SQLite's own verdict on the file afterwards; `ok` when it is whole.
    """

    keys: int
    unclaimed: int
    claimed_twice: int
    faults: tuple[str, ...]
    integrity: str

    @property
    def clean(self) -> bool:
        """Whether every key was claimed exactly once, nobody failed, and the file is whole."""
        return (self.unclaimed, self.claimed_twice, self.faults, self.integrity) == (0, 0, (), "ok")


def journal_storm(state_home: Path, *, processes: int, clients: int, keys: int, burners: int = 0) -> StormReport:
    """Let every client of every process claim every key, on the state folder a user gets who names none.

    Args:
        state_home: What `XDG_STATE_HOME` is for the processes.
        processes: How many processes.
        clients: Journals each of them has open at the same time.
        keys: How many calls are claimed.
        burners: Further processes that only keep the processors busy.
    """
    environment = {**os.environ, "XDG_STATE_HOME": str(state_home), "PYTHONPATH": os.pathsep.join(sys.path)}
    claims: Counter[str] = Counter()
    faults: list[str] = []
    with _burning(burners):
        children = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(processes), str(clients), str(keys), str(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for number in range(processes)
        ]  # fmt: skip
        try:
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()  # it has imported everything: all begin together
            for child in children:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            for child in children:
                answer = json.loads(child.communicate()[0] or '{"claims": [], "faults": ["a process died"]}')
                claims.update(answer["claims"])
                faults += answer["faults"]
        finally:
            for child in children:
                child.kill()
                child.wait()
    with contextlib.closing(sqlite3.connect(state_home / "kdskills" / "remote" / "calls.sqlite3")) as link:
        try:
            integrity = "; ".join(row[0] for row in link.execute("PRAGMA integrity_check"))
        except sqlite3.DatabaseError as error:
            integrity = str(error)
    twice = sum(count > 1 for count in claims.values())
    return StormReport(keys, keys - len(claims), twice, tuple(faults), integrity)


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


class _Client(threading.Thread):
    """One client: claims every key, in an order of its own."""

    def __init__(self, name: str, keys: int, *, stays: bool, together: threading.Barrier | None) -> None:
        super().__init__(name=name)
        self.claims: list[str] = []
        self.fault: str | None = None
        self._keys = keys
        self._stays = stays
        self._together = together

    def run(self) -> None:
        try:
            self._claim_all()
        except Exception as error:  # noqa: BLE001 - reported by the process, whatever it is
            self.fault = f"{type(error).__name__}: {error}"
            if self._together is not None:
                self._together.abort()

    def _claim_all(self) -> None:
        names = [f"key-{number}" for number in range(self._keys)]
        random.Random(self.name).shuffle(names)  # noqa: S311 - an order, no secret
        step = len(names) if self._stays else REOPEN_EVERY
        for start in range(0, len(names), step):
            journal = SqlJournal(journal_url(user_state_dir()))
            try:
                for name in names[start : start + step]:
                    identity = CallIdentity("s", "ship", name, "s", "t", name, None, "0")
                    if journal.claim(name, identity, self.name, 3600.0, idempotent=False).mine:
                        self.claims.append(name)
            finally:
                journal.close()
            if self._together is not None:
                self._together.wait()


def _main(processes: int, clients: int, keys: int, number: int) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    passing = number == processes - 1
    together = threading.Barrier(clients) if passing else None
    members = [
        _Client(f"p{number}-c{index}", keys, stays=not passing and index == 0, together=together)
        for index in range(clients)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    faults = [member.fault for member in members if member.fault is not None]
    sys.stdout.write(json.dumps({"claims": [key for one in members for key in one.claims], "faults": faults}) + "\n")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
