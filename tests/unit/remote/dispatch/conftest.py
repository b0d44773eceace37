"""What tests of dispatching share: skills made in one line, and dispatchers of both kinds of session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdskills.remote.dispatch import RemoteDispatcher
from kdskills.remote.journal import SqlJournal, arguments_digest, journal_url
from kdskills.remote.ports import CallIdentity
from kdskills.remote.registry import RemoteSkill

PERMISSIVE = {"type": "object", "properties": {}, "additionalProperties": True}


@pytest.fixture
def make_skill() -> Callable[..., RemoteSkill]:
    """Make a skill around a handler."""

    def make(handler: Callable[..., Any], name: str = "ship", **options: Any) -> RemoteSkill:
        options.setdefault("input_schema", dict(PERMISSIVE))
        return RemoteSkill(name, handler, "Book a parcel", **options)

    return make


@pytest.fixture
def make_call() -> SimpleNamespace:
    """Make identities: `strong(call)` and `weak(request_id)`."""

    def strong(call: str = "c1", arguments: Any = None, turn: str = "t1", **more: Any) -> CallIdentity:
        return CallIdentity("s1", "ship", arguments_digest(arguments), "s1", turn, call, **more)

    def weak(request: str | None = "0", arguments: Any = None, **more: Any) -> CallIdentity:
        return CallIdentity("s1", "ship", arguments_digest(arguments), request_id=request, epoch="e", **more)

    return SimpleNamespace(strong=strong, weak=weak)


@pytest.fixture
def make_dispatcher() -> Iterator[Callable[..., RemoteDispatcher]]:
    """Make dispatchers; all are closed afterwards."""
    made: list[RemoteDispatcher] = []

    def make(*args: Any, asynchronous: bool = False, **options: Any) -> RemoteDispatcher:
        dispatcher = RemoteDispatcher(*args, asynchronous=asynchronous, **options)
        made.append(dispatcher)
        return dispatcher

    yield make
    for dispatcher in made:
        dispatcher.close()


@pytest.fixture
def sql_journal(tmp_path: Path) -> Iterator[SqlJournal]:
    """A journal on a file."""
    journal = SqlJournal(journal_url(tmp_path))
    yield journal
    journal.close()
