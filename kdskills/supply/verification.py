"""Whether skills are what was locked and signed, and what a policy makes of it: the judge that registries ask."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as cache_answers
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from kdskills.bundle.descriptor import SkillsDescriptor, TrustPolicy
from kdskills.bundle.lock_file import MAX_LOCK, LockFileInvalid, lock_of
from kdskills.errors import DescriptorError, Diagnostic, FileRefused, KdskillsError, MissingExtra
from kdskills.skills.folder import RegistryContent
from kdskills.skills.model import Skill
from kdskills.skills.private_files import private_folder, replace_file
from kdskills.skills.roots import SkillRecord
from kdskills.skills.safe_open import (
    PREFIX,
    RACY_NS,
    TreeFile,
    bytes_digest,
    newest_of,
    read_file,
    read_tree,
    stamp_of,
    stamps_of,
    version_of,
)
from kdskills.skills.selection import EMPTY
from kdskills.supply.lock import read_skills, skill_key
from kdskills.supply.signatures import (
    SignatureVerdict,
    TrustAnchors,
    TrustFailed,
    VerdictKind,
    signature_of,
)

TrustVerdict = Literal["ok", "changed", "unlocked", "unsigned", "untrusted_signer", "bad_signature"]
MAX_CACHE: Final = 64 * 1024 * 1024
_FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class VerifiedSkill:
    """How one skill stands to the lock and to its signature.

    Attributes:
        skill: Full id.
        verdict: The worst of what is so; what the policy forbids comes first.
        files: Paths that differ from what was locked, or else from what was signed.
        signer: Anchor that the signature leads to.
        reason: A sentence for people; empty for `ok`.
        findings: What the policy makes of it: an error refuses the skill.
    """

    skill: str
    verdict: TrustVerdict
    files: tuple[str, ...] = ()
    signer: str = ""
    reason: str = ""
    findings: tuple[Diagnostic, ...] = ()

    @property
    def forbidden(self) -> bool:
        """Whether the policy refuses the skill."""
        return any(finding.severity == "error" for finding in self.findings)


class _FolderReading(NamedTuple):
    """A skill's folder as it was read, all as texts, so that thousands need no decoding at a start; lists have NULs between.

    `scanned` are the paths of files and folders that discovery looks at, in its order and "." for the folder itself, and
    `unscanned` the others; `stamps` has the stamps of both in hex, and nothing if a file was new just then, or for a folder that
    cannot be locked or signed: `problem` says why. `files` has the line of each file and `version` is their digest;
    `signature` is a verdict under `anchors`.
    """

    scanned: str = ""
    unscanned: str = ""
    stamps: str = ""
    files: str = ""
    version: str = ""
    problem: str = ""
    signature: str = ""
    anchors: str = ""

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 in hex of each file, by path."""
        lines = [line.split(" ", 3) for line in self.files.split("\0") if line]
        return {line[3]: line[0] for line in lines}


class _Opinion(NamedTuple):
    """Something wrong with a skill: its verdict, the code and level of the policy it falls under, and words."""

    verdict: TrustVerdict
    code: str
    level: str
    words: str
    files: tuple[str, ...] = ()


