"""The shim, forked by the test itself: verdicts, cancel, leftovers; and the files everybody reads."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kdskills.errors import ExecRefused
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempt, Verdict, attempt_alive
from kdskills.jobs.records import without_room


@pytest.fixture
def folder(tmp_path, make_order):
    """The folder of an attempt that has its order."""
    shim.write_json(tmp_path / shim.ORDER, make_order().to_json())
    return tmp_path


@pytest.fixture
def begin(folder):
    """Return a starter of shims as forks of this process; what is left of them at the end is killed, runners included."""
    started = []

    def start(run, reap=lambda: 0, backstop=None):
        if backstop is not None:
            order = json.loads((folder / shim.ORDER).read_text()) | {"backstop_s": backstop}
            shim.write_json(folder / shim.ORDER, order)
        lock = shim.take_lock(folder)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.setsid()
                shim.watch(folder, lock, run, reap)
                code = 0
            finally:
                os._exit(code)
        os.close(lock)
        started.append(pid)
        return pid

    yield start
    for pid in started:
        for end in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.waitpid(pid, 0)):  # noqa: B023 - called at once
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                end()


def ended(pid):
    """Wait for a shim's end and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def until(condition):
    """Wait until *condition* holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def verdict(folder):
    """Return the verdict in *folder*."""
    return Verdict.model_validate(shim.read_json(folder / shim.EXIT))


def tells(folder, status="ok", **facts):
    """Return a runner that leaves a result."""

    def run():
        shim.write_json(folder / shim.RESULT, {"status": status, **facts})
        return 0

    return run


def sleeps():
    """Be a runner that ignores everything but KILL."""
    time.sleep(600)
    return 0


def test_result_becomes_the_verdict(folder, begin):
    """What the runner says is the verdict, and the lock is free afterwards."""
    assert ended(begin(tells(folder, exit_code=0, stdout_total=3))) == 0
    found = verdict(folder)
    assert (found.status, found.exit_code, found.stdout_total, attempt_alive(folder)) == ("ok", 0, 3, False)


def test_runner_that_gives_up_is_our_fault(folder, begin):
    """A runner that exits without a result is no lost attempt but a broken one, after leftovers were reaped."""
    ended(begin(lambda: 3, lambda: shim.write_json(folder / "reaped", {}) or 0))
    found = verdict(folder)
    assert (found.status, found.error_code, "code 3" in found.error_message) == ("infra_error", "runner_failed", True)
    assert (folder / "reaped").exists()


def test_runner_that_found_no_room_says_so(folder, begin):
    """A runner that could not keep what it had, for want of room, blames the disk and nobody else."""
    ended(begin(lambda: shim.DISK_FULL))
    found = verdict(folder)
    assert (found.status, found.error_code, "disk" in found.error_message) == ("infra_error", "disk_full", True)


def test_runner_that_began_nothing_for_want_of_room_says_so(folder, begin):
    """Nothing ran, so it may be begun again whatever it is."""
    ended(begin(lambda: shim.NO_ROOM))
    found = verdict(folder)
    assert (found.status, found.error_code, "nothing began" in found.error_message) == ("refused", "disk_full", True)
    assert without_room(found)


def no_room(*_):
    """Find the disk full."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_nothing_begins_before_there_is_room_for_its_verdict(folder, begin, monkeypatch, make_order):
    """Without room to keep for the verdict the runner is never called; nothing is written, and nothing began."""
    monkeypatch.setattr(shim, "ROOM_S", 0.3)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert ended(begin(tells(folder))) == 0
    assert sorted(path.name for path in folder.iterdir()) == [shim.LOCK, shim.ORDER]
    assert without_room(await Attempt(folder, make_order()).wait())


async def test_room_is_asked_for_before_the_shim_says_who_it_is(folder, begin, monkeypatch, make_order):
    """On a disk without a single block left there is none for the lock's own words either."""
    monkeypatch.setattr(shim, "ROOM_S", 0.3)
    monkeypatch.setattr(os, "pwrite", no_room)
    assert ended(begin(tells(folder))) == 0
    assert without_room(await Attempt(folder, make_order()).wait())


