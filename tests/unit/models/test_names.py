"""Model strings."""

import pytest

from kdskills.errors import BadRequest, UnknownName
from kdskills.hooks import Register
from kdskills.models import ModelAddress, open_model, parse_address, split_name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("replay", ("replay", "")),
        ("openai:gpt-5", ("openai", "gpt-5")),
        ("json:ollama:qwen3:4b", ("json", "ollama:qwen3:4b")),
        (" openai:a@http://h:1/v1 ", ("openai", "a@http://h:1/v1")),
    ],
)
def test_the_prefix_ends_at_the_first_colon(name, parts):
    """Only the first colon parts the provider from the rest."""
    assert split_name(name) == parts


@pytest.mark.parametrize("name", ["", "  ", ":gpt"])
def test_a_string_without_prefix_is_refused(name):
    """A model string names a provider."""
    with pytest.raises(BadRequest):
        split_name(name)


def test_an_url_begins_at_an_at_sign_before_a_scheme():
    """A model name may hold an @ of its own."""
    assert parse_address("a@b@https://h/v1") == ModelAddress("a@b", "https://h/v1")
    assert parse_address("a@2024-01-01") == ModelAddress("a@2024-01-01")
    assert parse_address("a", base_url="http://h") == ModelAddress("a", "http://h")


@pytest.mark.parametrize("rest", ["", "@http://h/v1"])
def test_an_address_names_a_model(rest):
    """A provider alone is not enough."""
    with pytest.raises(BadRequest):
        parse_address(rest)


def test_an_unknown_prefix_lists_the_known_ones():
    """A misspelt provider is told what there is."""
    register = Register("model")
    register("replay", lambda rest: rest)
    with pytest.raises(UnknownName, match="known: replay"):
        open_model(register, "opanai:gpt")
