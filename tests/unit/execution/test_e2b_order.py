"""Orders to and answers from a remote machine: what is written, and how little of what comes back is believed."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.builtin.executors.e2b import Talk, build_order, read_answer
from kdskills.builtin.executors.e2b.sandboxes import PreparedSandbox, SandboxFacts
from kdskills.execution import ExecRequest, Limits
from kdskills.execution.check import check_request
from kdskills.execution.seccomp import program_bytes

PLAN = check_request(ExecRequest(argv=("true",), outputs=("*.txt",), limits=Limits(stdout=10, stderr=10)))
END = {"kind": "end", "reason": "exited", "code": 0, "duration": 0.5}


def answer(*lines: bytes, out=b"out", err=b"", totals=(3, 0), **head) -> bytes:
    """Return an answer file."""
    said = {"streams": [[len(out), totals[0]], [len(err), totals[1]]], "oom": False, "limits": ["memory"], **head}
    text = json.dumps(said).encode()
    return len(text).to_bytes(8, "big") + text + out + err + b"".join(lines)


def lines(*values: dict) -> bytes:
    """Return JSON lines."""
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_an_order_announces_its_bytes():
    """Inputs, standard input and payload follow the JSON in order; names of the caller are not words of ours."""
    request = ExecRequest(argv=("p", "{payload_fd}"), stdin=b"STDIN", env={"A": "\udc80"})
    plan = check_request(request)
    box = PreparedSandbox(None, "/code", SandboxFacts("python3", "x86_64", frozenset(), ()))
    data = build_order(plan, box, [("a", b"12"), ("b", b"")], {"/skills/x.y": "/t"}, b"PAY")
    size = 8 + int.from_bytes(data[:8], "big")
    order = json.loads(data[8:size])
    assert data[size:] == b"12STDINPAY"
    assert (order["inputs"], order["stdin"], order["payload"]) == ([["a", 2], ["b", 0]], 5, 3)
    assert (order["env"]["A"], order["mounts"], order["seccomp"]) == (
        "\udc80",
        {"/skills/x.y": "/t"},
        program_bytes("x86_64").hex(),
    )
    assert order["argv"][2:4] == ["/code/kdskills_runtime/py_code_exec_entry.py", "--payload-fd"]
    assert json.loads(build_order(plan, box, [], {}, None)[8:].rpartition(b"}")[0] + b"}")["argv"] == [
        "p",
        "{payload_fd}",
    ]


def test_an_answer_is_read_whole():
    """Streams, end, files and problems arrive; what was cut says so."""
    body = lines(END, {"kind": "file", "path": "a.txt", "mode": 511, "size": 2})
    read = read_answer(PLAN, answer(body, b"hi", lines({"kind": "done"}), out=b"0123456789", totals=(99, 0), oom=True))
    assert (read.stdout.data, read.stdout.total, read.stdout.truncated) == (b"0123456789", 99, True)
    assert (read.stderr.truncated, read.oom, read.memory, read.answer.done) == (False, True, True, True)
    assert [(item.path, item.content, item.mode) for item in read.answer.collection.artifacts] == [
        ("a.txt", b"hi", 0o755)
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        answer(out=b"x" * 11, totals=(11, 0)),
        answer(totals=(2, 0)),
        answer(streams=[[3, 3]]),
        answer(streams=[[-1, 3], [0, 0]]),
        answer(streams="odd"),
        answer(streams=[["3", 3], [0, 0]]),
        (2).to_bytes(8, "big") + b"[]",
    ],
    ids=range(9),
)
def test_what_is_no_answer_is_not_one(data):
    """Heads that lie about sizes, or are none, are refused whole."""
    assert read_answer(PLAN, data) is None


def test_files_nobody_declared_are_not_taken():
    """A far side that sends more than was asked for gets nothing by it."""
    files = b""
    for path in ("../up.txt", "/etc/x.txt", "other.bin", "ok.txt"):
        files += lines({"kind": "file", "path": path, "mode": 420, "size": 1}) + b"x"
    read = read_answer(PLAN, answer(lines(END), files, lines({"kind": "done"})))
    assert [item.path for item in read.answer.collection.artifacts] == ["ok.txt"]


def test_an_answer_that_breaks_off_is_not_done():
    """Without its last line an answer is broken."""
    read = read_answer(PLAN, answer(lines(END)))
    assert (read.answer.done, read.answer.broken) == (False, "the answer ended too early")


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data):
    """Whatever comes, reading ends in an answer or none."""
    read = read_answer(PLAN, data)
    assert read is None or not read.answer.done


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_live_output_arrives_in_any_pieces(chunks, size):
    """Lines cut anywhere by the wire give the same bytes; words of a login shell between them are ignored."""
    heard: list[bytes] = []
    talk = Talk(heard.append, lambda data: None)
    text = "Welcome!\n"
    for chunk in chunks:
        text += json.dumps({"kind": "live", "out": base64.b64encode(chunk).decode(), "err": ""}) + "\n"
    text += '{"kind": "done"}\n'
    for start in range(0, len(text), size):
        talk.feed(text[start : start + size])
    assert (b"".join(heard), talk.last) == (b"".join(chunks), {"kind": "done"})


@pytest.mark.parametrize("line", ["[]", "7", "{}", '{"kind": "live"}', '{"kind": "live", "out": 1, "err": ""}', "{"])
def test_odd_lines_say_nothing(line):
    """A line that is not of the protocol changes nothing."""
    talk = Talk(lambda data: None, lambda data: None)
    talk.feed(line + "\n")
    assert talk.last == {}
