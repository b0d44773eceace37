"""What a descriptor says: read strictly, because a typo must not lose a denial, and frozen."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, get_args

from kdskills.errors import DescriptorError, Diagnostic, Severity, StrPath, path_argument
from kdskills.skills.model import RootKind
from kdskills.skills.refs import is_number
from kdskills.skills.safe_open import is_folder
from kdskills.skills.selection import EMPTY, CatalogMode, ImportPolicy, Rules
from kdskills.skills.tool_names import AllowedToolsMode

IMPORT_POLICIES: tuple[ImportPolicy, ...] = get_args(ImportPolicy)  # loosest first
CATALOG_MODES: tuple[CatalogMode, ...] = get_args(CatalogMode)
ALLOWED_TOOLS_MODES: tuple[AllowedToolsMode, ...] = get_args(AllowedToolsMode)
LockPolicy = Literal["off", "warn", "enforce"]
SignaturePolicy = Literal["off", "warn", "require"]
AuditPolicy = Literal["off", "warn", "block-high"]
UPPER = {
    name: name.upper()
    for name in ("custom_skills_root", "agents_config", "allowed_tools", "consumers", "trust", "public", "check")
}
CHECK_KEYS: Final = ("select", "ignore")
EVERYONE = "*"
GROUP: Final = "@"
"""Begins the name of a group of users among consumers."""
DECISION: Final = "solver.react.decision"
"""Consumer of the shipped solver that decides each step and answers."""
CODEGEN: Final = "solver.codegen"
"""Consumer of the shipped solver that writes programs."""
_FIELD_OF = {upper: field for field, upper in UPPER.items()}
_MOST_BITS = 2_000  # Python always writes numbers of this size, however it is set up


def refuse(code: str, key: str, message: str, **facts: Any) -> DescriptorError:
    """Return the error of one key of a descriptor; *key* is its path, such as `agents_config.writer.enabled`."""
    return DescriptorError(f"{key}: {message}", code=code, key=key, **facts)


def resembling(key: str, known_names: Iterable[str], *, least: float = 0.75) -> str | None:
    """Return the known name that *key* is most probably a misspelling of, or None. Case and punctuation do not count."""
    from difflib import SequenceMatcher

    folded, nearest, likeness = _fold(key), None, 0.0
    for name, other in ((name, _fold(name)) for name in known_names):
        alike = least if len(folded) >= 5 and other.startswith(folded) else 0.0
        # Texts of very different length cannot be alike: a key of a megabyte is not even compared.
        if 2 * min(len(folded), len(other)) >= least * (len(folded) + len(other)):
            alike = max(alike, SequenceMatcher(None, folded, other, autojunk=False).ratio())
        if alike >= least and alike > likeness:
            nearest, likeness = name, alike
    return nearest


def _fold(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())


class Terms:
    """What people wrote, understood. Annotated fields hold it; those that were not written have the class's defaults."""

    # No pydantic model: every run of generated code starts a process that needs its rules, and no models.

    def __init__(self, **written: Any) -> None:
        vars(self).update(self._read(written, ""))

    @classmethod
    def _read(cls, value: object, prefix: str) -> dict[str, Any]:
        """Return the fields that *value* says; *prefix* is the path of its keys, for errors."""
        raise NotImplementedError  # each kind of terms reads its own keys

    @classmethod
    def from_json(cls, value: object, prefix: str = "") -> Self:
        """Read what `to_json` gave or what people write; what was read before comes back as it is.

        Args:
            value: A mapping, or what this gave before.
            prefix: Path of its keys with a dot behind it, for errors.

        Raises:
            DescriptorError: Whatever is not understood, with `.code` and the key's path in `details["key"]`.
        """
        if isinstance(value, cls):
            return value
        terms = object.__new__(cls)
        vars(terms).update(cls._read(value, prefix))
        return terms

    model_validate = from_json  # as what is made of a pydantic model may call it

    def to_json(self) -> dict[str, Any]:
        """Return the terms as JSON, defaults left out."""
        raise NotImplementedError  # each kind of terms writes its own keys

    def model_dump(self) -> dict[str, Any]:
        """Return every field, defaults too."""
        return {name: getattr(self, name) for name in type(self).__annotations__} | self.to_json()

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return the same terms with the fields of *update*, which are read as strictly as any. Raises DescriptorError."""
        return self.from_json({**self.to_json(), **(update or {})})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let terms be fields of pydantic models."""
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(cls.to_json)
        return core_schema.no_info_plain_validator_function(cls.from_json, serialization=written)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self.from_json, (self.to_json(),)


