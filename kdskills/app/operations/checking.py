"""What authors of skills do: `skills.check` and `skills.fix`, `new` to begin a bundle, a skill or a plugin, `plugins`.

Mending changes skill files and never touches a body.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import Field, StringConstraints

from kdskills.app.operations.bundles import demo_consumers, demo_of
from kdskills.app.operations.models import Finding, Input, Output
from kdskills.bundle.descriptor import EVERYONE
from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.environments.script_report import ImageContent, SkillScripts
from kdskills.errors import BadRequest, Conflict, Diagnostic, FileRefused
from kdskills.execution.egress import asked_network, host_rule
from kdskills.session.config import INTERPRETERS
from kdskills.skills import parse_skill, validate_skill
from kdskills.skills.discovery import enters, unreadable_note
from kdskills.skills.fix import apply_fix, plan_fix
from kdskills.skills.folder import SKILL_FILES, SKILL_YAML
from kdskills.skills.safe_open import is_folder, printable_path
from kdskills.turn.near_names import rule_findings

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.plugins import HookAnswers, PluginManager, Registers
    from kdskills.bundle import Bundle
    from kdskills.skills import Skill


DEPTH = 6
LOST = frozenset({"root_missing", "duplicate_id"})
"""What discovery warns of because it can go on, and what costs a bundle skills: for its author, errors."""
DISCOVERED = frozenset(
    {"symlink_skipped", "nested_skill", "duplicate_id", "root_is_skill", "scan_limit", "skill_large", "unreadable"}
)


class CheckInput(Input):
    """What to check, and how strictly."""

    path: Path = Field(description="A skill folder or file, a folder of skills, or a bundle.")
    verdict: Literal["lenient", "spec", "skills-ref"] = Field("lenient", description="Rules to judge by.")
    extra_fields: tuple[str, ...] = Field((), description="Further frontmatter keys the strict verdicts accept.")


class CheckOutput(Output):
    """Findings sorted by path, line and code; `ok` means that there is no error."""

    YES: ClassVar[str] = "ok"
    path: str
    kind: Literal["skill", "folder", "bundle"]
    verdict: str
    skills: int
    errors: int
    warnings: int
    infos: int
    ok: bool
    diagnostics: tuple[Finding, ...]


def skill_folders(top: Path, findings: list[Diagnostic] | None = None, *, itself: bool = True) -> list[Path]:
    """Return the folders below *top* that hold a skill file, at most six levels down, hidden ones left out.

    *findings* gets what could not be looked into; *itself* tells whether *top* may be a skill.
    """

    def unreadable(error: OSError) -> None:
        folder = Path(error.filename or top)
        inside = folder.is_relative_to(top)
        path = printable_path(folder.relative_to(top).as_posix() if inside else str(folder))
        if findings is not None:
            findings.append(unreadable_note("" if path == "." else path, error.strerror or "the system refused"))

    folders = []
    for directory, names, files in os.walk(top, onerror=unreadable):
        folder = Path(directory)
        depth = len(folder.relative_to(top).parts)
        entries = {*files, *names}  # of another kind than a file it is a skill that cannot be read
        names[:] = sorted(name for name in names if enters(name))
        owner = depth or itself
        if owner and any(name in entries for name in SKILL_FILES):
            folders.append(folder)
            names.clear()
        elif owner and any(name in files for name in SKILL_YAML):
            folders.append(folder)  # not a skill, and worth a word; skills below it are
        if depth >= DEPTH:
            names.clear()
    return folders


def _kind(path: Path) -> Literal["skill", "folder", "bundle"]:
    if path.name in SKILL_FILES or not is_folder(path) or any(os.path.lexists(path / name) for name in SKILL_FILES):
        return "skill"
    is_bundle = any(os.path.lexists(path / name) for name in DESCRIPTOR_NAMES) or is_folder(path / "skills")
    return "bundle" if is_bundle else "folder"


class BundleSkills(NamedTuple):
    """What a bundle's descriptor and discovery say, where its skills lie, their folders, and the files of each catalog."""

    findings: list[Diagnostic]
    root: Path
    folders: list[Path]
    catalogs: list[set[str]]


