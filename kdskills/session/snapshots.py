"""A session as JSON, and back (spec runtime §1 "Snapshot"). No arguments, environment or secrets are in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kdskills.errors import BadRequest, SessionError, ToolCallRefused
from kdskills.session.bodies import parsed
from kdskills.session.core import Call, Core, checked_id, gone, store_errors
from kdskills.session.receipts import text_digest
from kdskills.session.scope import NO_TURN
from kdskills.session.state import ImportedSkill, LoadedSkill, SessionRecord, from_iso, iso
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Refused

SCHEMA: Final = "kdskills.session/1"


class _Imported(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    id: str
    digest: str
    tree_digest: str = ""


class _Entry(_Imported):
    loaded_at: str
    loaded_by: str = "model"
    imports: list[_Imported] = []


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)
    session_id: str
    consumer: str
    version: int = 1
    created_at: str
    touched_at: str
    max_active: Annotated[int, Field(ge=1)] | None = 8
    active: list[_Entry] = []
    bodies: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A session at one moment: its record, and the SKILL.md texts by digest unless left out."""

    record: SessionRecord
    bodies: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of schema `kdskills.session/1`."""
        record = self.record
        return {
            "schema": SCHEMA,
            "session_id": record.session_id,
            "consumer": record.consumer,
            "version": record.version,
            "created_at": iso(record.created_at),
            "touched_at": iso(record.touched_at),
            "max_active": record.max_active,
            "active": [
                {
                    "id": entry.id,
                    "digest": entry.digest,
                    "tree_digest": entry.tree_digest,
                    "loaded_at": iso(entry.loaded_at),
                    "loaded_by": entry.loaded_by,
                    "imports": [
                        {"id": item.id, "digest": item.digest, "tree_digest": item.tree_digest}
                        for item in entry.imports
                    ],
                }
                for entry in record.active
            ],
            "bodies": dict(self.bodies),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SessionSnapshot:
        """Read a snapshot.

        Raises:
            BadRequest: `snapshot_unsupported` for another schema or shape.
        """
        if value.get("schema") != SCHEMA:
            found = value.get("schema")
            raise BadRequest(f"not a snapshot of schema {SCHEMA}: {found!r}", code="snapshot_unsupported")
        try:
            wire = _Wire.model_validate({key: item for key, item in value.items() if key != "schema"})
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            place = "/".join(str(part) for part in problem["loc"])
            raise BadRequest(f"not a snapshot: {place}: {problem['msg']}", code="snapshot_unsupported") from None
        return cls(_record(wire), dict(wire.bodies))


def _record(wire: _Wire) -> SessionRecord:
    return SessionRecord(
        session_id=wire.session_id,
        consumer=wire.consumer,
        version=wire.version,
        created_at=from_iso(wire.created_at),
        touched_at=from_iso(wire.touched_at),
        max_active=wire.max_active,
        active=tuple(
            LoadedSkill(
                entry.id,
                entry.digest,
                entry.tree_digest,
                from_iso(entry.loaded_at),
                entry.loaded_by if entry.loaded_by in {"model", "user", "code"} else "model",
                tuple(ImportedSkill(item.id, item.digest, item.tree_digest) for item in entry.imports),
            )
            for entry in wire.active
        ),
    )


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


async def restore(core: Core, found: SessionSnapshot, session_id: str | None, overwrite: bool) -> SessionRecord:
    """Bring a session back under the gate as it is now; the order is kept.

    Raises:
        SessionError: `session_exists` when the id is taken and *overwrite* is False.
        BadRequest: `snapshot_unsupported` when a text does not have its digest.
    """
    for digest, text in found.bodies.items():
        if text_digest(text) != digest:
            raise BadRequest(
                f"a body of the snapshot is not what its digest says: {digest}", code="snapshot_unsupported"
            )
    wanted = checked_id(session_id if session_id is not None else found.record.session_id)
    call = Call(wanted, NO_TURN)
    gate = core.source.gate(found.record.consumer)
    kept: list[LoadedSkill] = []
    for entry in {entry.id: entry for entry in found.record.active}.values():  # an id stands once
        granted = gate.resolve(entry.id, by=_by(entry.loaded_by))
        if isinstance(granted, Refused):
            core.emit(call, "diagnostic", code="restore_dropped", id=entry.id, refusal=granted.code)
            continue
        brought = {skill.full_id: skill for skill in granted.closure}
        if not await _have(core, brought[entry.id], entry.digest, found.bodies):
            core.emit(call, "diagnostic", code="body_lost", id=entry.id)
            continue
        imports = []
        for item in entry.imports:
            if item.id not in brought:
                core.emit(call, "diagnostic", code="restore_dropped", id=item.id, refusal="import")
            elif not await _have(core, brought[item.id], item.digest, found.bodies):
                core.emit(call, "diagnostic", code="body_lost", id=item.id)
            else:
                imports.append(item)
        kept.append(replace(entry, imports=tuple(imports)))
    now = core.config.clock()
    return await _put(core, replace(found.record, session_id=wanted, touched_at=now, active=tuple(kept)), overwrite)


async def _have(core: Core, skill: Skill, digest: str, bodies: Mapping[str, str]) -> bool:
    """Whether the text of *digest* can be shown; a text of the snapshot is put into the store."""
    text = bodies.get(digest)
    if text is not None:
        try:
            core.bodies.keep(parsed(text.encode("utf-8"), skill, "SKILL.md", ""))
        except ToolCallRefused:  # it has its digest, but was never a skill's text
            return False
        with store_errors():
            await core.store.put_body(digest, text)
        return True
    body = await core.body(skill, digest)
    if body is not None and body.raw is not None:
        with store_errors():
            await core.store.put_body(digest, body.raw)
    return body is not None


async def _put(core: Core, record: SessionRecord, overwrite: bool) -> SessionRecord:
    with store_errors():
        present = await core.store.get(record.session_id)
    if present is not None and not overwrite:
        raise SessionError(
            f"a session {record.session_id!r} exists", code="session_exists", session_id=record.session_id
        )
    expect = None if present is None else present.version
    placed = replace(record, version=1 if present is None else present.version + 1)
    if present is not None:
        core.tickets.session_closed(record.session_id, gone(record.session_id))
    await core.create(placed, expect=expect)
    return placed


def _by(loaded_by: str) -> By:
    return "user" if loaded_by == "user" else "code" if loaded_by == "code" else "model"
