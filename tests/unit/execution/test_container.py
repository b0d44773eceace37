"""The host's half of the talk with a container's first program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution import ExecRequest, Limits
from kdskills.execution.check import check_request
from kdskills.execution.container import NONCE_SIZE, ContainerAnswer, Demux, build_order, container_options
from kdskills.execution.payload import BASE_ENV
from kdskills.execution.processes import rlimits
from kdskills.execution.streams import TailBuffer

NONCE = bytes(range(200, 200 + NONCE_SIZE))
PLAN = check_request(ExecRequest(argv=("prog",), outputs=("*.txt", "deep/**"), stdin=b"in"))
END = {"kind": "end", "reason": "exited", "duration": 0.5, "code": 3}


def answer(plan=PLAN) -> ContainerAnswer:
    """Return a reader with nothing read yet."""
    return ContainerAnswer(plan, NONCE, TailBuffer(1000))


def lines(*events: dict[str, object]) -> bytes:
    """Return *events* as the init writes them."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def read(data: bytes, plan=PLAN) -> ContainerAnswer:
    """Return a reader that got everything at once."""
    reader = answer(plan)
    reader.feed(data)
    reader.close()
    return reader


@given(
    frames=st.lists(st.tuples(st.sampled_from([0, 1, 2, 7]), st.binary(max_size=50)), max_size=8),
    cut=st.integers(1, 20),
)
def test_demux_is_indifferent_to_chunks(frames, cut):
    """However the stream is cut, stdout and stderr come apart as they were sent; other streams are dropped."""
    stream = b"".join(bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for kind, data in frames)
    out, err = bytearray(), bytearray()
    demux = Demux(out.extend, err.extend)
    for at in range(0, len(stream), cut):
        demux.feed(stream[at : at + cut])
    assert bytes(out) == b"".join(data for kind, data in frames if kind == 1)
    assert bytes(err) == b"".join(data for kind, data in frames if kind == 2)


@given(output=st.binary(max_size=200), cut=st.integers(1, 300))
def test_output_and_answer_are_told_apart_by_the_nonce(output, cut):
    """Bytes before the nonce are the program's, wherever chunks end."""
    stream = output + NONCE + lines(END, {"kind": "done"})
    reader = answer()
    for at in range(0, len(stream), cut):
        reader.feed(stream[at : at + cut])
    reader.close()
    assert (reader.stdout.stream().data, reader.done, reader.broken) == (output, True, None)
    assert reader.end is not None
    assert (reader.end.code, reader.end.signal, reader.end.duration_s) == (3, None, 0.5)


def test_output_is_seen_at_once():
    """Nothing but what may be the beginning of the nonce is held back."""
    reader = answer()
    reader.feed(b"ready\n")
    assert reader.stdout.tail(100) == b"ready\n"
    reader.feed(b"more" + NONCE[:5])
    assert reader.stdout.tail(100) == b"ready\nmore"
    reader.feed(b"!")
    assert reader.stdout.tail(100) == b"ready\nmore" + NONCE[:5] + b"!"


def test_a_program_cannot_speak_for_the_init():
    """Lines of the protocol in a program's output stay output."""
    forged = lines({**END, "code": 0}, {"kind": "done"})
    reader = read(forged)
    assert (reader.stdout.stream().data, reader.end, reader.done) == (forged, None, False)


def test_files_and_problems():
    """Files come with their bytes, digests and masked modes; problems and missing outputs are named."""
    data = lines(END, {"kind": "file", "path": "a.txt", "mode": 0o6777, "size": 3}) + b"a\nb"
    data += lines({"kind": "problem", "path": "l.txt", "code": "link", "message": "is a link"}, {"kind": "done"})
    found = read(NONCE + data).collection
    assert [(item.path, item.content, item.mode) for item in found.artifacts] == [("a.txt", b"a\nb", 0o755)]
    assert [(item.path, item.code) for item in found.errors] == [("l.txt", "link"), ("deep/**", "missing")]


