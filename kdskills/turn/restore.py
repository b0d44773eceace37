"""The far side of an export: the same skills, answers and texts, or an error before anything is active."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kdskills.bundle.descriptor import SkillsDescriptor
from kdskills.errors import Diagnostic, FileRefused, RootChanged, RootMissing, StrPath
from kdskills.skills.folder import (
    COMPACT_FILE,
    SOURCES_FILES,
    TOOLS_FILES,
    ContentRead,
    ContentReader,
    FolderParts,
    RegistryContent,
    open_skill,
    read_companion,
)
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_parts
from kdskills.skills.roots import RefreshReport, RootState, SkillRoot, Snapshot
from kdskills.skills.safe_open import bytes_digest, tree_digest
from kdskills.turn.export import BUNDLE, Export, ExportedSkill, is_export, locate, read_export, remap_mounts, split_uri
from kdskills.turn.subsystem import Activation, SkillsSubsystem, SubsystemSource

Verify = Literal["catalog", "tree", "none"]


def set_skills_descriptor(
    descriptor: Mapping[str, Any] | SkillsDescriptor | None,
    *,
    bundle_root: StrPath | None = None,
    mounts: Mapping[str, StrPath] | None = None,
    verify: Verify = "catalog",
) -> SkillsSubsystem:
    """Build a subsystem of an export or a plain descriptor and put it in force here.

    Args:
        descriptor: An export, a plain descriptor, or None for an empty subsystem.
        bundle_root: Where the bundle is on this host.
        mounts: `{URI prefix: folder}` in place of the export's own.
        verify: `catalog` compares the digests of skill files and mounted roots, `tree` those of all files too,
            `none` nothing.

    Returns:
        The subsystem, active with the exported consumer and tools; a plain one for the anonymous consumer.

    Raises:
        RootMissing: A root or skill is not there. Nothing has become active.
        RootChanged: A root or skill has another digest. Nothing has become active.
        DescriptorError: The export or descriptor cannot be understood.
    """
    if verify not in {"catalog", "tree", "none"}:
        raise ValueError(f"verify is catalog, tree or none, not {verify!r}")
    if isinstance(descriptor, Mapping) and is_export(descriptor):
        export = read_export(descriptor if mounts is None else remap_mounts(descriptor, mounts))
        if bundle_root is not None:
            export = read_export(remap_mounts(descriptor, {**export.mounts, BUNDLE: bundle_root}))
        registry = RestoredRegistry(export, verify)
        roots = tuple(entry.root for entry in export.roots)
        source = SubsystemSource(registry, roots, export.mounts, export.exported)
        registry.snapshot()
        subsystem = SkillsSubsystem(export.descriptor, auto_refresh=None, source=source)
        recorded = export.exported
        view = subsystem.view(recorded.consumer, recorded.tools, include_internal=recorded.include_internal)
    elif descriptor is None:
        nothing = SkillsDescriptor(custom_skills_root=None)
        subsystem = SkillsSubsystem(nothing, roots=(), index_dir=None, auto_refresh=None)
        view = subsystem.view()
    else:
        subsystem = SkillsSubsystem(descriptor, bundle_root=bundle_root, index_dir=None, auto_refresh=None)
        for state in subsystem.snapshot.roots:
            if not state.present:
                raise _missing(state.root.label, state.root.uri)
        view = subsystem.view()
    Activation(subsystem, view).open()
    return subsystem


class RestoredRegistry:
    """The skills of an export on this host, each compared with what was exported. Safe from any thread."""

    def __init__(self, export: Export, verify: Verify) -> None:
        self._export = export
        self._verify = verify
        self._reader = ContentReader(verified=verify != "none", clock=time.time_ns)
        self._lock = threading.Lock()
        self._current: Snapshot | None = None
        self._generation = 0

    def snapshot(self) -> Snapshot:
        """Return the skills; the first call reads and compares them. Raises RootMissing or RootChanged."""
        with self._lock:
            if self._current is None:
                self._generation += 1
                self._current = self._load()
            return self._current

    def refresh(self) -> RefreshReport:
        """Compare everything again; nothing can be added, changed or removed. Raises as `snapshot`."""
        with self._lock:
            current = self._load()
            if self._current is None:
                self._current = current
        return RefreshReport((), (), (), current.diagnostics, self._generation)

    def clear_cache(self) -> None:
        """Forget everything read so far."""
        with self._lock:
            self._current = None
            self._reader.clear()

    def _load(self) -> Snapshot:
        for entry in self._export.roots:
            if entry.mounted:
                self._check_root(entry.root, entry.digest)
        skills: dict[str, Skill] = {}
        origins: dict[str, SkillRoot] = {}
        findings: list[Diagnostic] = []
        for row in sorted(self._export.skills, key=lambda row: row.full_id):
            root = self._export.root_of(row.uri)
            skill = self._skill(row, root)
            skills[row.full_id] = skill
            origins[row.full_id] = root
            findings += skill.diagnostics
        return Snapshot(
            MappingProxyType(skills),
            MappingProxyType({}),
            tuple(findings),
            tuple(RootState(entry.root, entry.digest, present=True) for entry in self._export.roots),
            MappingProxyType(origins),
            self._generation,
            time.time_ns(),
        )

    def _check_root(self, root: SkillRoot, expected: str) -> None:
        if not root.path.is_dir():
            raise _missing(root.label, root.uri)
        if self._verify == "none":
            return
        from kdskills.skills.registry import SkillRegistry

        digest = SkillRegistry([root], index_dir=None).snapshot().roots[0].digest
        if digest != expected:
            raise _changed(root.label, root.uri, expected, digest)

    def _skill(self, row: ExportedSkill, root: SkillRoot) -> Skill:
        folder = self._locate(row)
        parts = open_skill(folder, "lenient")
        if not isinstance(parts, FolderParts):
            raise _missing(row.full_id, row.uri)
        digest = bytes_digest(parts.data)
        if self._verify != "none" and digest != row.digest:
            raise _changed(row.full_id, row.uri, row.digest, digest)
        files = {parts.file_name: digest}

        def note(data: bytes, *, name: str, **_: object) -> ContentRead[None]:
            files[name] = bytes_digest(data)
            return ContentRead(None)

        for names in ((COMPACT_FILE,), SOURCES_FILES, TOOLS_FILES):  # later reads are compared with what they are now
            read_companion(folder, names, note, None)
        base = str(folder.parent)
        parsed = parse_parts(
            parts.data,
            folder=split_uri(row.uri)[1][-1],
            file_name=parts.file_name,
            fixed_namespace=row.full_id.partition(".")[0],
            layer=root.kind,
            file=str(folder / parts.file_name),
            content=lambda full_id: RegistryContent(
                self._reader, base, folder.name, full_id, tuple(files), tuple(files.values())
            ),
            tools=parts.tools,
            findings=parts.findings,
            digest=digest,
        )
        if parsed.skill is None or parsed.skill.full_id != row.full_id:
            raise _changed(row.full_id, row.uri, row.full_id, parsed.full_id or "no usable skill")
        if self._verify == "tree":
            try:
                tree = tree_digest(folder.parent, folder.name, shown=True)
            except FileRefused as error:
                raise _changed(row.full_id, row.uri, row.tree, error.code) from error
            if tree != row.tree:
                raise _changed(row.full_id, row.uri, row.tree, tree)
        findings = tuple(finding for finding in parsed.diagnostics if finding.code != "namespace_ignored")
        return replace(parsed.skill, diagnostics=findings)

    def _locate(self, row: ExportedSkill) -> Path:
        """Return where a skill is: a real folder that no link below its mount leads to."""
        folder = locate(row.uri, self._export.mounts)
        if folder is None:
            raise _missing(row.full_id, row.uri)
        mounts = [Path(mount) for mount in self._export.mounts.values() if folder.is_relative_to(mount)]
        mount = max(mounts, key=lambda path: len(path.parts))
        real = Path(os.path.realpath(folder))
        if not real.is_dir() or real != Path(os.path.realpath(mount)) / folder.relative_to(mount):
            raise _missing(row.full_id, row.uri)
        return real


def _missing(label: str, uri: str) -> RootMissing:
    return RootMissing(f"{label} ({uri}) is not there", label=label, uri=uri)


def _changed(label: str, uri: str, expected: str, actual: str) -> RootChanged:
    message = f"{label} ({uri}) is not what was exported: expected {expected}, found {actual}"
    return RootChanged(message, label=label, uri=uri, expected=expected, found=actual)
