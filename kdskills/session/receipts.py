"""What the runtime answers and reports: frozen values with a JSON form, and the events of a session."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

Wire: TypeAlias = Mapping[str, Any]
"""A JSON object on its way to a model or a door."""

Encoding = Literal["text", "binary"]


@dataclass(frozen=True, slots=True)
class SkillReceipt:
    """A loaded skill as told to a model; a hidden one has its alias for name and id, no place and no properties.

    `location` and `root_dir` are its SKILL.md and folder by the runtime's `locations`, None for `none`. `digest` is of
    the SKILL.md the session holds, `tree_digest` over all files when it was loaded, `current_digest` of the file now,
    only when `stale` and readable. `origin` is where third-party text comes from; `imports` are names.
    """

    name: str
    id: str
    location: str | None
    root_dir: str | None
    digest: str
    tree_digest: str
    stale: bool = False
    current_digest: str | None = None
    origin: str | None = None
    imports: tuple[str, ...] = ()
    properties: Wire = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object as in `docs/reference/runtime-tools.md`; `current_digest` only when stale."""
        names = [
            field.name for field in fields(self) if field.name != "current_digest" or self.current_digest is not None
        ]
        receipt = {name: getattr(self, name) for name in names}
        return receipt | {"imports": list(self.imports), "properties": dict(self.properties)}


