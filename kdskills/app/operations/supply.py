"""Operations on skills from elsewhere and for others: add, remove and update them, follow the lock, and publish."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal

from pydantic import Field

from kdskills.app.operations.checking import skill_folders
from kdskills.app.operations.models import Finding, Input, Output, ProjectInput
from kdskills.app.publication import PublicArtifact
from kdskills.bundle import SkillsDescriptor
from kdskills.bundle.load import NAMES
from kdskills.bundle.lock_file import LOCK_NAME
from kdskills.errors import BadRequest, Conflict, FileRefused
from kdskills.skills.archives import ArchiveRefused, write_archive
from kdskills.skills.folder import SKILL_FILES, LazyContent
from kdskills.skills.model import Skill
from kdskills.skills.refs import DEFAULT_NAMESPACE
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import is_folder, printable_path
from kdskills.storage.folder import telling_full_disk
from kdskills.supply.audit import AuditReport, audit_folder, read_review, sarif
from kdskills.supply.audit_rules import RANKS
from kdskills.supply.fetching import SourceFailed
from kdskills.supply.index import FOLDER as SITE_FOLDER
from kdskills.supply.index import write_site
from kdskills.supply.install import SkillSupply, SuppliedBundle
from kdskills.supply.signatures import TrustAnchor, TrustAnchors, make_anchor, sign_folder
from kdskills.supply.sources import FetchedArchive, RefusedSkill, SkillCache, SkillSource, fetch_source
from kdskills.turn import build_skills_instruction_block

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.plugins import HookAnswers
    from kdskills.app.publication import PublicSkill
    from kdskills.app.settings import Settings
    from kdskills.errors import Diagnostic
    from kdskills.skills.roots import InvalidSkill
    from kdskills.supply.index import SiteEntry
    from kdskills.supply.verification import TrustJudge
    from kdskills.turn import SkillsSubsystem


class PublishInput(ProjectInput):
    """Whose skills, and where their site is written."""

    bundle: Path | None = Field(None, description="A bundle's folder; none means the skills of a project.")
    out: Path | None = Field(
        None, description="Folder that a web server serves from its root; nothing is written without one."
    )


class PublicSkillRow(Output):
    """A skill that anybody may fetch: its name in the index, what its artifact is and where, beside the index, it lies."""

    name: str
    full_id: str
    kind: str
    url: str
    digest: str


class PublishOut(Output):
    """What is published, by name; each diagnostic is a skill marked as public that is not, or a mark without a skill.

    `ok` means that there is none; `index` is the file that was written.
    """

    YES: ClassVar[str] = "ok"
    ok: bool
    skills: tuple[PublicSkillRow, ...]
    index: str | None
    diagnostics: tuple[Finding, ...]


async def publish(
    bundles: BundleLoader,
    public_skills: Callable[[SkillsSubsystem], tuple[tuple[PublicSkill, ...], tuple[Diagnostic, ...]]],
    arguments: PublishInput,
    context: Context,
) -> PublishOut:
    """Tell what of a bundle or project anybody may fetch, and write it as a site of static files where that is wanted."""
    if arguments.bundle is None:
        skills = await bundles.project_skills(arguments.project_of(context))
    else:
        skills = await bundles.skills(arguments.bundle, context)
    public, notes = await asyncio.to_thread(public_skills, skills.subsystem)
    rows = [PublicSkillRow.of(skill.entry, full_id=skill.full_id) for skill in public]
    index = None
    if arguments.out is not None:
        index = str(await asyncio.to_thread(_write, arguments.out, public, skills.subsystem))
    return PublishOut(ok=not notes, skills=tuple(rows), index=index, diagnostics=tuple(map(Finding.of, notes)))


def _write(out: Path, public: tuple[PublicSkill, ...], subsystem: SkillsSubsystem) -> Path:
    bundle, skills = subsystem.bundle_root, [root.path for root in subsystem.roots if root.listing is None]
    for folder in (out.resolve(), (out / SITE_FOLDER).resolve()):  # either may be a link
        inside = any(folder.is_relative_to(root.resolve()) for root in skills)
        if inside or (bundle is not None and folder == bundle.resolve()):
            words = f"a site in {out} would be among the bundle's own files: name a folder beside them"
            raise BadRequest(words, code="site_in_bundle", path=str(out))
    with telling_path(out, "the site"), telling_full_disk():
        return write_site(out, _artifacts(public))


@contextmanager
def telling_path(path: Path, content: str) -> Iterator[None]:
    """Turn the system's refusal of a path that the caller chose into BadRequest, `path_unwritable`."""
    try:
        yield
    except OSError as error:
        words = f"{content} cannot be written to {path}: {error.strerror}"
        raise BadRequest(words, code="path_unwritable", path=str(path)) from error


