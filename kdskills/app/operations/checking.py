"""What authors of skills do: `skills.check` and `skills.fix`, `new` to begin a bundle, a skill or a plugin, `plugins`.

Mending changes skill files and never touches a body.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, resources
from importlib.resources.abc import Traversable
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field, StringConstraints

from kdskills.app.operations.bundles import demo_consumers, demo_of
from kdskills.app.operations.models import Finding, Input, Output
from kdskills.bundle.descriptor import EVERYONE, is_group, resembling
from kdskills.bundle.load import NAMES as DESCRIPTOR_NAMES
from kdskills.environments.script_report import ImageContent, SkillScripts
from kdskills.errors import BadRequest, Conflict, Diagnostic, FileRefused
from kdskills.errors.reports import BUNDLE_CODES, ReportRule, Selection
from kdskills.execution.egress import asked_network, host_rule
from kdskills.session.config import INTERPRETERS
from kdskills.skills import parse_skill, validate_skill
from kdskills.skills.discovery import enters, unreadable_note
from kdskills.skills.findings import CODES
from kdskills.skills.fix import apply_fix, plan_fix
from kdskills.skills.folder import SKILL_FILES, SKILL_YAML
from kdskills.skills.safe_open import is_folder, printable_path
from kdskills.turn.lint import SkillLint, bundle_findings, pointed_at, tools_of
from kdskills.turn.near_names import descriptor_words, rule_findings

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.plugins import HookAnswers, PluginManager, Registers
    from kdskills.bundle import Bundle
    from kdskills.bundle.descriptor import AuditPolicy
    from kdskills.skills import Skill


DEPTH = 6
LOST = frozenset({"root_missing", "duplicate_id"})
"""What discovery warns of because it can go on, and what costs a bundle skills: for its author, errors."""
DISCOVERED = frozenset(
    {"symlink_skipped", "nested_skill", "duplicate_id", "root_is_skill", "scan_limit", "skill_large", "unreadable"}
)


FindingCodes = tuple[Annotated[str, StringConstraints(min_length=1, max_length=100)], ...]


class JudgedInput(Input):
    """What is judged, by which rules, and which findings are told."""

    path: Path = Field(description="A skill folder or file, a folder of skills, or a bundle.")
    verdict: Literal["lenient", "spec", "skills-ref"] = Field("lenient", description="Rules to judge by.")
    select: FindingCodes = Field(
        (),
        description="Codes, or how they begin, of the findings that are told, instead of what the bundle says; `all`: every one.",
    )
    ignore: FindingCodes = Field(
        (), description="Codes, or how they begin, of findings that are left out; of errors the whole code."
    )


class CheckInput(JudgedInput):
    """What to check, and how strictly."""

    extra_fields: tuple[str, ...] = Field((), description="Further frontmatter keys the strict verdicts accept.")
    audit: bool = Field(default=False, description="Tell findings of the audit, too.")


class CheckOutput(Output):
    """Findings sorted by path, line and code; `ok` means that there is no error.

    Paths begin at `base`, those of a bundle's own files at the bundle. `left_out` counts findings that are not told.
    """

    YES: ClassVar[str] = "ok"
    path: str
    base: str
    kind: Literal["skill", "folder", "bundle"]
    verdict: str
    skills: int
    left_out: int
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
    findings += bundle.descriptor.unused_policies(subsystem.snapshot.namespaces)
    consumers = [each for each in bundle.descriptor.agents_config if each != EVERYONE and not is_group(each)]
    views = {each: subsystem.view(each) for each in (None, *consumers)}
    findings += [pointed_at(finding, bundle) for view in views.values() for finding in view.diagnostics]
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
            finding = pointed_at(finding, bundle)
            findings.append(replace(finding, severity="error") if finding.code in LOST else finding)
    findings += bundle_findings(bundle, subsystem, root)
    if not (folders or subsystem.registry or any(each.code == "root_missing" for each in findings)):
        cure = "Add one: `kdskills new skill NAME --into` the folder of the skills."
        message, descriptor = "The bundle has no skill.", descriptor_words(bundle)[0]
        findings.append(Diagnostic("bundle_without_skills", "warning", message, descriptor, fix=cure))
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


def audit_findings(path: Path, top: Path, policy: AuditPolicy) -> list[Diagnostic]:
    """Return findings of the audit of a skill, but for what the review of the bundle at *top* accepts."""
    from kdskills.supply.audit import audit_folder, read_review  # its patterns take a moment, and few ask for it

    folder = path if is_folder(path) else path.parent
    accepted = read_review(top) if _kind(top) == "bundle" else ()
    inside = folder.relative_to(top / "skills") if folder.is_relative_to(top / "skills") else folder
    name = "/".join(("public", *inside.parts)[-2:])
    findings = audit_folder(folder, skill=name, accepted=accepted).findings
    return [each.diagnostic(policy) for each in findings if each.accepted is None]


def _loaded_bundle(bundles: BundleLoader, path: Path, context: Context) -> Bundle | None:
    """Return the bundle at *path*, None for what is none; its descriptor is read as data unless it is trusted."""
    if not os.path.lexists(path):
        raise BadRequest(f"{path} is not there", code="path_missing", path=str(path))
    return bundles.load(path, python="execute" if context.trust else "read") if _kind(path) == "bundle" else None


def code_rules() -> list[ReportRule]:
    """Return what findings of `check` may be, but for those of plugins."""
    from kdskills.supply.audit_rules import RULES

    rules = [ReportRule(row.code, row.meaning, row.cure) for row in CODES.values()]
    rules += [ReportRule(code, meaning) for code, meaning in BUNDLE_CODES.items()]
    return rules + [ReportRule(f"audit_{rule.id}", rule.why, rule.cure) for rule in RULES.values()]


def _no_code(text: str, codes: Sequence[str]) -> tuple[str, str]:
    like = resembling(text, codes)
    cure = f"Write {like!r}." if like else "Codes stand in the reference of findings."
    return f"No finding has the code {text!r:.100}, or one that begins so.", cure


def _selection(
    answers: HookAnswers, arguments: JudgedInput, bundle: Bundle | None
) -> tuple[Selection, list[Diagnostic]]:
    """Return which findings are told, and errors for codes of the bundle that nothing has.

    Raises BadRequest, `check_code_unknown`, for those of the caller. Where a plugin checks skills, any code may be its own.
    """
    terms = {} if bundle is None or arguments.select else bundle.descriptor.check
    of_bundle = Selection(terms.get("select", ()), terms.get("ignore", ()))
    of_caller = Selection(arguments.select, arguments.ignore)
    selection = Selection(of_caller.select or of_bundle.select, (*of_caller.ignore, *of_bundle.ignore))
    if selection == Selection() or answers.pm.hook.kdskills_check_skill.get_hookimpls():
        return selection, []
    codes = [rule.id for rule in code_rules()]
    for code in of_caller.unknown(codes):
        raise BadRequest(" ".join(_no_code(code, codes)), code="check_code_unknown", given=code)
    unknown = of_bundle.unknown(codes)
    if bundle is None or not unknown:
        return selection, []
    path, lines = descriptor_words(bundle)
    findings: list[Diagnostic] = []
    for code in unknown:
        message, fix = _no_code(code, codes)
        line = lines.after("check", code)
        findings.append(Diagnostic("check_code_unknown", "error", message, path, line, ref="check", fix=fix))
    return selection, findings


def _unusable(finding: Diagnostic) -> bool:
    """Whether it is an error, and not only one of a stricter verdict."""
    row = CODES.get(finding.code)
    return finding.severity == "error" and (row is None or row.severity("lenient") == "error")


def _known_tools(registers: Registers, bundle: Bundle | None) -> frozenset[str]:
    """Return ids of every tool that the runtime, the solver, plugins or the bundle have."""
    from kdskills.session.tools import DESCRIPTIONS  # who names no tool does not pay for this
    from kdskills.solver.file_tools import FILE_TOOLS
    from kdskills.solver.shell import SHELL, SHELL_OUTPUT
    from kdskills.solver.turn_tools import PYTHON, READ, WRITE

    tools = (READ, WRITE, PYTHON, SHELL, SHELL_OUTPUT, *FILE_TOOLS)
    of_bundle = () if bundle is None else tools_of(bundle)
    return frozenset((*DESCRIPTIONS, *(tool.id for tool in tools), *registers.tools, *of_bundle))


@dataclass
class SkillChecker:
    """Checks skills one by one, as authors of `bundle` are told; tools are looked for when the first skill names one."""

    answers: HookAnswers
    registers: Registers
    bundle: Bundle | None
    image: ImageContent
    _tools: frozenset[str] | None = None

    @classmethod
    def of(
        cls, bundles: BundleLoader, answers: HookAnswers, registers: Registers, bundle: Bundle | None
    ) -> SkillChecker:
        """Return what checks the skills of a bundle, or of none."""
        image = ImageContent.collect(bundles.settings.execution_options().image, INTERPRETERS)
        return cls(answers, registers, bundle, image)

    def findings(
        self, path: Path, arguments: CheckInput, catalog: Collection[str] | None
    ) -> tuple[Skill | None, list[Diagnostic]]:
        """Return a skill, None for one that cannot be read, and what is wrong with its files.

        *catalog* are the real paths of the skill files that models are shown; None for all.
        """
        findings = validate_skill(path, verdict=arguments.verdict, extra_fields=arguments.extra_fields)
        skill = parse_skill(path).skill
        if skill is None:
            return None, findings
        needs = SkillScripts(skill, self.image).findings()
        findings += [*network_findings(skill), *self.answers.check_skill(skill), *needs]
        if self._tools is None and (skill.tools or skill.allowed_tool_names):
            self._tools = _known_tools(self.registers, self.bundle)
        is_shown = catalog is None or os.path.realpath(skill.file or "") in catalog
        suffixes = (*INTERPRETERS, *self.registers.interpreters)
        return skill, findings + list(SkillLint(skill, suffixes, self._tools, shown=is_shown).findings())

    def selected(self, findings: Iterable[Diagnostic], arguments: JudgedInput) -> list[Diagnostic]:
        """Return those of *findings* that the bundle's `check` tells, sorted by path, line and code."""
        selection, _ = _selection(self.answers, arguments, self.bundle)
        chosen = {each for each in findings if selection.tells(each.code, unusable=_unusable(each))}
        return sorted(chosen, key=lambda d: (d.path or "", d.line or 0, d.code, d.message))