class AgentRules(Terms):
    """Which skills one consumer may use.

    Attributes:
        enabled: Allow-list of rules; `()` means there is none, False that nothing is allowed.
        disabled: Rules of denial, stronger than `enabled`; True denies everything.
        imports: How dependencies are decided: `private`, `listed` or `strict`.
        catalog: What its catalog lists: `auto`, `all`, `names` or `search-only`; None leaves it to the solver's settings.

    Raises:
        DescriptorError: A key or value that is not understood; a typo must not lose a denial.
    """

    enabled: tuple[str, ...] | Literal[False] = ()
    disabled: tuple[str, ...] | Literal[True] = ()
    imports: ImportPolicy = "private"
    catalog: CatalogMode | None = None

    if TYPE_CHECKING:  # what may be written, which is more than what is then read from the attributes

        def __init__(
            self,
            *,
            enabled: Collection[str] | bool | None = (),
            disabled: Collection[str] | bool | None = (),
            imports: ImportPolicy = "private",
            catalog: CatalogMode | None = None,
        ) -> None: ...

    @classmethod
    def _read(cls, value: object, prefix: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            message = f"rules are a mapping, not {type(value).__name__}"
            raise refuse("descriptor_type", prefix.rstrip(".") or "rules", message)
        for key in value:
            if key not in cls.__annotations__:
                hint = resembling(key, cls.__annotations__) if isinstance(key, str) else None
                suggestion = f"; did you mean {hint!r}?" if hint else "; known: enabled, disabled, imports, catalog"
                raise refuse("descriptor_unknown_key", f"{prefix}{key}", f"not a key of rules{suggestion}")
        fields: dict[str, Any] = {}
        for key, everything in (("enabled", False), ("disabled", True)):
            rules = value.get(key)
            if rules is not everything:
                rules = rule_list(None if isinstance(rules, bool) else rules, f"{prefix}{key}")
            fields[key] = rules
        fields["imports"] = imports = value.get("imports", "private")
        if not isinstance(imports, str) or imports not in IMPORT_POLICIES:
            raise refuse("descriptor_type", f"{prefix}imports", f"one of {', '.join(IMPORT_POLICIES)}, not {imports!r}")
        fields["catalog"] = catalog = value.get("catalog")
        if catalog is not None and (not isinstance(catalog, str) or catalog not in CATALOG_MODES):
            raise refuse("descriptor_type", f"{prefix}catalog", f"one of {', '.join(CATALOG_MODES)}, not {catalog!r}")
        return fields

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON, defaults left out."""
        fields: dict[str, Any] = {
            key: rules if isinstance(rules, bool) else list(rules)
            for key, rules in (("enabled", self.enabled), ("disabled", self.disabled))
            if rules != ()
        }
        fields |= {} if self.imports == "private" else {"imports": self.imports}
        return fields if self.catalog is None else fields | {"catalog": self.catalog}

    def denying(self, denied: tuple[str, ...]) -> AgentRules:
        """Return the same rules with more denials."""
        disabled = True if self.disabled is True else tuple(dict.fromkeys((*self.disabled, *denied)))
        return AgentRules(enabled=self.enabled, disabled=disabled, imports=self.imports, catalog=self.catalog)


class TrustPolicy(Terms):
    """What is asked of skills before anybody may use them.

    Attributes:
        lock: What a skill is that differs from `kdskills.lock`, or is not in it: unnoticed, told, or refused.
        signatures: Likewise of a skill whose signature is missing, not of its files, or of nobody who is trusted.
        signers: Names of the operator's anchors that may sign; `()` means any of them, False nobody.
        audit: What findings of the audit do to a skill that is added or uploaded: nothing, are told, or high ones refuse it.

    Raises:
        DescriptorError: A key or value that is not understood.
    """

    lock: LockPolicy = "off"
    signatures: SignaturePolicy = "off"
    signers: tuple[str, ...] | Literal[False] = ()
    audit: AuditPolicy = "off"

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            lock: LockPolicy = "off",
            signatures: SignaturePolicy = "off",
            signers: Collection[str] | Literal[False] | None = (),
            audit: AuditPolicy = "off",
        ) -> None: ...

    @classmethod
    def _read(cls, value: object, prefix: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            message = f"a policy is a mapping, not {type(value).__name__}"
            raise refuse("descriptor_type", prefix.rstrip(".") or "trust", message)
        for key in value:
            if key not in cls.__annotations__:
                known_keys = ", ".join(cls.__annotations__)
                raise refuse("descriptor_unknown_key", f"{prefix}{key}", f"not a key of a policy; known: {known_keys}")
        fields: dict[str, Any] = {}
        for key, levels in TRUST_LEVELS.items():
            level = value.get(key, "off")
            if level is False:  # as YAML reads a bare `off`
                level = "off"
            if not isinstance(level, str) or level not in levels:
                raise refuse("descriptor_type", f"{prefix}{key}", f"one of {', '.join(levels)}, not {level!r:.100}")
            fields[key] = level
        signers = value.get("signers")
        names = () if signers is False else tuple(_entries(signers, f"{prefix}signers", "a list of names"))
        if not all(isinstance(name, str) and name.strip() for name in names):
            raise refuse("descriptor_type", f"{prefix}signers", "a signer is the name of an anchor")
        fields["signers"] = False if signers is False else tuple(sorted(set(names)))
        return fields

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON, defaults left out."""
        levels = {key: getattr(self, key) for key in TRUST_LEVELS if getattr(self, key) != "off"}
        if self.signers == ():
            return levels
        return levels | {"signers": False if self.signers is False else list(self.signers)}

    @property
    def judges(self) -> bool:
        """Whether locks or signatures are looked at."""
        return (self.lock, self.signatures) != ("off", "off")

    def stricter(self, other: TrustPolicy) -> TrustPolicy:
        """Return the policy that refuses what either of both does."""
        levels: dict[str, Any] = {
            key: max(getattr(self, key), getattr(other, key), key=order.index) for key, order in TRUST_LEVELS.items()
        }
        lists = [() if policy.signers is False else policy.signers for policy in (self, other) if policy.signers != ()]
        names = set(lists[0]).intersection(*lists[1:]) if lists else set()
        return TrustPolicy(**levels, signers=False if lists and not names else names)


TRUST_LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # loosest first
    {"lock": get_args(LockPolicy), "signatures": get_args(SignaturePolicy), "audit": get_args(AuditPolicy)}
)