def _artifacts(public: tuple[PublicSkill, ...]) -> Iterator[tuple[SiteEntry, BinaryIO]]:
    """Yield the entries and artifacts of a site. Raises Conflict when a skill is no longer what it was."""
    for skill in public:
        artifact = PublicArtifact.make(skill.entry.name, skill.folder)
        with artifact.stream:
            if artifact.entry.url != skill.entry.url:
                raise Conflict(f"{skill.full_id} was changed while it was published: publish again", id=skill.full_id)
            yield skill.entry, artifact.stream


class VerifyInput(Input):
    """What to verify."""

    path: Path = Field(description="A bundle, or a skill's folder.")


class VerifiedRow(Output):
    """How a skill stands to lock and signature: `ok`, `changed`, `unlocked`, `unsigned`, `untrusted_signer` or `bad_signature`.

    `files` are those that differ; `forbidden` tells whether the policy refuses the skill.
    """

    skill: str
    verdict: str
    files: tuple[str, ...]
    signer: str
    reason: str
    forbidden: bool


class VerifyOutput(Output):
    """Every skill by full id; `ok` means that the policy forbids none, and no diagnostic is an error.

    Diagnostics are of the lock and the anchors, where they cannot be read, and of policies for namespaces without a skill.
    """

    YES: ClassVar[str] = "ok"
    ok: bool
    bundle: str
    skills: tuple[VerifiedRow, ...]
    diagnostics: tuple[Finding, ...] = ()


def verify(
    bundles: BundleLoader, skills_judge: Callable[..., TrustJudge], arguments: VerifyInput, context: Context
) -> VerifyOutput:
    """Compare skills with the lock and with their signatures. Raises BundleError, and BadRequest, `path_missing`."""
    path = arguments.path.absolute()
    is_skill = any((path / name).is_file() for name in SKILL_FILES)
    if not path.is_dir():
        raise BadRequest(f"there is no folder {str(arguments.path)!r}", code="path_missing", path=str(arguments.path))
    root = next(filter(_is_bundle, path.parents[:3]), None) if is_skill else path
    bundle = None if root is None else bundles.open(root, context)
    descriptor = SkillsDescriptor() if bundle is None else bundle.descriptor
    judge = skills_judge(descriptor, None if bundle is None else bundle.root, always=True)
    notes = [*judge.failures()]
    if bundle is None:
        skills, missing = [_bare_skill(DEFAULT_NAMESPACE, path.resolve())], []
    else:
        subsystem = bundles.subsystem(bundle)
        notes += descriptor.unused_policies(subsystem.snapshot.namespaces)
        roots = [root for root in subsystem.roots if root.kind == "bundle"]
        snapshot = SkillRegistry(roots, index_dir=None).snapshot()
        skills = [*snapshot.skills.values(), *map(_refused_skill, snapshot.invalid.values())]
        missing = judge.missing({skill.full_id for skill in skills})
        if is_skill:
            skills, missing = [skill for skill in skills if skill.folder == path.resolve()], []
    rows = [VerifiedRow.of(each) for each in (*map(judge.verify, skills), *missing)]
    return VerifyOutput(
        ok=not any(row.forbidden for row in rows) and not any(note.severity == "error" for note in notes),
        bundle="" if bundle is None else bundle.name,
        skills=tuple(sorted(rows, key=lambda row: row.skill)),
        diagnostics=tuple(map(Finding.of, notes)),
    )


