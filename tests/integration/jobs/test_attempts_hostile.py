"""Attempts when things go wrong: killed shims and runners, floods, odd values, process numbers that were used before."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from kdskills.execution import Limits
from kdskills.execution.owner import process_start
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts

pytestmark = pytest.mark.needs("bubblewrap")

MIB = 1024 * 1024
ODD_VALUES = {
    "DOLLAR": "$HOME ${HOME} $(id) $$",
    "TICKS": "`id` \\`id\\`",
    "QUOTES": "'single' \"double\" \\",
    "LINES": "one\ntwo\r\nthree\t",
    "LETTERS": "ключ=значение 鍵 🔑",
    "EMPTY": "",
}


def tree(pid):
    """Return *pid* and everything below it."""
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += shim.children(found[-1])
    return found


def alive(pids):
    """Return those of *pids* (number to start) that still are the same process."""
    return [pid for pid, start in pids.items() if process_start(pid) == start]


async def running(lab, script="echo begun; sleep 600 & sleep 600", **more):
    """Start a program and wait for its first words, and for its attempt's; return the attempt and its shim's number."""
    attempt = await lab.attempts.start(lab.order(script, **more))
    await lab.until(lambda: attempt.logs("stdout").total)
    await attempt.until_running()  # a program may speak before its attempt says that it runs
    return attempt, shim.read_identity(attempt.folder)["pid"]


async def test_killed_shim_is_lost_and_nothing_lives_on(lab):
    """An attempt whose shim was killed is lost, once and for good, when all it ran is gone."""
    attempt, pid = await running(lab)
    everything = {one: process_start(one) for one in tree(pid)}
    assert len(everything) >= 4
    os.kill(pid, signal.SIGKILL)
    verdicts = await asyncio.gather(*(attempt.wait() for _ in range(3)))
    assert {(one.status, one.error_code, one.exit_code) for one in verdicts} == {("lost", "lost", None)}
    assert alive(everything) == []
    assert verdicts[0].stdout_total == len("begun\n")
    assert (attempt.state(), attempt.verdict()) == ("ended", verdicts[0])


async def test_killed_runner_is_lost_and_nothing_lives_on(lab):
    """A killed runner leaves no process, and its shim says that the attempt is lost."""
    attempt, pid = await running(lab)
    facts = await attempt.until_running()
    everything = {one: process_start(one) for one in tree(pid)}
    os.kill(facts.runner.pid, signal.SIGKILL)
    verdict = await attempt.wait()
    assert (verdict.status, verdict.error_code) == ("lost", "lost"), lab.log(attempt)
    assert alive(everything) == []


async def test_killed_shim_and_runner_are_lost(lab):
    """With shim and runner killed at once, the sandbox still ends and the verdict is lost."""
    attempt, pid = await running(lab)
    facts = await attempt.until_running()
    everything = {one: process_start(one) for one in tree(pid)}
    os.kill(pid, signal.SIGSTOP)
    os.kill(facts.runner.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    assert (await attempt.wait()).status == "lost"
    await lab.until(lambda: alive(everything) == [])


async def test_lost_attempt_that_was_cancelled_is_cancelled(lab):
    """A cancel that was written down before the shim died stays a cancel."""
    attempt, pid = await running(lab)
    os.kill(pid, signal.SIGSTOP)
    attempt.cancel("late")
    os.kill(pid, signal.SIGKILL)
    assert (await attempt.wait()).status == "cancelled"


async def test_result_of_a_runner_that_finished_counts_without_its_shim(lab):
    """When only the shim's last words are missing, the program's result is not lost."""
    attempt, _ = await lab.run("exit 5")
    (attempt.folder / shim.EXIT).unlink()
    assert attempt.state() == "lost"
    assert (await attempt.wait()).exit_code == 5


async def test_attempt_is_adopted_by_another_process(lab):
    """A worker that never saw the attempt start finds it, cancels it and reads its verdict."""
    attempt, _ = await running(lab)
    lab.starter.close()
    other = Attempts(lab.state).find(attempt.order.task_id, 1)
    assert other is not None
    assert (other.state(), other.order) == ("running", attempt.order)
    waiting = asyncio.ensure_future(other.wait())
    other.cancel("from elsewhere")
    assert (await waiting).status == "cancelled"


async def test_start_is_repeated_without_running_twice(lab):
    """Starting the same attempt again, at once or after its end, finds the first one."""
    order = lab.order("echo once >> trace; cat trace", session="s")
    started = await asyncio.gather(*(lab.attempts.start(order) for _ in range(4)))
    verdicts = [await attempt.wait() for attempt in started]
    again = await lab.attempts.start(order)
    assert again.verdict() == verdicts[0]
    assert again.logs("stdout").data == b"once\n"


async def test_attempt_that_never_began_is_not_found(lab):
    """An order whose shim never took the lock can still be started, as the worker died before it was."""
    order = lab.order("echo late")
    folder = lab.state / "runs" / order.task_id / "1"
    folder.mkdir(parents=True)
    shim.write_json(folder / shim.ORDER, order.to_json())
    assert lab.attempts.find(order.task_id, 1) is None
    attempt = await lab.attempts.start(order)
    assert (await attempt.wait()).status == "ok"


async def test_cancel_before_the_shim_looks_means_nothing_runs(lab):
    """A cancel that was written before the start ends the attempt without its program."""
    order = lab.order("echo never")
    folder = lab.state / "runs" / order.task_id / "1"
    folder.mkdir(parents=True)
    shim.write_json(folder / shim.CANCEL, {"reason": "early"})
    attempt = await lab.attempts.start(order)
    verdict = await attempt.wait()
    assert (verdict.status, attempt.logs("stdout").total, attempt.facts()) == ("cancelled", 0, None)


@pytest.mark.parametrize("boot", ["this", "another"])
async def test_number_of_a_dead_shim_is_used_by_another_process(lab, python_process, boot):
    """A process that has the dead shim's number is neither taken for it nor killed by a cancel."""
    stranger = python_process("-c", "import time; time.sleep(600)")
    order = lab.order("true")
    folder = lab.state / "runs" / order.task_id / "1"
    folder.mkdir(parents=True)
    shim.write_json(folder / shim.ORDER, order.to_json())
    known = shim.identity(stranger.pid)
    known |= {"started": "1"} if boot == "this" else {"boot": "0" * 8}
    (folder / shim.LOCK).write_text(json.dumps(known), encoding="utf-8")
    attempt = lab.attempts.find(order.task_id, 1)
    assert attempt is not None
    assert attempt.state() == "lost"
    attempt.cancel("is it me?")
    assert (await attempt.wait()).status == "cancelled"
    assert stranger.poll() is None


