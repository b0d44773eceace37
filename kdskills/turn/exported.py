"""Reading an export from JSON: its shape is checked before anything of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args

from kdskills.bundle.terms import Terms
from kdskills.errors import DescriptorError
from kdskills.skills.model import RootKind
from kdskills.skills.roots import SkillRoot
from kdskills.turn.mounts import EXPORT_KEY, locate, split_uri
from kdskills.turn.state import Exported

T = TypeVar("T")

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

    terms: Terms
    roots: tuple[ExportedRoot, ...]
    skills: tuple[ExportedSkill, ...]
    mounts: Mapping[str, str]
    exported: Exported

    def root_of(self, uri: str) -> SkillRoot:
        """Return the root a skill's URI lies below: the longest that fits.

        Raises:
            DescriptorError: No root of the export does.
        """
        scheme, parts = split_uri(uri)
        fitting = []
        for entry in self.roots:
            root_scheme, start = split_uri(entry.root.uri)
            if root_scheme == scheme and parts[: len(start)] == start:
                fitting.append((len(start), entry.root))
        if not fitting:
            raise _invalid("skills", f"{uri!r} lies below no root of the export")
        return max(fitting, key=lambda pair: pair[0])[1]


def is_export(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is an export rather than a plain descriptor."""
    return EXPORT_KEY in value or ("skills" in value and "roots" in value)


def read_export(value: Mapping[str, Any]) -> Export:
    """Understand an export.

    Raises:
        DescriptorError: `export_invalid`, or what is wrong with the rules in it.
    """
    inner = value.get(EXPORT_KEY, value)
    content: dict[str, Any] = _typed({"": inner}, "", dict, "the export")
    terms = Terms.read(
        {key: content[key] for key in ("version", "custom_skills_root", "agents_config") if key in content}
    )
    mounts = {
        str(prefix): _typed({"": folder}, "", str, f"mounts.{prefix}")
        for prefix, folder in _typed(content, "mounts", dict).items()
    }
    roots = tuple(_root(entry, mounts) for entry in _typed(content, "roots", list))
    skills = tuple(_skill(entry) for entry in _typed(content, "skills", list))
    activation = _typed(content, "activation", dict)
    tools = _optional(activation, "tools", list)
    refused = _typed(activation, "refused", dict)
    exported = Exported(
        complete=content.get("scope") == "subsystem",
        consumer=_optional(activation, "consumer", str),
        tools=None if tools is None else frozenset(_typed({"": tool}, "", str, "tools") for tool in tools),
        include_internal=_typed(activation, "include_internal", bool),
        refused=MappingProxyType({str(name): _typed(refused, name, str) for name in refused}),
        content_hash=_typed(content, "content_hash", str),
        fingerprint=_typed(content, "fingerprint", str),
        uris=MappingProxyType({entry.full_id: entry.uri for entry in skills}),
    )
    return Export(terms, roots, skills, MappingProxyType(mounts), exported)


def _root(value: object, mounts: Mapping[str, str]) -> ExportedRoot:
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


def _skill(value: object) -> ExportedSkill:
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
