"""Load, unload, refresh and what is active: all or nothing, by snapshot, reads and compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kdskills.errors import KdskillsError
from kdskills.prompts import hidden_alias
from kdskills.session.approval import origin_of
from kdskills.session.bodies import Body, Ticket
from kdskills.session.codes import invalid, refuse
from kdskills.session.core import TRIES, Call, Core, GatedSession, PromptText, conflict, store_errors
from kdskills.session.receipts import ActiveSkill, LoadReceipt, SkillReceipt, UnloadReceipt
from kdskills.session.scope import NO_TURN
from kdskills.session.source import Gate, Locations
from kdskills.session.store import (
    ImportedSkill,
    LoadedSkill,
    LoadMode,
    StoreConflict,
    load_mode,
    merge_entries,
    next_ids,
    prompt_order,
    without,
)
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Granted, Refused


def clean_names(names: Sequence[str], max_count: int) -> list[str]:
    """Return *names* trimmed, without blanks; raises `invalid_argument` for too many, or for what is no clean text."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise invalid("names must be a list of skill names", ("/names", "must be a list of strings"))
    if len(names) > max_count:
        raise invalid(f"at most {max_count} names are allowed", ("/names", f"holds more than {max_count} names"))
    for number, name in enumerate(names):
        if "\0" in name or len(name) > 512:
            raise invalid("a name is too long or holds NUL", (f"/names/{number}", "is no skill name"))
    return [name.strip() for name in names if name.strip()]


async def load(core: Core, call: Call, names: Sequence[str], mode: str | None, loader: By) -> LoadReceipt:
    """Load skills: all of *names*, or none when one of them cannot be loaded."""
    await core.record(call.session_id)
    load_kind = load_mode(mode)
    if load_kind is None:
        raise invalid(f"mode must be replace or add, not {mode!r}", ("/mode", "must be replace or add"))
    refs = clean_names(names, core.config.limits.max_names)
    if not refs:
        raise invalid("name at least one skill", ("/names", "is empty"))
    return await _commit(core, call, refs, load_kind, loader)


async def _commit(core: Core, call: Call, refs: Sequence[str], mode: LoadMode, loader: By | None) -> LoadReceipt:
    """Load *refs*, as often as other calls are faster; without *loader* read again what is loaded, by whom it was."""
    with core.tickets.opened(call.session_id) as ticket:
        for _ in range(TRIES):
            session = await core.gated_session(call)
            if loader is None and not session.record.active:
                return LoadReceipt((), False, 0)
            grants = core.granted(call, session, refs if loader else session.record.ids, loader or "code")
            ticket.watch(skill.full_id for grant in grants for skill in grant.closure)
            for grant in grants if loader else ():
                core.ask(call, session.record, "load", grant.skill, {"names": refs, "mode": mode})
            receipt = await _attempt(core, call, ticket, session, grants, mode, loader)
            if receipt is not None:
                return receipt
    raise conflict(call.session_id)


async def _attempt(
    core: Core,
    call: Call,
    ticket: Ticket,
    session: GatedSession,
    grants: list[Granted],
    mode: LoadMode,
    loader: By | None,
) -> LoadReceipt | None:
    """Try once to commit; None when another call was faster. Without *loader*, entries keep who loaded them."""
    record = session.record
    order = next_ids(record.ids, [grant.full_id for grant in grants], mode)
    if record.max_active is not None and len(order) > record.max_active:
        message = f"{len(order)} skills would be active; at most {record.max_active} may be"
        active = _names(session, record.ids)
        raise refuse("too_many_active", message, limit=record.max_active, would_be=len(order), active=active)
    texts = await ticket.race(_read(core, grants))
    before = {entry.id: entry.loaded_by for entry in record.active}
    fresh = [_entry(core, grant, texts, loader or before[grant.full_id]) for grant in grants]
    entries = merge_entries(record.active, fresh, order)
    skills = {**session.skills, **{skill.full_id: skill for grant in grants for skill in grant.closure}}
    following = replace(session, record=record.with_active(entries, record.touched_at), skills=skills)
    loaded = await texts_of(core, following, texts)
    tokens = sum(core.count(call.scope, item.body.text) for item in loaded.texts)
    limit = core.budget(call.scope).active
    if tokens > limit:
        active = _names(session, record.ids)
        message = f"the active skills would take {tokens} tokens; {limit} are allowed. Load fewer, or replace"
        raise refuse("active_budget_exceeded", message, limit=limit, would_be=tokens, active=active)
    # Texts go first: a committed session must never name a text the store does not have.
    with store_errors():
        for body in texts.values():
            if body.raw is not None:
                await core.store.put_body(body.digest, body.raw)
    ticket.check()  # a skill removed while its text was read is not committed
    try:
        committed = await core.commit(record, entries)
    except StoreConflict:
        return None
    # A skill removed during the commit was not in the session when removals were applied, so it is unloaded here.
    try:
        ticket.check()
    except KdskillsError:
        await _undo(core, call, [entry.id for entry in fresh])
        raise
    changed = [(e.id, e.digest) for e in record.active] != [(e.id, e.digest) for e in entries]
    for entry in fresh:
        core.emit(call, "skill.loaded", id=public_id(skills[entry.id]), digest=entry.digest, by=entry.loaded_by)
    await adopt(call, loaded)
    bodies = tuple(_active(core, call, loaded, entry) for entry in committed.active)
    return LoadReceipt(tuple(skill.receipt for skill in bodies), changed, tokens, bodies)


