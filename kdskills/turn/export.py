"""The skills in force, handed to another process: logical URIs, mounts, digests, decisions.

A logical URI names no path of a host; mounts say where it is here, and the longest prefix by path components counts. An
export read from JSON is checked for its shape before anything of it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from kdskills.bundle.descriptor import EVERYONE, AgentRules, SkillsDescriptor, is_group
from kdskills.errors import DescriptorError, Diagnostic, FileRefused, PolicyUnavailable, StrPath, path_argument
from kdskills.skills.folder import shown_digest
from kdskills.skills.model import RootKind, Skill
from kdskills.skills.refs import INTERNAL_NAMESPACE
from kdskills.skills.roots import SkillRoot, Snapshot, far_content
from kdskills.skills.safe_open import rows_digest
from kdskills.skills.selection import STEP_OF, KnownSkills, Rules

if TYPE_CHECKING:
    import jinja2

    from kdskills.prompts import CatalogEntry
    from kdskills.search import EmbedderGuard, JoinedIndex, Searcher, SearchHit, SearchIndex, SkillVectors
    from kdskills.sources import SourceKey, SourceResolver

T = TypeVar("T")

EXPORT_KEY = "SKILLS_DESCRIPTOR"

IndexMaker = Callable[[], "SearchIndex | JoinedIndex"]

HitOrder = Callable[[str | None, str, Sequence["SearchHit"]], tuple[Sequence["SearchHit"], tuple[Diagnostic, ...]]]
"""Reorders and drops the best hits of a consumer's query, and says what went wrong."""


def split_uri(uri: str) -> tuple[str, tuple[str, ...]]:
    """Return scheme and path components of a logical URI such as `bundle://skills/acme/brief`."""
    scheme, _, path = uri.partition("://")
    return scheme, tuple(part for part in path.split("/") if part)


def below(uri: str, *parts: str) -> str:
    """Return the URI of something below *uri*."""
    path = "/".join(parts)
    return f"{uri.rstrip('/')}/{path}" if path and not uri.endswith("://") else f"{uri}{path}"


def locate(uri: str, mounts: Mapping[str, str]) -> Path | None:
    """Return where *uri* is on this host, or None: no mount covers it, or `.` or `..` could lead out of its mount."""
    scheme, parts = split_uri(uri)
    if {".", ".."} & set(parts) or any("\0" in part for part in parts):
        return None
    best: tuple[int, str] | None = None
    for prefix, folder in mounts.items():
        prefix_scheme, start = split_uri(prefix)
        if prefix_scheme == scheme and parts[: len(start)] == start and (best is None or len(start) > best[0]):
            best = (len(start), folder)
    return None if best is None else Path(best[1], *parts[best[0] :])


def remap_mounts(export: Mapping[str, Any], mounts: Mapping[str, StrPath]) -> dict[str, Any]:
    """Return an export with other mounts; nothing else changes and nothing is looked at.

    Args:
        export: What `export_runtime_globals` gave, or its inner descriptor.
        mounts: `{URI prefix: folder}`, in place of the export's own, so that no path of this host goes along unasked.
            Give the prefix of a root, or of each skill: `bundle://skills/acme/brief` as in the export's `skills`.
    """
    copied = deepcopy(dict(export))
    inner: dict[str, Any] = copied.get(EXPORT_KEY, copied)
    inner["mounts"] = {
        prefix: str(path_argument(folder, f"the mount of {prefix}")) for prefix, folder in mounts.items()
    }
    return copied


class Exported(NamedTuple):
    """What an export said about itself, kept on the restored side.

    `complete` tells that all skills were exported, so that a view of any consumer can be taken; otherwise it is the
    view of `consumer` with its `tools` (None: no tool gate), which refused `{full id: code}`. `content_hash` and
    `fingerprint` are those of the exporting side, `uris` is `{full id: URI of the skill's folder}`. `rules` held for the user
    beside those of the descriptor.
    """

    complete: bool
    consumer: str | None
    tools: frozenset[str] | None
    include_internal: bool
    refused: Mapping[str, str]
    content_hash: str
    fingerprint: str
    uris: Mapping[str, str]
    rules: AgentRules | None = None

    def admit(self, consumer: str | None, tools: frozenset[str] | None, include_internal: bool) -> None:
        """Raise PolicyUnavailable unless the export holds every answer of the requested view."""
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


def index_maker(file: Path | None) -> IndexMaker:
    """Return what gives one search index, kept in *file*, and imports what it needs when first asked."""

    @cache
    def search_index() -> SearchIndex:
        from kdskills.search import SearchIndex

        return SearchIndex(file)

    return search_index


