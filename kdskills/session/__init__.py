"""Loaded skills per conversation, and the runtime tools a model calls.

`SkillRuntime` keeps what each session has loaded and answers `skills.load`, `skills.unload`, `skills.read` and
`skills.run_script`; every use passes the gate of `kdskills.turn`. `store` holds the pure transitions and where records
are kept, `tools` what a model is told and may call, `scripts` the way to an executor, `approval` what persons and policy
plugins are asked. Each name is loaded when it is first used: a store of sessions needs no runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.session.approval import AccessRequest, Approval, ApprovalRequest, Approver, Denial, User, allow, deny
    from kdskills.session.codes import CODES
    from kdskills.session.config import INTERPRETERS, Budget, RuntimeLimits
    from kdskills.session.receipts import (
        ActiveSkill,
        LoadReceipt,
        ProducedFile,
        PromptParts,
        ReadResult,
        ScriptResult,
        SessionEvent,
        SkillReceipt,
        ToolReply,
        UnloadReceipt,
    )
    from kdskills.session.runtime import Session, SkillRuntime
    from kdskills.session.scope import TurnScope, TurnSources
    from kdskills.session.snapshots import SessionSnapshot
    from kdskills.session.source import SkillCatalog
    from kdskills.session.store import (
        MemoryStore,
        SessionHead,
        SessionRecord,
        SessionStore,
        StoreConflict,
        StoreUnavailable,
    )
    from kdskills.session.workspace import FolderWorkspace, Workspace
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".approval": "AccessRequest Approval ApprovalRequest Approver Denial User allow deny",
            ".codes": "CODES",
            ".config": "INTERPRETERS Budget RuntimeLimits",
            ".receipts": (
                "ActiveSkill LoadReceipt ProducedFile PromptParts ReadResult ScriptResult SessionEvent SkillReceipt "
                "ToolReply UnloadReceipt"
            ),
            ".runtime": "Session SkillRuntime",
            ".scope": "TurnScope TurnSources",
            ".snapshots": "SessionSnapshot",
            ".source": "SkillCatalog",
            ".store": "MemoryStore SessionHead SessionRecord SessionStore StoreConflict StoreUnavailable",
            ".workspace": "FolderWorkspace Workspace",
        },
    )

__all__ = [
    "CODES",
    "INTERPRETERS",
    "AccessRequest",
    "ActiveSkill",
    "Approval",
    "ApprovalRequest",
    "Approver",
    "Budget",
    "Denial",
    "FolderWorkspace",
    "LoadReceipt",
    "MemoryStore",
    "ProducedFile",
    "PromptParts",
    "ReadResult",
    "RuntimeLimits",
    "ScriptResult",
    "Session",
    "SessionEvent",
    "SessionHead",
    "SessionRecord",
    "SessionSnapshot",
    "SessionStore",
    "SkillCatalog",
    "SkillReceipt",
    "SkillRuntime",
    "StoreConflict",
    "StoreUnavailable",
    "ToolReply",
    "TurnScope",
    "TurnSources",
    "UnloadReceipt",
    "User",
    "Workspace",
    "allow",
    "deny",
]
