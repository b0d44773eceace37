"""Remote skills: Python functions registered per conversation with a Codex app-server.

`api` and `session` are what programs hold, over `core` and `turns`; `registry` and `schemas` read handlers, `dispatch` and
`journal` run calls once, `catalog` makes catalog changes true, `client` speaks to the server, `probe` finds out what it does.
Each name is loaded when it is first used; nothing here needs the optional packages before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.remote.api import (
        AsyncCodexClient,
        AsyncRemoteSkillsFacade,
        CodexClient,
        RemoteSkillLifecycle,
        RemoteSkillsFacade,
    )
    from kdskills.remote.calls import AppServerSignal, Receipt, RemoteSkillDispatch, RemoteSkillSendResult
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
    from kdskills.remote.registry import RemoteSkill
    from kdskills.remote.session import AsyncRemoteSkillSession, RemoteSkillSession
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".api": "AsyncCodexClient AsyncRemoteSkillsFacade CodexClient RemoteSkillLifecycle RemoteSkillsFacade",
            ".calls": "AppServerSignal Receipt RemoteSkillDispatch RemoteSkillSendResult",
            ".journal": "MemoryJournal SqlJournal",
            ".ports": (
                "AppServerError AppServerGone CallJournal CatalogBackend CatalogBusy CatalogChange CatalogContext "
                "CatalogError CatalogNotApplied RemoteCall ServerProfile WaitTimeoutError"
            ),
            ".publish": "PublishReport",
            ".registry": "RemoteSkill",
            ".session": "AsyncRemoteSkillSession RemoteSkillSession",
        },
    )

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
