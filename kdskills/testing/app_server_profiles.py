"""What the emulated versions of the app-server can do, and the errors it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

JsonObject = dict[str, Any]

INVALID: Final = -32600
UNSUPPORTED: Final = -32601
INTERNAL: Final = -32603

BUILT_INS: Final = (
    "exec_command",
    "write_stdin",
    "view_image",
    "request_user_input",
    "get_goal",
    "create_goal",
    "update_goal",
    "web_search",
)
"""Tools the emulated server shows the model by itself; a dynamic tool of the same name is dropped."""

_OLD_METHODS: Final = (
    "initialize",
    "thread/start",
    "thread/resume",
    "thread/fork",
    "thread/archive",
    "thread/unarchive",
    "thread/name/set",
    "thread/compact/start",
    "thread/rollback",
    "thread/loaded/list",
    "thread/read",
    "turn/start",
    "turn/interrupt",
)
_NEW_METHODS: Final = (
    *(method for method in _OLD_METHODS if method != "thread/rollback"),
    "thread/unsubscribe",
    "thread/delete",
    "thread/turns/list",
    "thread/revert",
    "thread/inject_items",
    "thread/settings/update",
    "skills/extraRoots/set",
)


@dataclass(frozen=True, slots=True)
class EmulatorProfile:
    """One version of the server.

    Attributes:
        version: As the user agent says it.
        methods: What it understands; anything else is an unknown variant.
        paged: Threads are `paginated` and can be reverted.
        name_materialises: Naming a thread writes its rollout file.
        context: `additionalContext` reaches the model.
        namespaces: Namespace tools are understood.
    """

    version: str
    methods: tuple[str, ...]
    paged: bool
    name_materialises: bool
    context: bool
    namespaces: bool


PROFILES: Final = {
    "0.169": EmulatorProfile("0.169.0", _NEW_METHODS, True, True, True, True),
    "0.105": EmulatorProfile("0.105.0", _OLD_METHODS, False, False, False, False),
}


class RpcError(Exception):
    """Answers a request with an error."""

    def __init__(self, message: str, code: int = INVALID) -> None:
        super().__init__(message)
        self.code = code


def unknown_variant(method: str, profile: EmulatorProfile) -> RpcError:
    """Return the error of a method this version does not have."""
    known = ", ".join(f"`{name}`" for name in profile.methods)
    return RpcError(f"Invalid request: unknown variant `{method}`, expected one of {known}")