@dataclass(frozen=True, slots=True)
class ActiveSkill:
    """A loaded skill with its text; `full_id` and `hidden` are for the host, `receipt` is what a model may see."""

    receipt: SkillReceipt
    full_id: str
    body: str
    tokens: int
    hidden: bool = False
    loaded_by: str = "model"

    @property
    def name(self) -> str:
        """The name it is shown under."""
        return self.receipt.name

    def to_json(self) -> dict[str, Any]:
        """Return the receipt with `body` and `tokens`."""
        return {**self.receipt.to_json(), "body": self.body, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class LoadReceipt:
    """What is loaded after a load or refresh, in order; `changed` says whether anything is different now."""

    active_skills: tuple[SkillReceipt, ...]
    changed: bool
    tokens: int
    bodies: tuple[ActiveSkill, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `skills.load`."""
        skills = [receipt.to_json() for receipt in self.active_skills]
        return {"active_skills": skills, "changed": self.changed, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class UnloadReceipt:
    """What is left after an unload, and the names that mean nothing here."""

    active_skills: tuple[SkillReceipt, ...]
    ignored: tuple[str, ...]
    changed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `skills.unload`."""
        return {"active_skills": [receipt.to_json() for receipt in self.active_skills], "ignored": list(self.ignored)}


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A file of a skill, or a window of it; `size` (bytes) and `digest` are of the whole file as it is on disk.

    The window is in `text`, or in `b64` for `binary`; `offset` is where it begins, in characters of text or bytes of
    binary, and `next_offset` where to go on, None at the end.
    """

    skill: str
    path: str
    encoding: Encoding
    media_type: str
    size: int
    digest: str
    offset: int = 0
    truncated: bool = False
    next_offset: int | None = None
    text: str | None = None
    b64: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `skills.read`, with `text` or `b64` by the encoding."""
        payload = "text" if self.encoding == "text" else "b64"
        rest = ("media_type", "size", "digest", "offset", "truncated", "next_offset")
        return {name: getattr(self, name) for name in ("skill", "path", "encoding", payload, *rest)}


@dataclass(frozen=True, slots=True)
class ProducedFile:
    """A file a run left in the turn's files."""

    path: str
    size: int
    digest: str
    media_type: str

    def to_json(self) -> dict[str, Any]:
        """Return the four facts as JSON."""
        return asdict(self)


ScriptStatus = Literal["ok", "nonzero", "timeout", "oom", "limit", "cancelled"]


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What came of a script. A non-zero exit is a result, not an error.

    `workdir` is the folder it started in and `skill_dir` the skill's, as programs see them. `dropped` lists produced
    files that were not kept, as `(path, why)`, and `note` says how the call was understood: both only if there are any.
    """

    skill: str
    path: str
    workdir: str
    skill_dir: str
    status: ScriptStatus
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    duration_ms: int
    engine: str
    level: str
    artifacts: tuple[ProducedFile, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `skills.run_script`."""
        program = ("exit_code", "stdout", "stderr", "stdout_truncated", "stderr_truncated", "timed_out", "duration_ms")
        names = ("skill", "path", "workdir", "skill_dir", *program, "status", "signal", "engine", "level")
        receipt: dict[str, Any] = {name: getattr(self, name) for name in names}
        receipt["artifacts"] = [item.to_json() for item in self.artifacts]
        if self.dropped:
            receipt["dropped"] = [{"path": path, "problem": problem} for path, problem in self.dropped]
        if self.note:
            receipt["note"] = self.note
        return receipt


@dataclass(frozen=True, slots=True)
class SearchReceipt:
    """The answer of `skills.search`: a catalog of the hits as text, their names, the best first, and how many share a word."""

    text: str
    names: tuple[str, ...]
    total: int

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `skills.search`."""
        return {"names": list(self.names), "total": self.total}


@dataclass(frozen=True, slots=True)
class ToolSuccess:
    """The answer of a tool that did what was asked; `ok` tells the two forms of a reply apart.

    `text` is the JSON of `result` for the model's message, `pin` is `skill:<id>@<digest>`, blank-separated, when the
    text carries bodies a compactor must keep.
    """

    tool: str
    result: Wire
    text: str = ""
    pin: str | None = None
    ok: Literal[True] = True
    error: None = None


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """The answer of a tool that did not do what was asked; `ok` tells the two forms of a reply apart.

    `tool` is the spelling asked for when there is none; `error` is `{"code", "who", "message", "details"}`.
    """

    tool: str
    error: Wire
    text: str = ""
    ok: Literal[False] = False
    result: None = None
    pin: None = None


ToolReply = ToolSuccess | ToolFailure
"""The answer to one tool call: `reply.ok is True` and `reply.error is None` tell type checkers that `result` is there, else
`error` is. To mypy `if reply.ok` says it, too; pyright narrows a union by no truth of a member."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The top-level text of a model call; `base` is the bundle's own text, which stands between rules and catalog.

    `listed` are the names the catalog shows, of `total` skills.
    """

    rules: str
    available: str
    active: str
    base: str = ""
    tokens: int = 0
    level: int = 0
    listed: tuple[str, ...] = ()
    total: int = 0

    @property
    def steady(self) -> int:
        """Characters of `text` before those of the active skills."""
        return len(replace(self, active="").text) if self.active else len(self.text)

    @property
    def text(self) -> str:
        """Rules, the bundle's own text, available and active skills; empty parts are left out."""
        return "\n\n".join(part for part in (self.rules, self.base, self.available, self.active) if part)

    @property
    def digest(self) -> str:
        """`sha256:` + hex of `text`."""
        return text_digest(self.text)


def text_digest(text: str) -> str:
    """Return `sha256:` + hex over the UTF-8 bytes of *text*."""
    return bytes_digest(text.encode("utf-8", "surrogatepass"))


def bytes_digest(data: bytes) -> str:
    """Return `sha256:` + hex over *data*."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


_LOG = logging.getLogger("kdskills.session")


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """One thing that happened in a session; a turn adds its number, time and ids.

    `type` is `skill.loaded`, `skill.unloaded`, `skill.stale`, `skill.pruned`, `skill.refused`, `catalog.truncated`,
    `approval.requested`, `approval.decided`, `script.started`, `script.connection`, `script.finished` or `diagnostic`. `data` are JSON-able
    facts; hidden skills appear under their alias, values of `env` never.
    """

    type: str
    session_id: str
    data: Mapping[str, Any] = field(default_factory=dict)


Sink = Callable[[SessionEvent], None]


def send(sink: Sink | None, event: SessionEvent) -> None:
    """Hand *event* to *sink*; a sink that fails is logged and never undoes what happened."""
    if sink is None:
        return
    try:
        sink(event)
    except Exception:  # noqa: BLE001 - a listener may fail in any way; what happened stays, and the log says so
        _LOG.exception("an event sink failed on %s", event.type)
