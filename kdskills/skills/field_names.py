"""Which keys of the frontmatter are known, and what each may be called."""

from __future__ import annotations

PUBLISHED = frozenset({"name", "description", "license", "compatibility", "metadata", "allowed-tools"})
"""The six keys of the published Agent Skills format."""

_SYNONYMS = {
    "when_to_use_lines": "when_to_use",
    "import": "imports",
    "agent_disclosure": "disclosure",
}
_OWN = (
    "name", "description", "license", "compatibility", "metadata", "allowed_tools", "id", "namespace", "version",
    "category", "author", "created", "argument_hint", "tags", "when_to_use", "imports", "include_for", "disclosure",
    "disable_model_invocation", "user_invocable", "arguments", "insert",
)  # fmt: skip

FIELD_OF: dict[str, str] = {
    spelling: _SYNONYMS.get(key, key) for key in (*_OWN, *_SYNONYMS) for spelling in (key, key.replace("_", "-"))
}
"""Every known key, with underscores or hyphens, and the field it fills."""

RESTRICTING = frozenset(
    {"include_for", "disclosure", "disable_model_invocation", "user_invocable", "insert", "namespace"}
)
"""Fields that keep a skill from somebody: their misspellings count, lest a slip widens who may use it."""

_WATCHED = (*sorted(RESTRICTING), "agent_disclosure")
_FIRST = frozenset("iduanIDUAN")


def misspelt(key: str) -> str | None:
    """Return the restricting field that an unknown *key* was meant for, if it looks like one."""
    if key[:1] not in _FIRST or len(key) > 40:
        return None
    import difflib  # only a skill with an unknown key pays for it

    near = difflib.get_close_matches(key.lower().replace("-", "_"), _WATCHED, n=1, cutoff=0.85)
    return FIELD_OF[near[0]] if near else None


def near_required(key: str) -> bool:
    """Whether an unknown *key* of a tool was meant to say that the tool is required."""
    import difflib

    words = ("required", "hard_required", "availability")
    return bool(difflib.get_close_matches(key.lower().replace("-", "_"), words, n=1, cutoff=0.8))