async def _undo(core: Core, call: Call, ids: Iterable[str]) -> None:
    """Unload skills that were removed from the catalog while their load was being committed."""
    removed = set(ids)
    for _ in range(TRIES):
        with store_errors():
            record = await core.store.get(call.session_id)
        if record is None or not removed & set(record.ids):
            return
        try:
            await core.commit(record, without(record.active, removed))
        except StoreConflict:
            continue
        return


async def _read(core: Core, grants: Iterable[Granted]) -> dict[str, Body]:
    skills = {skill.full_id: skill for grant in grants for skill in grant.closure}
    bodies = await asyncio.gather(*(core.bodies.current(skill) for skill in skills.values()))
    return {full_id: core.bodies.keep(body) for full_id, body in zip(skills, bodies, strict=True)}


def _entry(core: Core, grant: Granted, texts: Mapping[str, Body], loader: str) -> LoadedSkill:
    body = texts[grant.full_id]
    imports = tuple(
        ImportedSkill(skill.full_id, texts[skill.full_id].digest, texts[skill.full_id].tree)
        for skill in grant.closure
        if skill.full_id != grant.full_id
    )
    return LoadedSkill(grant.full_id, body.digest, body.tree, core.config.clock(), loader, imports)


async def texts_of(core: Core, session: GatedSession, fresh: Mapping[str, Body] = MappingProxyType({})) -> GatedSession:
    """Return every text of a session in prompt order; one nobody has any more is left out, for callers to report.

    Files in *fresh* were read just now and are not read again.
    """
    texts: list[PromptText] = []
    for full_id, digest, importer in prompt_order(session.record.active):
        skill = session.skills[full_id]
        body = await core.body(skill, digest)
        if body is None:
            continue
        now = fresh.get(full_id)
        current = now.digest if now is not None else await core.bodies.current_digest(skill)
        texts.append(PromptText(skill, body, importer, current != digest, current))
    return replace(session, texts=tuple(texts))


async def loaded_now(core: Core, call: Call, *, touch: bool = True) -> GatedSession:
    """Return the session with its texts; entries whose text is lost are pruned with `body_lost`."""
    for _ in range(TRIES):
        loaded = await texts_of(core, await core.gated_session(call, touch=touch))
        record = loaded.record
        lost_ids = set(record.ids) - {item.skill.full_id for item in loaded.texts}
        if not lost_ids:
            return loaded
        try:
            await core.commit(record, without(record.active, lost_ids))
        except StoreConflict:
            continue
        for full_id in sorted(lost_ids):
            core.emit(call, "skill.pruned", id=full_id, code="body_lost")
    raise conflict(call.session_id)


async def active(core: Core, call: Call) -> list[ActiveSkill]:
    """Return the loaded skills with their texts, in load order, imports left out."""
    loaded = await loaded_now(core, call)
    return [_active(core, call, loaded, entry) for entry in loaded.record.active]


async def unload(core: Core, call: Call, names: Sequence[str], everything: bool) -> UnloadReceipt:
    """Unload skills; a visible skill that is not loaded changes nothing, unknown names are returned as `ignored`."""
    await core.record(call.session_id)
    refs = clean_names(names, core.config.limits.max_names)
    if not everything and not refs:
        raise invalid("name the skills to unload, or say all", ("/names", "is empty and all is false"))
    for _ in range(TRIES):
        session = await core.gated_session(call)
        record = session.record
        ignored: list[str] = []
        ids: set[str] = set(record.ids) if everything else set()
        for ref in () if everything else refs:
            full_id_or_refusal = loaded_ref(core, call, session, ref)
            if isinstance(full_id_or_refusal, Refused):
                ignored.append(ref)
            else:
                ids.add(full_id_or_refusal)
        unloaded = [entry.id for entry in record.active if entry.id in ids]
        if unloaded:
            try:
                record = await core.commit(record, without(record.active, ids))
            except StoreConflict:
                continue
        for full_id in unloaded:
            core.emit(call, "skill.unloaded", id=public_id(session.skills[full_id]))
        loaded = await texts_of(core, replace(session, record=record))
        receipts = tuple(_active(core, call, loaded, entry).receipt for entry in record.active)
        return UnloadReceipt(receipts, tuple(dict.fromkeys(ignored)), bool(unloaded))
    raise conflict(call.session_id)


