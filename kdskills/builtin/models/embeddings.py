"""`openai:…`, `ollama:…`: vectors of any server that speaks OpenAI's `/v1/embeddings`.

The module registers names only; the client is imported when an embedder is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kdskills.errors import MissingExtra, ModelFailed
from kdskills.hooks import Register, hookimpl
from kdskills.models import Redactor, server_of

if TYPE_CHECKING:
    import openai

    from kdskills.search import EmbedderFactory

SECONDS: Final = 60.0
"""Longest silence of the server within one call."""

MAX_WORDS: Final = 160
"""Characters of a server's own words in a failure."""

_TOO_LONG: Final = ("too large to process", "too long", "context length", "context size", "maximum context")
_REFUSED: Final = frozenset({400, 413, 422})


class OpenAIEmbedder:
    """A model behind `/v1/embeddings`. The *key* is kept out of failures, whatever the server repeats."""

    def __init__(self, client: openai.OpenAI, *, provider: str, model: str, key: str) -> None:
        self._client, self._model, self._name = client, model, f"{provider}:{model}"
        self._redactor = Redactor([key])

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector of each text. Raises ValueError for a text that the model cannot take, and ModelFailed."""
        import openai

        try:
            # Other servers do not know base64, which the client asks for where no format is named.
            answer = self._client.embeddings.create(input=list(texts), model=self._model, encoding_format="float")
            rows = sorted(answer.data, key=lambda row: row.index)
            vectors = [row.embedding for row in rows]
        except openai.APIStatusError as error:
            words = self._short(error.message)
            if error.status_code in _REFUSED or any(sign in error.message for sign in _TOO_LONG):
                raise ValueError(words) from None
            raise self._failure(f"answered with status {error.status_code}: {words}") from None
        except openai.OpenAIError as error:
            raise self._failure(f"could not be asked: {self._short(str(error))}") from None
        except (AttributeError, TypeError, ValueError) as error:  # whatever else a server calls JSON
            raise self._failure(f"gave no usable answer ({type(error).__name__})") from None
        return vectors

    def _failure(self, words: str) -> ModelFailed:
        # Without the cause: it holds headers and bodies, which a printed traceback would show.
        return ModelFailed(f"{self._name} {words}", model=self._name)

    def _short(self, text: str) -> str:
        return " ".join(self._redactor.text(text).split())[:MAX_WORDS]


def open_embedder(provider: str, target: str) -> OpenAIEmbedder:
    """Open `NAME[@URL]`; key and URL come from where `openai:` and `ollama:` models have theirs.

    Raises:
        BadRequest: No model is named, or there is no key.
        MissingExtra: The client is not installed.
    """
    address, key = server_of(provider, target)
    try:
        from openai import OpenAI
    except ImportError:
        raise MissingExtra("an embedder over HTTP", "models") from None
    client = OpenAI(api_key=key, base_url=address.base_url, max_retries=0, timeout=SECONDS)
    return OpenAIEmbedder(client, provider=provider, model=address.model, key=key)


@hookimpl
def kdskills_register_embedders(register: Register[EmbedderFactory]) -> None:
    """Add the prefixes `openai` and `ollama`."""
    for provider in ("openai", "ollama"):
        register(provider, partial(open_embedder, provider))
