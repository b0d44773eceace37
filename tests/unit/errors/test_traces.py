"""Trace contexts: what is read, what is refused, and that tasks of an event loop keep theirs apart."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors.traces import Trace, current_trace, in_trace

HEX = "0123456789abcdef"


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?") | st.none() | st.binary())
def test_what_is_read_is_good(text):
    """Whatever comes, what is read is a good one of version 00 that is read as itself; all else is none."""
    trace = Trace.read(text)
    if trace is not None:
        assert Trace.read(str(trace)) == trace
        assert len(str(trace)) == 55
        assert set(trace.trace_id + trace.span_id) <= set(HEX)
        assert trace.trace_id in text
        assert int(trace.trace_id, 16) * int(trace.span_id, 16) > 0


def test_steps_are_of_one_trace():
    """A step within another has its trace and flags and an id of its own; new traces are never alike."""
    first = Trace.new()
    child = first.child()
    assert (child.trace_id, child.flags) == (first.trace_id, first.flags)
    assert len({first.span_id, child.span_id, Trace.new().span_id}) == 3
    assert Trace.new().trace_id != first.trace_id


async def test_tasks_keep_their_traces_apart():
    """Fifty tasks at one time, and threads of theirs, are each in their own; outside there is none, also after an error."""

    async def task():
        trace = Trace.new()
        with in_trace(trace):
            await asyncio.sleep(0)
            assert await asyncio.to_thread(current_trace) == current_trace() == trace
            raise KeyError(trace.trace_id)

    failures = await asyncio.gather(*(task() for _ in range(50)), return_exceptions=True)
    assert len({str(failure) for failure in failures}) == 50
    assert current_trace() is None
