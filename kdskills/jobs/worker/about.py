"""What the lines of a worker's log are about: the task and the job in hand, as facts of each line."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_ABOUT: Final[ContextVar[Mapping[str, str]]] = ContextVar("kdskills_work_in_hand")


@contextmanager
def about(**ids: str | None) -> Iterator[None]:
    """Give every line that is logged in the block these facts, such as `task` or `job`; None gives none."""
    facts = {name: item for name, item in ids.items() if item is not None}
    mark = _ABOUT.set({**_ABOUT.get(_NOTHING), **facts})
    try:
        yield
    finally:
        _ABOUT.reset(mark)


class AboutWork(logging.Filter):
    """Adds to a record's facts what it is about; facts of its own come first."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: every record passes."""
        record_facts = getattr(record, "facts", None)
        record.facts = {**_ABOUT.get(_NOTHING), **(record_facts if isinstance(record_facts, dict) else {})}
        return True
