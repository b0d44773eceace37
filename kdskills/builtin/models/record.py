"""`record:PROVIDER:MODEL[>FILE]`: another provider, its replies written to a cassette."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

from kdskills.hooks import Register, hookimpl
from kdskills.models import (
    ModelFactory,
    ModelProvider,
    ModelReply,
    ModelRequest,
    OutputMode,
    Redactor,
    TextDelta,
    open_model,
    parse_object,
)
from kdskills.models.cassette import (
    SCHEMA,
    Cassette,
    CassetteEntry,
    RecordedCall,
    RecordedReply,
    RecordedUsage,
    describe,
    write_cassette,
)

DEFAULT_FILE = "recording.yaml"


class RecordingModel:
    """Asks another provider and writes down what it answered.

    The cassette is rewritten after every reply, so that a run which breaks off leaves what it had. Values of a call's
    `env` are written as `***`, there and wherever they are repeated; to the *redactor* a solver adds its settings' secrets.
    """

    replayed = False

    def __init__(self, inner: ModelProvider, path: Path, *, redactor: Redactor | None = None) -> None:
        self._inner, self.path, self.redactor = inner, path, redactor or Redactor()
        self.name, self.context_window = inner.name, inner.context_window
        self.takes_images = getattr(inner, "takes_images", False)
        self.output_mode: OutputMode = getattr(inner, "output_mode", "tool")
        self._entries: list[CassetteEntry] = []
        self._writing = asyncio.Lock()

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer as the inner provider does, and write it down."""
        answer = await self._inner.reply(request)
        await self._record(request, answer)
        return answer

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Pass the pieces on, and write down the whole reply."""
        async for item in self._inner.stream(request):
            if isinstance(item, ModelReply):
                await self._record(request, item)
            yield item

    async def aclose(self) -> None:
        """Close the inner provider."""
        await self._inner.aclose()

    async def _record(self, request: ModelRequest, answer: ModelReply) -> None:
        for call in answer.calls:
            self.redactor.arguments(call.arguments)
        when = describe(request, exact=True)
        when = when.model_copy(update={"user": self.redactor.text(when.user or "")})
        calls = (RecordedCall(tool=c.tool, arguments=self._arguments(c.arguments), id=c.id) for c in answer.calls)
        reply = RecordedReply(
            text=self.redactor.text(answer.text),
            calls=tuple(calls),
            usage=RecordedUsage(**asdict(answer.usage)),
            model=answer.model or None,
            finish_reason=answer.finish_reason,
            response_id=answer.response_id,
        )
        self._entries.append(CassetteEntry(role=request.role, lane=request.lane, when=when, reply=reply))
        replies, mode = tuple(self._entries), self.output_mode
        cassette = Cassette(schema_=SCHEMA, match="shape", output_mode=mode, replies=replies)
        async with self._writing:
            await asyncio.to_thread(write_cassette, self.path, cassette)

    def _arguments(self, raw: str) -> dict[str, object] | str:
        redacted = self.redactor.arguments(raw)
        parsed = parse_object(redacted)
        return redacted if parsed is None else parsed


@hookimpl
def kdskills_register_models(register: Register[ModelFactory]) -> None:
    """Add the prefix `record`; the recorded provider is looked up when a model is opened."""

    def open_record(target: str) -> RecordingModel:
        name, _, file = target.partition(">")
        return RecordingModel(open_model(register, name), Path(file.strip() or DEFAULT_FILE))

    register("record", open_record)
