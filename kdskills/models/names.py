"""Model strings, such as `openai:gpt-5@http://localhost:8000/v1`, `replay`, `json:ollama:qwen3`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kdskills.errors import BadRequest
from kdskills.models.provider import ModelProvider

ModelFactory = Callable[[str], ModelProvider]


class ModelFactories(Protocol):
    """What names are looked up in: the register of `kdskills_register_models`, or a plain dict."""

    def __getitem__(self, name: str) -> ModelFactory:
        """Return the factory of a prefix; an unknown one raises `UnknownName`."""
        ...


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """The part of a model string after its prefix: a model's name and, after `@`, the URL it is served from."""

    model: str
    base_url: str | None = None


def split_name(name: str) -> tuple[str, str]:
    """Return prefix and rest of a model string: `openai:gpt-5` gives `("openai", "gpt-5")`.

    Raises:
        BadRequest: The string has no prefix.
    """
    prefix, _, target = name.strip().partition(":")
    if not prefix:
        raise BadRequest(f"{name!r} is no model: write provider:model, such as openai:gpt-5", model=name)
    return prefix, target


def parse_address(target: str, *, base_url: str | None = None) -> ModelAddress:
    """Return model and base URL of the part after the prefix.

    Only an `@` followed by `http://` or `https://` begins a URL: model names may hold an `@` of their own.

    Raises:
        BadRequest: No model is named.
    """
    model, url = target, base_url
    for scheme in ("@http://", "@https://"):
        position = target.find(scheme)
        if position >= 0:
            model, url = target[:position], target[position + 1 :]
            break
    if not model.strip():
        raise BadRequest("the model string names a provider but no model", model=target)
    return ModelAddress(model.strip(), url)


def open_model(factories: ModelFactories, name: str) -> ModelProvider:
    """Return the provider a model string names.

    Raises:
        BadRequest: The string is malformed.
        UnknownName: No plugin registered its prefix.
    """
    prefix, target = split_name(name)
    return factories[prefix](target)