class TrustJudge:
    """Holds skills to the lock and to signatures, as registries ask for it. Safe from any thread.

    What was read of a folder, and the verdict of its signature, is kept by the stamps of its files, so that a skill is read
    and a signature checked once for every change.

    Args:
        policy: What is asked of the skills of a namespace.
        lock: The lock file; None means that nothing is locked.
        anchors: Whom the operator trusts.
        cache: File to keep what was read for the next start; None keeps nothing.
    """

    def __init__(
        self,
        policy: Callable[[str], TrustPolicy],
        lock: Path | None,
        anchors: TrustAnchors,
        cache: Path | None = None,
    ) -> None:
        self._policy = policy
        self._lock_file, self._anchors, self._cache = lock, anchors, cache
        self._guard = threading.Lock()
        self._readings, self._locked_before = ({}, ("", {})) if cache is None else _load(cache)
        self._unsaved = False
        self._mark: tuple[bytes, bytes] | None = None
        self._locked: Mapping[str, str] | LockFileInvalid = {}
        self._trusted: Any = ()
        self._anchors_digest = ""

    def __call__(self, skill: Skill, record: SkillRecord, stamps: Mapping[str, bytes]) -> tuple[Diagnostic, ...]:
        """Return what the policy has against *skill*, and hold one that may be used to the files of now.

        *record* is what discovery has of it just now, *stamps* are those of other files that it met, by path below the root:
        what has one is not asked about again.
        """
        policy = self._policy(skill.namespace)
        if not policy.judges:
            return ()
        if self._mark is None:
            self._look()
        strict = policy.lock == "enforce" or policy.signatures == "require"
        folder = _folder_of(skill)
        earlier = self._readings.get(folder)
        if (
            earlier is not None
            and self._in_order(skill, earlier, policy)
            and _is_current(folder, earlier, record, stamps)
        ):
            if isinstance(skill.content, RegistryContent):  # most skills of most starts: nothing of them changed
                skill.content.pin(earlier.files if strict else None)
            return ()
        reading = None if skill.file is None else self._read(skill, record, stamps)
        judged = self._verified(skill, reading)
        if isinstance(skill.content, RegistryContent):
            skill.content.pin(reading.files if strict and not judged.forbidden and reading is not None else None)
        return judged.findings

    def outdated(self, skills: Iterable[Skill]) -> Collection[str]:
        """Return the full ids of the skills whose files, lock or anchors changed since they were judged."""
        judged = [skill for skill in skills if self._policy(skill.namespace).judges]
        if self._look():
            return {skill.full_id for skill in judged}
        on_host = [(skill.full_id, _folder_of(skill)) for skill in judged if skill.file is not None]
        return {name for name, folder in on_host if not _is_current(folder, self._readings.get(folder))}

    def settle(self) -> None:
        """Write down what was read since the last time; an unwritable folder costs the next start time, and nothing else."""
        with self._guard:
            if self._cache is None or not self._unsaved:
                return
            self._readings = {folder: each for folder, each in self._readings.items() if Path(folder).is_dir()}
            text = json.dumps({"format": _FORMAT, "folders": self._readings, "locked": self._locked_before})
            self._unsaved = False
        with suppress(OSError):
            private_folder(self._cache.parent)
            replace_file(self._cache, text.encode("ascii"))

    def verify(self, skill: Skill) -> VerifiedSkill:
        """Return how *skill* stands, whatever the policy asks for.

        A reason why nothing can be said, such as a missing extra, is a finding of the level of the policy.
        """
        self._look()
        return self._verified(skill, None if skill.file is None else self._read(skill))

    def failures(self) -> tuple[Diagnostic, ...]:
        """Return an error for the lock, and for the file of anchors, where it cannot be read."""
        self._look()
        broken = [each for each in (self._locked, self._trusted) if isinstance(each, KdskillsError)]
        return tuple(Diagnostic(error.code, "error", error.message) for error in broken)

    def missing(self, present: Collection[str]) -> list[VerifiedSkill]:
        """Return the skills that are locked and not among the full ids *present*."""
        self._look()
        locked = {} if isinstance(self._locked, LockFileInvalid) else self._locked
        missing = []
        for key in locked:
            full_id = key.replace("/", ".", 1)
            if full_id not in present:
                level = self._policy(key.partition("/")[0]).lock
                opinions = [_Opinion("changed", "lock_mismatch", level, "is locked, and not there")]
                missing.append(_told(full_id, opinions))
        return missing

    def _verified(self, skill: Skill, reading: _FolderReading | None) -> VerifiedSkill:
        policy = self._policy(skill.namespace)
        signature = SignatureVerdict("unsigned", reason="its files are elsewhere")
        opinions: list[_Opinion] = []
        if reading is not None:
            opinions += _seen_otherwise(skill, reading, policy)
        opinions += self._against_lock(skill, reading, policy)
        if reading is not None:
            signature, trouble = self._signature(skill, reading, policy)
            opinions += trouble
        opinions += _against_signature(signature, policy)
        return _told(skill.full_id, opinions, signature.signer)

    def _in_order(self, skill: Skill, reading: _FolderReading, policy: TrustPolicy) -> bool:
        """Whether *policy* has nothing against a skill that was read before, if it is as it was then."""
        if policy.lock != "off":
            locked = {} if isinstance(self._locked, LockFileInvalid) else self._locked
            if not reading.version or locked.get(skill_key(skill.namespace, skill.id)) != reading.version:
                return False
        if policy.signatures == "off":
            return True
        if not reading.signature or not reading.anchors == self._anchors_digest != "":
            return False
        signature = _signature_from(reading.signature)
        return signature.kind == "ok" and not _against_signature(signature, policy)

    def _look(self) -> bool:
        """Read lock and anchors again where their files changed; whether they did."""
        mark = (_file_mark(self._lock_file), _file_mark(self._anchors.path))
        with self._guard:
            if mark == self._mark:
                return False
            try:
                self._locked = {} if self._lock_file is None else self._versions(self._lock_file)
            except LockFileInvalid as error:
                self._locked = error
            try:
                self._trusted = self._anchors.read()
                self._anchors_digest = hashlib.sha256(repr(self._trusted).encode()).hexdigest()
            except TrustFailed as error:
                self._trusted, self._anchors_digest = error, ""
            self._mark = mark
            return True

    def _versions(self, lock: Path) -> Mapping[str, str]:
        """Return the versions of locked skills by key; understood once for the same bytes. Raises LockFileInvalid."""
        try:
            digest = bytes_digest(read_file(lock.parent, lock.name, limit=MAX_LOCK).data)
        except FileRefused:  # there is none, or it says why it cannot be read
            digest = ""
        if not digest or digest != self._locked_before[0]:
            versions = {key: entry.version for key, entry in read_skills(lock).items()}
            self._locked_before, self._unsaved = (digest, versions), True
        return self._locked_before[1]

    def _read(
        self, skill: Skill, record: SkillRecord | None = None, stamps: Mapping[str, bytes] = EMPTY
    ) -> _FolderReading:
        folder = _folder_of(skill)
        reading = self._readings.get(folder)
        if reading is None or not _is_current(folder, reading, record, stamps):
            reading = _reading_of(folder, skill)
            self._keep(folder, reading)
        return reading

    def _keep(self, key: str, reading: _FolderReading) -> None:
        with self._guard:
            self._readings[key] = reading
            self._unsaved = True

    def _against_lock(self, skill: Skill, reading: _FolderReading | None, policy: TrustPolicy) -> list[_Opinion]:
        if isinstance(self._locked, LockFileInvalid):
            return [_Opinion("unlocked", self._locked.code, policy.lock, f"cannot be judged: {self._locked.message}")]
        key = skill_key(skill.namespace, skill.id)
        version = self._locked.get(key)
        if not version:
            return [_Opinion("unlocked", "lock_mismatch", policy.lock, "is not in the lock")]
        if reading is None or not reading.version:
            problem = "its files are elsewhere" if reading is None else reading.problem
            return [_Opinion("changed", "lock_mismatch", policy.lock, f"is not what was locked: {problem}")]
        if reading.version == version:
            return []
        assert self._lock_file is not None  # else nothing is locked
        locked: tuple[TreeFile, ...] = ()
        with suppress(LockFileInvalid, KeyError):  # changed meanwhile: the next look decides
            locked = read_skills(self._lock_file)[key].files
        lines = {*reading.files.split("\0")} ^ {file.line for file in locked}
        files = tuple(sorted({line.split(" ", 3)[3] for line in lines}))
        words = f"is not what was locked: {_listed(files)}"
        return [_Opinion("changed", "lock_mismatch", policy.lock, words, files)]

    def _signature(
        self, skill: Skill, reading: _FolderReading, policy: TrustPolicy
    ) -> tuple[SignatureVerdict, list[_Opinion]]:
        """Return the verdict of a skill's signature, checked once for the same files and anchors, and why there is none."""
        if isinstance(self._trusted, TrustFailed):
            words = f"cannot be judged: {self._trusted.message}"
            return SignatureVerdict("ok"), [_Opinion("untrusted_signer", self._trusted.code, policy.signatures, words)]
        if reading.signature and reading.anchors == self._anchors_digest:
            return _signature_from(reading.signature), []
        if not reading.version:
            return SignatureVerdict("unreadable", reason=reading.problem), []
        try:
            verdict = signature_of(Path(_folder_of(skill)), self._trusted, digests=reading.digests)
        except MissingExtra as error:
            words = f"cannot be judged: {error.message}"
            return SignatureVerdict("ok"), [_Opinion("untrusted_signer", error.code, policy.signatures, words)]
        if not any(
            anchor.kind == "identity" for anchor in self._trusted
        ):  # those ask a network, which may answer later
            text = "\0".join((verdict.kind, verdict.signer, verdict.reason, *verdict.files))
            self._keep(_folder_of(skill), reading._replace(signature=text, anchors=self._anchors_digest))
        return verdict, []


