"""Loaded skills per conversation, and the runtime tools a model calls.

`SkillRuntime` keeps what each session has loaded and answers `skills.load`, `skills.unload`, `skills.read` and
`skills.run_script`; every use passes the gate of `kdskills.turn`. `state` holds the pure transitions, `store` where
records are kept, `prompt` the top-level text, `scripts` the way to an executor, `wiring` what policy plugins see.
"""

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
