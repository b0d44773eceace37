"""Records and leases of E2B sandboxes: one holder at a time, tokens that only rise."""

from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.builtin.executors.e2b.sandboxes import Record, SandboxLeases, owner_key
from kdskills.execution.owner import owner_labels
from kdskills.execution.request import Owner

KEY = "k" * 64
DEAD = {"kdskills.run": "r", "kdskills.boot": "another boot"}
PARTS = st.text(alphabet="a_b", max_size=4)


@pytest.fixture
def labels():
    """Return the labels of a run watched by this process."""
    return owner_labels(Owner(), "r1")


@pytest.fixture
def leases(tmp_path):
    """Return leases in a folder of their own."""
    return SandboxLeases(tmp_path / "e2b")


def take(leases, labels, hold=60.0):
    """Take the lease at once, or return None when it is held."""
    given_up = threading.Event()
    timer = threading.Timer(0.15, given_up.set)
    timer.start()
    try:
        return leases.acquire(KEY, labels, hold, given_up)
    finally:
        timer.cancel()


@given(st.tuples(PARTS, PARTS, PARTS, PARTS), st.tuples(PARTS, PARTS, PARTS, PARTS))
def test_no_two_owners_share_a_key(one, other):
    """Keys are equal exactly when every part is; agent `a_b` and conversation `c` never meet `a` and `b_c`."""
    assert (owner_key(Owner(*one)) == owner_key(Owner(*other))) == (one == other)


def test_a_key_says_nothing_about_its_owner():
    """A key is 64 hex digits whatever the names are, fit for a file name; addresses and templates count."""
    keys = {owner_key(Owner("../../etc"), url, "base") for url in ("", "https://a", "https://b")}
    assert [len(key) for key in keys if set(key) <= set("0123456789abcdef")] == [64, 64, 64]


def test_one_holder_at_a_time(leases, labels):
    """A lease that is held is not given; given back, it goes to the next with a higher token."""
    first = take(leases, labels)
    assert (first.token, take(leases, labels)) == (1, None)
    assert leases.release(first)
    assert take(leases, labels).token == 2


def test_a_dead_holder_loses_its_lease(leases, labels):
    """Nobody waits for a process that is gone."""
    take(leases, DEAD)
    assert take(leases, labels).token == 2


def test_a_lease_ends_with_its_time(leases, labels):
    """A living holder over its time loses the lease; what it writes down or gives back later changes nothing."""
    late = take(leases, labels, hold=0.0)
    leases_now = take(leases, labels)
    assert leases.note(leases_now, "sandbox-2", 5.0)
    assert (leases.note(late, "sandbox-1", 1.0), leases.release(late)) == (False, False)
    assert leases._read(KEY).sandbox == "sandbox-2"
    assert take(leases, labels) is None


def test_what_is_noted_is_found_by_the_next(leases, labels):
    """The next holder knows the sandbox, when it was made and when it was last used."""
    before, lease = time.time(), take(leases, labels)
    assert leases.note(lease, "sandbox-1", 123.0)
    leases.release(lease)
    record = take(leases, labels).record
    assert (record.sandbox, record.created) == ("sandbox-1", 123.0)
    assert before <= record.used <= time.time()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1, "odd": 2}', '{"version": 99}', "\x00"])
def test_an_unreadable_record_is_no_sandbox_and_no_lower_token(leases, labels, text):
    """A record nobody understands is replaced; its tokens go on above all that can have been given out."""
    lease = take(leases, labels)
    leases._top.joinpath(f"{KEY}.json").write_text(text)
    after = take(leases, labels)
    assert (after.token > lease.token + 1_000_000, after.record.sandbox) == (True, None)


def test_threads_take_turns(leases, labels):
    """Twenty waits on one lease: never two holders, every token once."""
    inside, seen, most = [0], [], [0]

    def one() -> None:
        lease = leases.acquire(KEY, labels, 60, threading.Event())
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        seen.append(lease.token)
        time.sleep(0.002)
        inside[0] -= 1
        leases.release(lease)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sorted(seen), most[0]) == (list(range(1, 21)), 1)


def test_leftovers_are_told_from_what_is_used(leases, labels, tmp_path):
    """Dead holders and sandboxes over their times are left over; held, fresh and empty records are not."""
    now = time.time()
    records = {
        "dead": Record(3, "s1", now, now, now + 99, DEAD),
        "idle": Record(3, "s2", now - 20, now - 20),
        "old": Record(3, "s3", now - 500, now),
        "held": Record(3, "s4", now - 500, now - 500, now + 99, labels),
        "fresh": Record(3, "s5", now, now),
        "empty": Record(3),
    }
    (tmp_path / "e2b").mkdir()
    for key, record in records.items():
        leases._write(key, record)
    assert [key for key, _, _ in leases.leftovers(10, 100)] == ["dead", "idle", "old"]
    assert leases.forget("idle", records["idle"])
    assert leases._read("idle") == Record(token=3)
    assert not leases.forget("old", records["idle"])


def test_records_hold_no_more_than_they_must(leases, labels, tmp_path):
    """A record has the fields of the class and nothing else, readable by its owner only."""
    take(leases, labels)
    path = tmp_path / "e2b" / f"{KEY}.json"
    assert set(json.loads(path.read_text())) == {"version", "token", "sandbox", "created", "used", "until", "holder"}
    assert path.stat().st_mode & 0o777 == 0o600
