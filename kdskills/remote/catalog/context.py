"""The catalog's text beside a message, sent once per change and again after a compaction."""

from __future__ import annotations

from kdskills.remote.ports import JsonObject

CONTEXT_KEY = "kdskills"
REPLACES = "This catalog replaces every earlier one."


def escaped(text: str) -> str:
    r"""Return the text with `</` as `<\/`: the server writes it unescaped between `<kdskills>` and `</kdskills>`."""
    return text.replace("</", "<\\/")


def context_text(instruction_text: str, *, earlier: bool) -> str | None:
    """Return what the channel must carry now, or None when there is nothing to say.

    Args:
        instruction_text: The catalog; empty for none.
        earlier: Whether the model has seen an earlier catalog, which this one replaces.
    """
    if not earlier:
        return instruction_text or None
    if not instruction_text:
        return REPLACES
    return f"{REPLACES}\n{instruction_text}"


def additional_context(text: str) -> JsonObject:
    """Return the `additionalContext` of `turn/start`."""
    return {CONTEXT_KEY: {"kind": "application", "value": escaped(text)}}