def check(
    bundles: BundleLoader, answers: HookAnswers, registers: Registers, arguments: CheckInput, context: Context
) -> CheckOutput:
    """Check a skill, a folder of skills or a bundle; its code runs only where the caller trusts it."""
    path = arguments.path
    bundle = _loaded_bundle(bundles, path, context)
    kind = _kind(path)
    selection, unknown = _selection(answers, arguments, bundle)
    findings: list[Diagnostic] = []
    base = path if is_folder(path) else path.parent
    folders = [path]
    catalogs = None
    if bundle is not None:
        findings, base, folders, catalogs = _bundle_skills(bundles, bundle)
    elif kind == "folder":
        folders = skill_folders(path, findings)
    skills = {}
    checker = SkillChecker.of(bundles, answers, registers, bundle)
    shown = None if catalogs is None else set[str]().union(*catalogs)
    for folder in folders:
        prefix = "" if folder == base or kind == "skill" else printable_path(folder.relative_to(base).as_posix()) + "/"
        skill, skill_findings = checker.findings(folder, arguments, shown)
        if arguments.audit:
            skill_findings += audit_findings(folder, path, bundles.settings.trust.audit)
        if skill is not None:
            skills[prefix.removesuffix("/")] = skill
        findings += [replace(d, path=prefix + (d.path or "SKILL.md")) for d in skill_findings]
    findings += _alike_findings(skills, catalogs)
    selected = {each for each in findings if selection.tells(each.code, unusable=_unusable(each))}
    unique = sorted(selected | {*unknown}, key=lambda d: (d.path or "", d.line or 0, d.code, d.message))
    counts = {f"{name}s": sum(d.severity == name for d in unique) for name in ("error", "warning", "info")}
    return CheckOutput.of(
        path=printable_path(str(path)),
        base=printable_path(str(base)),
        kind=kind,
        verdict=arguments.verdict,
        skills=len(folders),
        left_out=len(set(findings) - selected),
        **counts,
        ok=counts["errors"] == 0,
        diagnostics=unique,
    )


