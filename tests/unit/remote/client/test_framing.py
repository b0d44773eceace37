"""Messages of the wire: what is one, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.client.wire import decode, encode

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
    assert found == {"id": raw_id, "method": "m", "params": params}
    assert type(found["id"]) is type(raw_id)


def test_ids_are_strict_about_their_type():
    """A text id stays text, and neither a bool nor a fraction is an id."""
    assert decode(b'{"id":"0","method":"m"}') == {"id": "0", "method": "m", "params": {}}
    assert decode(b'{"id":false,"result":{}}') is None
    assert decode(b'{"id":1.0,"method":"m"}') is None
    assert decode(b'{"id":0,"method":"m"}') == {"id": 0, "method": "m", "params": {}}


def test_answers_and_notifications_are_told_apart():
    """`id` and `result` is an answer, a null result included; `method` alone is a notification."""
    assert decode(b'{"id":3,"result":null}') == {"id": 3, "result": None}
    assert decode(b'{"id":3,"error":{"code":-1,"message":"no"}}') == {"id": 3, "error": {"code": -1, "message": "no"}}
    assert decode(b'{"id":3,"error":"text"}') == {"id": 3, "error": "text"}
    assert decode(b'{"method":"turn/started","params":null}') == {"method": "turn/started", "params": {}}
    assert decode('{"method":"x","params":{"a":1}}') == {"method": "x", "params": {"a": 1}}


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
    """Nothing a server writes raises: it is no message."""
    assert decode(line) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(line):
    """Whatever bytes come, decoding answers."""
    decode(line)


def test_infinities_are_not_written():
    """What is not JSON is refused here, not by the server."""
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"id": 1, "result": {"x": float("nan")}})
