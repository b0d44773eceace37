"""Messages of the wire: what is one, and what is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.client.wire import (
    LineBuffer,
    LineTooLong,
    Malformed,
    Notification,
    Reply,
    Request,
    decode,
    encode,
    id_key,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(raw_id=st.integers() | st.text(), params=st.dictionaries(st.text(), JSON, max_size=3))
def test_a_request_survives_the_wire(raw_id, params):
    """Any request comes back with the same id, of the same type, and the same params."""
    line = encode({"id": raw_id, "method": "m", "params": params})
    assert b"\n" not in line
    found = decode(line)
    assert found == Request(raw_id, "m", params)
    assert type(found.id) is type(raw_id)


def test_ids_are_strict_about_their_type():
    """`0`, `"0"`, and `False` are three keys, and a bool is no id at all."""
    assert len({id_key(0), id_key("0"), id_key(1)}) == 3
    assert isinstance(decode(b'{"id":false,"result":{}}'), Malformed)
    assert isinstance(decode(b'{"id":1.0,"method":"m"}'), Malformed)
    assert decode(b'{"id":0,"method":"m"}') == Request(0, "m", {})


def test_answers_and_notifications_are_told_apart():
    """`id` and `result` is an answer, a null result included; `method` alone is a notification."""
    assert decode(b'{"id":3,"result":null}') == Reply(3, None, None)
    assert decode(b'{"id":3,"error":{"code":-1,"message":"no"}}') == Reply(3, None, {"code": -1, "message": "no"})
    assert decode(b'{"id":3,"error":"text"}') == Reply(3, None, {"message": "text"})
    assert decode(b'{"method":"turn/started","params":null}') == Notification("turn/started", {})
    assert decode('{"method":"x","params":{"a":1},"jsonrpc":"2.0"}') == Notification("x", {"a": 1})


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage",
        b"[]",
        b"1",
        b"null",
        b'{"id":1}',
        b'{"id":[],"result":1}',
        b'{"method":5}',
        b'{"method":""}',
        b'{"method":"m","params":[1]}',
        b"\xff\xfe",
        b'{"id":null,"result":1}',
        b"{" * 5,
        b"[" * 200_000,
    ],
    ids=lambda line: line[:24].decode("latin-1"),
)
def test_what_is_no_message_is_malformed(line):
    """Nothing a server writes raises: it is malformed, with a reason."""
    found = decode(line)
    assert isinstance(found, Malformed)
    assert found.reason


@given(st.binary(max_size=200))
def test_no_bytes_raise(line):
    """Whatever bytes come, decoding answers."""
    decode(line)


def test_infinities_are_not_written():
    """What is not JSON is refused here, not by the server."""
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"id": 1, "result": {"x": float("nan")}})


@given(
    lines=st.lists(st.text(alphabet="ab c", min_size=1).map(str.strip).filter(bool)), cuts=st.lists(st.integers(1, 7))
)
def test_lines_do_not_depend_on_chunks(lines, cuts):
    """However the stream is cut into chunks, the same lines come out."""
    stream = "".join(f"{line}\n" for line in lines).encode()
    splitter, found, at, turn = LineBuffer(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)] if cuts else 3
        found += splitter.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert [line.decode() for line in found] == lines
    assert splitter.pending_bytes == 0


def test_a_line_of_megabytes_comes_whole():
    """Eight megabytes in small chunks are one line; blank lines are none."""
    text = json.dumps({"method": "m", "params": {"x": "y" * 8_000_000}}).encode()
    splitter = LineBuffer()
    found = [line for at in range(0, len(text), 4096) for line in splitter.feed(text[at : at + 4096])]
    assert splitter.pending_bytes == len(text)
    assert [*found, *splitter.feed(b"\n\n  \n")] == [text]


def test_a_line_without_end_is_refused():
    """A stream that never ends its line does not fill the memory."""
    splitter = LineBuffer(limit=100)
    for _ in range(10):
        splitter.feed(b"x" * 10)
    with pytest.raises(LineTooLong):
        splitter.feed(b"x")
    with pytest.raises(LineTooLong):
        LineBuffer(limit=10).feed(b"y" * 11 + b"\n")
