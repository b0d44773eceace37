"""The options of a client, and the environment and command line of the server it starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kdskills.errors import BadRequest
from kdskills.remote.ports import CallJournal, ServerProfile

Strategy = Literal["auto", "native", "reload", "dispatcher", "successor"]
Dispatch = Literal["auto", "manual"]
Unload = Literal["unsubscribe", "archive"]

UNLOAD_AT_ONCE: dict[str, int] = {"thread_unload_delay_secs": 0}
"""Sent with every start and resume: an idle thread must unload at once, because a loaded thread cannot be changed."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The options of `spawn` and `connect`.

    Attributes:
        journal: Stores calls; None means the state folder's for `CodexClient` and `AsyncCodexClient`, else memory.
        strategy: How catalogs reach the model; `auto` takes the first proven one.
        dispatch: `auto` answers tool calls by the sessions' registries, `manual` leaves them to the caller.
        unload: `archive`: a thread that another client may have open is archived and unarchived to make the server unload it.
        allow_successor: Whether a new thread may replace an old one.
        profile: What is known of the server; None means unprobed.
        spool: Stores the full text of answers that were cut (a `Spool`).
        request_timeout_s: Longest wait for one answer of the server.
        reconnect_s: How long a client tries to reconnect by itself after a loss; with 0 only `reconnect` does.
    """

    journal: CallJournal | None = None
    strategy: Strategy = "auto"
    dispatch: Dispatch = "auto"
    unload: Unload = "unsubscribe"
    allow_successor: bool = False
    profile: ServerProfile | None = None
    spool: Any = None
    request_timeout_s: float = 120.0
    reconnect_s: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", Strategy), ("dispatch", Dispatch), ("unload", Unload)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise BadRequest(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}", option=name)
        if not 0 <= self.reconnect_s < float("inf"):
            raise BadRequest(
                f"reconnect_s is a number of seconds, 0 or more, not {self.reconnect_s!r}", option="reconnect_s"
            )


def child_environment(home: str | os.PathLike[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the whole environment of the child: `PATH`, `LANG`, the caller's variables, and `home` as both homes.

    No other variable of this process is passed, so none of the user's logins and keys is.
    """
    passed = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    home_path = str(Path(home).absolute())
    return {**passed, **(env or {}), "HOME": home_path, "CODEX_HOME": home_path}


def app_server_command(binary: str, config: Mapping[str, Any] | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line: `binary app-server -c key=value …`.

    Args:
        binary: A path, or a name found in the `PATH`.
        config: Values of the server's configuration by dotted key, written as TOML.
        arguments: Further arguments at the end.
    """
    overrides = [part for key, value in (config or {}).items() for part in ("-c", f"{key}={toml(value)}")]
    return [binary, "app-server", *overrides, *arguments]


def toml(value: Any) -> str:
    """Return a value as TOML on one line.

    Raises:
        BadRequest: A value TOML has no word for.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_toml_key(str(key))}={toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(toml(item) for item in value) + "]"
    raise BadRequest(
        f"a configuration value is text, a number, a bool, a list or a mapping, not {type(value).__name__}"
    )


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def camel(name: str) -> str:
    """Return a snake_case keyword as the server's camelCase; other names stay."""
    head, *tail = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in tail) if head else name


def camel_keys(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as the server's params."""
    return {camel(key): value for key, value in keywords.items()}