async def test_state_after_a_reboot_is_lost(lab):
    """Rows say running, facts are there, nothing lives: the attempt is lost and says so at once."""
    attempt, pid = await running(lab, "echo begun; sleep 600")
    os.kill(pid, signal.SIGKILL)
    await lab.until(lambda: attempt.state() == "lost")
    (attempt.folder / shim.LOCK).write_text(json.dumps({"pid": 1, "started": "5", "boot": "gone"}), encoding="utf-8")
    (attempt.folder / shim.RESULT).unlink(missing_ok=True)
    assert Attempts(lab.state, lab.starter).find(attempt.order.task_id, 1).state() == "lost"
    assert (await attempt.wait()).status == "lost"


async def test_torn_lock_text_is_no_process(lab):
    """A lock whose text is torn names nobody; the attempt is lost rather than waited for."""
    attempt, pid = await running(lab, "echo begun; sleep 600")
    os.kill(pid, signal.SIGKILL)
    await lab.until(lambda: attempt.state() == "lost")
    (attempt.folder / shim.RESULT).unlink(missing_ok=True)
    (attempt.folder / shim.LOCK).write_text('{"pid": "x", "started": 3}', encoding="utf-8")
    assert (await attempt.wait()).status == "lost"


async def test_killed_launcher_is_replaced(lab):
    """An order after the launcher was killed starts a new one; what it had started goes on."""
    attempt, _ = await running(lab)
    lab.starter._process.kill()
    _, verdict = await lab.run("true")
    assert (verdict.status, attempt.state()) == ("ok", "running")
    attempt.cancel()
    await attempt.wait()


