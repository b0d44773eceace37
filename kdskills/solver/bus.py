"""Numbers the events of a turn, masks secrets in them, and hands them to readers.

Writing is synchronous: an event that was emitted stands in the transcript. Sinks read from queues of their own, so that
a slow one holds up nobody.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, get_origin

from kdskills.errors import Diagnostic
from kdskills.models import Redactor
from kdskills.skills.private_files import make_folder, open_private
from kdskills.solver.events import (
    TRANSCRIPT_SCHEMA,
    AgentEvent,
    DiagnosticRaised,
    Event,
    Form,
    ModelDelta,
    ToolOutput,
    TurnFinished,
)

Sink = Callable[[Event], Awaitable[None] | None]
"""Takes events one by one; may be async."""

F = TypeVar("F", bound=Form)

_LOG = logging.getLogger("kdskills.solver")

SLOW = 256
"""Events that may wait for a reader before deltas are merged."""
SINK_GRACE_S = 5.0
"""How long the end of a turn waits for sinks that are behind."""


def masked(form: F, redactor: Redactor) -> F:
    """Return *form* with secrets masked in its texts.

    Names of fields, and the words of a field that has a list of them, stay: a model chooses what is a secret, by the `env` of a
    call, and a secret such as `status` may not make a result unreadable.
    """
    fixed = {name for name, field in type(form).model_fields.items() if get_origin(field.annotation) is Literal}
    fixed |= {"event"} if isinstance(form, AgentEvent) else set()  # masked by the agent's bus, which knows its fields
    texts = {name: _masked(getattr(form, name), redactor) for name in type(form).model_fields if name not in fixed}
    return form.model_copy(update=texts)


def _masked(value: Any, redactor: Redactor) -> Any:
    if isinstance(value, Form):
        return masked(value, redactor)
    if isinstance(value, Diagnostic):
        return replace(Diagnostic(**redactor.value(value.to_json(), keys=False)), severity=value.severity)
    if isinstance(value, tuple):
        return tuple(_masked(item, redactor) for item in value)
    return redactor.value(value, keys=False)


class Reader:
    """A queue of events for one reader; deltas are merged when more than `SLOW` wait."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._more = asyncio.Event()
        self._closed = False

    def add(self, event: Event) -> None:
        """Add an event."""
        last = self._waiting[-1] if len(self._waiting) >= SLOW else None
        merged_event = None if last is None else merge(last, event)
        if merged_event is None:
            self._waiting.append(event)
        else:
            self._waiting[-1] = merged_event
        self._more.set()

    def close(self) -> None:
        """Say that no more events come."""
        self._closed = True
        self._more.set()

    async def get(self) -> Event | None:
        """Return the next event, or None at the end."""
        while not self._waiting:
            if self._closed:
                return None
            self._more.clear()
            await self._more.wait()
        return self._waiting.popleft()


def merge(first: Event, second: Event) -> Event | None:
    """Return two pieces of one text as one event, or None when they belong to different texts or are no pieces."""
    if isinstance(first, ModelDelta) and isinstance(second, ModelDelta):
        same_stream = (first.step, first.role) == (second.step, second.role)
    elif isinstance(first, ToolOutput) and isinstance(second, ToolOutput):
        same_stream = (first.call_id, first.stream) == (second.call_id, second.stream)
    else:
        return None
    if not same_stream:
        return None
    return second.model_copy(update={"text": first.text + second.text, "merged": first.merged + second.merged + 1})


def _opened(path: Path) -> IO[str]:
    """Return a new transcript at *path*, locked: while the lock is held, the turn is going on. Raises OSError."""
    make_folder(path.parent)
    file: IO[str] = open_private(path, "x", encoding="utf-8", errors="backslashreplace")
    try:
        with suppress(OSError, ImportError):  # some file systems have no locks, and some systems none at all
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"schema": TRANSCRIPT_SCHEMA}) + "\n")
        file.flush()
    except BaseException:  # raised again
        file.close()
        raise
    return file


