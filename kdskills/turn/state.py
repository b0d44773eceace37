"""What a view keeps of the subsystem it was taken from: frozen, so that older views stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kdskills.bundle.descriptor import SkillsDescriptor
from kdskills.errors import PolicyUnavailable
from kdskills.skills.digest import rows_digest
from kdskills.skills.refs import INTERNAL_NAMESPACE
from kdskills.skills.selection import STEP_OF, KnownSkills
from kdskills.skills.snapshot import Snapshot

if TYPE_CHECKING:
    import jinja2

    from kdskills.prompts import CatalogEntry
    from kdskills.skills.model import Skill
    from kdskills.sources import SourceKey


class Exported(NamedTuple):
    """What an export said about itself, kept on the restored side.

    Attributes:
        complete: Whether all skills were exported, so that a view of any consumer can be taken.
        consumer: Whose view it is.
        tools: The tools of that consumer; None for no tool gate.
        include_internal: Whether internal skills were asked for.
        refused: `{full id: code}` of what that view refused.
        content_hash: The descriptor's on the exporting side.
        fingerprint: The subsystem's on the exporting side.
        uris: `{full id: URI of the skill's folder}`.
    """

    complete: bool
    consumer: str | None
    tools: frozenset[str] | None
    include_internal: bool
    refused: Mapping[str, str]
    content_hash: str
    fingerprint: str
    uris: Mapping[str, str]

    def admit(self, consumer: str | None, tools: frozenset[str] | None, include_internal: bool) -> None:
        """Check that the export holds every answer of the requested view.

        Raises:
            PolicyUnavailable: Another consumer, further tools or internal skills, whose answers were not exported.
        """
        if self.complete:
            return
        requested = "an anonymous consumer" if consumer is None else repr(consumer)
        if consumer != self.consumer:
            message = f"this is the exported view of {self.consumer!r}; it knows no policy of {requested}"
            raise PolicyUnavailable(message, consumer=consumer, exported=self.consumer)
        more_tools = self.tools is not None and (tools is None or not tools <= self.tools)
        if more_tools or (include_internal and not self.include_internal):
            message = (
                f"this exported view of {self.consumer!r} can be narrowed, not widened by tools or internal skills"
            )
            raise PolicyUnavailable(message, consumer=consumer, exported=self.consumer)

    def codes(self, include_internal: bool) -> Mapping[str, str]:
        """Return the recorded refusal codes, adapted to a view with or without internal skills."""
        if self.include_internal == include_internal:
            return self.refused
        prefix = f"{INTERNAL_NAMESPACE}."
        return {
            full_id: "internal" if full_id.startswith(prefix) and STEP_OF.get(code, 8) > 3 else code
            for full_id, code in self.refused.items()
        }


@dataclass(frozen=True)
class SubsystemState:
    """What a subsystem holds at one moment; never changed, but for `entries`, which is a cache.

    Attributes:
        descriptor: Its rules.
        snapshot: Its skills.
        mounts: `{URI prefix: folder on this host}`.
        environment: Templates, or None for the shipped ones.
        source_key: Overrides what makes two rows one source.
        exported: What the export said, on the restored side.
        entries: Catalog entries already made, by full id, each with the skill it was made of.
    """

    descriptor: SkillsDescriptor
    snapshot: Snapshot
    mounts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    environment: jinja2.Environment | None = None
    source_key: SourceKey | None = None
    exported: Exported | None = None
    entries: dict[str, tuple[Skill, CatalogEntry]] = field(default_factory=dict, repr=False, compare=False)

    def reusable_entries(self, snapshot: Snapshot) -> dict[str, tuple[Skill, CatalogEntry]]:
        """Return the catalog entries of skills that are the same object in *snapshot*, for the `SubsystemState` made of it."""
        now = snapshot.skills
        # Copied in one step, which no thread can interrupt: views of this snapshot still add entries in other threads.
        entries = self.entries.copy()
        return {full_id: entry for full_id, entry in entries.items() if now.get(full_id) is entry[0]}

    def skill_index(self, include_internal: bool) -> KnownSkills:
        """Return the usable skills, and the ids of unusable ones with their refusal codes."""
        refused = dict.fromkeys(self.snapshot.invalid, "skill_invalid")
        if self.exported is not None:
            usable = self.snapshot.skills
            codes = self.exported.codes(include_internal)
            refused |= {full_id: code for full_id, code in codes.items() if full_id not in usable}
        return KnownSkills(self.snapshot.skills, MappingProxyType(refused))

    @cached_property
    def fingerprint(self) -> str:
        """Digest over descriptor, root digests and winners; a restored subsystem has its exporter's."""
        if self.exported is not None:
            return self.exported.fingerprint
        return rows_digest([["descriptor", self.descriptor.content_hash], ["skills", self.snapshot.digest]])

    @property
    def content_hash(self) -> str:
        """The descriptor's content hash, on the restored side that of the exporter."""
        return self.descriptor.content_hash if self.exported is None else self.exported.content_hash
