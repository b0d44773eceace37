"""The settings of a runtime and the bounds of its tools, each with a hard maximum, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import SecretStr

from kdskills.errors import BadRequest, NameTaken
from kdskills.execution import Executor
from kdskills.execution.egress import Grants
from kdskills.session.approval import Approver, Deny
from kdskills.session.receipts import Sink
from kdskills.session.source import Locations
from kdskills.skills.model import Skill, TokenCounter, estimate_tokens
from kdskills.skills.selection import CatalogMode

if TYPE_CHECKING:
    from kdskills.environments.scripts import ScriptPackages

KIB: Final = 1024
MIB: Final = 1024 * KIB

MAX_ENV_NAME: Final = 256
MAX_ENV_VALUE: Final = 32 * KIB
MAX_ENV_TOTAL: Final = 256 * KIB
MAX_ARG: Final = 16 * KIB


def _limit(default: float, least: float, most: float) -> Any:
    return field(default=default, metadata={"bounds": (least, most)})


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """Bounds of the runtime tools; sizes in bytes, times in seconds.

    `max_read_bytes` is the largest file `skills.read` opens, `read_window_chars` one window of it as text,
    `max_body_bytes` the largest SKILL.md that loads, `max_names` are those of one load or unload. A call has `max_args`
    arguments of 16 KiB each and `max_env` variables, 256 KiB in all; `script_timeout_s` is the default wall time and
    the most a call may ask for; of each output stream the last `max_output_bytes` are kept.
    """

    max_read_bytes: int = _limit(16 * MIB, 1, 64 * MIB)
    read_window_chars: int = _limit(100_000, 1, 1_000_000)
    max_body_bytes: int = _limit(2 * MIB, 1, 2 * MIB)
    max_names: int = _limit(64, 1, 64)
    max_args: int = _limit(256, 1, 256)
    max_env: int = _limit(256, 1, 256)
    script_timeout_s: float = _limit(60.0, 0.001, 600.0)
    max_output_bytes: int = _limit(256 * KIB, KIB, 4 * MIB)

    def check(self) -> RuntimeLimits:
        """Return self when every limit lies within its bounds; raises BadRequest `config_invalid` naming them."""
        for item in fields(self):
            value = getattr(self, item.name)
            low, high = BOUNDS[item.name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                message = f"limit {item.name} must lie between {low:g} and {high:g}, not {value!r}"
                raise BadRequest(message, code="config_invalid", limit=item.name, low=low, high=high)
        return self


BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    item.name: item.metadata["bounds"] for item in fields(RuntimeLimits)
}
"""Smallest and largest value of each limit."""

BodyIn = Literal["instructions", "result"]
ScriptApproval = Literal["allow", "ask", "deny"]
ScriptEnv = Callable[[Skill], Mapping[str, SecretStr]]
Clock = Callable[[], datetime]

UNKNOWN_WINDOW: Final = 128_000

_PROGRAMS: Final = {".py": "python3", ".sh": "bash", ".bash": "bash", ".js": "node", ".mjs": "node", ".cjs": "node"}
INTERPRETERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {suffix: (program, "{path}") for suffix, program in _PROGRAMS.items()}
)
"""How each script suffix is started; nothing else runs unless registered."""


def utc_now() -> datetime:
    """Return the time now, in UTC."""
    return datetime.now(UTC)


def merged_interpreters(extra: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    """Return the shipped table with *extra* suffixes; raises NameTaken, or BadRequest for one that cannot be used."""
    table = dict(INTERPRETERS)
    for suffix, command in extra.items():
        words = tuple(command) if not isinstance(command, str) else ()
        if not suffix.startswith(".") or suffix != suffix.lower() or len(suffix) < 2 or "/" in suffix:
            raise config_invalid(f"an interpreter's suffix is a dot and lower-case letters, not {suffix!r}")
        if not any("{path}" in word for word in words):
            raise config_invalid(f"the interpreter of {suffix} must be a list of words with {{path}}")
        if table.get(suffix, words) != words:
            raise NameTaken(f"the suffix {suffix} already has an interpreter", name=suffix, kind="interpreter")
        table[suffix] = words
    return MappingProxyType(table)


def config_invalid(message: str) -> BadRequest:
    """Build the error for arguments a runtime cannot be built with."""
    return BadRequest(message, code="config_invalid")


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens a prompt may use, from the model's window."""

    catalog: int
    active: int
    result: int

    @classmethod
    def of(cls, window: int | None = None) -> Budget:
        """Return the shares of *window* tokens; None is an unknown window of 128,000."""
        size = UNKNOWN_WINDOW if window is None else window
        return cls(catalog=max(500, size * 2 // 100), active=size * 25 // 100, result=size * 10 // 100)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The arguments of a `SkillRuntime`, except its source and store."""

    consumer: str
    max_active: int | None
    max_sessions: int
    idle_ttl: timedelta
    run_scripts: bool
    executor: Executor | None
    profile: str | None
    interpreters: Mapping[str, tuple[str, ...]]
    limits: RuntimeLimits
    locations: Locations
    body_in: BodyIn
    approve: Approver | None
    script_approval: ScriptApproval
    script_env: ScriptEnv | None
    deny: Deny | None
    events: Sink | None
    clock: Clock
    listing: CatalogMode = "auto"
    packages: ScriptPackages | None = None
    budget: Budget = field(default_factory=Budget.of)
    count: TokenCounter = estimate_tokens
    network: Grants = field(default_factory=dict)

    def check(self) -> RuntimeConfig:
        """Return self when it can work; raises BadRequest `config_invalid` with the reason."""
        if self.max_active is not None and self.max_active < 1:
            raise config_invalid("max_active must be at least 1, or None for no cap")
        if self.max_sessions < 1:
            raise config_invalid("max_sessions must be at least 1")
        if self.idle_ttl <= timedelta(0):
            raise config_invalid("idle_ttl must be longer than zero")
        if self.run_scripts and self.executor is None:
            raise config_invalid("run_scripts=True needs an executor")
        for name, value, allowed in (
            ("locations", self.locations, ("host", "logical", "none")),
            ("listing", self.listing, get_args(CatalogMode)),
            ("body_in", self.body_in, ("instructions", "result")),
            ("script_approval", self.script_approval, ("allow", "ask", "deny")),
        ):
            if value not in allowed:
                raise config_invalid(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        self.limits.check()
        return self