class EventBus:
    """The events of one turn, their secrets masked by *redactor* in every field.

    Each of *sinks* is told of every event from a task of its own; each of the files *transcripts* gets a line per event, and is
    locked as long as lines may come. *above* is called at once with each event as JSON.
    """

    def __init__(
        self,
        turn_id: str,
        session_id: str,
        *,
        redactor: Redactor,
        sinks: Iterable[Sink] = (),
        transcripts: Iterable[Path] = (),
        above: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.step = 0
        self._above = above
        self.redactor = redactor
        self.diagnostics: list[Diagnostic] = []
        self.turn_id, self.session_id = turn_id, session_id
        self._seq = 0
        self._readers: list[Reader] = []
        self._sinks = tuple(sinks)
        self._tasks: list[asyncio.Task[None]] = []
        self._paths = tuple(transcripts)
        self._files: list[IO[str]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._ended = False

    def open(self) -> None:
        """Open the transcripts and start the sinks' tasks; called in the turn's own loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        for path in self._paths:
            try:
                self._files.append(_opened(path))
            except OSError as error:
                self._tell_lost(error)
        for sink in self._sinks:
            reader = self.reader()
            self._tasks.append(asyncio.create_task(self._feed(sink, reader)))

    def reader(self, reader: Reader | None = None) -> Reader:
        """Return a queue that gets every event from now on: the one given, or a new one."""
        reader = reader or Reader()
        self._readers.append(reader)
        return reader

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Number an event, mask its secrets, write it and hand it on; `step` says which step it is of, if not the present one."""
        if self._loop is not None and threading.get_ident() != self._thread:
            # Files are read in threads; numbering and queues belong to the turn's own.
            self._loop.call_soon_threadsafe(partial(self.emit, kind, **fields))
            return
        if self._ended:  # nothing may follow `turn.finished`: readers stop at it
            _LOG.warning("an event came after the end of its turn: %s", kind.__name__)
            return
        self._ended = kind is TurnFinished
        self._seq += 1
        step = fields.pop("step", self.step)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        raw = kind(seq=self._seq, ts=now, step=step, turn_id=self.turn_id, session_id=self.session_id, **fields)
        event = masked(raw, self.redactor)
        line = json.dumps(event.model_dump(mode="json"), ensure_ascii=False) + "\n" if self._files else ""
        for file in tuple(self._files):
            try:
                file.write(line)
                file.flush()
            except (OSError, ValueError) as error:
                self._files.remove(file)
                self._tell_lost(error)
        if self._above is not None:
            self._above(event.model_dump(mode="json"))
        for reader in self._readers:
            reader.add(event)

    def diagnose(self, diagnostic: Diagnostic) -> None:
        """Keep a finding for the turn's result, and emit it."""
        self.diagnostics.append(diagnostic)
        self.emit(DiagnosticRaised, diagnostic=diagnostic)

    async def aclose(self) -> None:
        """Close the queues, wait for the sinks, close the transcripts."""
        for reader in self._readers:
            reader.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=SINK_GRACE_S)
            for task in late:
                _LOG.warning("an event sink did not take its last events within %g s", SINK_GRACE_S)
                task.cancel()
        self._tasks.clear()
        for file in self._files:
            file.close()
        self._files.clear()

    async def _feed(self, sink: Sink, reader: Reader) -> None:
        while (event := await reader.get()) is not None:
            try:
                answer = sink(event)
                if inspect.isawaitable(answer):
                    await answer
            except Exception as error:  # noqa: BLE001 - a foreign sink may raise anything; it is told and left out
                self._readers.remove(reader)
                name = getattr(sink, "__qualname__", type(sink).__qualname__)
                message = f"an event sink failed and gets no more events: {type(error).__name__}"
                self.diagnose(Diagnostic("sink_failed", "warning", message, ref=name))
                return

    def _tell_lost(self, error: Exception) -> None:
        message = f"the transcript cannot be written: {error}"
        self.diagnose(Diagnostic("transcript_failed", "warning", message))