def _is_bundle(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*NAMES, LOCK_NAME)) or (folder / "skills").is_dir()


def _refused_skill(skill: InvalidSkill) -> Skill:
    """Return a skill that cannot be read, as far as its files are concerned."""
    namespace, _, name = skill.full_id.partition(".")
    return replace(_bare_skill(namespace, (skill.root.path.resolve() / skill.path).parent), id=name)


def _bare_skill(namespace: str, folder: Path) -> Skill:
    content = LazyContent.of_text("", 0, "")
    return Skill(folder.name, namespace, folder.name, "", content, file=str(folder / SKILL_FILES[0]))


class SignInput(Input):
    """What to sign, and by what."""

    skill: Path = Field(description="The skill's folder.")
    key: Path = Field(description="PEM file with the private key, of P-256, P-384 or P-521.")
    certificate: Path | None = Field(None, description="PEM file with the certificate of that key.")
    chain: tuple[Path, ...] = Field((), description="PEM files of certificates between it and the root.")


class SignOutput(Output):
    """Where the signature is."""

    file: str


def sign(arguments: SignInput) -> SignOutput:
    """Sign a skill's folder. Raises TrustFailed, MissingExtra, and BadRequest, `path_missing` or `path_unwritable`."""
    folder = arguments.skill
    if not any((folder / name).is_file() for name in SKILL_FILES):
        raise BadRequest(f"there is no skill in {str(folder)!r}", code="path_missing", path=str(folder))
    with telling_path(folder, "a signature"):
        file = sign_folder(folder, arguments.key, certificate=arguments.certificate, chain=arguments.chain)
    return SignOutput(file=str(file))


class TrustAddInput(Input):
    """Whom to trust, by a key, a root certificate or an identity."""

    name: str = Field(description="Name that policies call the anchor by.")
    key: Path | None = Field(None, description="PEM file with the public key.")
    certificate: Path | None = Field(None, description="PEM file with the root certificate.")
    identity: str = Field("", description="Identity that Sigstore vouches for, such as an address.")
    issuer: str = Field("", description="Who vouches for the identity, such as `https://accounts.example.net`.")


class TrustRemoveInput(Input):
    """Whom to trust no longer."""

    name: str = Field(description="Name of the anchor.")


class TrustListInput(Input):
    """Nothing is asked."""


class AnchorRow(Output):
    """Somebody who is trusted: a `key`, a `certificate` or an `identity`, and how it is known elsewhere.

    `fingerprint` is SHA-256 in hex: of a key as signatures name it, of a certificate over its DER.
    """

    name: str
    kind: str
    fingerprint: str
    identity: str
    issuer: str


class AnchorsOutput(Output):
    """The anchors by name; `file` is where they are."""

    anchors: tuple[AnchorRow, ...]
    file: str


def add_anchor(settings: Settings, arguments: TrustAddInput) -> AnchorRow:
    """Trust somebody. Raises TrustFailed, MissingExtra."""
    anchor: TrustAnchor = make_anchor(**dict(arguments))
    TrustAnchors(settings.state_dir).add(anchor)
    return AnchorRow.of(anchor)


def list_anchors(settings: Settings, arguments: TrustListInput) -> AnchorsOutput:
    """Tell who is trusted. Raises TrustFailed."""
    anchors = TrustAnchors(settings.state_dir)
    return AnchorsOutput(anchors=tuple(map(AnchorRow.of, anchors.read())), file=str(anchors.path))


def remove_anchor(settings: Settings, arguments: TrustRemoveInput) -> AnchorRow:
    """Trust somebody no longer. Raises TrustFailed."""
    return AnchorRow.of(TrustAnchors(settings.state_dir).remove(arguments.name))


class AuditInput(Input):
    """What to audit, and whose review holds."""

    path: Path = Field(description="A bundle, a folder of skills, a skill's folder, or an archive.")
    review: Path | None = Field(
        None, description="Folder of the kdskills.audit.toml that holds; none means the bundle's own, for a bundle."
    )
    sarif: Path | None = Field(None, description="File to write the findings to, as SARIF 2.1.0.")
    fail_on: Literal["low", "medium", "high"] = Field("high", description="The least severity that fails.")


