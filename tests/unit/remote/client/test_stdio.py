"""The pipes of a child process, whatever the child does."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest

from kdskills.remote.client.wire import StdioTransport
from kdskills.remote.ports import AppServerGone

PREPARE = "import sys, os, time, json\nout = sys.stdout.buffer\n"


async def child(body, tmp_path, **env):
    """Start a child that runs this program."""
    program = tmp_path / "child.py"
    program.write_text(PREPARE + body)
    return await StdioTransport.spawn([sys.executable, "-I", str(program)], env={"PATH": os.defpath, **env})


def alive(pid):
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def gone(pid):
    """Wait until a process has ended."""
    end = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < end, "the process lives on"
        await asyncio.sleep(0.02)


async def test_lines_go_and_come(tmp_path):
    """What is sent comes back line by line; closing stdin ends a well-behaved child."""
    transport = await child("for line in sys.stdin.buffer:\n out.write(line); out.flush()", tmp_path)
    for text in (b'{"a":1}', '{"b":"ü"}'.encode()):
        await transport.send(text)
        assert await transport.receive() == text
    await transport.close()
    assert await transport.receive() is None
    await transport.close()


async def test_lines_of_megabytes_pass_both_ways(tmp_path):
    """A line far above asyncio's 64 KiB is one message in either direction."""
    transport = await child("for line in sys.stdin.buffer:\n out.write(line); out.flush()", tmp_path)
    payload = json.dumps({"x": "y" * 5_000_000}).encode()
    sending = asyncio.ensure_future(transport.send(payload))
    assert await transport.receive() == payload
    await sending
    await transport.close()


async def test_lines_do_not_depend_on_chunks(tmp_path):
    """However the stream is cut into chunks, the same lines come out; blank lines are none."""
    body = (
        "for part in (b'a', b'b\\nc\\n\\n  \\nd', b'ef\\n', b'g\\n'):\n out.write(part); out.flush(); time.sleep(0.02)"
    )
    transport = await child(body, tmp_path)
    assert [await transport.receive() for _ in range(5)] == [b"ab", b"c", b"def", b"g", None]
    await transport.close()


async def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    """A stream that never ends its line does not fill the memory; lines before it are delivered."""
    monkeypatch.setattr("kdskills.remote.client.wire.MAX_LINE_BYTES", 100)
    body = "out.write(b'{}\\n'); out.flush(); time.sleep(0.1)\nout.write(b'x' * 101); out.flush(); sys.stdin.read()"
    transport = await child(body, tmp_path)
    assert await transport.receive() == b"{}"
    assert await transport.receive() is None
    assert "more than 100 bytes without an end of line" in transport.why_closed()
    assert await transport.receive() is None
    await transport.close()


async def test_a_flood_on_stderr_does_not_stop_the_child(tmp_path):
    """Stderr is drained all the time, and only its newest part is kept."""
    body = "sys.stderr.write('x' * 3_000_000 + 'the last words\\n'); sys.stderr.flush()\nout.write(b'{}\\n'); out.flush()\nsys.stdin.read()"
    transport = await child(body, tmp_path)
    assert await transport.receive() == b"{}"
    await transport.close()
    assert b"the last words" in transport.stderr
    assert len(transport.stderr) < 2_000_000


async def test_half_a_line_at_the_end_is_told(tmp_path):
    """A child that dies within a line ends the connection; the half line is no message."""
    transport = await child('out.write(b\'{"whole":1}\\n{"half\'); out.flush(); os._exit(3)', tmp_path)
    assert await transport.receive() == b'{"whole":1}'
    assert await transport.receive() is None
    assert "within a line of 6 bytes" in transport.why_closed()
    await transport.close()
    with pytest.raises(AppServerGone):
        await transport.send(b"x")


async def test_the_end_tells_code_and_last_words(tmp_path):
    """The reason of the end has the exit code and the last line of stderr."""
    transport = await child("sys.stderr.write('first\\nno such model\\n'); sys.exit(7)", tmp_path)
    assert await transport.receive() is None
    await transport.close()
    assert transport.why_closed() == "it ended with 7; stderr: no such model"


async def test_the_native_child_of_a_killed_launcher_is_stopped_too(tmp_path):
    """Killing the launcher alone leaves the connection open; closing ends the whole group, whatever it ignores."""
    body = (
        "import signal, subprocess\n"
        "if len(sys.argv) > 1:\n"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        " out.write(b'%d\\n' % os.getpid()); out.flush()\n"
        " for line in sys.stdin.buffer:\n"
        "  out.write(line); out.flush()\n"
        " time.sleep(600)\n"
        "else:\n"
        " subprocess.call([sys.executable, '-I', sys.argv[0], 'native'])\n"
    )
    transport = await child(body, tmp_path)
    native = int(await transport.receive())
    os.kill(transport.pid, 9)
    await gone(transport.pid)
    await transport.send(b"still there")
    assert await transport.receive() == b"still there"
    await transport.close()
    await gone(native)


async def test_a_grandchild_that_left_the_group_does_not_hold_the_close(tmp_path):
    """A process with our pipes in a session of its own cannot keep `close` waiting."""
    body = (
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-I', '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "out.write(b'%d\\n' % p.pid); out.flush(); sys.stdin.read()"
    )
    transport = await child(body, tmp_path)
    stray = int(await transport.receive())
    try:
        reading = asyncio.ensure_future(transport.receive())
        async with asyncio.timeout(60):
            await transport.close()
        assert await reading is None
    finally:
        os.kill(stray, 9)


async def test_a_program_that_is_not_there_is_gone(tmp_path):
    """A missing binary is an `AppServerGone` that names it."""
    with pytest.raises(AppServerGone, match="cannot be started"):
        await StdioTransport.spawn([str(tmp_path / "nothing")], env={})


async def test_only_the_given_environment_passes(tmp_path, monkeypatch):
    """Nothing of this process's environment reaches the child."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never")
    transport = await child(
        "out.write(json.dumps(dict(os.environ)).encode() + b'\\n'); out.flush()", tmp_path, HOME="/h"
    )
    found = json.loads(await transport.receive())
    await transport.close()
    assert found["HOME"] == "/h"
    assert "OPENAI_API_KEY" not in found
