"""`skills.read` and `describe`: files of loaded skills, windows of text, refusals by reason."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from kdskills.errors import FileRefused
from kdskills.session.codes import invalid, not_found, path_denied, refuse
from kdskills.session.core import Call, Core, GatedSession
from kdskills.session.loading import loaded_ref, public_name, skill_receipt
from kdskills.session.receipts import ReadResult, SkillReceipt, bytes_digest
from kdskills.session.store import LoadedSkill
from kdskills.session.workspace import clean_path, media_type
from kdskills.skills.folder import shown_digest, skill_bytes
from kdskills.skills.model import Skill
from kdskills.skills.roots import FarContent, far_content
from kdskills.skills.safe_open import ROOT_FLAGS, is_withheld, join, open_folder_at
from kdskills.skills.selection import Refused

T = TypeVar("T")

SMALL: Final = 64 * 1024
"""Files up to this many bytes are hashed and decoded on the event loop: a thread would take longer."""

MAX_SIBLINGS = 20
MAX_ENTRIES = 100


@dataclass(frozen=True, slots=True)
class Target:
    """The skill a call is about, and the loaded entry it belongs to."""

    session: GatedSession
    skill: Skill
    entry: LoadedSkill

    @property
    def digest(self) -> str:
        """Digest of the SKILL.md the session holds of it."""
        import_digests = {item.id: item.digest for item in self.entry.imports}
        return import_digests.get(self.skill.full_id, self.entry.digest)

    @property
    def name(self) -> str:
        """The name a model knows it by."""
        return public_name(self.skill, self.session.gate)


async def find_target(core: Core, call: Call, ref: str | None) -> Target:
    """Return the loaded skill *ref* means, or one that came along with it; the one loaded last without *ref*.

    Raises `no_active_skills`, `skill_not_found` or `skill_not_active`, in this order.
    """
    session = await core.gated_session(call)
    record = session.record
    if not record.active:
        raise refuse("no_active_skills", "no skill is loaded; load one first")
    wanted_name = (ref or "").strip()
    if not wanted_name:
        return Target(session, session.skills[record.ids[-1]], record.active[-1])
    loaded_id = loaded_ref(core, call, session, wanted_name)
    full_id = loaded_id.full_id if isinstance(loaded_id, Refused) else loaded_id
    for entry in record.active:
        for item in entry.imports:
            known_as = {item.id, public_name(session.skills[item.id], session.gate)}
            if (full_id == item.id or wanted_name in known_as) and item.id not in record.ids:
                return Target(session, session.skills[item.id], entry)
    if isinstance(loaded_id, Refused):
        core.granted(call, session, [wanted_name], "model")  # raises `skill_not_found`, as every refusal does
        raise refuse("skill_not_found", f"no such skill: {wanted_name!r}", names=[wanted_name], near=[])
    loaded_entry = next((entry for entry in record.active if entry.id == loaded_id), None)
    if loaded_entry is None:
        raise refuse("skill_not_active", f"the skill {wanted_name!r} is not loaded; load it first", name=wanted_name)
    return Target(session, session.skills[loaded_id], loaded_entry)


async def read(core: Core, call: Call, path: str, skill: str | None, encoding: str, offset: int) -> ReadResult:
    """Read a file of a loaded skill; checks in the order session, shape, active, skill, path, existence, kind, size."""
    await core.record(call.session_id)
    if encoding not in {"text", "binary"}:
        raise invalid("encoding must be text or binary", ("/encoding", "must be text or binary"))
    if offset < 0:
        raise invalid("offset must be 0 or more", ("/offset", "must be a whole number from 0"))
    if not path.strip():
        raise invalid("the path is blank", ("/path", "must not be blank"))
    target = await find_target(core, call, skill)
    clean = clean_path(path)
    data = await asyncio.to_thread(skill_file, target.skill, clean, core.config.limits.max_read_bytes)
    arguments = {"path": clean, "encoding": encoding, "offset": offset}
    core.ask(call, target.session.record, "read", target.skill, arguments, clean)
    facts = ReadResult(target.name, clean, "binary", media_type(clean), len(data), "", offset)
    if encoding == "binary":
        digest = await asyncio.to_thread(bytes_digest, data)
        return replace(facts, digest=digest, b64=base64.b64encode(data[offset:]).decode("ascii"))
    if len(data) <= SMALL:
        if call.scope.sources is not None:
            await call.scope.sources.resolve([target.skill])
        return _text(core, call, target, facts, data)
    return await asyncio.to_thread(_text, core, call, target, facts, data)


def skill_file(skill: Skill, clean: str, limit: int) -> bytes:
    """Return the bytes of a file below the skill's folder, opened part by part.

    Raises `path_denied`, `resource_not_found`, `not_a_file`, `too_large` or `skill_unreadable`.
    """
    content = far_content(skill)
    if content is not None:
        return _remote_file(content, clean, lambda: content.fetch(clean, limit))
    if skill.folder is None:
        raise refuse("resource_not_found", "this skill has no files", path=clean, siblings=[])
    try:
        return skill_bytes(skill, clean, limit)
    except FileRefused as error:
        explain(error, skill.folder, clean, limit)


def check_script(skill: Skill, clean: str, limit: int) -> None:
    """Raise as `skill_file` when there is no such script; far files are not fetched before a run is approved."""
    content = far_content(skill)
    if content is None:
        skill_file(skill, clean, limit)
    else:
        _remote_file(content, clean, lambda: content.check(clean))


def _remote_file(content: FarContent, clean: str, look: Callable[[], T]) -> T:
    """Return the result of *look*; a file that cannot be had is refused as one on this host would be."""
    try:
        return look()
    except FileRefused as error:
        if error.code in {"file_missing", "not_regular"}:
            neighbours = [path for path in content.paths if path.rpartition("/")[0] == clean.rpartition("/")[0]]
            inside = [path for path in content.paths if path.startswith(f"{clean}/")]
            if error.code == "not_regular":
                raise refuse("not_a_file", f"{clean!r} is no file", path=clean, entries=inside[:MAX_ENTRIES]) from error
            siblings = neighbours[:MAX_SIBLINGS]
            raise refuse("resource_not_found", f"there is no file {clean!r}", path=clean, siblings=siblings) from error
        if error.code == "too_large":
            raise refuse("too_large", error.message, path=clean, limit=error.details.get("limit", 0)) from error
        reason = error.details.get("reason", error.code)
        raise refuse("skill_unreadable", error.message, path=clean, reason=reason) from error


def explain(error: FileRefused, root: Path, clean: str, limit: int = 0) -> NoReturn:
    """Raise the runtime's own error for a file that was not opened."""
    if error.code == "symlink":
        raise path_denied(clean, "symlink") from error
    endless = error.code == "unreadable" and (
        len(clean) > 4000 or any(len(os.fsencode(p)) > 255 for p in clean.split("/"))
    )
    if endless or error.code in {"file_missing", "not_a_directory", "path_unsafe"}:
        siblings = entries_of(root, clean.rpartition("/")[0])[:MAX_SIBLINGS]
        hint = f"; beside it: {', '.join(siblings)}" if siblings else ""
        message = f"there is no file {clean!r}{hint}"
        raise refuse("resource_not_found", message, path=clean, siblings=siblings) from error
    if error.code == "not_regular":
        entries = entries_of(root, clean)
        contents = f"; it holds: {', '.join(entries[:MAX_SIBLINGS])}" if entries else ""
        raise refuse("not_a_file", f"{clean!r} is no file{contents}", path=clean, entries=entries) from error
    if error.code == "too_large":
        raise refuse("too_large", f"{clean!r} has more than {limit} bytes", path=clean, limit=limit) from error
    raise refuse("skill_unreadable", f"{clean!r} cannot be read now", path=clean, reason=error.code) from error