class AuditRow(Output):
    """One finding: `line` is 0 for a file as a whole; `accepted` is a reviewer's reason to let it be."""

    rule: str
    severity: str
    path: str
    line: int
    excerpt: str
    why: str
    cure: str
    accepted: str | None = None


class AuditedSkill(Output):
    """One skill, the digest of its tree, what was read of it, and its findings, the worst first.

    `below` is what stands before their paths in what was audited: its folder with a slash, or nothing.
    """

    skill: str
    below: str
    digest: str
    files: int
    size: int
    findings: tuple[AuditRow, ...]


class AuditOutput(Output):
    """Skills by name; counts leave out what a reviewer accepted. `ok` means that nothing is as bad as was asked."""

    YES: ClassVar[str] = "ok"
    ok: bool
    path: str
    skills: tuple[AuditedSkill, ...]
    high: int
    medium: int
    low: int
    info: int
    accepted: int


@contextmanager
def _audited_folders(path: Path) -> Iterator[dict[str, tuple[str, Path]]]:
    """Give skills by name: where they lie below *path*, and their folders; an archive is unpacked for the time being."""
    if not os.path.lexists(path):
        raise BadRequest(f"{path} is not there", code="path_missing", path=str(path))
    if not is_folder(path) and path.name not in SKILL_FILES:
        with tempfile.TemporaryDirectory(prefix="kdskills-audit-") as scratch:
            location = str(path.absolute())
            fetched = fetch_source(SkillSource("archive", location, "", "", location), Path(scratch))
            for refused in fetched.refused:  # it would be looked at in part
                raise ArchiveRefused(refused.code, refused.message, entry=refused.path)
            yield {each.unpacked.name: (f"{each.unpacked.name}/", each.unpacked.folder) for each in fetched.skills}
        return
    top = path if is_folder(path) else path.parent
    itself = {printable_path(top.resolve().name): ("", top)}
    if any(os.path.lexists(top / name) for name in SKILL_FILES):
        yield itself
        return
    root = top / "skills" if is_folder(top / "skills") else top
    skills = {}
    for folder in skill_folders(top, itself=False):
        inside = folder.relative_to(root if folder.is_relative_to(root) else top)
        name = f"public/{inside}" if len(inside.parts) == 1 and root != top else inside.as_posix()
        skills[printable_path(name)] = (f"{printable_path(folder.relative_to(top).as_posix())}/", folder)
    yield skills or itself  # whatever it is, it is looked at


def _brings_review(path: Path) -> bool:
    """Whether *path* is a bundle, whose reviewer's file holds; that of a skill never does."""
    return _is_bundle(path) and not any(os.path.lexists(path / name) for name in SKILL_FILES)


def audit(arguments: AuditInput, context: Context) -> AuditOutput:
    """Look for what is wrong with skills, without running anything of them."""
    review = arguments.review or (arguments.path if _brings_review(arguments.path) else None)
    accepted = () if review is None else read_review(review)
    reports: dict[str, AuditReport] = {}
    with _audited_folders(arguments.path) as skills:
        for name, (below, folder) in sorted(skills.items()):
            reports[below] = audit_folder(folder, skill=name, accepted=accepted)
    if arguments.sarif is not None:
        text = json.dumps(sarif(reports), indent=2, ensure_ascii=False) + "\n"
        with telling_path(arguments.sarif, "the findings"):
            arguments.sarif.write_text(text, encoding="utf-8")
    counts = {severity: sum(len(report.of(severity)) for report in reports.values()) for severity in RANKS}
    findings = sum(len(report.findings) for report in reports.values())
    return AuditOutput.of(
        ok=not sum(counts[severity] for severity in RANKS if RANKS[severity] >= RANKS[arguments.fail_on]),
        path=printable_path(str(arguments.path)),
        skills=tuple(AuditedSkill.of(report, below=below) for below, report in reports.items()),
        **counts,
        accepted=findings - sum(counts.values()),
    )


class SuppliedInput(Input):
    """Which bundle."""

    bundle: Path = Field(description="The bundle's folder.")


