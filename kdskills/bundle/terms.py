"""What a descriptor says, as plain values: read strictly, because a typo must not lose a denial.

`SkillsDescriptor` and `AgentRules` are the models people build and read; what their fields mean is decided here, so that
a process which only restores an export understands its rules without loading models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

from kdskills.errors import DescriptorError, Diagnostic, StrPath, path_argument
from kdskills.skills.refs import is_number
from kdskills.skills.safe_open import is_folder
from kdskills.skills.selection import EMPTY, ImportPolicy, Rules

IMPORT_POLICIES: tuple[ImportPolicy, ...] = get_args(ImportPolicy)  # loosest first
FIELDS = ("version", "custom_skills_root", "agents_config", "consumers", "bundle_root", "allow_outside_bundle", "extra")
UPPER = {"custom_skills_root": "CUSTOM_SKILLS_ROOT", "agents_config": "AGENTS_CONFIG", "consumers": "CONSUMERS"}
EVERYONE = "*"
DECISION: Final = "solver.react.decision"
"""Consumer of the shipped solver that decides each step and answers."""
CODEGEN: Final = "solver.codegen"
"""Consumer of the shipped solver that writes programs."""
_MOST_BITS = 2_000  # Python always writes numbers of this size, however it is set up


def refuse(code: str, key: str, message: str, **facts: Any) -> DescriptorError:
    """Return the error of one key of a descriptor; *key* is its path, such as `agents_config.writer.enabled`."""
    return DescriptorError(f"{key}: {message}", code=code, key=key, **facts)


def resembling(key: str, known_names: Iterable[str], *, least: float = 0.75) -> str | None:
    """Return the known name *key* is probably a misspelling of, or None. Case and punctuation do not count."""
    from difflib import SequenceMatcher

    folded = _fold(key)
    for name in known_names:
        folded_name = _fold(name)
        beginning = len(folded) >= 5 and folded_name.startswith(folded)
        # Texts of very different length cannot be alike: a key of a megabyte is not even compared.
        comparable = 2 * min(len(folded), len(folded_name)) >= least * (len(folded) + len(folded_name))
        if beginning or (comparable and SequenceMatcher(None, folded, folded_name, autojunk=False).ratio() >= least):
            return name
    return None


def _fold(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())


class AgentTerms(NamedTuple):
    """Which skills one consumer may use; fields as in `AgentRules`."""

    enabled: tuple[str, ...] | Literal[False] = ()
    disabled: tuple[str, ...] | Literal[True] = ()
    imports: ImportPolicy = "private"

    @classmethod
    def read(cls, value: object, prefix: str = "") -> AgentTerms:
        """Read rules as people write them.

        Args:
            value: A mapping, `AgentRules`, or what this gave before.
            prefix: Path of the rules with a dot behind it, for errors.

        Raises:
            DescriptorError: A key or value that is not understood.
        """
        terms = value if isinstance(value, AgentTerms) else getattr(value, "terms", None)
        return terms if isinstance(terms, AgentTerms) else _rules(value, prefix)

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON, defaults left out."""
        fields: dict[str, Any] = {}
        if self.enabled != ():
            fields["enabled"] = False if self.enabled is False else list(self.enabled)
        if self.disabled != ():
            fields["disabled"] = True if self.disabled is True else list(self.disabled)
        if self.imports != "private":
            fields["imports"] = self.imports
        return fields

    def denying(self, denied: tuple[str, ...]) -> AgentTerms:
        """Return the same rules with more denials."""
        if self.disabled is True:
            return self
        return self._replace(disabled=tuple(dict.fromkeys((*self.disabled, *denied))))


