"""The protocol a model provider implements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kdskills.models.messages import ModelReply, ModelRequest


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text of a reply that is still being written."""

    text: str


@runtime_checkable
class ModelProvider(Protocol):
    """Answers model requests.

    Failures are raised as `ModelFailed`: with `retryable` for timeouts, lost connections and the statuses 408, 409,
    429 and 5xx (`retry_after` in seconds when the server says so), with code `context_full` when the request does not
    fit the model's window. Retrying is the solver's business, never the provider's.

    Attributes:
        name: `provider:model`, as shown in results and spans.
        context_window: Tokens the model takes, or None when unknown.
        replayed: Whether replies come from a recording.
    """

    name: str
    context_window: int | None
    replayed: bool

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer *request* as a whole.

        Raises:
            ModelFailed: The provider could not answer.
            ReplayError: A recording does not fit the request.
        """
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Answer *request* in pieces; the last item is the whole `ModelReply`. Raises as `reply`."""
        ...

    async def aclose(self) -> None:
        """Release connections; for recordings, check for leftovers (`replay_unused`)."""
        ...