class ChangeInput(SuppliedInput):
    """What may happen to the bundle."""

    accept_change: bool = Field(
        default=False,
        description="Take a moved tag, a rewritten branch or other bytes than were locked, and lose edits here.",
    )
    yes: bool = Field(default=False, description="Change the bundle; without it the answer tells what would come.")
    agreed: tuple[str, ...] = Field(
        (), description="The `agreement` of each skill that was looked at: these come, and no others."
    )


class AddInput(ChangeInput):
    """What to add, and where to."""

    source: str = Field(
        description="Folder, archive, git repository, site or MCP server: see the page on the lock file."
    )
    into: str = Field("public", description="Namespace that the skills get.")
    skill: tuple[str, ...] = Field((), description="Only skills of this name.")
    ref: str = Field("", description="Branch, tag or commit of a repository, as `@ref` behind SOURCE.")
    pin: bool = Field(
        default=False, description="Fix what came: `update` leaves it alone, and a folder is locked, too."
    )


class UpdateInput(ChangeInput):
    """Which skills to bring up to date."""

    names: tuple[str, ...] = Field(
        (), description="Skills as `namespace/name` or by their name; all when none is given."
    )
    check: bool = Field(default=False, description="Change nothing; say whether anything is newer.")


class RemoveInput(SuppliedInput):
    """Which skills go."""

    names: tuple[str, ...] = Field(min_length=1, description="Skills as `namespace/name`, or by their name.")
    accept_change: bool = Field(default=False, description="Lose edits here.")


class SyncInput(SuppliedInput):
    """How strictly the lock is followed."""

    frozen: bool = Field(default=False, description="Refuse whatever the lock does not fix, and never change it.")
    accept_change: bool = Field(
        default=False, description="Lock what a source has now where it has no longer what was locked."
    )


class LockedSkillsInput(SuppliedInput):
    """Whose sources."""


class SupplyEvent(Output):
    """What is done now: `fetch`, `git` or `look`, with what, how much of it, and how much there is, 0 where unknown."""

    kind: str
    subject: str
    done: int
    total: int


class SuppliedRow(Output):
    """One skill. `state` says what would become, or became, of it, or how it stands.

    It is `new`, `changed`, `same`, `removed`, `restored`, `pinned`, `refused`, `ok`, `missing` or `unlocked`; what is refused
    has `code` and `reason`. `files` are those that differ from the lock; `diff` is of files, `prompt_diff` of what a model reads.
    """

    key: str
    state: str
    source: str = ""
    resolved: str = ""
    digest: str = ""
    tokens: int = 0
    size: int = 0
    files: tuple[str, ...] = ()
    diff: str = ""
    prompt_diff: str = ""
    agreement: str = ""
    code: str = ""
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    signature: str = ""


class SupplyOutput(Output):
    """Skills by key; `ok` means that nothing was refused, or, where something was only looked at, that nothing is newer.

    `changed` tells whether the bundle was changed.
    """

    YES: ClassVar[str] = "ok"
    ok: bool
    skills: tuple[SuppliedRow, ...]
    changed: bool = False
    diagnostics: tuple[Finding, ...] = ()


def add(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: AddInput, context: Context
) -> SupplyOutput:
    """Fetch skills, tell what came, and put them into the bundle where that is agreed to. Nothing of them runs."""
    report = _supply(bundles, settings, answers, arguments, context).added(
        arguments.source,
        base=Path.cwd(),
        ref=arguments.ref,
        into=arguments.into,
        names=arguments.skill,
        agreed=arguments.agreed,
        pin=arguments.pin,
        yes=arguments.yes,
    )
    return SupplyOutput.of(report)


def update(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: UpdateInput, context: Context
) -> SupplyOutput:
    """Fetch locked skills anew, tell what is different, and replace them where that is agreed to."""
    supply = _supply(bundles, settings, answers, arguments, context)
    report = supply.updated(arguments.names, arguments.agreed, yes=arguments.yes and not arguments.check)
    newer = arguments.check and any(row.state == "changed" for row in report.skills)
    return SupplyOutput.of(report, ok=report.ok and not newer)


