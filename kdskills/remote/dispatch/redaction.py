"""Masks secrets in exception texts before they reach a model, a log or a journal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from kdskills.models.redact import MASK, MIN_TEXT, Redactor

NAMES_OF_SECRETS: Final = "password|passwd|passphrase|secret|token|key|authorization|cookie"

_KEY_BLOCK: Final = re.compile(
    r"-----BEGIN ([A-Z0-9 ]{0,40}(?:PRIVATE KEY|CERTIFICATE)[A-Z0-9 ]{0,20})-----.*?(?:-----END \1-----|\Z)", re.DOTALL
)
_URL_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/?#@'\"<>]{0,500}(?=@)")
_SCHEME: Final = re.compile(r"\b(bearer|basic|digest|negotiate)(\s+)[A-Za-z0-9._~+/=:\-]{4,}", re.IGNORECASE)
_HEADER: Final = re.compile(
    r"(?i)(\b[\w-]{0,60}(?:authorization|cookie)['\"]?\s{0,3}[:=]\s{0,3})([^\r\n'\"]+|'[^'\n]*'|\"[^\"\n]*\")"
)
_ASSIGNED_SECRET: Final = re.compile(
    rf"(?i)((?:{NAMES_OF_SECRETS})(?!error|exception)[\w-]{{0,40}}(?:\\?['\"])?\]?\s{{0,3}}(?::|=>?|\bis\b)\s{{0,3}})"
    r"(\\[\"'][^\"'\\\n]*\\[\"']|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[\"'][^\n]*|[^\s,;&)\]}'\"]+)"
)
_VARIABLE: Final = re.compile(rf"(?i)(?:{NAMES_OF_SECRETS}|credential)")


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return *text* with secrets masked.

    Masked are values after `password secret token key authorization cookie`, bearer tokens, credentials in URLs, key
    blocks, the values of environment variables whose names say secret, and the path of this user's home.

    Args:
        text: The message of an exception.
        environment: The variables to read; this process's own when omitted.
    """
    variables = os.environ if environment is None else environment
    text = Redactor(secret_values(variables)).text(text)
    text = _KEY_BLOCK.sub(MASK, text)
    text = _URL_CREDENTIALS.sub(MASK, text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _SCHEME.sub(rf"\1\2{MASK}", text)
    text = _ASSIGNED_SECRET.sub(_masked, text)
    return _without_home(text, variables)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names say secret, long enough to be told from ordinary words."""
    return [value for name, value in environment.items() if _VARIABLE.search(name) and len(value) >= MIN_TEXT]


def _masked(match: re.Match[str]) -> str:
    value = match[2]
    if value.strip("\\\"'") == MASK:
        return match[0]
    quote = re.match(r"\\?['\"]", value)
    return f"{match[1]}{quote[0]}{MASK}{quote[0]}" if quote else f"{match[1]}{MASK}"


def _without_home(text: str, environment: Mapping[str, str]) -> str:
    home = environment.get("HOME", "").rstrip("/")
    if home.count("/") < 1 or len(home) < 2:  # `/` identifies no user
        return text
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
