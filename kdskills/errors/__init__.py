"""Every error kdskills raises on purpose, split by who must act: model, caller, author, operator or user.

The message is written once, where the error is raised; facts travel in `details`. `docs/reference/errors.md` shows the tree.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kdskills.exports import tell_homes

Severity = Literal["error", "warning", "info"]

_RANK = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One sentence about what was found, where, and what would mend it.

    Attributes:
        code: Stable identifier, listed in `docs/reference`.
        severity: `error` refuses the thing, `warning` keeps it, `info` only informs.
        message: One sentence for people.
        path: Posix path relative to its root, or None when the finding has no file.
        line: 1-based, or None.
        column: 1-based, or None.
        ref: Full id, consumer, rule, field or sid the finding is about.
        fix: What would mend it, in words, or None.
    """

    code: str
    severity: Severity
    message: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    ref: str | None = None
    fix: str | None = None

    @property
    def rank(self) -> int:
        """0 for errors, 1 for warnings, 2 for infos."""
        return _RANK[self.severity]

    def at(self, path: str | None) -> Diagnostic:
        """Return the same finding with *path*."""
        return replace(self, path=path)

    def to_json(self) -> dict[str, str | int | None]:
        """Return the finding as JSON, absent facts left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        position = ":".join(str(p) for p in (self.path, self.line, self.column) if p is not None)
        return f"{position + ': ' if position else ''}{self.severity}[{self.code}] {self.message}"


__all__ = [
    "AuthorMustAct",
    "BadRequest",
    "BundleError",
    "CallRefused",
    "CallerMustAct",
    "Conflict",
    "ContextOrder",
    "DescriptorError",
    "Diagnostic",
    "ExecFailed",
    "ExecRefused",
    "FileRefused",
    "KdskillsError",
    "MissingExtra",
    "ModelFailed",
    "ModelMustAct",
    "NameTaken",
    "NoActiveSkills",
    "NotFound",
    "OperatorMustAct",
    "PluginFailed",
    "PluginInvalid",
    "PolicyUnavailable",
    "ReplayError",
    "RootChanged",
    "RootMissing",
    "SessionError",
    "Severity",
    "ToolCallRefused",
    "UnknownName",
    "UserMustAct",
    "Who",
]

Who = Literal["model", "caller", "author", "operator", "user"]


class KdskillsError(Exception):
    """Root of the tree.

    Args:
        message: One sentence for the person named by `who`.
        code: Stable wire code; the class's own when omitted.
        who: Who must act; the class's own when omitted.
        **details: JSON-able facts.

    `result` holds what a solver's turn came to before the error ended it; it is never serialised.
    """

    code: str = "kdskills_error"
    who: Who = "caller"
    result: object | None = None

    def __init_subclass__(cls, *, code: str | None = None, who: Who | None = None) -> None:
        """Take the code and the person of a kind of errors; what is not said is that of the kind above."""
        super().__init_subclass__()
        cls.code, cls.who = code or cls.code, who or cls.who

    def __init__(self, message: str, *, code: str | None = None, who: Who | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.who = who or type(self).who
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """Return the wire form `{"error": {"code", "who", "message", "details"}}`."""
        return {"error": {"code": self.code, "who": self.who, "message": self.message, "details": self.details}}


class ModelMustAct(KdskillsError, code="invalid_call", who="model"):
    """The model may call again, differently."""


class ToolCallRefused(ModelMustAct, code="invalid_argument"):
    """A runtime tool refused a call; `code` is one of those in `docs/reference/runtime-tools.md`, `who` follows the code.

    `refusal` holds the gate's own answer for people and events; it is never serialised.
    """

    refusal: object | None = None


class CallerMustAct(KdskillsError, code="bad_request", who="caller"):
    """The calling program must change the call."""


class NoActiveSkills(CallerMustAct, code="no_active_subsystem"):
    """No `SkillsSubsystem` is active in this context."""


class ContextOrder(CallerMustAct, code="context_order"):
    """An activation was closed in another context or out of order."""


class PolicyUnavailable(CallerMustAct, code="policy_unavailable"):
    """The export of one consumer's view was asked for another consumer."""


