"""A session as JSON, and back. No arguments, environment or secrets are in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kdskills.errors import BadRequest, SessionError, ToolCallRefused
from kdskills.session.core import Call, Core, checked_id, loader_of, session_not_found, store_errors
from kdskills.session.receipts import text_digest
from kdskills.session.scope import NO_TURN
from kdskills.session.store import ImportedSkill, LoadedSkill, SessionRecord, from_iso, iso
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Refused

SCHEMA: Final = "kdskills.session/1"
_LOADERS: Final[tuple[By, ...]] = ("model", "user", "code")


class _Imported(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    id: str
    digest: str
    tree_digest: str = ""


_Moment = Annotated[str, AfterValidator(from_iso)]
_Loader = Annotated[str, AfterValidator(lambda name: name if name in _LOADERS else "model")]


class _Entry(_Imported):
    loaded_at: _Moment
    loaded_by: _Loader = "model"
    imports: list[_Imported] = []


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)
    session_id: str
    consumer: str
    version: int = 1
    created_at: _Moment
    touched_at: _Moment
    max_active: Annotated[int, Field(ge=1)] | None = 8
    active: list[_Entry] = []
    listed: tuple[str, ...] = ()
    located: tuple[str, ...] = ()
    bodies: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A session at one moment: its record, and the SKILL.md texts by digest unless left out."""

    record: SessionRecord
    bodies: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of schema `kdskills.session/1`."""
        facts = asdict(self.record, dict_factory=_plain)
        shown = {name: ids for name in ("listed", "located") if (ids := facts.pop(name))}
        return {"schema": SCHEMA, **facts, **shown, "bodies": dict(self.bodies)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SessionSnapshot:
        """Read a snapshot; raises BadRequest `snapshot_unsupported` for another schema or shape."""
        if value.get("schema") != SCHEMA:
            schema = value.get("schema")
            raise BadRequest(f"not a snapshot of schema {SCHEMA}: {schema!r}", code="snapshot_unsupported")
        try:
            wire = _Wire.model_validate({key: item for key, item in value.items() if key != "schema"})
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            location = "/".join(str(part) for part in problem["loc"])
            raise BadRequest(f"not a snapshot: {location}: {problem['msg']}", code="snapshot_unsupported") from None
        imports = [tuple(ImportedSkill(**dict(item)) for item in entry.imports) for entry in wire.active]
        active = (LoadedSkill(**dict(entry) | {"imports": of}) for entry, of in zip(wire.active, imports, strict=True))
        facts = {name: value for name, value in wire if name != "bodies"}
        return cls(SessionRecord(**facts | {"active": tuple(active)}), dict(wire.bodies))


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a value as JSON has them: times as text, tuples as lists."""
    return {
        name: iso(value) if isinstance(value, datetime) else list(value) if isinstance(value, tuple) else value
        for name, value in items
    }


async def snapshot(core: Core, session_id: str, bodies: bool) -> SessionSnapshot:
    """Return the session as it is, without renewing its idle clock."""
    record = await core.record(session_id, touch=False)
    texts: dict[str, str] = {}
    if bodies:
        with store_errors():
            for digest in sorted(record.digests):
                raw = await core.store.get_body(digest)
                if raw is not None:
                    texts[digest] = raw
    return SessionSnapshot(record, texts)


async def restore(
    core: Core, snapshot: SessionSnapshot, *, consumer: str, session_id: str | None, overwrite: bool, max_loader: By
) -> SessionRecord:
    """Bring a session back under the gate as it is now; the sequence of its skills stays.

    Anybody may have edited a snapshot, so it only says which skills were loaded: their texts come from this runtime's
    store or from the skill's own file. Raises as `SkillRuntime.restore`.
    """
    for digest, text in snapshot.bodies.items():
        if text_digest(text) != digest:
            message = f"a body of the snapshot is not what its digest says: {digest}"
            raise BadRequest(message, code="snapshot_unsupported")
    record = snapshot.record
    if record.consumer != consumer:
        raise BadRequest(
            f"the snapshot is of consumer {record.consumer!r}, and is to be restored for {consumer!r}; "
            "say consumer= of the session it was taken from",
            code="snapshot_untrusted",
            consumer=record.consumer,
            expected=consumer,
        )
    session_id = checked_id(session_id if session_id is not None else record.session_id)
    call = Call(session_id, NO_TURN)
    gate = core.gate_of(record.consumer)
    active: list[LoadedSkill] = []
    for entry in {entry.id: entry for entry in record.active}.values():  # an id stands once
        # a snapshot cannot widen what its reader vouches for
        loader = min(loader_of(entry), max_loader, key=_LOADERS.index)
        grant = gate.resolve(entry.id, by=loader)
        if isinstance(grant, Refused):
            core.emit(call, "diagnostic", code="restore_dropped", id=entry.id, refusal=grant.code)
            continue
        closure = {skill.full_id: skill for skill in grant.closure}
        if not await _has_text(core, closure[entry.id], entry.digest, snapshot.bodies):
            core.emit(call, "diagnostic", code="body_lost", id=entry.id)
            continue
        imports = []
        for item in entry.imports:
            if item.id not in closure:
                core.emit(call, "diagnostic", code="restore_dropped", id=item.id, refusal="import")
            elif not await _has_text(core, closure[item.id], item.digest, snapshot.bodies):
                core.emit(call, "diagnostic", code="body_lost", id=item.id)
            else:
                imports.append(item)
        active.append(replace(entry, loaded_by=loader, imports=tuple(imports)))
    caps = [cap for cap in (record.max_active, core.config.max_active) if cap is not None]  # None is no cap
    restored = replace(
        record,
        session_id=session_id,
        touched_at=core.config.clock(),
        max_active=min(caps, default=None),
        active=tuple(active),
    )
    return await _store_record(core, restored, overwrite)


async def _has_text(core: Core, skill: Skill, digest: str, bodies: Mapping[str, str]) -> bool:
    """Whether this runtime has the text of *digest* for *skill* itself: in its store, or as the file is now.

    Raises `snapshot_untrusted` when only the snapshot has it.
    """
    try:
        body = await core.body(skill, digest)
    except ToolCallRefused as error:
        if error.code != "skill_unreadable":
            raise
        body = None  # the store has a text of that digest which was never a skill's
    if body is not None and _names(body.properties) in (None, _names(skill.frontmatter)):
        if body.raw is not None:
            with store_errors():
                await core.store.put_body(digest, body.raw)
        return True
    if digest in bodies:
        raise BadRequest(
            f"the snapshot brings a text of {skill.full_id!r} that neither the store nor the skill's file has; "
            "restore it without bodies and load the skill again",
            code="snapshot_untrusted",
            id=skill.full_id,
            digest=digest,
        )
    return False


def _names(frontmatter: Mapping[str, Any]) -> str | None:
    name = frontmatter.get("name")
    return None if name is None else str(name)


async def _store_record(core: Core, record: SessionRecord, overwrite: bool) -> SessionRecord:
    with store_errors():
        present = await core.store.get(record.session_id)
    if present is not None and not overwrite:
        message = f"a session {record.session_id!r} exists"
        raise SessionError(message, code="session_exists", session_id=record.session_id)
    expect = None if present is None else present.version
    next_record = replace(record, version=1 if present is None else present.version + 1)
    if present is not None:
        core.tickets.session_closed(record.session_id, session_not_found(record.session_id))
    await core.create(next_record, expect=expect)
    return next_record
