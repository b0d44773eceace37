"""Which trace something belongs to: the trace context of W3C that a request brought, or that was begun for it.

It goes from door to door as `traceparent`, with or without a library that records spans. See docs/reference/metrics.md.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

TRACEPARENT: Final = "traceparent"
VARIABLE: Final = "TRACEPARENT"
"""The variable of programs that has it, ours and those of skills."""
FLAGS: Final = 0x03
"""Flags that have a meaning: sampled, and an id that was drawn at random. Others are not passed on."""
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]{0,400})?")


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of a trace: ids of 32 and 16 hexadecimal digits, neither of them zero. As text it is a `traceparent`."""

    trace_id: str
    span_id: str
    flags: int = 1

    @classmethod
    def new(cls) -> Trace:
        """Return the first step of a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8), FLAGS)

    @classmethod
    def read(cls, text: object) -> Trace | None:
        """Return the step that a `traceparent` names; None for what is none, whatever it is."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            return None
        version, trace_id, span_id, flags, tail = match.groups()
        if version == "ff" or (version == "00" and tail is not None) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(trace_id, span_id, int(flags, 16) & FLAGS)

    @classmethod
    def of_span(cls, ids: Any) -> Trace:
        """Return the step that a span of OpenTelemetry is, by its valid context."""
        return cls(f"{ids.trace_id:032x}", f"{ids.span_id:016x}", int(ids.trace_flags) & FLAGS)

    def child(self) -> Trace:
        """Return a step within this one."""
        return replace(self, span_id=secrets.token_hex(8))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


_CURRENT: Final[ContextVar[Trace | None]] = ContextVar("kdskills_trace", default=None)


def current_trace() -> Trace | None:
    """Return the step this task of the event loop, or thread, is in; None outside of any.

    Within a step, or outside of any, a span that OpenTelemetry's SDK records is the step.
    """
    current, api = _CURRENT.get(), sys.modules.get("opentelemetry.trace")
    ids = None if api is None else api.get_current_span().get_span_context()
    if ids is None or not ids.is_valid or ids.is_remote:
        return current
    span = Trace.of_span(ids)
    return span if current is None or current.trace_id == span.trace_id else current


@contextmanager
def in_trace(trace: Trace | None) -> Iterator[None]:
    """Have what is done in the block belong to *trace*."""
    mark = _CURRENT.set(trace)
    try:
        yield
    finally:
        _CURRENT.reset(mark)
