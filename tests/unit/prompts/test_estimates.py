"""How far estimated tokens lie from what tokenizers count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdskills.skills.model import estimate_tokens

#: Texts as prompts hold them, with what tokenizers counted: cl100k_base, o200k_base, Tekken, Anthropic's and DeepSeek's.
COUNTED = json.loads((Path(__file__).parent / "token_counts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", COUNTED)
def test_estimates_are_within_fifteen_percent(kind: str) -> None:
    """On an English prompt, its tools, a skill and a page the estimate is within 15 % of five known tokenizers."""
    estimate = estimate_tokens(COUNTED[kind]["text"])
    assert len(COUNTED[kind]["tokens"]) == 5
    assert {name for name, tokens in COUNTED[kind]["tokens"].items() if abs(estimate / tokens - 1) > 0.15} == set()
