"""The descriptor of a bundle and the rules of one consumer as models, completed when they are first used."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from kdskills.bundle.terms import EVERYONE, AgentTerms, Terms, read_fields, rule_list
from kdskills.errors import DescriptorError, Diagnostic, StrPath
from kdskills.skills.selection import ImportPolicy, Rules

_COMPLETING = threading.RLock()


class LateModel(BaseModel):
    """A frozen model without further keys, whose validator is built at its first use."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Complete the model, one thread at a time: pydantic before 2.14 lets two of them get into each other's way."""
        with _COMPLETING:
            return super().model_rebuild(**options)


class AgentRules(LateModel):
    """Which skills one consumer may use.

    Attributes:
        enabled: Allow-list of rules; `()` means there is none, False that nothing is allowed.
        disabled: Rules of denial, stronger than `enabled`; True denies everything.
        imports: How dependencies are decided: `private`, `listed` or `strict`.

    Raises:
        DescriptorError: A key or value that is not understood; a typo must not lose a denial.
    """

    enabled: tuple[str, ...] | Literal[False] = ()
    disabled: tuple[str, ...] | Literal[True] = ()
    imports: ImportPolicy = "private"

    if TYPE_CHECKING:  # what may be written, which is more than what is then read from the attributes

        def __init__(
            self,
            *,
            enabled: Collection[str] | bool | None = (),
            disabled: Collection[str] | bool | None = (),
            imports: ImportPolicy = "private",
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return value if isinstance(value, AgentRules) else AgentTerms.read(value)._asdict()

    @classmethod
    def read(cls, value: object, key: str) -> AgentRules:
        """Read rules found under *key*, whose path errors name."""
        return value if isinstance(value, AgentRules) else cls.model_validate(AgentTerms.read(value, f"{key}."))

    @property
    def terms(self) -> AgentTerms:
        """The same as a plain value."""
        return AgentTerms(self.enabled, self.disabled, self.imports)

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON, defaults left out."""
        return self.terms.to_json()

    def denying(self, denied: tuple[str, ...]) -> AgentRules:
        """Return the same rules with more denials."""
        return AgentRules.model_validate(self.terms.denying(denied))


class SkillsDescriptor(LateModel):
    """Where skills are and who may use which; frozen.

    Attributes:
        version: 1.
        custom_skills_root: Folder of the bundle's skills. None: there is none, written as blank, null or false; or,
            with `root_omitted`, it is `skills/` below the bundle if that is there.
        agents_config: Rules per consumer; `"*"` is a layer of denials over everybody.
        consumers: The agents the bundle has; `kdskills check` then knows a mistyped one. It decides nothing.
        bundle_root: Folder relative roots are joined to.
        allow_outside_bundle: Whether a relative root may leave the bundle.
        extra: Keys that are not known, kept.

    Raises:
        DescriptorError: Whatever is not understood, with `.code` and the key's path in `details["key"]`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    version: Literal[1] = 1
    custom_skills_root: str | None = None
    agents_config: Mapping[str, AgentRules] = Field(default_factory=lambda: MappingProxyType({}))
    consumers: tuple[str, ...] = ()
    bundle_root: str | None = None
    allow_outside_bundle: bool = False
    extra: Mapping[str, Any] = Field(default_factory=lambda: MappingProxyType({}))

    if TYPE_CHECKING:  # what may be written, which is more than what is then read from the attributes

        def __init__(
            self,
            *,
            version: Literal[1] = 1,
            custom_skills_root: StrPath | Literal[False] | None = None,
            agents_config: Mapping[str, AgentRules | Mapping[str, object]] = MappingProxyType({}),
            consumers: Collection[str] | None = (),
            bundle_root: StrPath | None = None,
            allow_outside_bundle: bool = False,
            extra: Mapping[str, object] = MappingProxyType({}),
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return value if isinstance(value, SkillsDescriptor) else read_fields(value)

    @field_validator("agents_config", "extra", mode="after")
    @classmethod
    def _freeze(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return MappingProxyType(dict(value))

    @field_serializer("agents_config", "extra")
    def _thaw(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: entry.to_json() if isinstance(entry, AgentRules) else entry for key, entry in value.items()}

    @property
    def terms(self) -> Terms:
        """The same as plain values: what every question below is answered from."""
        return Terms(
            custom_skills_root=self.custom_skills_root,
            root_omitted=self.root_omitted,
            agents_config=MappingProxyType({name: rules.terms for name, rules in self.agents_config.items()}),
            bundle_root=self.bundle_root,
            allow_outside_bundle=self.allow_outside_bundle,
            extra=self.extra,
            consumers=self.consumers,
        )

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
        return self.terms.to_json()

    @property
    def root_omitted(self) -> bool:
        """Whether nothing was said about the root, unlike a root said to be none."""
        return "custom_skills_root" not in self.model_fields_set

    @property
    def content_hash(self) -> str:
        """sha256 over `to_json()` with sorted keys, without `bundle_root`: the same on every host."""
        return self.terms.content_hash

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Warnings: keys that are not known, and parts of `"*"` that mean nothing."""
        return self.terms.diagnostics

    def narrow(self, denied: Iterable[str] | str) -> SkillsDescriptor:
        """Return a descriptor that denies more, to every consumer and `"*"`; the same object when nothing is denied.

        Args:
            denied: Rules, as in `disabled`.
        """
        entries = rule_list(denied if isinstance(denied, str) else list(denied), "denied")
        if not entries:
            return self
        config = {EVERYONE: AgentTerms(), **self.terms.agents_config}
        content = self.to_json() | {"agents_config": {name: rules.denying(entries) for name, rules in config.items()}}
        return SkillsDescriptor.model_validate(content)

    def rules(self, consumer: str | None) -> Rules:
        """Return what holds for *consumer*: its own rules under the denials for all.

        The key counts exactly as written. The stricter `imports` of the two layers holds, and `enabled: false` under
        `"*"` denies everything, for neither may be lost.
        """
        return self.terms.rules(consumer)

    def resolve_root(self, bundle_root: StrPath | None = None) -> Path | None:
        """Return the custom root on this host, or None when there is none.

        Args:
            bundle_root: Folder relative roots are joined to, instead of the descriptor's own.

        Raises:
            DescriptorError: `descriptor_root_relative`, or `descriptor_root_outside_bundle` when a relative root leaves
                the bundle by `..` or a link.
        """
        return self.terms.resolve_root(bundle_root)


__all__ = ["AgentRules", "DescriptorError", "SkillsDescriptor"]
