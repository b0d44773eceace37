"""Load, unload, refresh and what is active: all or nothing, by snapshot, reads and compare-and-set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kdskills.errors import KdskillsError
from kdskills.prompts import hidden_alias
from kdskills.session.approval import origin_of
from kdskills.session.bodies import Body
from kdskills.session.codes import invalid, refuse
from kdskills.session.core import TRIES, Call, Core, Standing, conflict, store_errors
from kdskills.session.flights import Ticket
from kdskills.session.receipts import ActiveSkill, LoadReceipt, SkillReceipt, UnloadReceipt
from kdskills.session.scope import NO_TURN
from kdskills.session.source import Locations, names_by_id
from kdskills.session.state import (
    ImportedSkill,
    LoadedSkill,
    LoadMode,
    load_mode,
    merge_entries,
    next_ids,
    prompt_order,
    without,
)
from kdskills.session.store import StoreConflict
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Granted, Refused


@dataclass(frozen=True, slots=True)
class Shown:
    """One text of the prompt: the skill, its text as loaded, and who imports it (None for a loaded skill)."""

    skill: Skill
    body: Body
    importer: str | None
    stale: bool
    current: str | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session with its texts, in prompt order."""

    standing: Standing
    shown: tuple[Shown, ...] = field(default=())

    def of(self, full_id: str) -> Shown:
        """Return the text of a skill that is shown."""
        return next(item for item in self.shown if item.skill.full_id == full_id)