def test_what_waits_for_room_begins_once_there_is_some(folder, begin, monkeypatch):
    """Room that comes is found within a moment."""
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *to: allocate(*to) if (folder / "free").exists() else no_room())
    pid = begin(tells(folder, exit_code=0))
    until((folder / shim.ROOM).exists)  # it was tried
    assert not (folder / shim.RESULT).exists()
    (folder / "free").touch()
    assert ended(pid) == 0
    assert verdict(folder).status == "ok"


@pytest.mark.parametrize("told", [True, False], ids=["told", "signal alone"])
async def test_what_waits_for_room_can_be_canceled(folder, begin, monkeypatch, make_order, told):
    """A cancel ends the wait, also one that finds no room to be written; nothing began, and nothing does later."""
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    pid = begin(tells(folder))
    until(lambda: shim.read_identity(folder) is not None)
    if not told:
        monkeypatch.setattr(shim, "write_json", no_room)
    assert Attempt(folder, make_order()).cancel("enough")
    assert ended(pid) == 0
    assert ((folder / shim.CANCEL).exists(), (folder / shim.RESULT).exists()) == (told, False)
    assert without_room(await Attempt(folder, make_order()).wait())


def test_a_cancel_that_nobody_could_hear_yet_is_heard(folder, begin, monkeypatch, make_order):
    """A shim without room to say who it is cannot be told: the cancel is asked again until it can, and nothing runs."""
    write, pwrite = shim.write_json, os.pwrite

    def has_room():
        return (folder / "free").exists()

    monkeypatch.setattr(os, "pwrite", lambda *to: pwrite(*to) if has_room() else no_room())
    pid = begin(tells(folder))
    until(lambda: attempt_alive(folder))
    monkeypatch.setattr(shim, "write_json", lambda *to, **how: write(*to, **how) if has_room() else no_room())
    asking = threading.Thread(target=Attempt(folder, make_order()).cancel)
    asking.start()
    (folder / "free").touch()
    asking.join(30)
    assert ended(pid) == 0
    assert (asking.is_alive(), (folder / shim.CANCEL).exists()) == (False, True)


def test_a_disk_on_which_no_room_can_be_kept_is_used_as_it_is(folder, begin, monkeypatch):
    """Some file systems cannot allocate ahead."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert ended(begin(tells(folder, exit_code=0))) == 0
    assert verdict(folder).status == "ok"


async def test_what_ran_is_never_said_not_to_have_begun(folder, make_order):
    """A lock that says nothing is not believed where the runner told of itself."""
    shim.write_json(folder / shim.FACTS, {"started_at": 1.0, "engine": "e"})
    assert (await Attempt(folder, make_order()).wait()).status == "lost"


def test_the_end_of_a_chain_may_be_a_full_disk():
    """What an engine refuses for want of room is told from what it refuses for another reason."""

    def prepare():
        try:
            no_room()
        except OSError:
            raise ExecRefused("cannot prepare") from None

    with pytest.raises(ExecRefused) as refused:
        prepare()
    assert shim.full_disk_of(refused.value).errno == errno.ENOSPC
    assert shim.full_disk_of(ExecRefused("no engine")) is None


def test_a_runner_has_the_room_kept_for_the_verdict(folder, monkeypatch):
    """What a runner tells is written in its place on a full disk."""
    (folder / shim.ROOM).write_bytes(b"x")
    write = shim.write_json
    monkeypatch.setattr(
        shim, "write_json", lambda *to, **how: no_room() if (folder / shim.ROOM).exists() else write(*to, **how)
    )
    shim.write_in_room(folder / shim.RESULT, {"status": "ok"})
    assert shim.read_json(folder / shim.RESULT) == {"status": "ok"}


@pytest.fixture
def full_disk(folder, monkeypatch):
    """A disk without room for a verdict, but for what is kept for one."""
    write = shim.write_json

    def refuse(path, facts, *, durable=False):
        if path.name == shim.EXIT and (folder / shim.ROOM).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, facts, durable=durable)

    monkeypatch.setattr(shim, "write_json", refuse)


@pytest.mark.usefixtures("full_disk")
def test_verdict_has_its_room_on_a_full_disk(folder, begin):
    """With no room left, the verdict is written where room was kept for it, and says that the disk was full."""
    assert ended(begin(tells(folder, exit_code=0, stdout_total=3))) == 0
    found = verdict(folder)
    assert (found.status, found.exit_code, found.stdout_total) == ("ok", 0, 3)
    assert "disk was full" in found.error_message
    assert not (folder / shim.ROOM).exists()


def test_verdict_that_finds_no_room_is_an_error_and_leaves_nothing(folder, monkeypatch):
    """With no room at all, whoever writes the verdict is told by the system's own words; no part of a file stays."""

    def refuse(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shim, "ROOM_S", 0.1)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        shim.write_verdict(folder, {"status": "ok"})
    assert [path.name for path in folder.iterdir()] == [shim.ORDER]


