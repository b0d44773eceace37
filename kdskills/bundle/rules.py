"""What the configuration says about one consumer: `AgentRules`, and its reading from loose values (spec skills §3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from kdskills.errors import DescriptorError
from kdskills.skills.refs import is_number
from kdskills.skills.selection import ImportPolicy

IMPORT_POLICIES: tuple[ImportPolicy, ...] = get_args(ImportPolicy)  # loosest first


def refuse(code: str, key: str, message: str, **facts: Any) -> DescriptorError:
    """Return the error of one key of a descriptor; *key* is its path, such as `agents_config.writer.enabled`."""
    return DescriptorError(f"{key}: {message}", code=code, key=key, **facts)


def resembling(key: str, known: Iterable[str], *, least: float = 0.75) -> str | None:
    """Return the known name *key* is probably a misspelling of, or None. Case and punctuation do not count."""
    folded = _fold(key)
    for name in known:
        other = _fold(name)
        beginning = len(folded) >= 5 and other.startswith(folded)
        if beginning or SequenceMatcher(None, folded, other, autojunk=False).ratio() >= least:
            return name
    return None


def _fold(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())


class AgentRules(BaseModel):
    """Which skills one consumer may use (spec skills §3.1).

    Attributes:
        enabled: Allow-list of rules; `()` means there is none, False that nothing is allowed.
        disabled: Rules of denial, stronger than `enabled`; True denies everything.
        imports: How dependencies are decided: `private`, `listed` or `strict`.

    Raises:
        DescriptorError: A key or value that is not understood; a typo must not lose a denial.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: tuple[str, ...] | Literal[False] = ()
    disabled: tuple[str, ...] | Literal[True] = ()
    imports: ImportPolicy = "private"

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return value if isinstance(value, AgentRules) else _normalise(value, "")

    @classmethod
    def read(cls, value: object, key: str) -> AgentRules:
        """Read rules found under *key*, whose path errors name."""
        return value if isinstance(value, AgentRules) else cls.model_validate(_normalise(value, f"{key}."))

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON, defaults left out."""
        found: dict[str, Any] = {}
        if self.enabled != ():
            found["enabled"] = False if self.enabled is False else list(self.enabled)
        if self.disabled != ():
            found["disabled"] = True if self.disabled is True else list(self.disabled)
        if self.imports != "private":
            found["imports"] = self.imports
        return found

    def denying(self, denied: tuple[str, ...]) -> AgentRules:
        """Return the same rules with more denials."""
        if self.disabled is True:
            return self
        return AgentRules(
            enabled=self.enabled, disabled=tuple(dict.fromkeys((*self.disabled, *denied))), imports=self.imports
        )


def _normalise(value: object, prefix: str) -> dict[str, Any]:
    """Bring rules as people write them into the three fields."""
    place = prefix.rstrip(".") or "rules"
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", place, f"rules are a mapping, not {type(value).__name__}")
    for key in value:
        if key not in AgentRules.model_fields:
            hint = resembling(key, AgentRules.model_fields) if isinstance(key, str) else None
            meant = f"; did you mean {hint!r}?" if hint else "; known: enabled, disabled, imports"
            raise refuse("descriptor_unknown_key", f"{prefix}{key}", f"not a key of rules{meant}")
    found: dict[str, Any] = {}
    enabled = value.get("enabled")
    found["enabled"] = (
        enabled if enabled is False else rule_list(None if enabled is True else enabled, f"{prefix}enabled")
    )
    disabled = value.get("disabled")
    found["disabled"] = (
        disabled if disabled is True else rule_list(None if disabled is False else disabled, f"{prefix}disabled")
    )
    if "imports" in value:
        imports = value["imports"]
        if not isinstance(imports, str) or imports not in IMPORT_POLICIES:
            raise refuse("descriptor_type", f"{prefix}imports", f"one of {', '.join(IMPORT_POLICIES)}, not {imports!r}")
        found["imports"] = imports
    return found


def rule_list(value: object, key: str) -> tuple[str, ...]:
    """Read a list of rules; a string is a list of one, None an empty one.

    Raises:
        DescriptorError: Another type, or a short id: numbers belong to one view (spec skills §4.1).
    """
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise refuse("descriptor_type", key, f"a list of rules, not {type(value).__name__}")
    entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    for entry in entries:
        if not isinstance(entry, str):
            raise refuse("descriptor_type", key, f"a rule is text, not {type(entry).__name__}")
        if is_number(entry):
            raise refuse("descriptor_short_id", key, f"{entry!r} is a number of one view; rules take ids and patterns")
    return tuple(str(entry) for entry in entries)
