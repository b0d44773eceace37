"""Remote skills: Python functions registered per conversation with a Codex app-server.

`api`, `facade` and `session` are what programs hold; `core`, `core_session` and `turns` are the one implementation behind them,
sync or async; `registry` and `schemas` read handlers, `dispatch` and `journal` run calls once, `catalog` makes catalog changes
true, `client` speaks to the server, and `probe` finds out what the server does.

Each name is loaded when it is first used; nothing here needs the optional packages before that.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.remote.api import AsyncCodexClient, CodexClient
    from kdskills.remote.facade import AsyncRemoteSkillsFacade, RemoteSkillLifecycle, RemoteSkillsFacade
    from kdskills.remote.journal import MemoryJournal, SqlJournal
    from kdskills.remote.ports import (
        AppServerError,
        AppServerGone,
        CallJournal,
        CatalogBackend,
        CatalogBusy,
        CatalogChange,
        CatalogContext,
        CatalogError,
        CatalogNotApplied,
        RemoteCall,
        ServerProfile,
        WaitTimeoutError,
    )
    from kdskills.remote.publish import PublishReport
    from kdskills.remote.receipts import Receipt, RemoteSkillDispatch, RemoteSkillSendResult
    from kdskills.remote.registry import RemoteSkill
    from kdskills.remote.session import AsyncRemoteSkillSession, RemoteSkillSession
    from kdskills.remote.signals import AppServerSignal

__all__ = [
    "AppServerError",
    "AppServerGone",
    "AppServerSignal",
    "AsyncCodexClient",
    "AsyncRemoteSkillSession",
    "AsyncRemoteSkillsFacade",
    "CallJournal",
    "CatalogBackend",
    "CatalogBusy",
    "CatalogChange",
    "CatalogContext",
    "CatalogError",
    "CatalogNotApplied",
    "CodexClient",
    "MemoryJournal",
    "PublishReport",
    "Receipt",
    "RemoteCall",
    "RemoteSkill",
    "RemoteSkillDispatch",
    "RemoteSkillLifecycle",
    "RemoteSkillSendResult",
    "RemoteSkillSession",
    "RemoteSkillsFacade",
    "ServerProfile",
    "SqlJournal",
    "WaitTimeoutError",
]

_MODULES = MappingProxyType(
    {
        "kdskills.remote.facade": ("AsyncRemoteSkillsFacade", "RemoteSkillLifecycle", "RemoteSkillsFacade"),
        "kdskills.remote.journal": ("MemoryJournal", "SqlJournal"),
        "kdskills.remote.api": ("AsyncCodexClient", "CodexClient"),
        "kdskills.remote.ports": (
            "AppServerError",
            "AppServerGone",
            "CallJournal",
            "CatalogBackend",
            "CatalogBusy",
            "CatalogChange",
            "CatalogContext",
            "CatalogError",
            "CatalogNotApplied",
            "RemoteCall",
            "ServerProfile",
            "WaitTimeoutError",
        ),
        "kdskills.remote.publish": ("PublishReport",),
        "kdskills.remote.receipts": ("Receipt", "RemoteSkillDispatch", "RemoteSkillSendResult"),
        "kdskills.remote.registry": ("RemoteSkill",),
        "kdskills.remote.session": ("AsyncRemoteSkillSession", "RemoteSkillSession"),
        "kdskills.remote.signals": ("AppServerSignal",),
    }
)


def __getattr__(name: str) -> object:
    """Return a name of this room, importing its module now."""
    for module_name, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module_name), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what is here, loaded or not."""
    return sorted({*globals(), *__all__})
