"""Loaded skills per conversation, and the runtime tools a model calls.

`SkillRuntime` keeps what each session has loaded and answers `skills.load`, `skills.unload`, `skills.read` and
`skills.run_script`; every use passes the gate of `kdskills.turn`. `state` holds the pure transitions, `store` where
records are kept, `prompt` the top-level text, `scripts` the way to an executor, `wiring` what policy plugins see. Each
name is loaded when it is first used: a store of sessions needs no runtime.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.session.approval import Approval, ApprovalRequest, Approver, allow, deny
    from kdskills.session.catalog import SkillCatalog
    from kdskills.session.codes import CODES
    from kdskills.session.config import INTERPRETERS, Budget
    from kdskills.session.events import SessionEvent
    from kdskills.session.limits import RuntimeLimits
    from kdskills.session.receipts import (
        ActiveSkill,
        LoadReceipt,
        ProducedFile,
        PromptParts,
        ReadResult,
        ScriptResult,
        SkillReceipt,
        ToolReply,
        UnloadReceipt,
    )
    from kdskills.session.runtime import SkillRuntime
    from kdskills.session.scope import TurnScope, TurnSources
    from kdskills.session.session import Session
    from kdskills.session.snapshots import SessionSnapshot
    from kdskills.session.state import SessionHead, SessionRecord
    from kdskills.session.store import MemoryStore, SessionStore, StoreConflict, StoreUnavailable
    from kdskills.session.wiring import AccessRequest, Denial
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
        "kdskills.session.approval": ("Approval", "ApprovalRequest", "Approver", "allow", "deny"),
        "kdskills.session.catalog": ("SkillCatalog",),
        "kdskills.session.codes": ("CODES",),
        "kdskills.session.config": ("INTERPRETERS", "Budget"),
        "kdskills.session.events": ("SessionEvent",),
        "kdskills.session.limits": ("RuntimeLimits",),
        "kdskills.session.receipts": (
            "ActiveSkill",
            "LoadReceipt",
            "ProducedFile",
            "PromptParts",
            "ReadResult",
            "ScriptResult",
            "SkillReceipt",
            "ToolReply",
            "UnloadReceipt",
        ),
        "kdskills.session.runtime": ("SkillRuntime",),
        "kdskills.session.scope": ("TurnScope", "TurnSources"),
        "kdskills.session.session": ("Session",),
        "kdskills.session.snapshots": ("SessionSnapshot",),
        "kdskills.session.state": ("SessionHead", "SessionRecord"),
        "kdskills.session.store": ("MemoryStore", "SessionStore", "StoreConflict", "StoreUnavailable"),
        "kdskills.session.wiring": ("AccessRequest", "Denial"),
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