_ORDER: Final[tuple[TrustVerdict, ...]] = (
    "changed",
    "bad_signature",
    "untrusted_signer",
    "unlocked",
    "unsigned",
    "ok",
)
_RANK: Final[Mapping[str, int]] = {"enforce": 0, "require": 0, "warn": 1, "off": 2}


def judge_of(
    descriptor: SkillsDescriptor,
    bundle_root: Path | None,
    state: Path,
    *,
    usual: TrustPolicy,
    cache: Path | None = None,
    always: bool = False,
) -> TrustJudge | None:
    """Return the judge of a bundle's skills, or None where nothing asks for one.

    Args:
        descriptor: Its policies hold beside *usual*, and the stricter counts.
        bundle_root: Folder with the lock file.
        state: The operator's state folder, with the anchors.
        usual: Policy of the settings.
        cache: Folder to keep what was read in.
        always: Return a judge also where no policy asks for one.
    """
    if not (always or usual.judges or any(policy.judges for policy in descriptor.trust.values())):
        return None
    lock = None if bundle_root is None else lock_of(bundle_root)
    skills = None
    with suppress(DescriptorError):  # then there are none, and whoever looks for them is told why
        skills = descriptor.resolve_root(bundle_root)

    @cache_answers
    def policy(namespace: str) -> TrustPolicy:
        return usual.stricter(descriptor.guarded_policy(namespace, skills))

    name = hashlib.sha256(os.fsencode(lock or "")).hexdigest()[:32]
    return TrustJudge(policy, lock, TrustAnchors(state), cache and cache / f"{name}.trust")


