"""The descriptor: where a bundle's skills are and which consumer may use which (spec skills §3.1)."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from kdskills.bundle.rules import IMPORT_POLICIES, AgentRules, refuse, resembling, rule_list
from kdskills.errors import DescriptorError, Diagnostic
from kdskills.skills.selection import Rules

FIELDS = ("version", "custom_skills_root", "agents_config", "bundle_root", "allow_outside_bundle", "extra")
UPPER = {"custom_skills_root": "CUSTOM_SKILLS_ROOT", "agents_config": "AGENTS_CONFIG"}
EVERYONE = "*"
_MOST_BITS = 2_000  # Python always writes numbers of this size, however it is set up


class SkillsDescriptor(BaseModel):
    """Where skills are and who may use which; frozen (spec skills §3.1).

    Attributes:
        version: 1.
        custom_skills_root: Folder of the bundle's skills. None: there is none, written as blank, null or false; or,
            with `root_omitted`, it is `skills/` below the bundle if that is there.
        agents_config: Rules per consumer; `"*"` is a layer of denials over everybody.
        bundle_root: Folder relative roots are joined to.
        allow_outside_bundle: Whether a relative root may leave the bundle.
        extra: Keys that are not known, kept.

    Raises:
        DescriptorError: Whatever is not understood, with `.code` and the key's path in `details["key"]`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    version: Literal[1] = 1
    custom_skills_root: str | None = None
    agents_config: Mapping[str, AgentRules] = Field(default_factory=lambda: MappingProxyType({}))
    bundle_root: str | None = None
    allow_outside_bundle: bool = False
    extra: Mapping[str, Any] = Field(default_factory=lambda: MappingProxyType({}))

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, SkillsDescriptor):
            return value
        try:
            return _normalise(value)
        except ValueError as error:  # a number of thousands of digits, which Python does not write out
            raise refuse("descriptor_type", "descriptor", f"it cannot be understood: {error}") from error

    @field_validator("agents_config", "extra", mode="after")
    @classmethod
    def _freeze(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return MappingProxyType(dict(value))

    @field_serializer("agents_config", "extra")
    def _thaw(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: entry.to_json() if isinstance(entry, AgentRules) else entry for key, entry in value.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SkillsDescriptor) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> SkillsDescriptor:
        return self  # nothing of it can change

    def __reduce__(self) -> tuple[Any, ...]:
        return SkillsDescriptor.from_json, (self.to_json(),)

    @classmethod
    def from_json(cls, value: object) -> SkillsDescriptor:
        """Read what `to_json` gave, or any other accepted form."""
        return cls.model_validate(value)

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON, defaults left out."""
        found: dict[str, Any] = {}
        if not self.root_omitted:
            found["custom_skills_root"] = self.custom_skills_root
        if self.agents_config:
            found["agents_config"] = {name: rules.to_json() for name, rules in self.agents_config.items()}
        if self.bundle_root is not None:
            found["bundle_root"] = self.bundle_root
        if self.allow_outside_bundle:
            found["allow_outside_bundle"] = True
        if self.extra:
            found["extra"] = json.loads(json.dumps(dict(self.extra)))
        return found

    @property
    def root_omitted(self) -> bool:
        """Whether nothing was said about the root, unlike a root said to be none."""
        return "custom_skills_root" not in self.model_fields_set

    @property
    def content_hash(self) -> str:
        """sha256 over `to_json()` with sorted keys, without `bundle_root`: the same on every host."""
        content = {key: value for key, value in self.to_json().items() if key != "bundle_root"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Warnings: keys that are not known, and parts of `"*"` that mean nothing."""
        found = [
            Diagnostic("descriptor_unknown_key", "warning", f"{key}: not a known key; it is kept and ignored", ref=key)
            for key in self.extra
        ]
        everyone = self.agents_config.get(EVERYONE)
        if everyone is not None and everyone.enabled:
            message = 'agents_config.*.enabled is ignored: "*" denies, it cannot allow'
            found.append(Diagnostic("rule_ignored", "warning", message, ref="agents_config.*.enabled"))
        return tuple(found)

    def narrow(self, denied: Iterable[str] | str) -> SkillsDescriptor:
        """Return a descriptor that denies more, to every consumer and `"*"`; the same object when nothing is denied.

        Args:
            denied: Rules, as in `disabled`.
        """
        entries = rule_list(denied if isinstance(denied, str) else list(denied), "denied")
        if not entries:
            return self
        config = {EVERYONE: AgentRules(), **self.agents_config}
        content = self.to_json() | {"agents_config": {name: rules.denying(entries) for name, rules in config.items()}}
        return SkillsDescriptor.model_validate(content)

    def rules(self, consumer: str | None) -> Rules:
        """Return what holds for *consumer*: its own rules under the denials for all (spec skills §4.2).

        The key counts exactly as written. The stricter `imports` of the two layers holds, and `enabled: false` under
        `"*"` denies everything, for neither may be lost.
        """
        everyone = self.agents_config.get(EVERYONE, AgentRules())
        own = AgentRules() if consumer in {None, EVERYONE} else self.agents_config.get(str(consumer), AgentRules())
        for_all = (EVERYONE,) if everyone.disabled is True or everyone.enabled is False else everyone.disabled
        return Rules(
            enabled=() if own.enabled is False else own.enabled or None,
            disabled=(EVERYONE,) if own.disabled is True else own.disabled,
            disabled_for_all=for_all,
            imports=max(own.imports, everyone.imports, key=IMPORT_POLICIES.index),
        )

    def resolve_root(self, bundle_root: str | Path | None = None) -> Path | None:
        """Return the custom root on this host, or None when there is none.

        Args:
            bundle_root: Folder relative roots are joined to, instead of the descriptor's own.

        Raises:
            DescriptorError: `descriptor_root_relative`, or `descriptor_root_outside_bundle` when a relative root leaves
                the bundle by `..` or a link.
        """
        base = None if bundle_root is None and self.bundle_root is None else Path(bundle_root or self.bundle_root or "")
        if self.root_omitted:
            folder = None if base is None else base / "skills"
            if folder is None or not folder.is_dir():
                return None
        elif self.custom_skills_root is None:
            return None
        else:
            folder = Path(self.custom_skills_root)
            if folder.is_absolute():
                return folder
            if base is None:
                message = f"{self.custom_skills_root!r} is relative, and there is no bundle_root to join it to"
                raise refuse("descriptor_root_relative", "custom_skills_root", message)
            folder = base / folder
        if not self.allow_outside_bundle and not lies_inside(folder, base or folder):
            message = f"{folder.name!r} leads out of the bundle; give an absolute path, or set allow_outside_bundle"
            raise refuse("descriptor_root_outside_bundle", "custom_skills_root", message)
        return folder


def lies_inside(path: Path, base: Path) -> bool:
    """Whether *path* stays below *base* once links and `..` are followed, part by part."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(base))


def _normalise(value: object) -> dict[str, Any]:
    """Bring a descriptor as people write it into the fields."""
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "descriptor", f"a descriptor is a mapping, not {type(value).__name__}")
    found: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise refuse("descriptor_type", str(key), "keys are text")
        name = next((field for field, upper in UPPER.items() if key == upper), key)
        if name not in FIELDS:
            meant = resembling(name, FIELDS)
            if meant is not None:
                raise refuse("descriptor_unknown_key", key, f"not a known key; did you mean {meant!r}?")
            extra[key] = _json_value(entry, key)
            continue
        read = _READ[name](entry)
        if name in found and found[name] != read:
            raise refuse("descriptor_conflict", key, f"{name} and {UPPER[name]} say different things")
        found[name] = read
    if extra:
        found["extra"] = {**found.get("extra", {}), **extra}
    return found


def _version(value: object) -> int:
    if type(value) is not int or value < 1:
        raise refuse("descriptor_type", "version", f"a whole number from 1, not {value!r}")
    if value > 1:
        raise refuse("descriptor_version", "version", f"this kdskills reads version 1, not {value}")
    return value


def _path_text(value: object, key: str) -> str:
    text = str(value) if isinstance(value, PurePath) else value
    if not isinstance(text, str):
        raise refuse("descriptor_type", key, f"a path, not {type(value).__name__}")
    if "\0" in text:
        raise refuse("descriptor_type", key, "a path without NUL")
    return text


def _root(value: object) -> str | None:
    if value is None or value is False:
        return None
    text = _path_text(value, "custom_skills_root")
    return text if text.strip() else None


def _bundle_root(value: object) -> str | None:
    text = "" if value is None else _path_text(value, "bundle_root")
    return text if text.strip() else None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse("descriptor_type", "allow_outside_bundle", f"true or false, not {value!r}")
    return value


def _agents(value: object) -> dict[str, AgentRules]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "agents_config", f"rules per consumer, not {type(value).__name__}")
    found: dict[str, AgentRules] = {}
    for consumer, rules in value.items():
        key = f"agents_config.{consumer}"
        if not isinstance(consumer, str) or not consumer.strip():
            raise refuse("descriptor_type", key, "a consumer is a name")
        if EVERYONE in consumer and consumer != EVERYONE:
            raise refuse("descriptor_consumer_pattern", key, 'consumers match exactly; only "*" stands for all')
        found[consumer] = AgentRules.read(rules, key)
    return found


def _extra(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "extra", f"a mapping, not {type(value).__name__}")
    return {str(key): _json_value(entry, f"extra.{key}") for key, entry in value.items()}


def _json_value(value: object, key: str, depth: int = 0) -> Any:
    """Return *value* as plain JSON, so that a descriptor can travel."""
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and value.bit_length() <= _MOST_BITS):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if depth < 20 and isinstance(value, Mapping):
        return {str(name): _json_value(entry, f"{key}.{name}", depth + 1) for name, entry in value.items()}
    if depth < 20 and isinstance(value, (list, tuple)):
        return [_json_value(entry, key, depth + 1) for entry in value]
    raise refuse("descriptor_type", key, f"not a JSON value: {type(value).__name__}")


_READ = MappingProxyType(
    {
        "version": _version,
        "custom_skills_root": _root,
        "agents_config": _agents,
        "bundle_root": _bundle_root,
        "allow_outside_bundle": _flag,
        "extra": _extra,
    }
)

__all__ = ["AgentRules", "DescriptorError", "SkillsDescriptor", "lies_inside"]
