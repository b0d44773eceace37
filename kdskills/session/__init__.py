"""Loaded skills per conversation, and the runtime tools a model calls.

`SkillRuntime` keeps what each session has loaded and answers `skills.load`, `skills.unload`, `skills.read` and
`skills.run_script`; every use passes the gate of `kdskills.turn`. `store` holds the pure transitions and where records
are kept, `tools` what a model is told and may call, `scripts` the way to an executor, `approval` what persons and policy
plugins are asked. Each name is loaded when it is first used: a store of sessions needs no runtime.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.session.approval import AccessRequest, Approval, ApprovalRequest, Approver, Denial, allow, deny
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
    "Workspace",
    "allow",
    "deny",
]

_HOMES = MappingProxyType(
    {
        "kdskills.session.approval": (
            "AccessRequest",
            "Approval",
            "ApprovalRequest",
            "Approver",
            "Denial",
            "allow",
            "deny",
        ),
        "kdskills.session.codes": ("CODES",),
        "kdskills.session.config": ("INTERPRETERS", "Budget", "RuntimeLimits"),
        "kdskills.session.receipts": (
            "ActiveSkill",
            "LoadReceipt",
            "ProducedFile",
            "PromptParts",
            "ReadResult",
            "ScriptResult",
            "SessionEvent",
            "SkillReceipt",
            "ToolReply",
            "UnloadReceipt",
        ),
        "kdskills.session.runtime": ("Session", "SkillRuntime"),
        "kdskills.session.scope": ("TurnScope", "TurnSources"),
        "kdskills.session.snapshots": ("SessionSnapshot",),
        "kdskills.session.source": ("SkillCatalog",),
        "kdskills.session.store": (
            "MemoryStore",
            "SessionHead",
            "SessionRecord",
            "SessionStore",
            "StoreConflict",
            "StoreUnavailable",
        ),
        "kdskills.session.workspace": ("FolderWorkspace", "Workspace"),
    }
)


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