def _told(full_id: str, opinions: Iterable[_Opinion], signer: str = "") -> VerifiedSkill:
    """Return the verdict of all *opinions* of a skill."""
    findings = tuple(
        Diagnostic(each.code, "error" if _RANK[each.level] == 0 else "warning", f"{full_id} {each.words}.", ref=full_id)
        for each in opinions
        if each.level != "off"
    )
    worst = min(opinions, key=lambda each: (_RANK[each.level], _ORDER.index(each.verdict)), default=None)
    if worst is None:
        return VerifiedSkill(full_id, "ok", signer=signer)
    return VerifiedSkill(full_id, worst.verdict, worst.files, signer, f"It {worst.words}.", findings)


def _seen_otherwise(skill: Skill, reading: _FolderReading, policy: TrustPolicy) -> list[_Opinion]:
    """Return what is wrong when discovery read other files than were judged: someone changed them in between."""
    content = skill.content
    if not reading.version or not isinstance(content, RegistryContent):
        return []
    digests = reading.digests
    files = tuple(name for name, digest in content.read_digests.items() if digest != f"{PREFIX}{digests.get(name)}")
    level, code = (policy.lock, "lock_mismatch") if policy.lock != "off" else (policy.signatures, "signature_invalid")
    words = "changed while it was looked at; the next look decides"
    return [_Opinion("changed", code, level, words, files)] if files else []