def joined_maker(state: SubsystemState, added: Mapping[str, Skill]) -> IndexMaker:
    """Return what gives the index of *state* with the terms of *added* skills beside it, which are kept in memory."""

    @cache
    def search_index() -> JoinedIndex:
        from kdskills.search import JoinedIndex, SearchIndex

        return JoinedIndex(state.search_index(), state.snapshot.skills, SearchIndex(), added)

    return search_index


def vectors_maker(embedder: EmbedderGuard | None, file: Path | None) -> Callable[[], SkillVectors | None]:
    """Return what gives the vectors of one embedder's making, kept beside the search index in *file*, or None without one."""

    @cache
    def skill_vectors() -> SkillVectors | None:
        from kdskills.search import SkillVectors

        return None if embedder is None else SkillVectors(embedder, file and file.with_suffix(".vectors"))

    return skill_vectors


def merged_ids(base: Mapping[str, T], added: Mapping[str, T]) -> dict[str, T]:
    """Return both sorted by key, where *base* is sorted already."""
    both = {**base, **{key: added[key] for key in sorted(added)}}
    if not (base and added) or [*base][-1] < min(added):
        return both  # which costs a quarter
    order = sorted(both)
    return dict(zip(order, map(both.__getitem__, order), strict=True))


@dataclass(frozen=True)
class SubsystemState:
    """What a subsystem holds at one moment; never changed, but for `entries`, which is a cache.

    `mounts` is `{URI prefix: folder on this host}`, `environment` None for the shipped templates, `source_key`
    overrides what makes two rows one source, `source_resolver` completes rows first; `entries` holds catalog entries by full id, each with its skill; `search_index`
    gives the index that views are searched by, made at the first search, and `skill_vectors` their vectors; `hit_order` has the last word about hits.
    `over` is the state that this one adds the skills of a snapshot to.
    """

    descriptor: SkillsDescriptor
    snapshot: Snapshot
    mounts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    environment: jinja2.Environment | None = None
    source_key: SourceKey | None = None
    source_resolver: SourceResolver | None = None
    hit_order: HitOrder | None = None
    exported: Exported | None = None
    entries: dict[str, tuple[Skill, CatalogEntry]] = field(default_factory=dict, repr=False, compare=False)
    search_index: IndexMaker = field(default_factory=lambda: index_maker(None), repr=False, compare=False)
    skill_vectors: Callable[[], SkillVectors | None] = field(default=lambda: None, repr=False, compare=False)
    over: tuple[SubsystemState, Snapshot] | None = field(default=None, repr=False, compare=False)

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
    def searcher(self) -> Searcher:
        """Searches all usable skills, whoever may use them: for people who are told of everything."""
        from kdskills.search import Searcher

        skills = self.snapshot.skills
        return Searcher(self.search_index(), skills, list(skills), self.skill_vectors())

    @cached_property
    def fingerprint(self) -> str:
        """Digest over descriptor, root digests and winners; a restored subsystem has its exporter's."""
        if self.exported is not None:
            return self.exported.fingerprint
        if self.over is not None:
            below_it, added = self.over
            return rows_digest([["over", below_it.fingerprint], ["added", added.digest]])
        return rows_digest([["descriptor", self.descriptor.content_hash], ["skills", self.snapshot.digest]])

    @property
    def content_hash(self) -> str:
        """The descriptor's content hash, on the restored side that of the exporter."""
        return self.descriptor.content_hash if self.exported is None else self.exported.content_hash


VERSION = 1


def _skill_rows(state: SubsystemState, skills: Mapping[str, Skill]) -> tuple[list[dict[str, str]], list[str]]:
    """Return what an export says of each skill on this host, and the ids of those that somebody changed since they were judged:
    they stay out, and take none of the others along.
    """
    rows: list[dict[str, str]] = []
    changed: list[str] = []
    for full_id, skill in sorted(skills.items()):
        if far_content(skill) is not None:
            continue
        try:
            tree = shown_digest(skill)
        except FileRefused as error:
            if error.code != "skill_changed":
                raise
            changed.append(full_id)
        else:
            rows.append({"id": full_id, "uri": skill_uri(state, skill), "digest": skill.digest, "tree": tree})
    return rows, changed