class FixInput(JudgedInput):
    """What to mend; what is left is judged, and told, as `check` does."""

    rename: bool = Field(default=False, description="Fit folder names to skill names.")
    dry_run: bool = Field(default=False, description="Say what would be done, change nothing.")


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


def fix(
    bundles: BundleLoader, answers: HookAnswers, registers: Registers, arguments: FixInput, context: Context
) -> FixOutput:
    """Mend skill files; one that cannot be mended costs only itself."""
    top = arguments.path
    _selection(answers, arguments, _loaded_bundle(bundles, top, context))  # what cannot be judged is not mended
    is_directory = is_folder(top)
    changes = []
    image = ImageContent.collect(bundles.settings.execution_options().image, INTERPRETERS)
    for path in skill_folders(top) if is_directory else [top]:
        change, file = _mend(path, arguments)
        changes += [] if change is None else [change]
        changes += _declare(path, file, image, dry_run=arguments.dry_run)
        if path == top and not arguments.dry_run and file != path:  # it may have another name now
            top = file.parent if is_directory else file
    words = {name: getattr(arguments, name) for name in ("verdict", "select", "ignore")}
    report = check(bundles, answers, registers, CheckInput(path=top, **words), context)
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
        files = tuple(sorted([*_fill(templates, work, "", arguments.name), *_write_schemas(work, arguments.kind)]))
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