def _bundle_skills(bundles: BundleLoader, bundle: Bundle) -> BundleSkills:
    """Return the skills of a bundle; catalogs are those of its consumers, or of the anonymous one where it names none."""
    subsystem = bundles.subsystem(bundle)
    findings = [*bundle.diagnostics, *rule_findings(bundle, demo_consumers(demo_of(bundle.root)))]
    views = {each: subsystem.view(each) for each in (None, *bundle.descriptor.agents_config) if each != EVERYONE}
    findings += [finding for view in views.values() for finding in view.diagnostics]
    named = [view for consumer, view in views.items() if consumer is not None] or list(views.values())
    catalogs = [{os.path.realpath(skill.file or "") for skill in view.listed.values()} for view in named]
    roots = subsystem.snapshot.roots
    root = Path(roots[-1].root.path) if roots else bundle.root / "skills"
    folders = skill_folders(root, itself=False)
    for finding in subsystem.diagnostics:
        # What discovery says of a skill's own files is found by validating it; what it left out is not.
        seen_by_validation = finding.code in DISCOVERED and finding.severity != "error"
        if finding.path is None or (
            seen_by_validation and (finding.code == "unreadable" or os.path.lexists(root / finding.path))
        ):
            findings.append(replace(finding, severity="error") if finding.code in LOST else finding)
    for folder in folders:
        path = folder.relative_to(root)
        if len(path.parts) > 2:
            skill_path, skill_file = printable_path(path.as_posix()), printable_path((path / "SKILL.md").as_posix())
            message = f"{skill_path} lies deeper than <namespace>/<skill>, so that no agent gets it."
            findings.append(Diagnostic("skill_too_deep", "warning", message, skill_file))
    return BundleSkills(findings, root, folders, catalogs)


def _alike_findings(skills: Mapping[str, Skill], catalogs: Sequence[set[str]] | None) -> Iterator[Diagnostic]:
    """Yield a warning for each two of `{path: skill}` that one model is shown and cannot tell apart."""
    shown = {path: skill for path, skill in skills.items() if not (skill.hidden or skill.disable_model_invocation)}
    if len(shown) < 2:
        return
    from kdskills.search.alike import alike_skills  # words are stemmed there, which one skill alone does not need

    for first, second, shared in alike_skills(shown):
        files = {os.path.realpath(skills[path].file or "") for path in (first, second)}
        if catalogs is None or any(files <= catalog for catalog in catalogs):
            message = (
                f"{first} and {second} cannot be told apart: each is the best other answer to the description of the other. "
                f"Both have: {', '.join(shared)}."
            )
            fix = "Say in both descriptions when to use which, and name the other skill there; or make them one."
            path = f"{first}/{Path(skills[first].file or '').name}"
            yield Diagnostic("indistinguishable_skills", "warning", message, path, ref="description", fix=fix)


def network_findings(skill: Skill) -> Iterator[Diagnostic]:
    """Yield what a skill says about the hosts it asks for: that it asks, and which of them no rule can be."""
    asked = asked_network(skill.metadata)
    for text in asked:
        try:
            host_rule(text)
        except ValueError as error:
            fix = "Write hosts such as `pypi.org`, `*.example.net` or `api.example.net:8443`."
            yield Diagnostic(
                "network_invalid", "warning", f"The skill asks for a host, and {error}.", ref="metadata", fix=fix
            )
    if asked:
        message = (
            f"The skill asks for the network: {', '.join(asked)}. Only an operator grants it, by the setting network."
        )
        yield Diagnostic("network_asked", "info", message, ref="metadata")


def _loaded_bundle(bundles: BundleLoader, path: Path, context: Context) -> Bundle | None:
    """Return the bundle at *path*, None for what is none; its descriptor is read as data unless it is trusted."""
    if not os.path.lexists(path):
        raise BadRequest(f"{path} is not there", code="path_missing", path=str(path))
    return bundles.load(path, python="execute" if context.trust else "read") if _kind(path) == "bundle" else None