def _rules(value: object, prefix: str) -> AgentTerms:
    """Bring rules as people write them into the three fields."""
    rules_key = prefix.rstrip(".") or "rules"
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", rules_key, f"rules are a mapping, not {type(value).__name__}")
    for key in value:
        if key not in AgentTerms._fields:
            hint = resembling(key, AgentTerms._fields) if isinstance(key, str) else None
            suggestion = f"; did you mean {hint!r}?" if hint else "; known: enabled, disabled, imports"
            raise refuse("descriptor_unknown_key", f"{prefix}{key}", f"not a key of rules{suggestion}")
    fields: dict[str, Any] = {}
    enabled = value.get("enabled")
    fields["enabled"] = (
        enabled if enabled is False else rule_list(None if enabled is True else enabled, f"{prefix}enabled")
    )
    disabled = value.get("disabled")
    fields["disabled"] = (
        disabled if disabled is True else rule_list(None if disabled is False else disabled, f"{prefix}disabled")
    )
    if "imports" in value:
        imports = value["imports"]
        if not isinstance(imports, str) or imports not in IMPORT_POLICIES:
            raise refuse("descriptor_type", f"{prefix}imports", f"one of {', '.join(IMPORT_POLICIES)}, not {imports!r}")
        fields["imports"] = imports
    return AgentTerms(**fields)


