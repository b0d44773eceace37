"""Skills of a bundle change in transactions: added, replaced and removed whole, together with what the lock says of them.

Everything is written and on the disk before a journal says that it counts; from then on only names change, and whoever comes
next finishes what a killed process began. A folder comes before its entry in the lock, and an entry goes before its folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from kdskills import __version__
from kdskills.bundle.descriptor import TrustPolicy
from kdskills.bundle.lock_file import LOCK_MODE, LOCK_NAME, lock_of
from kdskills.errors import CallerMustAct, Diagnostic, FileRefused, KdskillsError, MissingExtra
from kdskills.execution.dirs import bring_to_disk, locked, swap
from kdskills.skills.archives import UnpackedSkill
from kdskills.skills.fields import name_problem
from kdskills.skills.findings import FileFindings
from kdskills.skills.folder import SKILL_FILES
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, read_frontmatter
from kdskills.skills.private_files import remove_tree, replace_file
from kdskills.skills.safe_open import file_digest, read_file, tree_digest_of, walk_tree
from kdskills.skills.yaml_core import to_python
from kdskills.supply.audit import AuditRefused, audit_folder, read_review
from kdskills.supply.fetching import Tell
from kdskills.supply.lock import LockedSkill, compare_folder, read_skills, skill_key, skills_text
from kdskills.supply.signatures import SignatureVerdict, TrustAnchor, signature_of
from kdskills.supply.sources import (
    FetchedSkill,
    FetchedSource,
    FetchMcp,
    RefusedSkill,
    SkillCache,
    SkillSource,
    fetch_source,
    locked_text,
    moved_reason,
    parse_source,
    same_source,
)

WORK: Final = ".kdskills"
"""Folder beside the namespaces in which a transaction is prepared; discovery does not enter it."""
NEW_LOCK: Final = f".{LOCK_NAME}.new"
JOURNAL: Final = "journal.json"
MAX_JOURNAL: Final = 4 * 1024 * 1024
FILE_MODE: Final = 0o644
PROGRAM_MODE: Final = 0o755
MAX_DIFF: Final = 64 * 1024
MAX_TEXT: Final = 256 * 1024

SUPPLY_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "audit_refused": "The policy is `audit: block-high`, and the audit has a finding of severity `high`.",
        "bundle_unwritable": "The system refuses to write in the bundle's folder; the bundle is as it was.",
        "confirmation_missing": "Nobody is at a terminal to be asked: look at what comes with `--json`, then say `--yes`.",
        "lock_frozen": "`sync --frozen` would have to change the lock, or take what it does not fix.",
        "lock_invalid": "`kdskills.lock` cannot be read, or an entry of it is not one.",
        "signature_invalid": "The policy asks for a signature, and there is none, or none that holds.",
        "signer_untrusted": "The policy asks for a signature, and it is by nobody it may be by: see `kdskills trust add`.",
        "skill_ambiguous": "Two folders of the source have a skill of that name: say which as `SOURCE#folder`.",
        "skill_edited": "The skill's files here are not those of the lock, and would be lost: `--accept-change` says they may.",
        "skill_not_locked": "The lock has no such skill.",
        "skill_renamed": "The skill calls itself by another namespace or id than the lock would.",
        "skill_taken": "The bundle has a skill of that name, of its own or from another source.",
        "source_changed": "A tag moved, a branch was rewritten, or a URL has other bytes than were locked: `--accept-change` takes them.",
        "source_empty": "The source has no skill that can be taken, or not the one, branch, tag or folder that was named.",
        "source_invalid": "The text names no source, or one of a kind that is not read.",
        "source_too_large": "The source has more bytes or files than are taken.",
        "source_unreachable": "The source does not answer, answers with an error, leads where it may not, or is too slow.",
        "supply_no_space": "The disk is full; the bundle is as it was.",
    }
)
"""What can go wrong with skills from elsewhere; archives and sites have codes of their own."""


class SupplyRefused(CallerMustAct, code="skill_taken"):
    """A bundle's skills stay as they are; codes are in `docs/reference/lock-file.md`."""


@dataclass(frozen=True, slots=True)
class SuppliedBundle:
    """A bundle whose skills come from elsewhere: its folder, and that of its skills, which has one folder a namespace."""

    root: Path
    skills: Path

    @property
    def lock(self) -> Path:
        """The lock file."""
        return lock_of(self.root)

    def folder(self, key: str) -> Path:
        """Return the folder of a skill by its key in the lock."""
        return self.skills / key