def check(bundles: BundleLoader, answers: HookAnswers, arguments: CheckInput, context: Context) -> CheckOutput:
    """Check a skill, a folder of skills or a bundle; its code runs only where the caller trusts it."""
    path = arguments.path
    bundle = _loaded_bundle(bundles, path, context)
    kind = _kind(path)
    findings: list[Diagnostic] = []
    base = path if is_folder(path) else path.parent
    folders = [path]
    catalogs = None
    if bundle is not None:
        findings, base, folders, catalogs = _bundle_skills(bundles, bundle)
    elif kind == "folder":
        folders = skill_folders(path, findings)
    skills = {}
    image = ImageContent.collect(bundles.settings.execution_options().image, INTERPRETERS)
    for folder in folders:
        prefix = "" if folder == base or kind == "skill" else printable_path(folder.relative_to(base).as_posix()) + "/"
        skill_findings = validate_skill(folder, verdict=arguments.verdict, extra_fields=arguments.extra_fields)
        skill = parse_skill(folder).skill
        if skill is not None:
            skills[prefix.removesuffix("/")] = skill
            needs = SkillScripts(skill, image).findings()
            skill_findings += [*network_findings(skill), *answers.check_skill(skill), *needs]
        findings += [replace(d, path=prefix + (d.path or "SKILL.md")) for d in skill_findings]
    findings += _alike_findings(skills, catalogs)
    unique = sorted(set(findings), key=lambda d: (d.path or "", d.line or 0, d.code, d.message))
    counts = {f"{name}s": sum(d.severity == name for d in unique) for name in ("error", "warning", "info")}
    return CheckOutput.of(
        path=printable_path(str(path)),
        kind=kind,
        verdict=arguments.verdict,
        skills=len(folders),
        **counts,
        ok=counts["errors"] == 0,
        diagnostics=unique,
    )


class FixInput(Input):
    """What to mend."""

    path: Path = Field(description="A skill folder or file, a folder of skills, or a bundle.")
    rename: bool = Field(default=False, description="Fit folder names to skill names.")
    dry_run: bool = Field(default=False, description="Say what would be done, change nothing.")
    verdict: Literal["lenient", "spec", "skills-ref"] = Field("lenient", description="Rules to judge what is left by.")


class Change(Output):
    """What is mended in one skill, with its diff, and what cannot be."""

    path: str
    done: tuple[str, ...]
    skipped: tuple[str, ...]
    diff: str


class FixOutput(Output):
    """The changes, made or, in a dry run, planned; `path` is where it all lies now, `left` what is found there now."""

    path: str
    dry_run: bool
    changes: tuple[Change, ...]
    left: CheckOutput

    @property
    def negative(self) -> bool:
        """Whether errors are left; a dry run only says what would be done."""
        return not self.dry_run and self.left.negative


def _mend(path: Path, arguments: FixInput) -> tuple[Change | None, Path]:
    """Mend one skill; return what was done, if anything, and where the skill file lies now."""
    plan = plan_fix(path, rename=arguments.rename)
    if plan is None:
        return None, path
    done, skipped, file = plan.done, plan.skipped, plan.folder / plan.file_name
    if plan.changed and not arguments.dry_run:
        try:
            file = apply_fix(plan)
        except FileRefused as refusal:
            done, skipped = (), (*skipped, f"{refusal.message}.")
    if not (done or skipped):
        return None, file
    return Change(path=printable_path(str(path)), done=done, skipped=skipped, diff=plan.diff if done else ""), file


def _declare(path: Path, file: Path, image: ImageContent, *, dry_run: bool) -> Iterator[Change]:
    """Write into scripts what they import, where that is certain; the skill was at *path*, and its file is *file* now."""
    skill = parse_skill(file).skill
    folder = path.parent if path.name in SKILL_FILES else path
    for plan in () if skill is None else SkillScripts(skill, image).declare(dry_run=dry_run):
        done = () if plan.reason else ("It declares what it imports.",)
        skipped = (f"What it imports stays undeclared: {plan.reason}.",) if plan.reason else ()
        script = printable_path(str(folder / plan.path))
        yield Change(path=script, done=done, skipped=skipped, diff=plan.diff if done else "")


