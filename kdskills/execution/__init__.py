"""Run something isolated: request, result, limits, the executor protocol and the payload.

Engines are plugins (`kdskills.builtin.executors`); this room holds what they share: checking a request,
staging its files, pumping and bounding output, collecting artifacts, and choosing an engine by its probe.
"""

from kdskills.execution.protocol import (
    ExecutionOptions,
    Executor,
    ExecutorFactory,
    Handle,
    ProbeCheck,
    ProbeReport,
    Reachable,
    ReapReport,
)
from kdskills.execution.request import (
    Artifact,
    ArtifactError,
    EgressBounds,
    EnvironmentMount,
    ExecError,
    ExecRequest,
    ExecResult,
    InputFile,
    IsolationLevel,
    Limits,
    LogFiles,
    NetworkConnection,
    Owner,
    ScriptCall,
    SkillMount,
    Status,
    Stream,
)
from kdskills.exports import tell_homes

__all__ = [
    "Artifact",
    "ArtifactError",
    "EgressBounds",
    "EnvironmentMount",
    "ExecError",
    "ExecRequest",
    "ExecResult",
    "ExecutionOptions",
    "Executor",
    "ExecutorFactory",
    "Handle",
    "InputFile",
    "IsolationLevel",
    "Limits",
    "LogFiles",
    "NetworkConnection",
    "Owner",
    "ProbeCheck",
    "ProbeReport",
    "Reachable",
    "ReapReport",
    "ScriptCall",
    "SkillMount",
    "Status",
    "Stream",
]

tell_homes(__name__)