def export_view(
    state: SubsystemState,
    skills: Mapping[str, Skill],
    *,
    refused: Mapping[str, str],
    consumer: str | None = None,
    tools: frozenset[str] | None = None,
    include_internal: bool = False,
    scope: Literal["view", "subsystem"] = "view",
    rules: Rules | None = None,
) -> dict[str, Any]:
    """Return the export of a view, or of a whole subsystem: with the rules of every consumer.

    *skills* are what the view grants with private dependencies; *refused* says `{full id: code}` of everything else. *rules*
    go along where they hold for a user, as rules without the names of groups.
    """
    # Skills of remote servers are not exported: the other process could not fetch and check their files.
    present = [each for each in state.snapshot.roots if each.present and each.root.listing is None]
    rows, changed = _skill_rows(state, skills)
    refused = {**refused, **dict.fromkeys(changed, "skill_invalid")}
    config = {
        name: rules.to_json()
        for name, rules in state.descriptor.agents_config.items()
        if (scope == "subsystem" or name in {EVERYONE, consumer}) and not is_group(name)
    }
    roots: list[dict[str, Any]] = []
    for each in present:
        root = each.root
        row: dict[str, Any] = {"label": root.label, "kind": root.kind, "uri": root.uri, "digest": each.digest}
        row |= {"namespace": root.namespace, "nested": root.nested or None}  # which stand only where they are unusual
        roots.append({key: value for key, value in row.items() if value is not None})
    custom = next((each.root.uri for each in reversed(present) if each.root.kind == "bundle"), None)
    return {
        EXPORT_KEY: {
            "version": VERSION,
            "scope": scope,
            "custom_skills_root": custom,
            "agents_config": config,
            "roots": roots,
            "mounts": dict(state.mounts),
            "skills": rows,
            "activation": {
                "consumer": consumer,
                "tools": None if tools is None else sorted(tools),
                "include_internal": include_internal,
                "refused": dict(sorted(refused.items())),
                **({"rules": rules.folded()} if rules is not None and rules.layers else {}),
            },
            "content_hash": state.content_hash,
            "fingerprint": state.fingerprint,
        }
    }


def skill_uri(state: SubsystemState, skill: Skill) -> str:
    """Return the logical URI of a skill's folder: its root's, and the path below it."""
    if state.exported is not None:
        return state.exported.uris[skill.full_id]
    root = state.snapshot.origins[skill.full_id]
    assert skill.folder is not None  # a skill of a root has a folder
    relative = skill.folder.relative_to(root.path.resolve())
    return below(root.uri, *PurePosixPath(relative.as_posix()).parts)


BUNDLE = "bundle://"
CUSTOM = "custom://"


def place_roots(
    descriptor: SkillsDescriptor, bundle_root: StrPath | None, further: Sequence[SkillRoot]
) -> tuple[tuple[SkillRoot, ...], dict[str, str]]:
    """Return all roots, the custom one last, and the mounts that say where they are on this host.

    Every root gets a URI of its own that names no host path. Raises DescriptorError for a custom root of no use.
    """
    roots: list[SkillRoot] = []
    mounts: dict[str, str] = {}
    for number, root in enumerate(further):
        used_uris = {earlier_root.uri for earlier_root in roots}
        uri = root.uri if _is_logical(root) and root.uri not in used_uris else f"root://{root.kind}/{number}"
        roots.append(root if uri == root.uri else replace(root, uri=uri))
        if root.listing is None:
            mounts[uri] = os.path.realpath(root.path)
    folder = descriptor.resolve_root(bundle_root)
    if folder is None:
        return tuple(roots), mounts
    base = bundle_root or descriptor.bundle_root
    real = Path(os.path.realpath(folder))
    top = None if base is None else Path(os.path.realpath(base))
    if top is not None and real.is_relative_to(top):
        uri, mount, mounted_folder = below(BUNDLE, *real.relative_to(top).parts), BUNDLE, top
    else:
        uri, mount, mounted_folder = CUSTOM, CUSTOM, real
    mounts[mount] = str(mounted_folder)
    return (*roots, SkillRoot(uri, folder, "bundle", "bundle")), mounts


def _is_logical(root: SkillRoot) -> bool:
    """Whether a root's URI has a scheme of its own and holds no path of this host."""
    scheme, parts = split_uri(root.uri)
    reserved = {"", "file", "bundle", "custom", "root"}
    host = [part for part in str(root.path).split("/") if part]
    return "://" in root.uri and scheme not in reserved and (not host or [*parts][: len(host)] != host)


NOWHERE = Path("/nonexistent")  # the path of a root that is not on this host, whose skills are mounted one by one


class ExportedSkill(NamedTuple):
    """One skill of an export: where it is, and the digests of its file and of its whole folder."""

    full_id: str
    uri: str
    digest: str
    tree: str


class ExportedRoot(NamedTuple):
    """One root of an export, placed on this host where a mount covers it."""

    root: SkillRoot
    digest: str
    mounted: bool