def test_broken_disk_is_not_waited_for(folder, monkeypatch):
    """An error that room would not mend is raised at once."""

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shim, "ROOM_S", 3600.0)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        shim.write_verdict(folder, {"status": "ok"})


def test_runner_that_breaks_leaves_its_words(folder, begin, capfd):
    """An error of the runner is printed, which the launcher leads into the shim's log."""

    def run():
        raise ZeroDivisionError("by zero")

    ended(begin(run))
    assert "ZeroDivisionError: by zero" in capfd.readouterr().err
    assert verdict(folder).error_code == "runner_failed"


def test_cancel_before_the_start_runs_nothing(folder, begin):
    """With the cancel already written, there is no runner and nothing to reap."""
    shim.write_json(folder / shim.CANCEL, {"reason": "early"})
    ended(begin(tells(folder), lambda: shim.write_json(folder / "reaped", {}) or 0))
    found = verdict(folder)
    assert (found.status, found.error_code) == ("cancelled", "canceled")
    assert not (folder / shim.RESULT).exists()
    assert not (folder / "reaped").exists()


def test_runner_that_does_not_end_is_killed(folder, begin, monkeypatch):
    """A runner that ignores TERM is killed, and the verdict still says cancelled."""
    monkeypatch.setattr(shim, "PATIENCE_S", 0.2)
    pid = begin(sleeps)
    until(lambda: shim.children(pid))
    os.kill(pid, signal.SIGTERM)
    ended(pid)
    assert verdict(folder).status == "cancelled"


def test_overdue_runner_is_ended_as_timeout(folder, begin, monkeypatch):
    """When the engine did not hold its own timeout, the shim does, and says timeout."""
    monkeypatch.setattr(shim, "PATIENCE_S", 0.2)
    ended(begin(sleeps, backstop=0.2))
    assert (verdict(folder).status, verdict(folder).error_code) == ("timeout", "timeout")


def test_overdue_runner_that_says_cancelled_ran_out_of_time(folder, begin):
    """The runner only knows that it was told to end; the shim knows why."""

    def run():
        signal.sigwait({signal.SIGTERM})
        return tells(folder, "cancelled")()

    ended(begin(run, backstop=0.2))
    assert verdict(folder).status == "timeout"


def test_everything_below_is_gone_at_the_end(folder, begin):
    """Daemons with sessions of their own, and their children, do not outlive the shim."""
    words = [sys.executable, "-c", "import os, time; os.setsid(); os.fork(); os.fork(); time.sleep(600)"]

    def run():
        for _ in range(3):
            subprocess.Popen(words)
        me = os.getppid()
        until(lambda: len(below(me)) >= 1 + 3 * 4)
        shim.write_json(folder / "left", {"pids": [shim.identity(pid) for pid in below(me)]})
        return tells(folder)()

    ended(begin(run))
    known = shim.read_json(folder / "left")["pids"]
    assert len(known) >= 13
    assert [one["pid"] for one in known if shim.lives(one)] == []


