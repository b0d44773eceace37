"""What names a call, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.journal.calls import WeakIdentities, arguments_digest, strong_key
from kdskills.remote.ports import CallIdentity

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
STRONG = CallIdentity("s", "ship", arguments_digest({"n": 1}), "th", "tu", "ca", "acme", "7")
WEAK = CallIdentity("s", "ship", arguments_digest(None), request_id="0", epoch="e1")


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_order_of_keys_is_no_difference(value: dict[str, object]) -> None:
    """Arguments that say the same have one digest, however they were written."""
    turned = dict(reversed(value.items()))
    assert arguments_digest(turned) == arguments_digest(value) == arguments_digest(json.loads(json.dumps(value)))


@given(JSON, JSON)
def test_different_arguments_have_different_digests(one: object, other: object) -> None:
    """Two digests are equal only when the canonical JSON is."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (arguments_digest(one) == arguments_digest(other)) == same


@pytest.mark.parametrize("odd", [{1: 2, "1": 3}, {1, 2}, b"bytes", float("nan"), "\ud800", {None: 1, "a": 2}])
def test_arguments_that_are_no_json_have_a_digest(odd: object) -> None:
    """A client in this process may hand over anything; it is named, not refused."""
    assert len(arguments_digest(odd)) == 64


def test_arguments_inside_themselves_have_a_digest() -> None:
    """Not even a list inside itself breaks the naming."""
    inner: list[object] = []
    inner.append(inner)
    assert len(arguments_digest(inner)) == 64


@pytest.mark.parametrize("field", ["thread_id", "turn_id", "call_id", "namespace", "tool", "arguments_sha256"])
def test_every_part_of_a_strong_identity_counts(field: str) -> None:
    """Thread, turn, call, namespace, tool and arguments: changing one makes another call."""
    assert strong_key(STRONG) != strong_key(replace(STRONG, **{field: "other"}))


@pytest.mark.parametrize("field", ["request_id", "epoch", "session_id"])
def test_request_ids_are_no_part_of_a_strong_identity(field: str) -> None:
    """Request ids begin again at 0 with every server: the same call under another one is the same call."""
    assert strong_key(STRONG) == strong_key(replace(STRONG, **{field: "other"}))


@pytest.mark.parametrize("field", ["thread_id", "turn_id", "call_id"])
@pytest.mark.parametrize("nothing", [None, ""])
def test_without_thread_turn_and_call_there_is_no_strong_identity(field: str, nothing: str | None) -> None:
    """What does not name a call for good is not kept for good."""
    assert strong_key(replace(STRONG, **{field: nothing})) is None


def test_parts_cannot_be_moved_into_one_another() -> None:
    """`a` + `bc` is not `ab` + `c`."""
    assert strong_key(replace(STRONG, thread_id="a", turn_id="bc")) != strong_key(
        replace(STRONG, thread_id="ab", turn_id="c")
    )


def test_weak_calls_are_known_again() -> None:
    """The same session, epoch, request id, tool and arguments are the same call; request id 0 is an id."""
    names = WeakIdentities()
    assert names.key(WEAK) == names.key(WEAK)
    assert names.key(WEAK) is not None


@pytest.mark.parametrize("field", ["session_id", "epoch", "request_id", "tool", "namespace", "arguments_sha256"])
def test_every_part_of_a_weak_identity_counts(field: str) -> None:
    """A request id alone never identifies a call."""
    names = WeakIdentities()
    assert names.key(WEAK) != names.key(replace(WEAK, **{field: "other"}))


def test_without_a_request_id_nothing_is_known_again() -> None:
    """Neither strong nor weak: no deduplication."""
    assert WeakIdentities().key(replace(WEAK, request_id=None, call_id="c")) is None


@pytest.mark.parametrize(("first", "second"), [("c1", None), (None, "c1"), ("c1", "c1"), (None, None)])
def test_an_absent_call_id_matches_any(first: str | None, second: str | None) -> None:
    """A row without a call id and a signal with one are one delivery twice."""
    names = WeakIdentities()
    assert names.key(replace(WEAK, call_id=first)) == names.key(replace(WEAK, call_id=second))


def test_another_call_id_is_another_call() -> None:
    """A request id that came back with another call id is not answered with the first call's answer."""
    names = WeakIdentities()
    assert names.key(replace(WEAK, call_id="c1")) != names.key(replace(WEAK, call_id="c2"))


def test_a_call_id_learnt_later_counts() -> None:
    """Once its call id is known, the call is not taken for one with another id."""
    names = WeakIdentities()
    first = names.key(WEAK)
    assert names.key(replace(WEAK, call_id="c1")) == first
    assert names.key(replace(WEAK, call_id="c2")) != first
    assert names.key(replace(WEAK, call_id="c1")) == first


def test_the_newest_weak_identities_are_kept() -> None:
    """The oldest go first, per session, and memory does not grow."""
    names = WeakIdentities(limit=2)
    keys = [names.key(replace(WEAK, request_id=str(number))) for number in range(3)]
    assert names.key(replace(WEAK, request_id="2")) == keys[2]
    assert names.key(replace(WEAK, request_id="1")) == keys[1]
    assert names.key(replace(WEAK, request_id="0")) != keys[0]
    other = names.key(replace(WEAK, session_id="s2"))
    assert names.key(replace(WEAK, session_id="s2")) == other
    assert len(names._sessions["s"]) == 2


def test_forgotten_sessions_begin_anew() -> None:
    """After a session is closed its request ids mean nothing."""
    names = WeakIdentities()
    first = names.key(WEAK)
    names.forget("s")
    names.forget("s")
    assert names.key(WEAK) != first