def rule_list(value: object, key: str) -> tuple[str, ...]:
    """Read a list of rules; a string is a list of one, None an empty one.

    Raises:
        DescriptorError: Another type, or a short id: numbers belong to one view.
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


class Terms(NamedTuple):
    """Where skills are and who may use which; fields as in `SkillsDescriptor`.

    `root_omitted` says that nothing was said about the root, unlike a root said to be none.
    """

    custom_skills_root: str | None = None
    root_omitted: bool = True
    agents_config: Mapping[str, AgentTerms] = EMPTY
    bundle_root: str | None = None
    allow_outside_bundle: bool = False
    extra: Mapping[str, Any] = EMPTY
    consumers: tuple[str, ...] = ()

    @classmethod
    def read(cls, value: object) -> Terms:
        """Read a descriptor as people write it, a `SkillsDescriptor`, or what this gave before.

        Raises:
            DescriptorError: Whatever is not understood, with `.code` and the key's path in `details["key"]`.
        """
        terms = value if isinstance(value, Terms) else getattr(value, "terms", None)
        if isinstance(terms, Terms):
            return terms
        fields = read_fields(value)
        return cls(
            custom_skills_root=fields.get("custom_skills_root"),
            root_omitted="custom_skills_root" not in fields,
            agents_config=MappingProxyType(fields.get("agents_config", {})),
            bundle_root=fields.get("bundle_root"),
            allow_outside_bundle=fields.get("allow_outside_bundle", False),
            extra=MappingProxyType(fields.get("extra", {})),
            consumers=fields.get("consumers", ()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON, defaults left out."""
        fields: dict[str, Any] = {}
        if not self.root_omitted:
            fields["custom_skills_root"] = self.custom_skills_root
        if self.agents_config:
            fields["agents_config"] = {name: rules.to_json() for name, rules in self.agents_config.items()}
        if self.consumers:
            fields["consumers"] = list(self.consumers)
        if self.bundle_root is not None:
            fields["bundle_root"] = self.bundle_root
        if self.allow_outside_bundle:
            fields["allow_outside_bundle"] = True
        if self.extra:
            fields["extra"] = json.loads(json.dumps(dict(self.extra)))
        return fields

    @property
    def content_hash(self) -> str:
        """sha256 over `to_json()` with sorted keys, without `bundle_root`: the same on every host."""
        content = {key: value for key, value in self.to_json().items() if key != "bundle_root"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Warnings: keys that are not known, and parts of `"*"` that mean nothing."""
        warnings = [
            Diagnostic("descriptor_unknown_key", "warning", f"{key}: not a known key; it is kept and ignored", ref=key)
            for key in self.extra
        ]
        everyone = self.agents_config.get(EVERYONE)
        if everyone is not None and everyone.enabled:
            message = 'agents_config.*.enabled is ignored: "*" denies, it cannot allow'
            warnings.append(Diagnostic("rule_ignored", "warning", message, ref="agents_config.*.enabled"))
        return tuple(warnings)

    def rules(self, consumer: str | None) -> Rules:
        """Return what holds for *consumer*: its own rules under the denials for all.

        The key counts exactly as written. The stricter `imports` of the two layers holds, and `enabled: false` under
        `"*"` denies everything, for neither may be lost.
        """
        everyone = self.agents_config.get(EVERYONE, AgentTerms())
        consumer_terms = (
            AgentTerms() if consumer in {None, EVERYONE} else self.agents_config.get(str(consumer), AgentTerms())
        )
        for_all = (EVERYONE,) if everyone.disabled is True or everyone.enabled is False else everyone.disabled
        return Rules(
            enabled=() if consumer_terms.enabled is False else consumer_terms.enabled or None,
            disabled=(EVERYONE,) if consumer_terms.disabled is True else consumer_terms.disabled,
            disabled_for_all=for_all,
            imports=max(consumer_terms.imports, everyone.imports, key=IMPORT_POLICIES.index),
        )

    def resolve_root(self, bundle_root: StrPath | None = None) -> Path | None:
        """Return the custom root on this host, or None when there is none.

        Args:
            bundle_root: Folder relative roots are joined to, instead of the descriptor's own.

        Raises:
            DescriptorError: `descriptor_root_relative`, or `descriptor_root_outside_bundle` when a relative root leaves
                the bundle by `..` or a link.
        """
        base_argument = None if bundle_root is None else path_argument(bundle_root, "bundle_root")
        base = base_argument if base_argument is not None or self.bundle_root is None else Path(self.bundle_root)
        if self.root_omitted:
            folder = None if base is None else base / "skills"
            if folder is None or not is_folder(folder):
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


def read_fields(value: object) -> dict[str, Any]:
    """Bring a descriptor as people write it into the fields of `SkillsDescriptor`; what was not said is left out."""
    try:
        return _fields(value)
    except ValueError as error:  # a number of thousands of digits, which Python does not write out
        raise refuse("descriptor_type", "descriptor", f"it cannot be understood: {error}") from error


def _fields(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "descriptor", f"a descriptor is a mapping, not {type(value).__name__}")
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise refuse("descriptor_type", str(key), "keys are text")
        name = next((field for field, upper in UPPER.items() if key == upper), key)
        if name not in FIELDS:
            suggestion = resembling(name, FIELDS)
            if suggestion is not None:
                raise refuse("descriptor_unknown_key", key, f"not a known key; did you mean {suggestion!r}?")
            extra[key] = _json_value(entry, key)
            continue
        read = _READ[name](entry)
        if name in fields and fields[name] != read:
            raise refuse("descriptor_conflict", key, f"{name} and {UPPER[name]} say different things")
        fields[name] = read
    if extra:
        fields["extra"] = {**fields.get("extra", {}), **extra}
    return fields


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


def _agents(value: object) -> dict[str, AgentTerms]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "agents_config", f"rules per consumer, not {type(value).__name__}")
    agents: dict[str, AgentTerms] = {}
    for consumer, rules in value.items():
        key = f"agents_config.{consumer}"
        if not isinstance(consumer, str) or not consumer.strip():
            raise refuse("descriptor_type", key, "a consumer is a name")
        if EVERYONE in consumer and consumer != EVERYONE:
            raise refuse("descriptor_consumer_pattern", key, 'consumers match exactly; only "*" stands for all')
        agents[consumer] = AgentTerms.read(rules, f"{key}.")
    return agents


def _consumers(value: object) -> tuple[str, ...]:
    """Read the agents a bundle says it has; a string is a list of one, None an empty one."""
    value = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise refuse("descriptor_type", "consumers", f"a list of names, not {type(value).__name__}")
    for name in value:
        if not isinstance(name, str) or not name.strip():
            raise refuse("descriptor_type", "consumers", f"a consumer is a name, not {name!r:.100}")
        if EVERYONE in name:
            raise refuse("descriptor_consumer_pattern", "consumers", "consumers are listed by their names, without '*'")
    return tuple(sorted({str(name) for name in value}))


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
        "consumers": _consumers,
        "bundle_root": _bundle_root,
        "allow_outside_bundle": _flag,
        "extra": _extra,
    }
)
