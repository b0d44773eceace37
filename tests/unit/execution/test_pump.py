"""The pump: counting, tail-keeping, never held up."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution import streams as pumps
from kdskills.execution.streams import HeadBuffer, Pump, TailBuffer

LONG = 60


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 30))
def test_the_tail_is_kept_and_everything_counted(chunks, limit):
    """Whatever comes, the last bytes stay and the count is exact."""
    buffer = TailBuffer(limit)
    for chunk in chunks:
        buffer.feed(chunk)
    whole = b"".join(chunks)
    stream = buffer.stream()
    assert stream.data == (whole[-limit:] if limit else b"")
    assert stream.total == len(whole)
    assert stream.truncated == (len(whole) > limit)


def test_memory_stays_bounded():
    """A flood leaves at most twice the limit and one chunk in memory."""
    buffer = TailBuffer(1000)
    for _ in range(1000):
        buffer.feed(b"x" * 5000)
        assert len(buffer._data) <= 7000


def test_a_report_keeps_its_beginning():
    """The head buffer keeps the first bytes and says that more came."""
    head = HeadBuffer(4)
    head.feed(b"abc")
    head.feed(b"def")
    assert head.value() == b"abcd"


def drive(program: str, *, wall_s: float = 100.0, stdin: bytes = b"", cancel_after: float | None = None):
    """Run a Python program under a pump; return (ending, stdout, seconds)."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    pidfd = os.pidfd_open(process.pid)
    out = TailBuffer(1 << 16)
    fd_out, fd_in = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
    process.stdout.close()
    process.stdin.close()
    pump = Pump(pidfd, [(fd_out, out.feed)], [(fd_in, stdin)], wall_s, process.terminate, process.kill)
    if cancel_after is not None:
        timer = threading.Timer(cancel_after, pump.cancel)
        timer.start()
    began = time.monotonic()
    ending = pump.drive(began)
    took = time.monotonic() - began
    process.wait()
    os.close(pidfd)
    if cancel_after is not None:
        timer.join()
    return ending, out.stream(), took


def test_stdin_reaches_the_program_and_output_us():
    """A megabyte goes in and comes out."""
    data = os.urandom(1 << 20)
    ending, out, _ = drive("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data)
    assert (ending.reason, out.total, out.data) == ("exited", 1 << 20, data[-(1 << 16) :])


def test_a_program_that_reads_nothing_is_no_trouble():
    """Unread stdin neither hangs nor fails the run."""
    ending, out, _ = drive("print('done')", stdin=b"x" * (4 << 20))
    assert (ending.reason, out.data) == ("exited", b"done\n")


def test_a_grandchild_holding_the_pipe_does_not_hold_us():
    """A daemon that keeps stdout open delays the end by the drain time only."""
    program = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n"
        "print(pid, flush=True)\n"
    )
    ending, out, took = drive(program)
    os.kill(int(out.data), signal.SIGKILL)  # it still was there, holding the pipe
    assert ending.reason == "exited"
    assert took < LONG


def test_a_hang_ends_by_the_clock():
    """The wall limit asks, and the program ends."""
    ending, _, took = drive("import time; time.sleep(600)", wall_s=0.3)
    assert ending.reason == "timeout"
    assert took < LONG


def test_ignoring_term_is_answered_by_kill():
    """After the grace the program is killed."""
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    ending, _, took = drive(program, wall_s=0.5)
    assert ending.reason == "timeout"
    assert 0.5 <= took < LONG


def test_cancel_from_another_thread():
    """A cancelled run says so, and late cancels are harmless."""
    ending, _, took = drive("import time; time.sleep(600)", cancel_after=0.2)
    assert ending.reason == "cancelled"
    assert took < LONG


def test_cancel_after_the_end_is_harmless():
    """A pump that is over takes a cancel without a word."""
    process = subprocess.Popen([sys.executable, "-I", "-c", "pass"])
    pidfd = os.pidfd_open(process.pid)
    pump = Pump(pidfd, [], [], 5, process.terminate, process.kill)
    pump.drive(time.monotonic())
    process.wait()
    os.close(pidfd)
    pump.cancel()


def drained(fd, monkeypatch):
    """Return what is read of *fd* when the drain's time is over before it began."""
    monkeypatch.setattr(pumps, "DRAIN_S", -1.0)
    out = TailBuffer(1 << 24)
    os.set_blocking(fd, False)
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ, out.feed)
        pumps._drain(selector, set())
        left = list(selector.get_map().values())
    return out.stream(), left


def test_what_the_dead_left_is_read_however_late_we_come(monkeypatch):
    """A thread that waited long for its turn loses nothing that lies in the pipe."""
    reading, writing = os.pipe()
    data = os.urandom(60_000)
    os.write(writing, data)
    os.close(writing)
    out, left = drained(reading, monkeypatch)
    assert (out.data, left) == (data, [])


def test_a_quiet_holder_of_the_pipe_is_not_waited_for_when_we_come_late(monkeypatch):
    """What lies there is taken, and the pipe is let go while somebody else still could write."""
    reading, writing = os.pipe()
    os.write(writing, b"said")
    out, left = drained(reading, monkeypatch)
    assert (out.data, [key.fd for key in left]) == (b"said", [reading])
    os.close(reading)
    os.close(writing)


def test_a_writer_without_end_is_cut_off_when_we_come_late(monkeypatch):
    """Somebody who keeps writing can hold us for some bytes only, never for ever."""
    reading, writing = os.pipe()

    def flood():
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(writing, b"x" * 65536)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        out, _ = drained(reading, monkeypatch)
        assert out.total <= pumps.MAX_LATE_BYTES
    finally:
        os.close(reading)
        thread.join(60)
        os.close(writing)
    assert not thread.is_alive()