def entries_of(root: Path, folder: str) -> list[str]:
    """Return up to 100 names in a folder, folders with a final slash; none when it cannot be listed."""
    try:
        current = os.open(root, ROOT_FLAGS)
    except OSError:  # the skill's folder is gone: there is nothing to list
        return []
    try:
        for part in folder.split("/") if folder else ():
            deeper = open_folder_at(current, part, folder)
            os.close(current)
            current = deeper
        with os.scandir(current) as listing:
            names = sorted(
                entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in listing
                if not is_withheld(join(folder, entry.name))
            )
    except (FileRefused, OSError):
        return []
    finally:
        os.close(current)
    return names[:MAX_ENTRIES]


def _text(core: Core, call: Call, target: Target, facts: ReadResult, data: bytes) -> ReadResult:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        message = f"{facts.path!r} is not UTF-8 text; read it with encoding binary"
        raise refuse("not_text", message, path=facts.path, size=len(data))
    text = text.removeprefix("\ufeff")
    if call.scope.sources is not None and facts.path.lower().endswith(".md"):
        text = call.scope.sources.adopt(target.skill, text, digest=target.digest)
    stop = facts.offset + core.config.limits.read_window_chars
    following, window, digest = (stop if stop < len(text) else None), text[facts.offset : stop], bytes_digest(data)
    truncated = following is not None
    return replace(facts, encoding="text", digest=digest, truncated=truncated, next_offset=following, text=window)


async def describe(core: Core, call: Call | None, ref: str) -> SkillReceipt:
    """Return the receipt of any visible skill, hashed afresh; without a session, for the runtime's consumer."""
    gate, resolved = core.gate_of(core.config.consumer), None
    if call is not None:
        session = await core.gated_session(call)
        gate, resolved = session.gate, core.granted(call, session, [ref], "code")[0]
    grant = resolved or gate.resolve(ref, by="code")
    if isinstance(grant, Refused):
        raise not_found([ref], gate.names, (grant,))
    body = await core.bodies.fresh(grant.skill)
    tree = await asyncio.to_thread(fresh_tree, grant.skill)
    imports = tuple(public_name(skill, gate) for skill in grant.closure if skill.full_id != grant.full_id)
    return skill_receipt(grant.skill, body, gate, core.config.locations, imports=imports, tree=tree)


def fresh_tree(skill: Skill, *, shown: bool = False) -> str:
    """Return the digest over the skill's files as they are now, with *shown* over those that are mounted; raises
    `skill_unreadable`.
    """
    try:
        return shown_digest(skill) if shown else skill.tree_digest()
    except FileRefused as error:
        raise refuse("skill_unreadable", f"the files of this skill cannot be read: {error.message}") from error