def fix(bundles: BundleLoader, answers: HookAnswers, arguments: FixInput, context: Context) -> FixOutput:
    """Mend skill files; one that cannot be mended costs only itself."""
    top = arguments.path
    _loaded_bundle(bundles, top, context)  # what cannot be judged afterwards is not mended
    is_directory = is_folder(top)
    changes = []
    image = ImageContent.collect(bundles.settings.execution_options().image, INTERPRETERS)
    for path in skill_folders(top) if is_directory else [top]:
        change, file = _mend(path, arguments)
        changes += [] if change is None else [change]
        changes += _declare(path, file, image, dry_run=arguments.dry_run)
        if path == top and not arguments.dry_run and file != path:  # it may have another name now
            top = file.parent if is_directory else file
    report = check(bundles, answers, CheckInput(path=top, verdict=arguments.verdict), context)
    return FixOutput(path=printable_path(str(top)), dry_run=arguments.dry_run, changes=tuple(changes), left=report)


SUFFIX: Final = ".tmpl"


class NewInput(Input):
    """What to begin, and where."""

    kind: Literal["bundle", "skill", "plugin"] = Field(description="What to begin.")
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)] = Field(
        description="Lower-case letters, digits and single hyphens; the folder gets this name."
    )
    into: Path = Field(Path(), description="Folder that the new folder is made in.")


class NewOutput(Output):
    """What was made."""

    kind: str
    path: str
    files: tuple[str, ...]


def new(arguments: NewInput) -> NewOutput:
    """Make a folder with the files to begin with, whole or not at all."""
    target = arguments.into / arguments.name
    if not arguments.into.is_dir():
        raise BadRequest(f"{arguments.into} is not a folder", code="path_missing", path=str(arguments.into))
    if os.path.lexists(target):
        raise Conflict(f"{target} is there already", code="path_exists", path=str(target))
    work = Path(tempfile.mkdtemp(prefix=f".{arguments.name}-", dir=arguments.into))
    try:
        templates = resources.files("kdskills.app") / "templates" / arguments.kind
        files = tuple(sorted(_fill(templates, work, "", arguments.name)))
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return NewOutput(kind=arguments.kind, path=str(target), files=files)


def _fill(source: Traversable, target: Path, below: str, name: str) -> list[str]:
    """Write the templates of *source* below *target*; return their paths."""
    paths: list[str] = []
    for item in source.iterdir():
        path = f"{below}{_filled(item.name, name)}"
        if item.is_dir():
            (target / path).mkdir()
            paths += _fill(item, target, f"{path}/", name)
        else:
            path = path.removesuffix(SUFFIX)
            (target / path).write_text(_filled(item.read_text(encoding="utf-8"), name), encoding="utf-8")
            paths.append(path)
    return paths


def _filled(text: str, name: str) -> str:
    text = text.replace("__name__", name).replace("__module__", name.replace("-", "_"))
    return text.replace("__title__", name.replace("-", " ").capitalize())


class PluginsInput(Input):
    """Nothing to say."""


class PluginRow(Output):
    """One plugin and the hooks it answers."""

    name: str
    shipped: bool
    hooks: tuple[str, ...]


class PluginsOutput(Output):
    """Plugins in the order they were registered, and names they registered, by kind."""

    plugins: tuple[PluginRow, ...]
    registered: dict[str, tuple[str, ...]]


def list_plugins(plugins: PluginManager, registers: Registers, arguments: PluginsInput) -> PluginsOutput:
    """List plugins and what they registered."""
    rows = []
    for name, plugin in plugins.list_name_plugin():
        hooks = tuple(sorted({caller.name for caller in plugins.get_hookcallers(plugin) or []}))
        rows.append(PluginRow(name=name, shipped=name.startswith("kdskills.builtin."), hooks=hooks))
    kinds = ("executors", "models", "stores", "tools", "interpreters")
    names = {kind: tuple(name for name, _ in getattr(registers, kind).items()) for kind in kinds}
    return PluginsOutput(plugins=tuple(rows), registered=names)