def clean_names(names: Sequence[str], most: int) -> list[str]:
    """Return *names* trimmed, without blanks.

    Raises:
        ToolCallRefused: `invalid_argument` when none is left, there are too many, or one is no clean text.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise invalid("names must be a list of skill names", ("/names", "must be a list of strings"))
    if len(names) > most:
        raise invalid(f"at most {most} names are allowed", ("/names", f"holds more than {most} names"))
    for number, name in enumerate(names):
        if "\0" in name or len(name) > 512:
            raise invalid("a name is too long or holds NUL", (f"/names/{number}", "is no skill name"))
    return [name.strip() for name in names if name.strip()]


async def load(core: Core, call: Call, names: Sequence[str], mode: str | None, by: By) -> LoadReceipt:
    """Load skills; nothing changes unless everything asked for can be had."""
    await core.record(call.session_id)
    wanted = load_mode(mode)
    if wanted is None:
        raise invalid(f"mode must be replace or add, not {mode!r}", ("/mode", "must be replace or add"))
    refs = clean_names(names, core.config.limits.max_names)
    if not refs:
        raise invalid("name at least one skill", ("/names", "is empty"))
    with core.tickets.opened(call.session_id) as ticket:
        for _ in range(TRIES):
            standing = await core.standing(call)
            grants = core.granted(call, standing, refs, by)
            ticket.watch(skill.full_id for grant in grants for skill in grant.closure)
            for grant in grants:
                core.ask(call, standing.record, "load", grant.skill, {"names": refs, "mode": wanted})
            receipt = await _attempt(core, call, ticket, standing, grants, wanted, by)
            if receipt is not None:
                return receipt
    raise conflict(call.session_id)


async def _attempt(
    core: Core, call: Call, ticket: Ticket, standing: Standing, grants: list[Granted], mode: LoadMode, by: By | None
) -> LoadReceipt | None:
    """Try once to commit; None when another call was faster. Without *by*, entries keep who loaded them."""
    record = standing.record
    order = next_ids(record.ids, [grant.full_id for grant in grants], mode)
    if record.max_active is not None and len(order) > record.max_active:
        message = f"{len(order)} skills would be active; at most {record.max_active} may be"
        active = _names(standing, record.ids)
        raise refuse("too_many_active", message, limit=record.max_active, would_be=len(order), active=active)
    texts = await ticket.race(_read(core, grants))
    before = {entry.id: entry.loaded_by for entry in record.active}
    fresh = [_entry(core, grant, texts, by or before[grant.full_id]) for grant in grants]
    entries = merge_entries(record.active, fresh, order)
    skills = {**standing.skills, **{skill.full_id: skill for grant in grants for skill in grant.closure}}
    following = Standing(record.with_active(entries, record.touched_at), standing.gate, skills)
    loaded = await texts_of(core, following, texts)
    tokens = sum(core.count(call.scope, item.body.text) for item in loaded.shown)
    limit = core.budget(call.scope).active
    if tokens > limit:
        active = _names(standing, record.ids)
        message = f"the active skills would take {tokens} tokens; {limit} are allowed. Load fewer, or replace"
        raise refuse("active_budget_exceeded", message, limit=limit, would_be=tokens, active=active)
    with store_errors():
        for body in texts.values():
            if body.raw is not None:
                await core.store.put_body(body.digest, body.raw)
    ticket.check()
    try:
        committed = await core.commit(record, entries)
    except StoreConflict:
        return None
    try:
        ticket.check()
    except KdskillsError:
        await _undo(core, call, [entry.id for entry in fresh])
        raise
    changed = [(e.id, e.digest) for e in record.active] != [(e.id, e.digest) for e in entries]
    for entry in fresh:
        core.emit(call, "skill.loaded", id=public_id(skills[entry.id]), digest=entry.digest, by=entry.loaded_by)
    adopt(call, loaded)
    return _receipt(core, call, Loaded(Standing(committed, standing.gate, skills), loaded.shown), changed, tokens)


async def _undo(core: Core, call: Call, ids: Iterable[str]) -> None:
    """Take back what was committed in the moment its skill was removed."""
    gone = set(ids)
    for _ in range(TRIES):
        with store_errors():
            record = await core.store.get(call.session_id)
        if record is None or not gone & set(record.ids):
            return
        try:
            await core.commit(record, without(record.active, gone))
        except StoreConflict:
            continue
        return


async def _read(core: Core, grants: Iterable[Granted]) -> dict[str, Body]:
    skills = {skill.full_id: skill for grant in grants for skill in grant.closure}
    bodies = await asyncio.gather(*(core.bodies.current(skill) for skill in skills.values()))
    return {full_id: core.bodies.keep(body) for full_id, body in zip(skills, bodies, strict=True)}


def _entry(core: Core, grant: Granted, texts: Mapping[str, Body], by: str) -> LoadedSkill:
    body = texts[grant.full_id]
    imports = tuple(
        ImportedSkill(skill.full_id, texts[skill.full_id].digest, texts[skill.full_id].tree)
        for skill in grant.closure
        if skill.full_id != grant.full_id
    )
    return LoadedSkill(grant.full_id, body.digest, body.tree, core.config.clock(), by, imports)


async def texts_of(core: Core, standing: Standing, fresh: Mapping[str, Body] = MappingProxyType({})) -> Loaded:
    """Return every text of a session in prompt order; one that is lost is left out (`body_lost` is told by callers).

    What is in *fresh* was read just now and is not looked at again.
    """
    shown: list[Shown] = []
    for full_id, digest, importer in prompt_order(standing.record.active):
        skill = standing.skills[full_id]
        body = await core.body(skill, digest)
        if body is None:
            continue
        now = fresh.get(full_id)
        current = now.digest if now is not None else await core.bodies.current_digest(skill)
        shown.append(Shown(skill, body, importer, current != digest, current))
    return Loaded(standing, tuple(shown))


async def loaded_now(core: Core, call: Call, *, touch: bool = True) -> Loaded:
    """Return the session with its texts; entries whose text is lost are pruned with `body_lost`."""
    for _ in range(TRIES):
        loaded = await texts_of(core, await core.standing(call, touch=touch))
        record = loaded.standing.record
        lost = set(record.ids) - {item.skill.full_id for item in loaded.shown}
        if not lost:
            return loaded
        try:
            await core.commit(record, without(record.active, lost))
        except StoreConflict:
            continue
        for full_id in sorted(lost):
            core.emit(call, "skill.pruned", id=full_id, code="body_lost")
    raise conflict(call.session_id)


async def active(core: Core, call: Call) -> list[ActiveSkill]:
    """Return the loaded skills with their texts, in load order, imports left out."""
    loaded = await loaded_now(core, call)
    return [_active(core, call, loaded, entry) for entry in loaded.standing.record.active]


async def unload(core: Core, call: Call, names: Sequence[str], everything: bool) -> UnloadReceipt:
    """Unload skills; what is not loaded has no effect, unknown names come back."""
    await core.record(call.session_id)
    refs = clean_names(names, core.config.limits.max_names)
    if not everything and not refs:
        raise invalid("name the skills to unload, or say all", ("/names", "is empty and all is false"))
    for _ in range(TRIES):
        standing = await core.standing(call)
        record = standing.record
        ignored: list[str] = []
        ids: set[str] = set(record.ids) if everything else set()
        for ref in () if everything else refs:
            found = loaded_ref(core, call, standing, ref)
            if isinstance(found, Refused):
                ignored.append(ref)
            else:
                ids.add(found)
        gone = [entry.id for entry in record.active if entry.id in ids]
        if gone:
            try:
                record = await core.commit(record, without(record.active, ids))
            except StoreConflict:
                continue
        for full_id in gone:
            core.emit(call, "skill.unloaded", id=public_id(standing.skills[full_id]))
        loaded = await texts_of(core, Standing(record, standing.gate, standing.skills))
        return UnloadReceipt(_receipts(core, call, loaded), tuple(dict.fromkeys(ignored)), bool(gone))
    raise conflict(call.session_id)


def loaded_ref(core: Core, call: Call, standing: Standing, ref: str) -> str | Refused:
    """Return the full id *ref* means; the alias of a loaded hidden skill is a ref too."""
    for entry in standing.record.active:
        if ref == public_id(standing.skills[entry.id]):
            return entry.id
    found = core.resolve(standing.record, call.scope, standing.gate, ref, "code")
    if isinstance(found, Refused) or found.full_id in standing.record.ids:
        return found if isinstance(found, Refused) else found.full_id
    # What is not loaded is named by a model: a skill only people and code start is as good as unknown to it.
    named = core.resolve(standing.record, call.scope, standing.gate, ref, "model")
    return named if isinstance(named, Refused) else named.full_id


async def refresh(core: Core, call: Call) -> LoadReceipt:
    """Read every loaded skill again, in the same order."""
    with core.tickets.opened(call.session_id) as ticket:
        for _ in range(TRIES):
            standing = await core.standing(call)
            if not standing.record.active:
                return LoadReceipt((), False, 0)
            grants = core.granted(call, standing, standing.record.ids, "code")
            ticket.watch(skill.full_id for grant in grants for skill in grant.closure)
            receipt = await _attempt(core, call, ticket, standing, grants, "replace", None)
            if receipt is not None:
                return receipt
    raise conflict(call.session_id)


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


def adopt(call: Call, loaded: Loaded) -> None:
    """Bring the sources of every shown skill into the turn's pool, in prompt order."""
    if call.scope.sources is not None:
        for item in loaded.shown:
            call.scope.sources.adopt(item.skill, "", digest=item.body.digest)