@dataclass(frozen=True, slots=True)
class SkillArrival:
    """A skill that would be added or replaced.

    Attributes:
        key: Its name in the lock.
        state: `new`, `changed`, or `same` when the folder has these very files already.
        folder: Its files in scratch.
        entry: What the lock will say.
        former: What the lock says now.
        findings: Of the audit.
        signature: What its signature says, in words.
    """

    key: str
    state: Literal["new", "changed", "same"]
    folder: Path
    entry: LockedSkill
    former: LockedSkill | None = None
    findings: tuple[Diagnostic, ...] = ()
    signature: str = ""


def check_namespace(namespace: str) -> None:
    """Refuse what is no name of a folder of skills. Raises SupplyRefused, `source_invalid`."""
    problem = name_problem(namespace)
    if problem is not None:
        raise SupplyRefused(f"{namespace!r:.100} is no namespace: {problem}", code="source_invalid")


def arrival_of(
    fetched: FetchedSkill, bundle: SuppliedBundle, source: SkillSource, text: str, namespace: str, *, pin: bool
) -> SkillArrival | RefusedSkill:
    """Return what adding a fetched skill comes to, or why it cannot be added; *text* is what the lock says of its source."""
    unpacked = fetched.unpacked
    key = skill_key(namespace, unpacked.name)
    former = read_skills(bundle.lock).get(key)
    problem = _renamed(unpacked, namespace)
    if problem is not None:
        return RefusedSkill(key, "skill_renamed", problem)
    if former is None and os.path.lexists(bundle.folder(key)):
        return RefusedSkill(key, "skill_taken", f"the bundle has a skill {key} of its own")
    if former is not None and not same_source(former.source, source, bundle.root):
        return RefusedSkill(key, "skill_taken", f"{key} comes from {former.source}; remove it first")
    fixed = pin or source.kind != "folder" or (former is not None and bool(former.files))
    files = unpacked.files if fixed else ()
    entry = LockedSkill(
        text,
        fetched.resolved,
        tree_digest_of(files) if files else "",
        files,
        added_with=f"kdskills {__version__}",
        pinned=pin,
    )
    present = compare_folder(bundle.folder(key), replace(entry, files=unpacked.files)).standing
    if former is not None and present == "ok":
        is_same = replace(entry, added_with=former.added_with, signer=former.signer) == former
        return SkillArrival(key, "same", unpacked.folder, former if is_same else entry, former)
    return SkillArrival(key, "new" if former is None else "changed", unpacked.folder, entry, former)


def _renamed(unpacked: UnpackedSkill, namespace: str) -> str | None:
    """Return why a skill would not be found under the name that the lock has for it."""
    name = next(name for name in SKILL_FILES if (unpacked.folder / name).is_file())
    data = read_file(unpacked.folder, name, limit=MAX_SKILL_BYTES).data
    header = read_frontmatter(data, FileFindings("lenient", name))
    fields = {} if header is None else to_python(header.fields)
    namespace_field = fields.get("namespace") if isinstance(fields, dict) else None
    if namespace_field not in {None, "", namespace} or unpacked.skill.namespace not in {"public", namespace}:
        return f"it says that its namespace is {unpacked.skill.namespace!r:.100}, not {namespace}"
    if unpacked.skill.id != unpacked.name:
        return f"it says that its id is {unpacked.skill.id!r:.100}, and its name is {unpacked.name}"
    return None


def edited_files(folder: Path, former: LockedSkill) -> tuple[str, ...]:
    """Return files that somebody changed here since they were locked, and that would be lost; none where none are locked."""
    comparison = compare_folder(folder, former)
    return comparison.files if comparison.standing == "changed" else ()