def outdated(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: LockedSkillsInput, context: Context
) -> SupplyOutput:
    """Tell which locked skills are different at their sources now, pinned ones too; nothing changes."""
    report = _supply(bundles, settings, answers, arguments, context).updated((), (), yes=False, pinned=True)
    rows = tuple(replace(row, diff="", prompt_diff="") for row in report.skills if row.state != "same")
    return SupplyOutput.of(report, ok=not rows, skills=rows)


def remove(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: RemoveInput, context: Context
) -> SupplyOutput:
    """Remove skills from the bundle and its lock; what the bundle has of its own is not touched."""
    return SupplyOutput.of(_supply(bundles, settings, answers, arguments, context).removed(arguments.names))


def sync(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: SyncInput, context: Context
) -> SupplyOutput:
    """Make the bundle's skills those of its lock, from the cache where it has them."""
    return SupplyOutput.of(_supply(bundles, settings, answers, arguments, context).synced(frozen=arguments.frozen))


def _supply(
    bundles: BundleLoader, settings: Settings, answers: HookAnswers, arguments: SuppliedInput, context: Context
) -> SkillSupply:
    bundle = bundles.open(arguments.bundle, context)
    skills = bundle.descriptor.resolve_root(bundle.root)
    if skills is None and not bundle.descriptor.root_omitted:
        raise BadRequest(f"the bundle {bundle.name} has no folder of skills, as its descriptor says", code="no_bundle")

    def tell(kind: str, subject: str, done: int, total: int) -> None:
        if context.emit is not None:
            context.emit(SupplyEvent(kind=kind, subject=subject, done=done, total=total))

    def prompt(key: str, tree: Path) -> str:
        with tempfile.TemporaryDirectory(prefix="kdskills-") as name:
            shutil.copytree(tree, Path(name, "skills", key), copy_function=shutil.copyfile, symlinks=True)
            subsystem = bundles.subsystem(bundles.load(Path(name), python="read"))
            with subsystem.activate(None):
                return str(build_skills_instruction_block((key.replace("/", "."),), by="code"))

    return SkillSupply(
        SuppliedBundle(bundle.root, skills or bundle.root / "skills"),
        SkillCache(settings.environment_cache_dir),
        tell=tell,
        mcp=partial(_fetch_mcp, answers, settings),
        prompt=prompt,
        policy=lambda namespace: settings.trust.policy.stricter(bundle.descriptor.guarded_policy(namespace, skills)),
        anchors=TrustAnchors(settings.state_dir).read(),
        accepts=getattr(arguments, "accept_change", False),
    )


def _fetch_mcp(
    answers: HookAnswers, settings: Settings, uri: str, folder: Path, names: Sequence[str]
) -> tuple[list[FetchedArchive], list[RefusedSkill]]:
    """Fetch skills of an MCP server; as locks may be anybody's, a label gives its token to servers of the settings alone."""
    if uri not in settings.skill_roots:
        uri = f"{uri.partition('#')[0]}#source-{sha256(uri.encode()).hexdigest()[:16]}"
    root = answers.open_skill_root(uri, folder / "root")
    if root is None:
        raise BadRequest(f"no plugin opens the skill root {uri!r:.300}", code="skill_root_unknown")
    snapshot = SkillRegistry([root], index_dir=None).snapshot()
    refused, archives = [], []
    for note in snapshot.diagnostics:
        if note.code == "mcp_unreachable":
            raise SourceFailed(note.message, code="source_unreachable")
        refused.append(
            RefusedSkill(printable_path(str(note.ref)[:300]), note.code, printable_path(note.message[:1000]))
        )
    for number, skill in enumerate(snapshot.skills.values()):
        content = far_content(skill)
        path = folder / f"{number}.zip"
        if content is None or (names and skill.name not in names):
            continue
        try:
            with content.materialized() as tree, path.open("xb") as out:
                write_archive(tree, out, name=skill.name)
        except (FileRefused, ArchiveRefused) as error:
            refused.append(RefusedSkill(skill.name, error.code, error.message))
        else:
            archives.append(FetchedArchive(path, skill.tree_digest(), promised=skill.name))
    return archives, refused
