"""The ReAct loop: a request in, decisions, tool calls and skills in between, a cited answer and files out.

`SolverSystem` holds what turns share, `ReactSolver` works on requests, `TurnResult` is what comes of one. Names become
objects through a `Wiring`, so that nothing here imports the house above.
"""

from kdskills.bundle.descriptor import CODEGEN, DECISION
from kdskills.exports import tell_homes
from kdskills.solver.bus import Sink
from kdskills.solver.events import (
    AgentEvent,
    AgentRun,
    CallRecord,
    CitationIssue,
    Event,
    SkillUse,
    Step,
    TokenUsage,
    TurnFile,
    TurnResult,
)
from kdskills.solver.parts import AgentBudget, AgentSpec, PlainWiring, SolverSettings, Wiring
from kdskills.solver.react import ReactSolver
from kdskills.solver.system import SolverSystem
from kdskills.solver.tools import SolverTool, ToolAnswer, ToolContext, ToolError, tool_from_function
from kdskills.solver.turn import Generated, Turn

__all__ = [
    "CODEGEN",
    "DECISION",
    "AgentBudget",
    "AgentEvent",
    "AgentRun",
    "AgentSpec",
    "CallRecord",
    "CitationIssue",
    "Event",
    "Generated",
    "PlainWiring",
    "ReactSolver",
    "Sink",
    "SkillUse",
    "SolverSettings",
    "SolverSystem",
    "SolverTool",
    "Step",
    "TokenUsage",
    "ToolAnswer",
    "ToolContext",
    "ToolError",
    "Turn",
    "TurnFile",
    "TurnResult",
    "Wiring",
    "tool_from_function",
]

tell_homes(__name__)