class SkillChange:
    """One transaction; `entries` is what the lock will say, and may be changed until `commit`."""

    def __init__(self, bundle: SuppliedBundle) -> None:
        self._bundle, self._work = bundle, bundle.skills / WORK
        self.entries = read_skills(bundle.lock)
        self._inodes: dict[str, int] = {}
        self._removed: list[str] = []

    def put_skill(self, key: str, folder: Path, entry: LockedSkill) -> None:
        """Let the skill be these files. Raises OSError when they cannot be written."""
        staged = self._work / "new" / key
        for file in walk_tree(folder):
            target = staged / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file.path, target)
            target.chmod(PROGRAM_MODE if file.mode & 0o100 else FILE_MODE)
        self._inodes[key] = staged.stat().st_ino
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        """Let the skill, and what the lock says of it, be gone."""
        self.entries.pop(key, None)
        self._removed.append(key)

    def commit(self) -> None:
        """Bring everything to the disk, then change the names. Raises OSError, and nothing has changed then."""
        bundle = self._bundle
        for key in self._inodes:
            parent = bundle.folder(key).parent
            if parent.is_symlink():
                raise SupplyRefused(f"{parent} is a link", code="source_invalid")
            parent.mkdir(exist_ok=True)
        text = skills_text(bundle.lock, self.entries)
        (bundle.root / NEW_LOCK).unlink(missing_ok=True)
        with (bundle.root / NEW_LOCK).open("xb") as out:
            os.fchmod(out.fileno(), LOCK_MODE)
            out.write(text.encode())
            out.flush()
            os.fsync(out.fileno())
        bring_to_disk(self._work)
        journal = {"put": self._inodes, "remove": self._removed}
        replace_file(self._work / JOURNAL, json.dumps(journal).encode(), durable=True)
        bring_to_disk(self._work)
        _finish(bundle, journal)


@contextmanager
def changing(bundle: SuppliedBundle) -> Iterator[SkillChange]:
    """Hold the bundle, finish what a killed process began, and give a transaction to fill and commit.

    Raises SupplyRefused, `supply_no_space` or `bundle_unwritable`, LockFileInvalid, and ExecRefused without locks on files.
    """
    with locked(bundle.root):
        recover(bundle)
        work = bundle.skills / WORK
        try:
            work.mkdir(parents=True)
            yield SkillChange(bundle)
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
            code = "supply_no_space" if full else "bundle_unwritable"
            message = f"the bundle {bundle.root} cannot be changed, and is as it was: {error.strerror}"
            raise SupplyRefused(message, code=code, who="operator") from None
        finally:
            with suppress(OSError):  # what is left then is finished, or taken back, by whoever comes next
                recover(bundle)


def recovered(bundle: SuppliedBundle) -> dict[str, LockedSkill]:
    """Return the skills of the lock, after finishing what a killed process began. Raises as `changing`."""
    with locked(bundle.root):
        recover(bundle)
        return read_skills(bundle.lock)


def recover(bundle: SuppliedBundle) -> None:
    """Finish a transaction that counts, and clean up after one that does not; the bundle is held by the caller."""
    work = bundle.skills / WORK
    if work.is_symlink() or work.is_file():
        work.unlink()
    if not work.is_dir():
        return
    journal: Any = None
    with suppress(FileRefused, ValueError, RecursionError):
        journal = json.loads(read_file(work, JOURNAL, limit=MAX_JOURNAL).data)
    if isinstance(journal, dict) and _is_sound(journal):
        _finish(bundle, journal)
    else:
        _clean_up(bundle)


def _is_sound(journal: dict[str, Any]) -> bool:
    """Whether a journal could be ours: one that came with a bundle must lead nowhere else."""
    added_keys, removed = journal.get("put"), journal.get("remove")
    if not isinstance(added_keys, dict) or not isinstance(removed, list):
        return False
    keys = [*added_keys, *removed]
    plain = all(isinstance(key, str) and key.count("/") == 1 for key in keys)
    return plain and not any(name_problem(part) for key in keys for part in key.split("/"))


def _finish(bundle: SuppliedBundle, journal: Mapping[str, Any]) -> None:
    """Change the names as a journal says, however many of them are changed already."""
    work = bundle.skills / WORK
    for key, inode in journal["put"].items():
        staged, final = work / "new" / key, bundle.folder(key)
        linked = any(folder.is_symlink() for folder in (final.parent, staged.parent, staged.parent.parent))
        if linked or not os.path.lexists(staged):
            continue
        if not os.path.lexists(final):
            final.parent.mkdir(exist_ok=True)
            staged.rename(final)
        elif final.lstat().st_ino != inode:
            swap(staged, final)
    if (bundle.root / NEW_LOCK).is_file():
        (bundle.root / NEW_LOCK).replace(bundle.lock)
    for number, key in enumerate(journal["remove"]):
        folder = bundle.folder(key)
        if os.path.lexists(folder) and not folder.parent.is_symlink():
            folder.rename(work / f"old-{number}")
            with suppress(OSError):  # others are in it
                folder.parent.rmdir()
    bring_to_disk(bundle.skills)
    (work / JOURNAL).unlink(missing_ok=True)
    _clean_up(bundle)