class Export(NamedTuple):
    """An export, understood."""

    descriptor: SkillsDescriptor
    roots: tuple[ExportedRoot, ...]
    skills: tuple[ExportedSkill, ...]
    mounts: Mapping[str, str]
    exported: Exported

    def root_of(self, uri: str) -> SkillRoot:
        """Return the root a skill's URI lies below, the longest that fits; raises DescriptorError."""
        scheme, parts = split_uri(uri)
        starts = [(split_uri(entry.root.uri), entry.root) for entry in self.roots]
        fitting = [
            (len(start), root) for (kind, start), root in starts if kind == scheme and parts[: len(start)] == start
        ]
        if not fitting:
            raise _invalid("skills", f"{uri!r} lies below no root of the export")
        return max(fitting, key=lambda pair: pair[0])[1]


def is_export(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is an export rather than a plain descriptor."""
    return EXPORT_KEY in value or ("skills" in value and "roots" in value)


def read_export(value: Mapping[str, Any]) -> Export:
    """Understand an export; raises DescriptorError: `export_invalid`, or what is wrong with the rules in it."""
    inner = value.get(EXPORT_KEY, value)
    content: dict[str, Any] = _typed({"": inner}, "", dict, "the export")
    descriptor = SkillsDescriptor.from_json(
        {key: content[key] for key in ("version", "custom_skills_root", "agents_config") if key in content}
    )
    mounts = {
        str(prefix): _typed({"": folder}, "", str, f"mounts.{prefix}")
        for prefix, folder in _typed(content, "mounts", dict).items()
    }
    roots = tuple(_read_root(entry, mounts) for entry in _typed(content, "roots", list))
    skills = tuple(_read_skill(entry) for entry in _typed(content, "skills", list))
    activation = _typed(content, "activation", dict)
    tools = _optional(activation, "tools", list)
    refused = _typed(activation, "refused", dict)
    rules = _optional(activation, "rules", dict)
    exported = Exported(
        complete=content.get("scope") == "subsystem",
        consumer=_optional(activation, "consumer", str),
        tools=None if tools is None else frozenset(_typed({"": tool}, "", str, "tools") for tool in tools),
        include_internal=_typed(activation, "include_internal", bool),
        refused=MappingProxyType({str(name): _typed(refused, name, str) for name in refused}),
        content_hash=_typed(content, "content_hash", str),
        fingerprint=_typed(content, "fingerprint", str),
        uris=MappingProxyType({entry.full_id: entry.uri for entry in skills}),
        rules=None if rules is None else AgentRules.from_json(rules, "activation.rules."),
    )
    return Export(descriptor, roots, skills, MappingProxyType(mounts), exported)


def _read_root(value: object, mounts: Mapping[str, str]) -> ExportedRoot:
    entry: dict[str, Any] = _typed({"": value}, "", dict, "roots")
    kind = _typed(entry, "kind", str)
    kinds: tuple[RootKind, ...] = get_args(RootKind)
    root_kind = next((name for name in kinds if name == kind), None)
    if root_kind is None:
        raise _invalid("roots", f"{kind!r} is no kind of root")
    uri = _typed(entry, "uri", str)
    folder = locate(uri, mounts)
    root = SkillRoot(
        uri,
        folder or NOWHERE,
        _typed(entry, "label", str),
        root_kind,
        _optional(entry, "namespace", str),
        bool(_optional(entry, "nested", bool)),
    )
    return ExportedRoot(root, _typed(entry, "digest", str), folder is not None)


def _read_skill(value: object) -> ExportedSkill:
    entry: dict[str, Any] = _typed({"": value}, "", dict, "skills")
    full_id, uri = _typed(entry, "id", str), _typed(entry, "uri", str)
    if full_id.count(".") != 1 or not split_uri(uri)[1]:
        raise _invalid("skills", f"{full_id!r} at {uri!r} is no skill")
    return ExportedSkill(full_id, uri, _typed(entry, "digest", str), _typed(entry, "tree", str))


def _typed(value: Mapping[Any, Any], key: str, kind: type[T], name: str = "") -> T:
    """Return `value[key]`. Raises DescriptorError when it is missing or of another type; *name* names it there."""
    member = value.get(key)
    if not isinstance(member, kind):
        raise _invalid(name or key, f"{kind.__name__.lower()} expected, not {type(member).__name__}")
    return member


def _optional(value: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    return None if value.get(key) is None else _typed(value, key, kind)


def _invalid(key: str, message: str) -> DescriptorError:
    return DescriptorError(f"the export cannot be used: {key}: {message}", code="export_invalid", key=key)