def below(pid):
    """Return every process below *pid*."""
    queue, found = shim.children(pid), []
    while queue:
        found.append(queue.pop())
        queue += shim.children(found[-1])
    return found


def test_lock_text_names_the_shim(folder, begin):
    """The lock says who holds it: number, start and boot."""
    pid = begin(sleeps)
    until(lambda: shim.read_identity(folder))
    known = shim.read_identity(folder)
    assert (known["pid"], shim.lives(known), attempt_alive(folder)) == (pid, True, True)
    assert not shim.lives(known | {"started": "1"})
    assert not shim.lives(known | {"boot": "x"})


@pytest.mark.parametrize(
    "known", [{}, {"pid": "1"}, {"pid": 1}, {"pid": 1, "started": ""}, {"pid": -1, "started": "5"}]
)
def test_torn_identity_lives_nowhere(known):
    """What is no identity names no living process."""
    assert not shim.lives(known)


def test_own_identity_lives_and_a_zombies_does_not():
    """This process lives; one that ended and was not collected does not."""
    assert shim.lives(shim.identity(os.getpid()))
    child = subprocess.Popen(["sleep", "600"])
    known = shim.identity(child.pid)
    child.kill()
    until(lambda: not shim.lives(known))
    child.wait()


def test_lock_is_taken_once(folder):
    """A second taker gives up; a look at the lock is not in the way of one."""
    lock = shim.take_lock(folder)
    assert (shim.take_lock(folder, 0.0), attempt_alive(folder)) == (None, True)
    os.close(lock)
    assert not attempt_alive(folder)
    again = shim.take_lock(folder, 0.0)
    os.close(again)


def test_file_is_replaced_at_once(tmp_path):
    """Readers see one whole text or another, never a part, while many write."""
    path = tmp_path / "facts.json"
    shim.write_json(path, {"n": 0})
    over = threading.Event()

    def write(number):
        while not over.is_set():
            shim.write_json(path, {"n": number, "text": "x" * 5000 * number})

    writers = [threading.Thread(target=write, args=(number,)) for number in range(1, 4)]
    for writer in writers:
        writer.start()
    for _ in range(300):
        facts = shim.read_json(path)
        assert len(facts.get("text", "")) == 5000 * facts["n"]
    over.set()
    for writer in writers:
        writer.join()
    assert [item.name for item in tmp_path.iterdir()] == ["facts.json"]


def test_unreadable_verdict_is_lost_not_an_error(folder, make_order):
    """A verdict of another version, or of nobody's, ends the attempt as lost."""
    attempt = Attempt(folder, make_order())
    shim.write_json(folder / shim.EXIT, {"status": "splendid"})
    assert (attempt.state(), attempt.verdict().status) == ("ended", "lost")


@pytest.fixture
def stuck(folder, begin):
    """A runner that ignores TERM and outlives its killed shim."""
    me = lambda: shim.write_json(
        folder / shim.FACTS, {"started_at": 1.0, "engine": "e", "runner": shim.identity(os.getpid())}
    )
    pid = begin(lambda: me() or sleeps())
    until((folder / shim.FACTS).exists)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.usefixtures("stuck")
async def test_runner_that_outlives_its_shim_is_ended_in_the_end(folder, make_order, monkeypatch):
    """A runner that does not end with its shim is killed by whoever waits, once it had its time."""
    monkeypatch.setattr(shim, "PATIENCE_S", 0.2)
    attempt = Attempt(folder, make_order())
    assert attempt.state() == "starting"
    assert (await attempt.wait()).status == "lost"


@pytest.fixture
def killed(begin):
    """A shim and its runner that were killed."""
    pid = begin(sleeps)
    until(lambda: shim.children(pid))
    runner = shim.children(pid)[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.kill(runner, signal.SIGKILL)


@pytest.mark.usefixtures("killed")
async def test_lost_attempt_is_settled_without_a_starter(folder, make_order):
    """An observer that cannot reap still gives a dead attempt its verdict."""
    attempt = Attempt(folder, make_order())
    assert (await attempt.wait()).status == "lost"
    assert await attempt.until_running() is None