# ---- receipts ----


def public_id(skill: Skill) -> str:
    """Return the full id, or the alias of a hidden skill."""
    return hidden_alias(skill.full_id) if skill.hidden else skill.full_id


def public_name(skill: Skill, names: Mapping[str, str]) -> str:
    """Return the name a model knows the skill by: of the catalog, else its full id; the alias of a hidden skill."""
    return hidden_alias(skill.full_id) if skill.hidden else names.get(skill.full_id, skill.full_id)


def skill_receipt(
    skill: Skill, body: Body, names: Mapping[str, str], locations: Locations, **facts: object
) -> SkillReceipt:
    """Return the receipt of one skill; hidden skills show their alias and digests only."""
    location, root = _places(skill, locations)
    stale = bool(facts.get("stale"))
    current = facts.get("current")
    imports = facts.get("imports")
    return SkillReceipt(
        name=public_name(skill, names),
        id=public_id(skill),
        location=None if skill.hidden else location,
        root_dir=None if skill.hidden else root,
        digest=body.digest,
        tree_digest=str(facts.get("tree") or body.tree),
        stale=stale,
        current_digest=current if stale and isinstance(current, str) else None,
        origin=origin_of(skill.namespace),
        imports=imports if isinstance(imports, tuple) else (),
        properties={} if skill.hidden else body.properties,
    )


def _places(skill: Skill, locations: Locations) -> tuple[str | None, str | None]:
    if locations == "none":
        return None, None
    if locations == "host" and skill.path is not None:
        return str(skill.path), str(skill.path.parent)
    return skill.location, skill.location.rpartition("/")[0]


def _names(standing: Standing, ids: Iterable[str]) -> list[str]:
    names = names_by_id(standing.gate)
    return [public_name(standing.skills[full_id], names) for full_id in ids]


def _active(core: Core, call: Call, loaded: Loaded, entry: LoadedSkill) -> ActiveSkill:
    names = names_by_id(loaded.standing.gate)
    item = loaded.of(entry.id)
    imports = tuple(public_name(loaded.standing.skills[brought.id], names) for brought in entry.imports)
    receipt = skill_receipt(
        item.skill, item.body, names, core.config.locations,
        stale=item.stale, current=item.current, imports=imports, tree=entry.tree_digest,
    )  # fmt: skip
    text = shown_text(call, item)
    return ActiveSkill(receipt, entry.id, text, core.count(call.scope, text), item.skill.hidden, entry.loaded_by)


def shown_text(call: Call, item: Shown) -> str:
    """Return the text as the prompt shows it: with the pool's sids inside a turn, as written outside."""
    if call.scope.sources is None:
        return item.body.text
    return call.scope.sources.adopt(item.skill, item.body.text, digest=item.body.digest)


def _receipts(core: Core, call: Call, loaded: Loaded) -> tuple[SkillReceipt, ...]:
    return tuple(_active(core, call, loaded, entry).receipt for entry in loaded.standing.record.active)


def _receipt(core: Core, call: Call, loaded: Loaded, changed: bool, tokens: int) -> LoadReceipt:
    skills = tuple(_active(core, call, loaded, entry) for entry in loaded.standing.record.active)
    return LoadReceipt(tuple(skill.receipt for skill in skills), changed, tokens, skills)