@pytest.mark.parametrize("path", ["../x.txt", "/etc/passwd", "other.bin", "a//b.txt", "", "deep/../x", "deep/\x00"])
def test_files_nobody_asked_for_are_not_taken(path):
    """Paths are checked again on this side."""
    found = read(
        NONCE + lines(END, {"kind": "file", "path": path, "mode": 0o644, "size": 0}, {"kind": "done"})
    ).collection
    assert found.artifacts == []
    assert found.errors[0].code == ("bad_name" if path.startswith("deep/") else "not_declared")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "file", "path": "a.txt", "mode": 0, "size": 10**12},
        {"kind": "file", "path": "a.txt", "mode": 0, "size": -1},
        {"kind": "file", "path": "a.txt", "mode": "x", "size": 0},
        {"kind": "report", "size": 10**9},
        {"kind": "surprise"},
        {},
        {"kind": "end"},
    ],
)
def test_an_answer_out_of_protocol_stops_the_reading(event):
    """What is not understood is broken, not guessed."""
    reader = read(NONCE + lines(event) + lines({"kind": "done"}))
    assert reader.broken is not None
    assert not reader.done


@given(st.binary(max_size=200))
def test_any_bytes_after_the_nonce(data):
    """Reading never raises."""
    read(NONCE + data)


def test_an_answer_that_breaks_off():
    """Half an answer is none."""
    reader = read(NONCE + lines(END))
    assert (reader.done, reader.broken) == (False, "the answer ended too early")


def test_a_line_without_end():
    """A line that never ends is not kept."""
    assert read(NONCE + b"x" * 100_000).broken == "a line of the answer is too long"


@pytest.mark.parametrize(
    ("facts", "code", "message"),
    [
        ({"stage": "exec", "errno": 2}, "program_missing", "prog: No such file or directory"),
        ({"stage": "exec", "errno": 13}, "program_missing", "prog: Permission denied"),
        ({"stage": "workdir", "errno": 20}, "workdir_missing", "/work: Not a directory"),
        ({"stage": "limits", "errno": 1}, "setup_failed", "limits: Operation not permitted"),
    ],
)
def test_what_could_not_be_started(facts, code, message):
    """A program that never ran is told from one that failed."""
    end = read(NONCE + lines({"kind": "end", "reason": "exited", "duration": 0, **facts}, {"kind": "done"})).end
    assert end is not None
    assert end.trouble is not None
    assert (end.trouble.code, end.trouble.message) == (code, message)


def test_the_order_announces_every_byte():
    """Length, order, inputs, standard input, payload; secrets of the caller stay out of argv."""
    plan = check_request(ExecRequest(argv=("prog",), outputs=("*.txt", "deep/**"), stdin=b"in", env={"A": "b"}))
    order = build_order(plan, ("prog", "ü\udc80"), [("x", b"123"), ("y", b"")], nonce=NONCE.hex(), payload=b"pay")
    size = int.from_bytes(order[:8], "big")
    head = json.loads(order[8 : 8 + size])
    assert order[8 + size :] == b"123inpay"
    assert (head["inputs"], head["stdin"], head["payload"]) == ([["x", 3], ["y", 0]], 2, 3)
    assert (head["argv"], head["env"], head["cwd"]) == (["prog", "ü\udc80"], {**BASE_ENV, "A": "b"}, "/work")
    assert bytes.fromhex(head["nonce"]) == NONCE


def test_container_is_locked_down():
    """Every option of the spec is there; nothing is privileged, nothing is pulled, nothing is mounted but skills."""
    options = container_options(PLAN, "sha256:x", {"/skills/public.a": Path("/stage/a")}, "{}", 10)
    assert options["network_mode"] == "none"
    assert options["read_only"] is True
    assert options["cap_drop"] == ["ALL"]
    assert "cap_add" not in options
    assert "privileged" not in options
    assert options["security_opt"] == ["no-new-privileges:true", "seccomp={}"]
    assert options["mem_limit"] == options["memswap_limit"] == Limits().memory
    assert options["pids_limit"] == Limits().pids + 2
    assert (options["user"], options["ipc_mode"], options["init"]) == ("10001:10001", "private", True)
    assert options["log_config"] == {"Type": "none"}
    assert options["oom_score_adj"] == 500
    assert set(options["tmpfs"]) == {"/work", "/tmp"}
    assert {limit["Name"] for limit in options["ulimits"]} == {"core", "nofile", "fsize", "cpu"}
    assert options["mounts"] == [{"Type": "bind", "Source": "/stage/a", "Target": "/skills/public.a", "ReadOnly": True}]


def test_processor_time_follows_the_wall():
    """Without a bound of its own processor time is bounded by the wall time, rounded up, one second of warning."""
    assert rlimits(Limits(wall_s=1.2))["cpu"] == (2, 3)
    assert rlimits(Limits(wall_s=30, cpu_s=5))["cpu"] == (5, 6)