async def test_stubborn_program_is_killed(lab):
    """A program and its child that ignore TERM are killed after the grace."""
    attempt, pid = await running(lab, "trap '' TERM; echo begun; (trap '' TERM; sleep 600) & while :; do sleep 1; done")
    everything = {one: process_start(one) for one in tree(pid)}
    attempt.cancel()
    assert (await attempt.wait()).status == "cancelled"
    await lab.until(lambda: alive(everything) == [])


async def test_timeout_keeps_the_output(lab):
    """A program over its time is ended, and what it printed is there."""
    attempt, verdict = await lab.run("echo said; echo told >&2; sleep 600", timeout_s=6.0)
    assert (verdict.status, verdict.error_code, verdict.exit_code) == ("timeout", "timeout", None)
    assert (attempt.logs("stdout").data, attempt.logs("stderr").data) == (b"said\n", b"told\n")


async def test_variables_arrive_byte_exact(lab):
    """Dollars, backticks, quotes, newlines and other letters in values are expanded by nobody."""
    names = sorted(ODD_VALUES)
    code = f"import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.environb[n.encode()] for n in {names!r}))"
    attempt, verdict = await lab.run(["python3", "-c", code], env=ODD_VALUES)
    assert verdict.status == "ok", lab.log(attempt)
    assert attempt.logs("stdout").data.split(b"\0") == [ODD_VALUES[name].encode() for name in names]


async def test_odd_bytes_and_one_long_line_are_kept(lab):
    """NUL bytes, bad UTF-8 and a line of 300 KiB are read back by offset as they were."""
    code = "import sys; w = sys.stdout.buffer.write; w(b'\\0\\xff'); w(b'x' * 300 * 1024); w(b'\\n')"
    attempt, _ = await lab.run(["python3", "-c", code])
    wanted = b"\0\xff" + b"x" * 300 * 1024 + b"\n"
    pieces, offset = [], 0
    while piece := attempt.logs("stdout", offset, 100_000).data:
        pieces.append(piece)
        offset += len(piece)
    assert b"".join(pieces) == wanted
    assert attempt.tail("stdout", 5).data == wanted[-5:]
    assert (attempt.tail("stdout", 0).data, attempt.tail("stdout", 0).total) == (b"", len(wanted))


async def test_flood_stays_bounded_in_memory_and_on_disk(lab):
    """300 MB of output: the total is true, the disk holds the kept tail only, no process of ours grows by 50 MiB."""
    order = lab.order(["sh", "-c", "echo first; sleep 2; head -c 300000000 /dev/zero; echo last"]).model_copy(
        update={"log_limit": 4 * MIB}
    )
    attempt = await lab.attempts.start(order)
    first, peak = {}, {}
    while attempt.verdict() is None:
        for pid in (
            (shim.read_identity(attempt.folder) or {}).get("pid"),
            getattr(getattr(attempt.facts(), "runner", None), "pid", None),
        ):
            grown = anonymous(pid)
            if grown:
                first.setdefault(pid, grown)
                peak[pid] = max(peak.get(pid, 0), grown)
        await asyncio.sleep(0.02)
    verdict = attempt.verdict()
    assert (verdict.status, verdict.stdout_total) == ("ok", 300_000_011)
    assert attempt.tail("stdout", 6).data == b"\0last\n"
    assert attempt.logs("stdout", 0, 10).truncated
    assert len(peak) == 2
    assert all(peak[pid] - first[pid] < 50 * MIB for pid in peak), (first, peak)
    assert (attempt.folder / shim.STDOUT).stat().st_blocks * 512 <= 6 * MIB


