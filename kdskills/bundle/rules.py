"""What the configuration says about one consumer: the model `AgentRules`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from kdskills.bundle.late import LateModel
from kdskills.bundle.terms import AgentTerms
from kdskills.skills.selection import ImportPolicy


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