class DescriptorError(CallerMustAct, code="descriptor_invalid"):
    """The descriptor says something that is not understood; `details["key"]` is the key's path."""


class BadRequest(CallerMustAct, code="bad_request"):
    """Arguments out of shape or bounds; `details["errors"]` lists them."""


class CallRefused(CallerMustAct, code="call_refused"):
    """This caller may not run this operation."""


class NotFound(CallerMustAct, code="not_found"):
    """Nothing of that id for this caller; what belongs to another project reads the same."""


class Conflict(CallerMustAct, code="conflict"):
    """The state of things does not allow it now: taken, busy, or another body under one key."""


class ServiceDown(CallerMustAct, code="service_down"):
    """The service is not running, or what runs does not answer as it must."""


class FileRefused(CallerMustAct, code="unreadable"):
    """A path below a root is not read: `path_unsafe`, `file_missing`, `symlink`, `not_a_directory`, `not_regular`,
    `too_large`, `too_deep` or `unreadable`; `details["path"]` is the relative path.
    """


class SessionError(CallerMustAct, code="session_not_found"):
    """Unknown, expired, taken or closed session, a lost race, or a cancelled call."""


class ReplayError(CallerMustAct, code="replay_diverged"):
    """Recorded replies and this run do not fit: `replay_diverged`, `replay_exhausted` or `replay_unused`."""


class AuthorMustAct(KdskillsError, code="author_error", who="author"):
    """The author of the bundle or skill must mend a file."""


class BundleError(AuthorMustAct, code="bundle_invalid"):
    """The bundle cannot be loaded."""


class OperatorMustAct(KdskillsError, code="operator_error", who="operator"):
    """The set-up of this machine or Host must change."""


class RootMissing(OperatorMustAct, code="root_missing"):
    """A root or skill named by an export is not there."""


class RootChanged(OperatorMustAct, code="root_changed"):
    """A root or skill named by an export has another digest."""


class ExecRefused(OperatorMustAct, code="engine_unavailable"):
    """Nothing was run: the request or this machine does not allow it."""


class ExecFailed(OperatorMustAct, code="executor_failed"):
    """The engine broke while it set up or ran a program; the program is not to blame."""


class ModelFailed(OperatorMustAct, code="model_failed"):
    """The model's provider failed for good; `retryable` says whether another try may help."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, code=code, **details)
        self.retryable = retryable
        self.retry_after = retry_after


class NameTaken(OperatorMustAct, code="name_taken"):
    """Two plugins claim one name."""


class UnknownName(OperatorMustAct, code="unknown_name"):
    """A name that no plugin registered."""


class PluginInvalid(OperatorMustAct, code="plugin_invalid"):
    """A plugin's hook cannot be called (async, a wrapper, misspelt, unknown arguments), or what it registers cannot be used."""


class PluginFailed(OperatorMustAct, code="plugin_failed"):
    """A plugin's hook raised, or answered something else than expected; `details` has `plugin`, `hook`, `expected`, `found`."""


class MissingExtra(OperatorMustAct, code="missing_extra"):
    """An optional part is not installed; the message names the command that installs it."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional part: pip install 'kdskills[{extra}]'", extra=extra)


class UserMustAct(KdskillsError, code="approval_denied", who="user"):
    """A person said no, or must be asked."""


StrPath = str | os.PathLike[str]
"""A path as callers give it."""


def path_argument(value: object, name: str) -> Path:
    """Return a path argument as a `Path`.

    Args:
        value: Text, or anything with `__fspath__` that gives text.
        name: Name of the argument, for the error.

    Raises:
        TypeError: It is neither; one sentence that names the argument.
    """
    if isinstance(value, Path):
        return value
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a path, as text or os.PathLike, not {type(value).__name__}")
    return Path(text)


tell_homes(__name__)