def anonymous(pid):
    """Return the bytes of memory that are *pid*'s own; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


async def test_outputs_cannot_escape(lab, tmp_path):
    """Links, special files and paths out of the workdir are never collected; the rest is."""
    script = "ln -s /etc/passwd link; mkfifo pipe; mkdir d; ln -s / d/up; echo fine > good; ln good hard"
    _, verdict = await lab.run(script, outputs=("link", "pipe", "d/up/etc/passwd", "good", "none"))
    assert [item.path for item in verdict.artifacts] == ["good"]
    assert {error.path: error.code for error in verdict.output_errors} == {
        "link": "link",
        "pipe": "not_regular",
        "d/up/etc/passwd": "link",
        "none": "missing",
    }
    _, refused = await lab.run("true", outputs=("../../etc/passwd",))
    assert (refused.status, refused.error_code) == ("refused", "bad_request")


async def test_outputs_beyond_their_bounds_are_named(lab):
    """A file larger than an output may be is named, not kept, and the others are."""
    order = lab.order("head -c 3000000 /dev/zero > big; echo x > small", outputs=("*",))
    bounded = order.model_copy(update={"outputs": order.outputs.model_copy(update={"each": 2 * MIB})})
    verdict = await (await lab.attempts.start(bounded)).wait()
    assert [item.path for item in verdict.artifacts] == ["small"]
    assert [(error.path, error.code) for error in verdict.output_errors] == [("big", "too_large")]


async def test_what_the_engine_refuses_is_a_verdict(lab, make_lab):
    """An engine that is not there, and one the operator did not allow, end the attempt as refused."""
    _, unknown = await make_lab("nowhere").run("true")
    _, bare = await make_lab("subprocess").run("true", unsafe=True)
    _, small = await lab.run("true", limits=Limits(memory=1))
    assert [one.status for one in (unknown, bare, small)] == ["refused"] * 3
    assert (bare.error_code, small.error_code) == ("policy_denied", "limit_not_enforceable")


async def test_folder_of_a_living_attempt_is_not_removed(lab):
    """Retention leaves what lives; a dead attempt's folder goes whole."""
    attempt, _ = await running(lab)
    assert not lab.attempts.remove(attempt.order.task_id)
    attempt.cancel()
    await attempt.wait()
    await lab.until(lambda: lab.attempts.remove(attempt.order.task_id))
    assert not attempt.folder.exists()
    assert lab.attempts.tasks() == []


async def test_signals_reach_programs_unblocked(lab):
    """A program starts with no signal blocked or ignored by those who started it."""
    attempt, _ = await lab.run("grep -E '^Sig(Blk|Ign)' /proc/self/status")
    blocked, ignored = (int(word, 16) for word in attempt.logs("stdout").data.split()[1::2])
    of_the_c_library = 0b11 << 31  # 32 and 33 are its own; what it spawns, such as make does, ignores them
    assert (blocked, ignored & ~of_the_c_library) == (0, 0)


async def test_programs_have_the_ordinary_mask(lab):
    """What a program makes is as readable as if it were run in the foreground."""
    attempt, _ = await lab.run("umask")
    assert attempt.logs("stdout").data.strip() == b"0022"


def links(pid):
    """Return what the descriptors of *pid* lead to."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(path.readlink()))
    return found


async def test_shim_holds_nothing_of_the_launcher(lab):
    """Shim and runner have sessions and descriptors of their own: no pipe of the launcher's stays open in them."""
    attempt, pid = await running(lab)
    pipes = {link for link in links(lab.starter._process.pid) if link[:5] == "pipe:"}
    assert len(pipes) >= 2
    for process in (pid, (await attempt.until_running()).runner.pid):
        assert not links(process) & pipes
        assert os.getsid(process) == pid
    attempt.cancel()
    await attempt.wait()


async def test_waiting_may_be_given_up(lab):
    """Whoever stops waiting ends nothing, and the next one who waits hears the verdict."""
    attempt, _ = await running(lab)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(attempt.wait(), 0.2)
    assert attempt.state() == "running"
    waiting = [asyncio.ensure_future(attempt.wait()) for _ in range(3)]
    waiting[0].cancel()
    attempt.cancel()
    assert {(await one).status for one in waiting[1:]} == {"cancelled"}


async def test_offsets_of_logs_hold_while_they_grow(lab):
    """Bytes read by offset while a program prints, put together, are what it printed."""
    attempt, _ = await running(lab, "for i in $(seq 2000); do echo line $i; done; sleep 0.2; echo last")
    pieces, offset = [], 0
    while attempt.verdict() is None or offset < attempt.logs("stdout").total:
        piece = attempt.logs("stdout", offset, 1000)
        assert (piece.offset, piece.truncated) == (offset, False)
        pieces.append(piece.data)
        offset = piece.next_offset
        await asyncio.sleep(0)
    wanted = "".join(f"line {number}\n" for number in range(1, 2001)) + "last\n"
    assert b"".join(pieces).decode() == wanted
    assert attempt.logs("stdout", 10**9).data == b""
    assert attempt.logs("stdout", -5).data == b"last\n"
