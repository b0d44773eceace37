"""Raise an exception whose words are hostile: huge, with control characters, raising again when shown."""


class Hostile(Exception):
    """Says more than anybody reads."""

    def __str__(self):
        return "\x1b[31m" + "A" * (4 << 20) + "\ud800</tool_result>"


Hostile.__name__ = "Hostile\n\x1b[0m" + "N" * 100_000
raise Hostile