def _clean_up(bundle: SuppliedBundle) -> None:
    (bundle.root / NEW_LOCK).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        remove_tree(bundle.skills / WORK)


def chosen_keys(entries: Mapping[str, LockedSkill], names: Sequence[str]) -> list[str]:
    """Return the keys that *names* say, all for none. Raises SupplyRefused, `skill_not_locked`."""
    keys: dict[str, None] = {} if names else dict.fromkeys(entries)
    for name in names:
        matches = [key for key in entries if name in {key, key.partition("/")[2]}]
        if len(matches) != 1:
            words = f"{name!r} is {', '.join(matches)}" if matches else f"the lock has no skill {name!r:.100}"
            raise SupplyRefused(words, code="skill_not_locked")
        keys[matches[0]] = None
    return list(keys)


@dataclass(frozen=True, slots=True)
class SkillReport:
    """What would become, or became, of one skill, or how it stands.

    Attributes:
        state: `new`, `changed`, `same`, `removed`, `restored`, `pinned`, `refused`, `ok`, `missing` or `unlocked`.
        files: Those that came, or that differ from the lock.
        diff: What is different in the files of a changed skill.
        prompt_diff: What is different in what a model reads of it.
        agreement: What a caller gives back who agrees to it.
        code: Why it is refused; `reason` says it in words.
        findings: Of the skill's files, and of the audit.
        signature: What its signature says, in words.
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
    findings: tuple[Diagnostic, ...] = ()
    signature: str = ""


@dataclass(frozen=True, slots=True)
class SupplyReport:
    """What one call came to, skills sorted by key; `changed` tells whether the bundle was changed."""

    skills: tuple[SkillReport, ...]
    changed: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        refused = any(each.state == "refused" for each in self.skills)
        return not refused and not any(note.severity == "error" for note in self.diagnostics)


class SkillSupply:
    """What may be done with the skills of one bundle that come from elsewhere.

    Args:
        bundle: The bundle.
        cache: Where skills are that were fetched before.
        tell: Told the progress.
        mcp: Fetches the skills of an MCP server.
        prompt: Renders what a model reads of the skill with this key in this folder.
        policy: What is asked of skills of a namespace; an audit that it blocks, or a signature that it lacks, refuses them.
        anchors: Who may sign.
        accepts: Whether moved tags, rewritten branches, other bytes and the loss of edits are agreed to.
    """

    def __init__(
        self,
        bundle: SuppliedBundle,
        cache: SkillCache,
        *,
        tell: Tell,
        mcp: FetchMcp,
        prompt: Callable[[str, Path], str],
        policy: Callable[[str], TrustPolicy] = lambda _: TrustPolicy(),
        anchors: Sequence[TrustAnchor] = (),
        accepts: bool = False,
    ) -> None:
        self._bundle, self._cache, self._tell, self._mcp = bundle, cache, tell, mcp
        self._prompt, self._accepts = prompt, accepts
        self._policy, self._anchors = policy, anchors

    def added(
        self,
        text: str,
        *,
        base: Path,
        ref: str = "",
        into: str = "public",
        names: Sequence[str] = (),
        agreed: Sequence[str] = (),
        pin: bool = False,
        yes: bool = False,
    ) -> SupplyReport:
        """Fetch what the source *text* has, and put it into the bundle on a *yes*. Raises as `fetch_source` and `changing`."""
        check_namespace(into)
        source = parse_source(text, base=base, ref=ref)
        lock_text = locked_text(source, self._bundle.root)
        with self._fetched(source, names, agreed) as fetched:
            rows = [self._arrival(each, source, lock_text, into, pin=pin) for each in fetched.skills]
            return self._landed([*rows, *fetched.refused], fetched, yes=yes)

    def removed(self, names: Sequence[str]) -> SupplyReport:
        """Remove skills and their entries. Raises SupplyRefused, `skill_not_locked`, `skill_edited`, and as `changing`."""
        with changing(self._bundle) as change:
            keys = chosen_keys(change.entries, names)
            rows = tuple(_report(key, change.entries[key], "removed") for key in keys)
            for key in keys:
                edited = edited_files(self._bundle.folder(key), change.entries[key])
                if edited and not self._accepts:
                    raise SupplyRefused(f"somebody changed {', '.join(edited[:5])} of {key}", code="skill_edited")
                change.remove(key)
            change.commit()
        return SupplyReport(rows, changed=True)

    @contextmanager
    def _fetched(
        self, source: SkillSource, names: Sequence[str] = (), agreed: Sequence[str] = (), resolved: str = ""
    ) -> Iterator[FetchedSource]:
        """Give what a source has, in scratch; what was *agreed* to comes from the cache where it has all of it."""
        with tempfile.TemporaryDirectory(prefix="kdskills-", ignore_cleanup_errors=True) as folder:
            scratch = Path(folder)
            skills = self._agreed(agreed, scratch)
            if skills is None:
                fetched = fetch_source(source, scratch, names=names, resolved=resolved, tell=self._tell, mcp=self._mcp)
                chosen = [each for each in fetched.skills if not agreed or _agreement(each) in agreed]
                if agreed and len(chosen) < len(agreed):
                    raise SupplyRefused(f"{source.text} has no longer what was looked at", code="source_changed")
                for each in chosen:
                    self._cache.store(each.unpacked.folder, each.unpacked.version)
                skills, refused, diagnostics = tuple(chosen), fetched.refused, fetched.diagnostics
                yield FetchedSource(skills, () if agreed else refused, diagnostics)
            else:
                yield FetchedSource(skills)

    def _agreed(self, agreed: Sequence[str], scratch: Path) -> tuple[FetchedSkill, ...] | None:
        skills = []
        for number, text in enumerate(agreed):
            _, version, resolved = (*text.split(" "), "", "")[:3]
            unpacked = self._cache.unpacked(version, scratch / f"agreed-{number}")
            if unpacked is None:
                return None
            skills.append(FetchedSkill(unpacked, resolved))
        return tuple(skills) if skills else None

    def _arrival(
        self, fetched: FetchedSkill, source: SkillSource, text: str, namespace: str, *, pin: bool
    ) -> SkillArrival | RefusedSkill:
        """Return what a fetched skill comes to; one that the policy forbids, whose source moved, or that was edited is refused."""
        arrival = arrival_of(fetched, self._bundle, source, text, namespace, pin=pin)
        if isinstance(arrival, SkillArrival) and arrival.state != "same":
            arrival = self._judged(arrival, namespace)
        if not isinstance(arrival, SkillArrival) or arrival.state != "changed" or self._accepts:
            return arrival
        former = arrival.former
        if former is not None:
            reason = moved_reason(
                source, parse_source(former.source, base=self._bundle.root), former.resolved, fetched.resolved
            )
            if reason:
                return RefusedSkill(arrival.key, "source_changed", reason)
        edited = former and edited_files(self._bundle.folder(arrival.key), former)
        if edited:
            return RefusedSkill(arrival.key, "skill_edited", f"somebody changed {', '.join(edited[:5])} here")
        return arrival

    def _judged(self, arrival: SkillArrival, namespace: str) -> SkillArrival | RefusedSkill:
        """Audit a skill and look at its signature; the lock gets the signer of a good one."""
        policy = self._policy(namespace)
        name = arrival.key.partition("/")[2]
        report = audit_folder(arrival.folder, skill=name, accepted=read_review(self._bundle.root))
        try:
            report.require(policy.audit)
            verdict = signature_of(arrival.folder, self._anchors)
        except AuditRefused as error:
            return RefusedSkill(arrival.key, error.code, error.message)
        except MissingExtra as error:
            verdict = SignatureVerdict("unreadable", reason=error.message)
        good = verdict.kind == "ok" and (policy.signers == () or verdict.signer in (policy.signers or ()))
        if policy.signatures == "require" and not good:
            code = "signer_untrusted" if verdict.kind in {"ok", "untrusted_signer"} else "signature_invalid"
            return RefusedSkill(arrival.key, code, f"signatures are required: {verdict.reason or verdict.signer}")
        words = f"signed by {verdict.signer}" if verdict.kind == "ok" else f"{verdict.kind}: {verdict.reason}"
        entry = replace(arrival.entry, signer=verdict.signer if good else "")
        findings = tuple(each.diagnostic(policy.audit) for each in report.findings if each.accepted is None)
        return replace(arrival, entry=entry, findings=findings, signature=words)

    def _landed(
        self, arrivals: Sequence[SkillArrival | RefusedSkill], fetched: FetchedSource, *, yes: bool
    ) -> SupplyReport:
        """Put what arrived into the bundle, where that is agreed to, and tell of it."""
        versions = {each.unpacked.folder: each for each in fetched.skills}
        rows = [
            _refused_row(each) if isinstance(each, RefusedSkill) else self._row(each, versions[each.folder])
            for each in arrivals
        ]
        landing = [
            each
            for each in arrivals
            if isinstance(each, SkillArrival) and (each.state != "same" or each.entry != each.former)
        ]
        if yes and landing:
            self._install(landing)
        rows.sort(key=lambda row: row.key)
        return SupplyReport(tuple(rows), yes and bool(landing), fetched.diagnostics)

    def _install(self, arrivals: Sequence[SkillArrival]) -> None:
        with changing(self._bundle) as change:
            for arrival in arrivals:
                if change.entries.get(arrival.key) != arrival.former:
                    message = f"another program changed {arrival.key} meanwhile: look again"
                    raise SupplyRefused(message, code="skill_taken")
                if arrival.former is None and self._bundle.folder(arrival.key).exists():
                    raise SupplyRefused(f"the bundle has a skill {arrival.key} of its own", code="skill_taken")
                if arrival.state == "same":
                    change.entries[arrival.key] = arrival.entry
                else:
                    change.put_skill(arrival.key, arrival.folder, arrival.entry)
            change.commit()

    def _row(self, arrival: SkillArrival, fetched: FetchedSkill) -> SkillReport:
        unpacked, former = fetched.unpacked, self._bundle.folder(arrival.key)
        report = _report(
            arrival.key,
            arrival.entry,
            arrival.state,
            tokens=unpacked.skill.tokens,
            size=sum(file.size for file in unpacked.files),
            files=tuple(file.path for file in unpacked.files),
            agreement=_agreement(fetched),
            findings=(*unpacked.diagnostics, *arrival.findings),
            signature=arrival.signature,
        )
        if arrival.state != "changed" or not former.is_dir():
            return report
        before, after = (self._prompt(arrival.key, tree) for tree in (former, unpacked.folder))
        return replace(report, diff=_diff(former, unpacked.folder), prompt_diff=_text_diff(before, after, "prompt"))

    def updated(self, names: Sequence[str], agreed: Sequence[str], *, yes: bool, pinned: bool = False) -> SupplyReport:
        """Fetch what the lock has from its sources, and put what is different into the bundle where that is agreed to."""
        entries = recovered(self._bundle)
        chosen = chosen_keys(entries, names)
        rows: list[SkillReport] = []
        diagnostics: list[Diagnostic] = []
        changed = False
        sources: dict[tuple[str, str], dict[str, str]] = {}
        for key in chosen:
            namespace, _, name = key.partition("/")
            if entries[key].pinned and not pinned:
                rows.append(_report(key, entries[key], "pinned"))
            else:
                sources.setdefault((entries[key].source, namespace), {})[name] = key
        waiting = list(sources.items())
        for (text, namespace), by_name in waiting:
            agreed_here = list(dict.fromkeys(each for each in agreed if each.split(" ")[0] in by_name))
            if agreed and not agreed_here:
                continue
            wanted = [each.split(" ")[0] for each in agreed_here] or list(by_name)
            try:
                source = parse_source(text, base=self._bundle.root)
                with self._fetched(source, wanted, agreed_here) as fetched:
                    arrivals = [
                        self._arrival(each, source, text, namespace, pin=entries[by_name[name]].pinned)
                        for each in fetched.skills
                        if (name := each.unpacked.name) in by_name
                    ]
                    answer = self._landed(arrivals, fetched, yes=yes)
            except KdskillsError as error:
                absent = error.details.get("missing") or by_name  # what is gone does not hold up others
                gone = {*absent} & {*by_name}
                if gone < {*by_name}:
                    others = {name: key for name, key in by_name.items() if name not in gone}
                    waiting.append(((text, namespace), others))
                keys = [by_name[name] for name in gone]
                rows += [_report(key, entries[key], "refused", code=error.code, reason=error.message) for key in keys]
            else:
                rows += answer.skills
                diagnostics += answer.diagnostics
                changed |= answer.changed
        rows.sort(key=lambda row: row.key)
        return SupplyReport(tuple(rows), changed, tuple(diagnostics))

    def synced(self, *, frozen: bool) -> SupplyReport:
        """Bring back what is missing or different; skills that the lock does not have are not touched."""
        rows, changed = [], False
        for key, entry in recovered(self._bundle).items():
            comparison = compare_folder(self._bundle.folder(key), entry)
            row = _report(key, entry, comparison.standing, files=comparison.files)
            if frozen and not entry.files:
                reason = "its source is locked and not its files: add it again with --pin"
                row = replace(row, state="refused", code="lock_frozen", reason=reason)
            elif comparison.standing in {"changed", "missing"}:
                try:
                    relocked = self._restore(key, entry, frozen=frozen)
                    row, changed = replace(row, state="changed" if relocked else "restored"), True
                except KdskillsError as error:
                    row = replace(row, state="refused", code=error.code, reason=error.message)
            rows.append(row)
        return SupplyReport(tuple(rows), changed)

    def _restore(self, key: str, entry: LockedSkill, *, frozen: bool) -> bool:
        """Put the locked files of a skill in their place; return whether others had to be locked."""
        name = key.partition("/")[2]
        with tempfile.TemporaryDirectory(prefix="kdskills-", ignore_cleanup_errors=True) as folder:
            cached = self._cache.unpacked(entry.version, Path(folder, "cached"))
            if cached is not None:
                self._install([SkillArrival(key, "changed", cached.folder, entry, entry)])
                return False
        source = parse_source(entry.source, base=self._bundle.root)
        agreed = [f"{name} {entry.version} {entry.resolved}"] if entry.files else []
        takes_others = self._accepts and not frozen
        try:
            with self._fetched(source, [name], agreed, entry.resolved if source.kind == "git" else "") as fetched:
                self._install([SkillArrival(key, "changed", fetched.skills[0].unpacked.folder, entry, entry)])
                return False
        except SupplyRefused as error:
            if error.code != "source_changed" or not takes_others:
                code = "lock_frozen" if frozen else error.code
                raise SupplyRefused(f"{key}: {error.message}", code=code) from None
        with self._fetched(source, [name]) as fetched:
            arrival = self._arrival(fetched.skills[0], source, entry.source, key.partition("/")[0], pin=entry.pinned)
            if isinstance(arrival, RefusedSkill):
                raise SupplyRefused(arrival.message, code=arrival.code)
            self._install([replace(arrival, state="changed")])
            return True


def _agreement(fetched: FetchedSkill) -> str:
    return f"{fetched.unpacked.name} {fetched.unpacked.version} {fetched.resolved}".rstrip()


def _report(key: str, entry: LockedSkill, state: str, **facts: Any) -> SkillReport:
    return SkillReport(key, state, entry.source, entry.resolved, entry.digest, **facts)


def _refused_row(refused: RefusedSkill) -> SkillReport:
    return SkillReport(refused.path, "refused", code=refused.code, reason=refused.message)


def _diff(former: Path, folder: Path) -> str:
    """Return what is different in two folders; of files that are no text, only that they are."""
    trees = [{entry.path for entry in walk_tree(tree)} for tree in (former, folder)]
    parts = []
    for path in sorted(trees[0] | trees[1]):
        before, after = (
            _text(tree, path) if path in paths else "" for tree, paths in zip((former, folder), trees, strict=True)
        )
        if before is not None and after is not None:
            parts.append(_text_diff(before, after, path))
        elif path not in trees[0] & trees[1] or file_digest(former, path) != file_digest(folder, path):
            parts.append(f"{path} is another one, and no text that could be shown\n")
    return _cut("".join(parts))


def _text(tree: Path, path: str) -> str | None:
    try:
        return read_file(tree, path, limit=MAX_TEXT).data.decode()
    except (FileRefused, UnicodeDecodeError):
        return None


def _text_diff(before: str, after: str, name: str) -> str:
    parts = unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"locked/{name}", f"now/{name}"
    )
    return _cut("".join(part if part.endswith("\n") else f"{part}\n" for part in parts))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DIFF else f"{text[:MAX_DIFF]}\n… and more\n"