def rule_list(value: object, key: str) -> tuple[str, ...]:
    """Read a list of rules; a string is a list of one, None an empty one.

    Raises DescriptorError for another type, and for a short id: numbers belong to one view.
    """
    entries = _entries(value, key, "a list of rules")
    for entry in entries:
        if not isinstance(entry, str):
            raise refuse("descriptor_type", key, f"a rule is text, not {type(entry).__name__}")
        if is_number(entry):
            raise refuse("descriptor_short_id", key, f"{entry!r} is a number of one view; rules take ids and patterns")
    return tuple(str(entry) for entry in entries)


def _entries(value: object, key: str, expected: str) -> Collection[Any]:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise refuse("descriptor_type", key, f"{expected}, not {type(value).__name__}")
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value


class SkillsDescriptor(Terms):
    """Where skills are and who may use which; frozen.

    Attributes:
        version: 1.
        custom_skills_root: Folder of the bundle's skills. None: there is none, written as blank, null or false; or,
            with `root_omitted`, it is `skills/` below the bundle if that is there.
        agents_config: Rules per consumer; `"*"` is a layer of denials over everybody, `"@name"` holds for every consumer
            that works for a user who has the role `name`.
        allowed_tools: What `allowed-tools` of skills does, by namespace, `"*"` for the others: `approve` (the default),
            `ask` or `restrict`.
        consumers: The agents the bundle has; `kdskills check` then knows a mistyped one. It decides nothing.
        trust: What is asked of skills, by namespace; `"*"` holds for all, and the stricter counts.
        public: Rules for skills that anybody may fetch once they are published; without any, nobody may. It grants nothing
            else.
        check: Codes of findings, or how they begin, that `kdskills check` tells of the bundle (`select`) and leaves out
            (`ignore`). It decides nothing.
        bundle_root: Folder relative roots are joined to.
        allow_outside_bundle: Whether a relative root may leave the bundle.
        extra: Keys that are not known, kept.

    Raises:
        DescriptorError: Whatever is not understood, with `.code` and the key's path in `details["key"]`.
    """

    version: Literal[1] = 1
    custom_skills_root: str | None = None
    agents_config: Mapping[str, AgentRules] = EMPTY
    allowed_tools: Mapping[str, AllowedToolsMode] = EMPTY
    consumers: tuple[str, ...] = ()
    trust: Mapping[str, TrustPolicy] = EMPTY
    public: tuple[str, ...] = ()
    check: Mapping[str, tuple[str, ...]] = EMPTY
    bundle_root: str | None = None
    allow_outside_bundle: bool = False
    extra: Mapping[str, Any] = EMPTY

    if TYPE_CHECKING:  # what may be written, which is more than what is then read from the attributes

        def __init__(
            self,
            *,
            version: Literal[1] = 1,
            custom_skills_root: StrPath | Literal[False] | None = None,
            agents_config: Mapping[str, AgentRules | Mapping[str, object]] = EMPTY,
            allowed_tools: Mapping[str, AllowedToolsMode] = EMPTY,
            consumers: Collection[str] | None = (),
            trust: Mapping[str, TrustPolicy | Mapping[str, object]] = EMPTY,
            public: Collection[str] | None = (),
            check: Mapping[str, Collection[str] | None] = EMPTY,
            bundle_root: StrPath | None = None,
            allow_outside_bundle: bool = False,
            extra: Mapping[str, object] = EMPTY,
        ) -> None: ...

    @classmethod
    def _read(cls, value: object, prefix: str) -> dict[str, Any]:
        try:
            return _fields(value)
        except ValueError as error:  # a number of thousands of digits, which Python does not write out
            raise refuse("descriptor_type", "descriptor", f"it cannot be understood: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON, defaults left out."""
        fields: dict[str, Any] = {
            "agents_config": {name: rules.to_json() for name, rules in self.agents_config.items()},
            "allowed_tools": dict(sorted(self.allowed_tools.items())),
            "consumers": list(self.consumers),
            "trust": {name: policy.to_json() for name, policy in sorted(self.trust.items())},
            "public": list(self.public),
            "check": {key: list(codes) for key, codes in self.check.items()},
            "bundle_root": self.bundle_root,
            "allow_outside_bundle": self.allow_outside_bundle,
            "extra": json.loads(json.dumps(dict(self.extra))),
        }
        root = {} if self.root_omitted else {"custom_skills_root": self.custom_skills_root}
        return root | {name: value for name, value in fields.items() if value}

    @property
    def root_omitted(self) -> bool:
        """Whether nothing was said about the root, unlike a root said to be none."""
        return "custom_skills_root" not in vars(self)

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

    def narrow(self, denied: Iterable[str] | str) -> SkillsDescriptor:
        """Return a descriptor that denies more, to every consumer and `"*"`; the same object when nothing is denied.

        Args:
            denied: Rules, as in `disabled`.
        """
        entries = rule_list(denied if isinstance(denied, str) else list(denied), "denied")
        if not entries:
            return self
        config = {EVERYONE: AgentRules(), **self.agents_config}
        narrowed = {name: rules.denying(entries) for name, rules in config.items()}
        return SkillsDescriptor.from_json(self.to_json() | {"agents_config": narrowed})

    @property
    def groups(self) -> frozenset[str]:
        """Names of the groups of users that rules are for, without their `@`."""
        return frozenset(name.removeprefix(GROUP) for name in self.agents_config if is_group(name))

    def rules(
        self, consumer: str | None, groups: Iterable[str] = (), further: Sequence[tuple[str, AgentRules]] = ()
    ) -> Rules:
        """Return what holds for *consumer*: its own rules under the denials for all, and those of the user it works for.

        The key counts exactly as written. A denial of any layer holds, and so do the strictest `imports`; the allow-lists of
        the consumer, of groups and of *further* rules are one list, of which nothing is left where any of them is `false`.
        `enabled: false` under `"*"` denies everything.

        Args:
            consumer: Who asks; None is an anonymous consumer.
            groups: The user's roles; those without rules mean nothing.
            further: Rules that hold beside those of the descriptor, and where they stand.
        """
        everyone = self.agents_config.get(EVERYONE, AgentRules())
        named = consumer is not None and consumer != EVERYONE and not is_group(consumer)
        own = self.agents_config.get(str(consumer), AgentRules()) if named else AgentRules()
        names = sorted(self.groups.intersection(groups))
        layers = [(f"agents_config.{GROUP}{name}", self.agents_config[f"{GROUP}{name}"]) for name in names]
        layers += further
        lists = [own.enabled, *(rules.enabled for _, rules in layers)]
        allowed = () if False in lists else tuple(dict.fromkeys(rule for each in lists for rule in each or ())) or None
        allowing = [(f"agents_config.{consumer}", own), *layers] if layers else []
        for_all = (EVERYONE,) if everyone.disabled is True or everyone.enabled is False else everyone.disabled
        every = [own, *(rules for _, rules in layers), everyone]
        return Rules(
            enabled=allowed,
            disabled=_denials(own),
            disabled_for_all=for_all,
            imports=max((rules.imports for rules in every), key=IMPORT_POLICIES.index),
            consumer=consumer,
            catalog=next((rules.catalog for rules in every if rules.catalog), None),
            layers=tuple((source, _denials(rules)) for source, rules in layers),
            allow_sources=tuple(source for source, rules in allowing if rules.enabled != ()),
        )

    def allowed_tools_mode(self, namespace: str, layer: RootKind = "bundle") -> AllowedToolsMode:
        """Return what `allowed-tools` does for skills of *namespace*; those of an overlay approve nothing unless it is named."""
        usual = self.allowed_tools.get(EVERYONE, "approve")
        return self.allowed_tools.get(namespace, "ask" if layer == "overlay" and usual == "approve" else usual)

    def trust_policy(self, namespace: str) -> TrustPolicy:
        """Return what is asked of skills of *namespace*."""
        usual = self.trust.get(EVERYONE, TrustPolicy())
        return usual.stricter(self.trust[namespace]) if namespace in self.trust else usual

    def guarded_policy(self, namespace: str, skills: StrPath | None) -> TrustPolicy:
        """Return what is asked of skills of *namespace*, so that a name mistyped under `trust` loosens nothing.

        A policy for a namespace that has no folder in *skills* also holds for each that it resembles and that has none of
        its own.
        """
        policy = self.trust_policy(namespace)
        for name, terms in {} if namespace in self.trust else self.trust.items():
            present = skills is not None and is_folder(path_argument(skills, "skills") / name)
            if name != EVERYONE and not present and resembling(name, (namespace,)):
                policy = policy.stricter(terms)
        return policy

    def unused_policies(self, namespaces: Collection[str]) -> list[Diagnostic]:
        """Return a finding for each policy of a namespace that is not among *namespaces*: an error where it resembles one."""
        findings = []
        for name in sorted(self.trust.keys() - {EVERYONE, *namespaces}):
            meant = resembling(name, sorted(namespaces))
            message = f"no skill is of the namespace {name!r:.100}" + (f"; did you mean {meant!r}?" if meant else "")
            severity: Severity = "error" if meant else "warning"
            findings.append(Diagnostic("trust_namespace_unknown", severity, message, ref=f"trust.{name}"))
        return findings

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


def is_group(name: str) -> bool:
    """Whether a key of `agents_config` names a group of users."""
    return name.startswith(GROUP)


def _denials(rules: AgentRules) -> tuple[str, ...]:
    return (EVERYONE,) if rules.disabled is True else rules.disabled


def lies_inside(path: Path, base: Path) -> bool:
    """Whether *path* stays below *base* once links and `..` are followed, part by part."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(base))


def _fields(value: object) -> dict[str, Any]:
    """Bring a descriptor as people write it into the fields of `SkillsDescriptor`; what was not said is left out."""
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", "descriptor", f"a descriptor is a mapping, not {type(value).__name__}")
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, entry in value.items():
        if not isinstance(key, str):
            raise refuse("descriptor_type", str(key), "keys are text")
        if key == "$schema":  # by which editors find the schema of JSON
            continue
        name = _FIELD_OF.get(key, key)
        if name not in _READ:
            suggestion = resembling(name, _READ)
            if suggestion is not None:
                raise refuse("descriptor_unknown_key", key, f"not a known key; did you mean {suggestion!r}?")
            extra[key] = _json_value(entry, key)
            continue
        read = _READ[name](entry, name)
        if name in fields and fields[name] != read:
            raise refuse("descriptor_conflict", key, f"{name} and {UPPER[name]} say different things")
        fields[name] = read
    if extra:
        fields["extra"] = MappingProxyType({**fields.get("extra", {}), **extra})
    return fields


def _version(value: object, key: str) -> int:
    if type(value) is not int or value < 1:
        raise refuse("descriptor_type", key, f"a whole number from 1, not {value!r}")
    if value > 1:
        raise refuse("descriptor_version", key, f"this kdskills reads version 1, not {value}")
    return value


def _folder(value: object, key: str) -> str | None:
    if value is None or (value is False and key == "custom_skills_root"):
        return None
    text = str(value) if isinstance(value, PurePath) else value
    if not isinstance(text, str):
        raise refuse("descriptor_type", key, f"a path, not {type(value).__name__}")
    if "\0" in text:
        raise refuse("descriptor_type", key, "a path without NUL")
    return text if text.strip() else None


def _flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise refuse("descriptor_type", key, f"true or false, not {value!r}")
    return value


def _agents(value: object, name: str) -> Mapping[str, AgentRules]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", name, f"rules per consumer, not {type(value).__name__}")
    agents: dict[str, AgentRules] = {}
    for consumer, rules in value.items():
        key = f"{name}.{consumer}"
        if not isinstance(consumer, str) or not consumer.strip():
            raise refuse("descriptor_type", key, "a consumer is a name")
        if EVERYONE in consumer and consumer != EVERYONE:
            raise refuse("descriptor_consumer_pattern", key, 'consumers match exactly; only "*" stands for all')
        if is_group(consumer) and (consumer == GROUP or consumer[1:] != consumer[1:].strip()):
            raise refuse("descriptor_type", key, f"a group is {GROUP} and the name of a role, without blanks around it")
        agents[consumer] = AgentRules.from_json(rules, f"{key}.")
    return MappingProxyType(agents)


def _allowed_tools(value: object, key: str) -> Mapping[str, AllowedToolsMode]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", key, f"modes by namespace, not {type(value).__name__}")
    modes: dict[str, AllowedToolsMode] = {}
    for namespace, written in value.items():
        if not isinstance(namespace, str) or (EVERYONE in namespace and namespace != EVERYONE):
            raise refuse(
                "descriptor_type", key, f'a namespace is a name, or "*" for all others, not {namespace!r:.100}'
            )
        mode = next((known for known in ALLOWED_TOOLS_MODES if known == written), None)
        if mode is None:
            expected = ", ".join(ALLOWED_TOOLS_MODES)
            raise refuse("descriptor_type", f"{key}.{namespace}", f"one of {expected}, not {written!r:.100}")
        modes[namespace] = mode
    return MappingProxyType(modes)


def _trust(value: object, key: str) -> Mapping[str, TrustPolicy]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", key, f"policies by namespace, not {type(value).__name__}")
    for namespace in value:
        if not isinstance(namespace, str) or not namespace or (EVERYONE in namespace and namespace != EVERYONE):
            raise refuse("descriptor_type", key, f'a namespace is a name, or "*" for all, not {namespace!r:.100}')
    return MappingProxyType({name: TrustPolicy.from_json(terms, f"{key}.{name}.") for name, terms in value.items()})


def _consumers(value: object, key: str) -> tuple[str, ...]:
    names = _entries(value, key, "a list of names")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise refuse("descriptor_type", key, f"a consumer is a name, not {name!r:.100}")
        if EVERYONE in name:
            raise refuse("descriptor_consumer_pattern", key, "consumers are listed by their names, without '*'")
        if is_group(name):
            raise refuse("descriptor_type", key, f"{name!r:.100} names a group of users, and consumers are agents")
    return tuple(sorted({str(name) for name in names}))


def _check(value: object, name: str) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", name, f"`select` and `ignore`, not {type(value).__name__}")
    lists = {}
    for key, codes in value.items():
        if key not in CHECK_KEYS:
            raise refuse("descriptor_unknown_key", f"{name}.{key!s:.100}", f"known: {', '.join(CHECK_KEYS)}")
        lists[key] = tuple(_entries(codes, f"{name}.{key}", "a list of codes"))
        if not all(isinstance(code, str) and code.strip() for code in lists[key]):
            raise refuse("descriptor_type", f"{name}.{key}", "a code of a finding is text")
    return MappingProxyType({key: lists[key] for key in sorted(lists) if lists[key]})


def _extra(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse("descriptor_type", name, f"a mapping, not {type(value).__name__}")
    return MappingProxyType({str(key): _json_value(entry, f"{name}.{key}") for key, entry in value.items()})


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
        "custom_skills_root": _folder,
        "agents_config": _agents,
        "allowed_tools": _allowed_tools,
        "consumers": _consumers,
        "trust": _trust,
        "public": rule_list,
        "check": _check,
        "bundle_root": _folder,
        "allow_outside_bundle": _flag,
        "extra": _extra,
    }
)
