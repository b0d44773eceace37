"""`replay:FILE`: recorded replies instead of a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from kdskills.errors import BadRequest, ReplayError
from kdskills.hooks import Register, hookimpl
from kdskills.models import ModelFactory, ModelReply, ModelRequest, Redactor, TextDelta
from kdskills.models.cassette import Cassette, CassetteEntry, check_fit, read_cassette


class ReplayModel:
    """Answers from a cassette, in order per role and lane, and says loudly when a request is not the recorded one.

    *name* is shown in results; to the *redactor*, which holds the secrets a recording has masked, a solver adds its own.
    """

    context_window: int | None = None
    replayed = True

    def __init__(self, cassette: Cassette, *, name: str = "replay", redactor: Redactor | None = None) -> None:
        self.name, self._cassette, self.redactor = name, cassette, redactor or Redactor()
        self.output_mode = cassette.output_mode
        self._left: dict[str, list[tuple[int, CassetteEntry]]] = {}
        for index, entry in enumerate(cassette.replies):
            self._left.setdefault(entry.role, []).append((index, entry))
        self._closed = False

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Return the next reply of the request's role and lane, or else of no lane. Raises ReplayError: `replay_diverged` or
        `replay_exhausted`; the reply is not used up then.
        """
        waiting = self._left.get(request.role, [])
        lanes = [entry.lane for _, entry in waiting]
        place = next((lanes.index(lane) for lane in (request.lane, "") if lane in lanes), None)
        if place is None:
            recorded = sum(entry.role == request.role for entry in self._cassette.replies)
            message = f"{self.name} holds {recorded} replies for {request.role}, one more was asked for"
            raise ReplayError(message, code="replay_exhausted", role=request.role, recorded=recorded)
        index, entry = waiting[place]
        check_fit(entry, request, self._cassette.match, index, mask=self.redactor.text)
        waiting.pop(place)
        return entry.reply.to_reply(index + 1, self.name)

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Return the recorded text in one piece, then the reply."""
        answer = await self.reply(request)
        if answer.text:
            yield TextDelta(answer.text)
        yield answer

    async def aclose(self) -> None:
        """Check that everything was used. Closing twice is harmless. Raises ReplayError: `replay_unused`, naming the
        entries.
        """
        if self._closed:
            return
        self._closed = True
        unused = sorted(index for waiting in self._left.values() for index, _ in waiting)
        if unused:
            message = f"{self.name} holds replies nobody asked for: entries {', '.join(map(str, unused))}"
            raise ReplayError(message, code="replay_unused", entries=unused)


def open_replay(file_name: str) -> ReplayModel:
    """Open `replay:FILE`. Raises BadRequest: no file is named; ReplayError: the file is missing or no cassette."""
    if not file_name:
        raise BadRequest("this bundle has no demo.yaml: name a recording with replay:FILE", model="replay")
    return ReplayModel(read_cassette(Path(file_name)), name=f"replay:{Path(file_name).name}")


@hookimpl
def kdskills_register_models(register: Register[ModelFactory]) -> None:
    """Add the prefix `replay`."""
    register("replay", open_replay)
