"""Keep secrets out of what is written down: `***` instead of values that were marked as secret."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
MAX_NESTING = 64
"""Levels of objects and lists a JSON value may have."""
_ENV = re.compile(r'"env"\s*:')
MIN_TEXT = 6
"""Shorter values of a call's `env` are masked where they stand only: replacing `1` everywhere would spoil the text."""


class Redactor:
    """Replaces secrets in texts and JSON values.

    A secret declared by the caller is replaced wherever it occurs. The values under a call's `env` are masked in place;
    those of at least `MIN_TEXT` characters are then replaced wherever they occur, too.

    Args:
        secrets: Values known from the start, of any length but empty.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: tuple[str, ...] = ()
        self._spellings: tuple[str, ...] = ()
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Mark further values as secret; blank ones are ignored."""
        secret_set = {*self._secrets, *(s for s in secrets if s.strip() and s != MASK)}
        # Longest first, so that no part of a secret is left beside the mask of a shorter one.
        self._secrets = tuple(sorted(secret_set, key=lambda s: (-len(s), s)))
        escaped = {secret: json.dumps(secret, ensure_ascii=False)[1:-1] for secret in self._secrets}
        self._spellings = tuple(word for secret in self._secrets for word in dict.fromkeys((secret, escaped[secret])))

    def learn(self, arguments: Mapping[str, Any]) -> None:
        """Take the values of a call's `env` as secrets."""
        env = arguments.get("env")
        if isinstance(env, Mapping):
            self.add(*(v for v in env.values() if isinstance(v, str) and len(v) >= MIN_TEXT))

    def text(self, text: str) -> str:
        """Return *text* with every secret replaced, in its plain and its JSON-escaped spelling."""
        for spelling in self._spellings:
            text = text.replace(spelling, MASK)
        return text

    def safe_length(self, text: str) -> int:
        """Return how many characters of a growing *text* can be shown: those after them may begin a secret."""
        end = len(text)
        for secret in self._spellings:
            for size in range(min(len(secret) - 1, len(text)), 0, -1):
                if text.endswith(secret[:size]):
                    end = min(end, len(text) - size)
                    break
        before = -1
        while before != end:  # no secret may reach over the end
            before = end
            for secret in self._spellings:
                start = text.find(secret, max(0, end - len(secret) + 1), end + len(secret) - 1)
                end = min(end, start) if start >= 0 else end
        return end

    def value(self, value: Any) -> Any:
        """Return a JSON value with secrets replaced; the values of any mapping named `env` are masked whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(k)): dict.fromkeys(map(str, v), MASK)
                if k == "env" and isinstance(v, Mapping)
                else self.value(v)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def arguments(self, text: str) -> str:
        """Return the raw JSON text of a call's arguments, redacted; what is not a JSON object is treated as text."""
        parsed = parse_object(text)
        if parsed is None:  # cut off, perhaps in the middle of a secret: what follows `env` is not shown
            env_key = _ENV.search(text)
            return self.text(text if env_key is None else text[: env_key.end()] + MASK)
        self.learn(parsed)
        redacted = self.value(parsed)
        return text if redacted == parsed else json.dumps(redacted, ensure_ascii=False)


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in *text*, or None when it is anything else, however broken or deep.

    What is nested deeper than `MAX_NESTING` counts as broken: recursive readers would run out of stack.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _flat_enough(value) else None


def _flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False