def loaded_ref(core: Core, call: Call, session: GatedSession, ref: str) -> str | Refused:
    """Return the full id *ref* means; the alias of a loaded hidden skill is a ref too."""
    for entry in session.record.active:
        if ref == public_id(session.skills[entry.id]):
            return entry.id
    grant = core.resolve(session.record, call.scope, session.gate, ref, "code")
    if isinstance(grant, Refused) or grant.full_id in session.record.ids:
        return grant if isinstance(grant, Refused) else grant.full_id
    # Only loaded skills were named by code above; a model must not learn of skills that only people and code may load.
    model_grant = core.resolve(session.record, call.scope, session.gate, ref, "model")
    return model_grant if isinstance(model_grant, Refused) else model_grant.full_id


async def refresh(core: Core, call: Call) -> LoadReceipt:
    """Read every loaded skill again, in the same order."""
    return await _commit(core, call, (), "replace", None)


async def prune_everywhere(core: Core, full_id: str) -> None:
    """Take a removed skill out of every session."""
    after: str | None = None
    while True:
        with store_errors():
            page = await core.store.page(consumer=None, after=after, limit=100)
        for head in page:
            if full_id in head.active:
                call = Call(head.session_id, NO_TURN)
                await _undo(core, call, [full_id])
                core.emit(call, "skill.pruned", id=full_id, code="unknown_skill")
        if len(page) < 100:
            return
        after = page[-1].session_id


async def adopt(call: Call, loaded: GatedSession) -> None:
    """Bring the sources of every shown skill into the turn's pool, in prompt order."""
    if call.scope.sources is not None:
        await call.scope.sources.resolve(item.skill for item in loaded.texts)
        for item in loaded.texts:
            call.scope.sources.adopt(item.skill, "", digest=item.body.digest)


# ---- receipts ----


def public_id(skill: Skill) -> str:
    """Return the full id, or the alias of a hidden skill."""
    return hidden_alias(skill.full_id) if skill.hidden else skill.full_id


def public_name(skill: Skill, gate: Gate) -> str:
    """Return the name a model knows the skill by: of the catalog, else its full id; the alias of a hidden skill."""
    return hidden_alias(skill.full_id) if skill.hidden else gate.names_by_id.get(skill.full_id, skill.full_id)


def skill_receipt(
    skill: Skill,
    body: Body,
    gate: Gate,
    locations: Locations,
    *,
    stale: bool = False,
    current: str | None = None,
    imports: tuple[str, ...] = (),
    tree: str = "",
) -> SkillReceipt:
    """Return the receipt of one skill; hidden skills show their alias and digests only."""
    location, root = None, None
    if locations == "host" and skill.path is not None:
        location, root = str(skill.path), str(skill.path.parent)
    elif locations != "none":
        location, root = skill.location, skill.location.rpartition("/")[0]
    return SkillReceipt(
        name=public_name(skill, gate),
        id=public_id(skill),
        location=None if skill.hidden else location,
        root_dir=None if skill.hidden else root,
        digest=body.digest,
        tree_digest=tree or body.tree,
        stale=stale,
        current_digest=current if stale else None,
        origin=origin_of(skill.namespace),
        imports=imports,
        properties={} if skill.hidden else body.properties,
    )


def _names(session: GatedSession, ids: Iterable[str]) -> list[str]:
    return [public_name(session.skills[full_id], session.gate) for full_id in ids]


def _active(core: Core, call: Call, session: GatedSession, entry: LoadedSkill) -> ActiveSkill:
    item = next(text for text in session.texts if text.skill.full_id == entry.id)
    receipt = skill_receipt(
        item.skill, item.body, session.gate, core.config.locations,
        stale=item.stale, current=item.current, imports=tuple(_names(session, (i.id for i in entry.imports))),
        tree=entry.tree_digest,
    )  # fmt: skip
    text = shown_text(call, item)
    return ActiveSkill(receipt, entry.id, text, core.count(call.scope, text), item.skill.hidden, entry.loaded_by)


def shown_text(call: Call, item: PromptText) -> str:
    """Return the text as the prompt shows it: with the pool's sids inside a turn, as written outside."""
    if call.scope.sources is None:
        return item.body.text
    return call.scope.sources.adopt(item.skill, item.body.text, digest=item.body.digest)
