"""Make a `Skill` of a skill file.

`parse_parts` is the heart: it takes bytes already read and companions already understood, and touches no file.
`parse_skill` and `parse_skill_bytes` are its two doors for callers; discovery calls it for each folder it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from kdskills.errors import Diagnostic, StrPath, path_argument
from kdskills.skills.fields import (
    RESERVED_NAMESPACES,
    FieldReader,
    check_name,
    clean_folder,
    clean_name,
    fallback_id,
    normal_id,
    unsafe_name,
)
from kdskills.skills.findings import FileFindings
from kdskills.skills.folder import (
    COMPACT_FILE,
    NO_ROWS,
    SKILL_FILES,
    SOURCES_FILES,
    FolderParts,
    LazyContent,
    open_skill,
    read_compact,
    read_companion,
    read_sources,
)
from kdskills.skills.frontmatter import read_frontmatter
from kdskills.skills.model import (
    ParsedSkill,
    RootKind,
    SkillContent,
    SkillTool,
    Verdict,
    estimate_tokens,
    make_skill,
)
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.safe_open import bytes_digest, is_folder
from kdskills.skills.yaml_core import to_python

FrontmatterForm = Callable[[dict[str, Any]], Mapping[str, Any]]
"""What becomes of the values of a frontmatter."""


def parse_parts(
    data: bytes,
    *,
    folder: str,
    file_name: str = "SKILL.md",
    path: str | None = None,
    verdict: Verdict = "lenient",
    extra_fields: Collection[str] = (),
    layout_namespace: str | None = None,
    fixed_namespace: str | None = None,
    layer: RootKind = "bundle",
    file: str | None = None,
    content: Callable[[str], SkillContent] | None = None,
    form: FrontmatterForm = dict,
    tools: tuple[SkillTool, ...] = (),
    findings: Sequence[Diagnostic] = (),
    digest: str | None = None,
) -> ParsedSkill:
    """Return the skill in *data*; pure, and nothing in *data* raises.

    *path* is for findings, `tools` and `findings` come from companions: an error among them refuses the skill. *content*
    makes the source of long texts from the full id, *form* what is kept of the frontmatter. The namespace that the root
    forces (*fixed_namespace*) wins over the field, the field over the one of the layout.
    """
    notes = FileFindings(verdict, file_name if path is None else path)
    if file_name == "skill.md":
        notes.add("file_name_case", "The file is called skill.md.", fix="Rename it to SKILL.md.")
    notes.items.extend(findings)
    front = read_frontmatter(data, notes)
    if front is None:
        namespace, own_id = fallback_id(folder, fixed_namespace or layout_namespace)
        return ParsedSkill(None, tuple(notes.items), f"{namespace}.{own_id}")
    reader = FieldReader(front, notes, extra_fields)
    name = _name(reader, folder, notes)
    namespace = _namespace(reader, layout_namespace, fixed_namespace)
    own_id = _own_id(reader, name, folder, notes)
    size, body, digest = len(data), front.body, digest or bytes_digest(data)
    skill = make_skill(
        **reader.values(),
        name=name,
        namespace=namespace,
        id=own_id,
        content=content(f"{namespace}.{own_id}") if content else LazyContent.of_text(body, size, digest),
        tools=tools,
        frontmatter=form(to_python(front.fields, text_only=verdict == "skills-ref")),
        diagnostics=tuple(notes.items),  # complete: every field above was read before
        digest=digest,
        size=size,
        tokens=estimate_tokens(body),
        layer=layer,
        file=file,
    )
    return ParsedSkill(None if notes.refused else skill, skill.diagnostics, skill.full_id)


def _name(reader: FieldReader, folder: str, notes: FileFindings) -> str:
    name_field = reader.text("name")
    if name_field is not None:
        name = clean_name(name_field)
        check_name(name, folder, notes, reader.position("name"))
        return name
    name = clean_folder(folder)
    message = f"There is no name; that of the folder, {name!r}, is used."
    reader.odd("name", message, "name_missing")
    if unsafe_name(name):
        notes.add("name_unsafe", f"The folder's name {name!r} cannot be one.", ref="name")
    return name


def _own_id(reader: FieldReader, name: str, folder: str, notes: FileFindings) -> str:
    id_field = reader.text("id")
    written = clean_name(id_field) if id_field is not None else name
    own_id = normal_id(written)
    if not own_id:
        reader.odd("id", f"Nothing of {written!r} can be an id.", "name_unsafe")
        return normal_id(name) or fallback_id(folder, None)[1]
    if own_id != written:
        message = f"The id {written!r} became {own_id!r}."
        notes.add("id_normalised", message, position=reader.position("id") or reader.position("name"), ref="id")
    if id_field is not None and written != name:
        message = f"The id {written!r} is not the name {name!r}."
        reader.odd("id", message, "id_name_differ")
    return own_id


def _namespace(reader: FieldReader, layout: str | None, fixed: str | None) -> str:
    namespace_field = reader.namespace()
    written = clean_name(namespace_field) if namespace_field is not None else clean_folder(layout or DEFAULT_NAMESPACE)
    if fixed is not None:
        if namespace_field is not None and written != fixed:
            message = f"The namespace {written!r} is ignored: this root's skills are in {fixed!r}."
            reader.odd("namespace", message, "namespace_ignored")
        return fixed
    namespace = normal_id(written)
    if not namespace:
        source = f"of {written!r}" if written else "that is written"
        reader.odd("namespace", f"Nothing {source} can be a namespace.", "name_unsafe")
        return normal_id(layout or "") or DEFAULT_NAMESPACE
    if namespace != written:
        reader.odd("namespace", f"The namespace {written!r} became {namespace!r}.", "id_normalised")
    if namespace in RESERVED_NAMESPACES:
        message = f"{namespace!r} is no namespace: refs use it as a prefix."
        reader.odd("namespace", message, "namespace_reserved")
    return namespace


def parse_skill_bytes(
    data: bytes,
    *,
    folder: str,
    file_name: str = "SKILL.md",
    verdict: Verdict = "lenient",
    extra_fields: Collection[str] = (),
) -> ParsedSkill:
    """Return the skill in the bytes of a skill file; pure.

    Args:
        data: The raw file.
        folder: Name of the folder it would lie in.
        file_name: `SKILL.md` or `skill.md`.
        verdict: `lenient`, `spec` or `skills-ref`.
        extra_fields: Further keys that are expected.

    Raises:
        TypeError: An argument is of the wrong type. Nothing in *data* raises.
    """
    check_arguments(verdict, extra_fields)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, not {type(data).__name__}")
    if not all(isinstance(text, str) for text in (folder, file_name)):
        raise TypeError("folder and file_name must be str")
    return parse_parts(
        bytes(data), folder=folder, file_name=file_name, verdict=verdict, extra_fields=frozenset(extra_fields)
    )


def parse_skill(path: StrPath, *, verdict: Verdict = "lenient", extra_fields: Collection[str] = ()) -> ParsedSkill:
    """Return the skill at *path*, a skill folder or its file.

    Of the companions only `tools.yaml` is read, because a broken one refuses the skill; the others are read on first
    use. Findings name paths relative to the skill's folder.

    Args:
        path: A folder or a `SKILL.md`.
        verdict: `lenient`, `spec` or `skills-ref`.
        extra_fields: Further keys that are expected.

    Raises:
        TypeError: An argument is of the wrong type. No content and no file-system state raises.
    """
    check_arguments(verdict, extra_fields)
    opened = open_skill(path_argument(path, "path"), verdict)
    if not isinstance(opened, FolderParts):
        return ParsedSkill(None, opened)
    return parse_parts(
        opened.data,
        folder=opened.folder.name,
        file_name=opened.file_name,
        verdict=verdict,
        extra_fields=frozenset(extra_fields),
        file=str(opened.folder / opened.file_name),
        content=lambda _: LazyContent.of_folder(opened.folder, opened.file_name, verdict),
        tools=opened.tools,
        findings=opened.findings,
    )


def check_arguments(verdict: object, extra_fields: object) -> None:
    """Raise TypeError unless *verdict* is one of the three and *extra_fields* a collection of texts."""
    if verdict not in get_args(Verdict):
        raise TypeError(f"verdict must be one of {', '.join(get_args(Verdict))}, not {verdict!r}")
    if isinstance(extra_fields, str | bytes) or not isinstance(extra_fields, Collection):
        raise TypeError("extra_fields must be a collection of field names")
    if not all(isinstance(field, str) for field in extra_fields):
        raise TypeError("extra_fields must hold field names")


def validate_skill(
    path: StrPath, *, verdict: Verdict = "lenient", extra_fields: Collection[str] = ()
) -> list[Diagnostic]:
    """Return all findings about the skill at *path* and its companions, sorted by path, line and code.

    Arguments and errors are those of `parse_skill`.
    """
    findings = list(parse_skill(path, verdict=verdict, extra_fields=extra_fields).diagnostics)
    skill_path = Path(path)
    folder = skill_path.parent if skill_path.name in SKILL_FILES and not is_folder(skill_path) else skill_path
    if is_folder(folder):
        findings += read_companion(folder, (COMPACT_FILE,), read_compact, None, verdict).diagnostics
        findings += read_companion(folder, SOURCES_FILES, read_sources, NO_ROWS, verdict).diagnostics
    return sorted(findings, key=lambda found: (found.path or "", found.line or 0, found.code, found.column or 0))