SCHEMA_BASE: Final = "urn:kdskills:schema:"
"""What the `$id` of every schema begins with: a name, which nobody can serve another schema under, and no address."""
SCHEMA_FOLDER: Final = ".kdskills/schemas"
"""Where in what `new` makes the schemas of its files lie; a hidden folder, so that no skill is looked for there."""
SCHEMAS_OF: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"bundle": ("descriptor",)})
"""Schemas that the templates of a kind name."""
SCHEMAS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "demo": ("demo.yaml", "models.cassette:Cassette.model_json_schema"),
        "descriptor": ("skills_descriptor.yaml", "bundle.load:descriptor_schema"),
        "evals": ("evals/evals.json", "evals.files:evals_schema"),
        "scripts": ("evals/scripts.yaml", "evals.scripts:scripts_schema"),
        "sources": ("sources.yaml", "sources.rows:sources_schema"),
        "tools": ("tools.yaml", "skills.folder:tools_schema"),
    }
)
"""Files that authors write, and what makes the schema of each."""


class SchemaInput(Input):
    """Which schema."""

    name: str | None = Field(None, max_length=64, description="The schema; none lists them.")


class SchemaRow(Output):
    """One schema, the file it is for, and its `$id`."""

    name: str
    file: str
    id: str


class SchemaOutput(Output):
    """All schemas, and the one that was asked for."""

    schemas: tuple[SchemaRow, ...]
    document: dict[str, Any] | None = None


def show_schema(arguments: SchemaInput) -> SchemaOutput:
    """List schemas of files that authors write, or give one. Raises BadRequest: there is none of that name."""
    rows = tuple(SchemaRow(name=name, file=file, id=SCHEMA_BASE + name) for name, (file, _) in SCHEMAS.items())
    if arguments.name is None:
        return SchemaOutput(schemas=rows)
    if arguments.name not in SCHEMAS:
        raise BadRequest(
            f"there is no schema {arguments.name!r}: there are {', '.join(SCHEMAS)}", code="schema_unknown"
        )
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_BASE + arguments.name}
    module, _, function = SCHEMAS[arguments.name][1].partition(":")
    return SchemaOutput(schemas=rows, document=head | attrgetter(function)(import_module(f"kdskills.{module}"))())


def schema_text(document: Mapping[str, Any]) -> str:
    """Return a schema as the text of its file."""
    return json.dumps(document, indent=2) + "\n"


def _write_schemas(folder: Path, kind: str) -> Iterator[str]:
    """Write the schemas that files of a new *folder* name; yield their paths."""
    for name in SCHEMAS_OF.get(kind, ()):
        path = f"{SCHEMA_FOLDER}/{name}.json"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        document = show_schema(SchemaInput(name=name)).document or {}
        (folder / path).write_text(schema_text(document), encoding="utf-8")
        yield path


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
    kinds = ("executors", "models", "stores", "tools", "interpreters", "checks")
    names = {kind: tuple(name for name, _ in getattr(registers, kind).items()) for kind in kinds}
    return PluginsOutput(plugins=tuple(rows), registered=names)