def _against_signature(signature: SignatureVerdict, policy: TrustPolicy) -> list[_Opinion]:
    level = policy.signatures
    if signature.kind == "ok":
        signers = () if policy.signers is False else policy.signers
        if not signature.signer or policy.signers == () or signature.signer in signers:
            return []
        words = f"is signed by {signature.signer}, and may be by {', '.join(signers) or 'nobody'} alone"
        return [_Opinion("untrusted_signer", "signer_untrusted", level, words)]
    if signature.kind == "unsigned":
        return [_Opinion("unsigned", "signature_invalid", level, f"is not signed: {signature.reason}")]
    if signature.kind == "untrusted_signer":
        words = f"is signed by somebody who is not trusted: {signature.reason}"
        return [_Opinion("untrusted_signer", "signer_untrusted", level, words)]
    listed = f": {_listed(signature.files)}" if signature.files else ""
    words = f"has a signature that does not hold: {signature.reason}{listed}"
    return [_Opinion("bad_signature", "signature_invalid", level, words, signature.files)]


def _listed(files: tuple[str, ...]) -> str:
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return ", ".join(ascii(path)[1:-1] for path in files[:5]) + more


def _file_mark(path: Path | None) -> bytes:
    try:
        return b"" if path is None else stamp_of(path.stat())
    except OSError:
        return b""


def _folder_of(skill: Skill) -> str:
    return (skill.file or "").rpartition("/")[0]  # a `Path` for each of thousands costs more than the answer


def _reading_of(folder: str, skill: Skill) -> _FolderReading:
    """Read a folder: its stamps first, so that whatever changes meanwhile is noticed at the next look."""
    read_at = time.time_ns()
    paths: list[str] = []
    for parent, folders, files in os.walk(folder):
        below = parent[len(folder) + 1 :]
        links = [name for name in folders if os.path.islink(f"{parent}/{name}")]  # noqa: PTH114 - thousands of names
        paths += [below or ".", *(f"{below}/{name}" if below else name for name in (*files, *links))]
    looked_at = skill.content.looked_at if isinstance(skill.content, RegistryContent) else ()
    scanned, unscanned = "\0".join(looked_at), "\0".join([path for path in paths if path not in looked_at])
    try:
        stamps = _stamps(folder, scanned) + _stamps(folder, unscanned)
        tree = read_tree(folder)
    except FileRefused as error:
        return _FolderReading(problem=error.message)
    except OSError as error:
        return _FolderReading(problem=error.strerror or "its files cannot be read")
    certain = newest_of(stamps) < read_at - RACY_NS
    lines = "\0".join([file.line for file in tree])
    return _FolderReading(scanned, unscanned, stamps.hex() if certain else "", lines, version_of(tree))


def _stamps(folder: str, paths: str) -> bytes:
    return stamps_of(None, [f"{folder}/{path}" for path in paths.split("\0")]) if paths else b""


def _is_current(
    folder: str,
    reading: _FolderReading | None,
    record: SkillRecord | None = None,
    met: Mapping[str, bytes] = EMPTY,
) -> bool:
    """Whether a folder is certainly as it was read; what discovery has a stamp of is not asked about again."""
    if reading is None or not reading.stamps:
        return False
    try:
        if record is None or not record.stamps:
            stamps = _stamps(folder, reading.scanned) + _stamps(folder, reading.unscanned)
        else:
            above = record.path
            unscanned = reading.unscanned.split("\0") if reading.unscanned else ()
            stamps = record.stamps + b"".join(
                [met.get(f"{above}/{path}") or _stamps(folder, path) for path in unscanned]
            )
    except OSError:
        return False
    return stamps.hex() == reading.stamps


@lru_cache(256)
def _signature_from(text: str) -> SignatureVerdict:
    kind, signer, reason, *files = text.split("\0")
    return SignatureVerdict(cast("VerdictKind", kind), signer, tuple(files), reason)


def _load(path: Path) -> tuple[dict[str, _FolderReading], tuple[str, dict[str, str]]]:
    """Return the readings of an earlier start, and versions of locked skills with the digest of their lock.

    None of a file that another account could have written, or that is none.
    """
    try:
        data, status = read_file(path.parent, path.name, limit=MAX_CACHE)
        document = json.loads(data) if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else {}
        if document.get("format") == _FORMAT:
            rows, (digest, versions) = document["folders"], document["locked"]
            if {*map(type, chain(versions.values(), *rows.values()))} <= {str}:
                return {folder: _FolderReading(*row) for folder, row in rows.items()}, (digest, versions)
    except (FileRefused, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return {}, ("", {})
