"""Load, unload, imports, freshness, removal."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kdskills.errors import KdskillsError, SessionError, ToolCallRefused
from kdskills.session import AccessRequest, Budget, Denial, SkillCatalog, TurnScope


def names(receipt: Any) -> list[str]:
    return [item.name for item in receipt.active_skills]


async def refused(awaiting: Any) -> KdskillsError:
    with pytest.raises(KdskillsError) as caught:
        await awaiting
    return caught.value


async def test_replace_then_add_moves_to_the_end(runtime):
    """The example of the spec, also under max_active=2."""
    session = await runtime.create_session(max_active=2, initial=["sales", "charts"])
    assert names(await session.load(["sales"], "add")) == ["charts", "sales"]


async def test_names_are_trimmed_and_deduplicated_by_id(runtime):
    """Blanks go, and two spellings of one skill are one."""
    session = await runtime.create_session()
    receipt = await session.load([" sales ", "", "acme.sales", "sk:acme.charts", "sales"])
    assert names(receipt) == ["sales", "charts"]


@pytest.mark.parametrize(
    ("given", "mode"), [([], "replace"), (["", "  "], "add"), (["sales"], "append"), (["a"] * 65, "add")]
)
async def test_shapes_of_load(runtime, given, mode):
    """No name left, an unknown mode, or too many names are invalid_argument and change nothing."""
    session = await runtime.create_session(initial=["charts"])
    error = await refused(session.load(given, mode))
    assert error.code == "invalid_argument"
    assert [skill.name for skill in await session.active()] == ["charts"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 600])
async def test_hostile_names(runtime, name):
    """NUL and endless names are refused before the gate."""
    session = await runtime.create_session()
    assert (await refused(session.load([name]))).code == "invalid_argument"


async def test_denied_reads_like_unknown(runtime):
    """A denied skill, by exact id, prefix or name, reads exactly like one that does not exist."""
    session = await runtime.create_session()
    texts = set()
    for ref in ("acme.embargo", "sk:acme.embargo", "acme.embargx", "embargo"):
        reply = await session.call("skills.load", {"names": [ref]})
        assert not reply.ok
        assert reply.error["code"] == "skill_not_found"
        texts.add(reply.text.replace(ref, "REF"))
    assert len(texts) == 1


async def test_the_refusal_is_for_people_only(make, events):
    """error.refusal and the event tell the code; nothing a model reads does."""
    runtime = make(events=events.append)
    session = await runtime.create_session()
    error = await refused(session.load(["acme.embargo"]))
    assert [item.code for item in error.refusal] == ["denied"]
    assert [(event.type, event.data["code"]) for event in events] == [("skill.refused", "denied")]
    assert "denied" not in json.dumps(error.to_json())


async def test_all_failing_names_are_listed(runtime):
    """Every refused name is told at once, with near visible ones, and nothing is loaded."""
    session = await runtime.create_session()
    error = await refused(session.load(["sale", "sales", "nothing"]))
    assert error.details["names"] == ["sale", "nothing"]
    assert "sales" in error.details["near"]
    assert "embargo" not in error.details["near"]
    assert await session.active() == []


async def test_cap_counts_the_next_set(make):
    """The cap is on the result: three of two fail, replacing two by two does not."""
    runtime = make(max_active=2)
    session = await runtime.create_session(initial=["sales", "charts"])
    error = await refused(session.load(["brief"], "add"))
    assert (error.code, error.details) == (
        "too_many_active",
        {"limit": 2, "would_be": 3, "active": ["sales", "charts"]},
    )
    assert names(await session.load(["brief", "sales"])) == ["brief", "sales"]


async def test_no_cap(make, bundle):
    """max_active=None takes as many as the names allow."""
    for number in range(20):
        bundle.skill(f"many.s{number}")
    session = await make(max_active=None).create_session()
    assert len((await session.load([f"many.s{number}" for number in range(20)])).active_skills) == 20


async def test_token_budget_is_on_the_next_set(make, bundle):
    """A load over the budget fails whole; imports count."""
    bundle.skill("acme.long", "word " * 2000)
    bundle.skill("acme.parent", "short", imports="[long]")
    runtime = make()
    scope = TurnScope(budget=Budget(catalog=500, active=1000, result=1000))
    session = (await runtime.create_session(initial=["sales"])).within(scope)
    for ref in ("long", "parent"):
        error = await refused(session.load([ref], "add"))
        assert (error.code, error.details["limit"], error.details["active"]) == (
            "active_budget_exceeded",
            1000,
            ["sales"],
        )
        assert error.details["would_be"] > 2000
    assert [skill.name for skill in await session.active()] == ["sales"]


async def test_imports_come_along(runtime):
    """A loaded skill's closure is readable and shown, but neither active nor counted."""
    session = await runtime.create_session(max_active=1)
    receipt = await session.load(["report"])
    assert names(receipt) == ["report"]
    assert receipt.active_skills[0].imports == ("base",)
    assert (await session.read("SKILL.md", skill="base")).skill == "base"
    text = (await session.instructions()).active
    assert text.index('<skill name="base" imported-by="report">') < text.index('<skill name="report">')


async def test_receipt(make, bundle):
    """A receipt has the facts of the reference, and location fields follow `locations`."""
    runtime = make(locations="host")
    session = await runtime.create_session()
    wire = (await session.load(["sales"])).to_json()
    skill = wire["active_skills"][0]
    assert sorted(skill) == sorted(
        ["name", "id", "location", "root_dir", "digest", "tree_digest", "stale", "origin", "imports", "properties"]
    )
    folder = bundle.root / "skills/acme/sales"
    assert (skill["location"], skill["root_dir"]) == (str(folder / "SKILL.md"), str(folder))
    assert skill["properties"] == {"name": "sales", "description": "About sales."}
    assert (wire["changed"], wire["tokens"]) == (True, 6)
    json.dumps(wire)


@pytest.mark.parametrize(
    ("locations", "place", "root"),
    [("logical", "skill://acme/sales/SKILL.md", "skill://acme/sales"), ("none", None, None)],
)
async def test_locations(make, locations, place, root):
    """`logical` gives URIs, `none` nothing."""
    session = await make(locations=locations).create_session(initial=["sales"])
    receipt = (await session.active())[0].receipt
    assert (receipt.location, receipt.root_dir) == (place, root)


async def test_no_place_of_this_host_reaches_a_model_unasked(runtime, bundle):
    """By default neither receipts nor the prompt name a folder of this host."""
    session = await runtime.create_session(initial=["sales"])
    reply = await session.call("skills.load", {"names": ["charts"], "mode": "add"})
    read = await session.call("skills.read", {"path": "references/guide.md", "skill": "sales"})
    prompt = (await session.instructions()).text
    assert "skill://acme/charts" in reply.text
    assert "skill://acme/charts/SKILL.md" in prompt
    assert str(bundle.root) not in reply.text + read.text + prompt


async def test_loading_the_same_again_changes_nothing(runtime):
    """Changed is False when set, order and texts stay."""
    session = await runtime.create_session(initial=["sales"])
    assert (await session.load(["sales"])).changed is False


async def test_hidden_skill_is_shown_by_alias(runtime):
    """A hidden skill loads by exact id; its name, id, place and fields reach no reply."""
    session = await runtime.create_session()
    reply = await session.call("skills.load", {"names": ["acme.secret"]})
    alias = reply.result["active_skills"][0]["name"]
    assert alias.startswith("hidden-guidance-")
    parts = await session.instructions()
    assert "secret" not in reply.text + parts.text
    assert f'<skill name="{alias}">' in parts.active
    assert "Quiet guidance." in (await session.read("SKILL.md", skill=alias)).text
    assert (await session.unload([alias])).active_skills == ()


# ---- unload ----


async def test_unload(runtime):
    """Loaded skills go, known but unloaded ones have no effect, unknown names come back."""
    session = await runtime.create_session(initial=["sales", "charts"])
    receipt = await session.unload(["charts", "brief", "nothing", "acme.embargo"])
    assert (names(receipt), receipt.ignored) == (["sales"], ("nothing", "acme.embargo"))


async def test_unload_all_wins(runtime):
    """all=True unloads everything, whatever names say."""
    session = await runtime.create_session(initial=["sales", "charts"])
    receipt = await session.unload(["nothing"], all=True)
    assert (receipt.active_skills, receipt.ignored) == ((), ())


@pytest.mark.parametrize("given", [[], [" "]])
async def test_unload_nothing(runtime, given):
    """Neither names nor all is invalid_argument."""
    session = await runtime.create_session(initial=["sales"])
    assert (await refused(session.unload(given))).code == "invalid_argument"


# ---- freshness ----


async def test_a_session_keeps_what_it_loaded(runtime, bundle, events):
    """A later change gives stale and the current digest; the text changes only by loading again."""
    session = await runtime.create_session(initial=["sales", "charts"])
    before = (await session.active())[0]
    bundle.skill("acme.sales", "Read the sales table twice.")
    after = (await session.active())[0]
    assert (after.body, after.receipt.stale, after.receipt.digest) == (before.body, True, before.receipt.digest)
    assert after.receipt.current_digest not in {None, before.receipt.digest}
    assert '<skill name="sales" stale="true">' in (await session.instructions()).active
    receipt = await session.load(["sales"], "add")
    assert [item.stale for item in receipt.active_skills] == [False, False]
    assert "twice" in (await session.instructions()).active


async def test_refresh_keeps_order_and_who(runtime, bundle):
    """Refresh reads all again in the same order and does not say that code loaded them."""
    session = await runtime.create_session()
    await session.load(["sales", "charts"], by="user")
    bundle.skill("acme.sales", "New.")
    receipt = await session.refresh()
    assert (names(receipt), receipt.changed) == (["sales", "charts"], True)
    skills = await session.active()
    assert [(skill.body, skill.loaded_by) for skill in skills] == [("New.", "user"), ("Draw charts.", "user")]
    assert (await session.refresh()).changed is False


async def test_refresh_of_nothing(runtime):
    """An empty session refreshes to nothing."""
    assert (await (await runtime.create_session()).refresh()).active_skills == ()


async def test_same_size_edit_in_one_tick_is_seen(runtime, bundle):
    """Size, time and inode may all stay: what changed under two seconds ago is hashed."""
    session = await runtime.create_session(initial=["sales"])
    path = bundle.root / "skills/acme/sales/SKILL.md"
    stamp = path.stat()
    path.write_bytes(path.read_bytes().replace(b"Read the", b"Eat  the"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (await session.active())[0].receipt.stale is True


async def test_a_failed_read_is_not_remembered(runtime, bundle):
    """A SKILL.md that does not parse now is skill_unreadable or unknown, and loads once mended."""
    runtime_view = bundle.subsystem(auto_refresh=None)
    runtime = type(runtime)(subsystem=runtime_view)
    session = await runtime.create_session()
    runtime_view.view("solver.react.decision")
    path = bundle.root / "skills/acme/sales/SKILL.md"
    good = path.read_bytes()
    path.write_bytes(b"no fence")
    error = await refused(session.load(["charts", "sales"]))
    assert (error.code, error.who) == ("skill_unreadable", "author")
    assert await session.active() == []
    path.write_bytes(good)
    assert names(await session.load(["charts", "sales"])) == ["charts", "sales"]


async def test_a_link_in_place_of_the_file(bundle, runtime, tmp_path):
    """A SKILL.md swapped for a link is not followed."""
    frozen = bundle.subsystem(auto_refresh=None)
    runtime = type(runtime)(subsystem=frozen)
    session = await runtime.create_session()
    frozen.view("solver.react.decision")
    secret = tmp_path / "secret"
    secret.write_text("---\nname: sales\ndescription: x\n---\nleak")
    path = bundle.root / "skills/acme/sales/SKILL.md"
    path.unlink()
    path.symlink_to(secret)
    error = await refused(session.load(["sales"]))
    assert (error.code, error.details["reason"]) == ("skill_unreadable", "symlink")


async def test_a_vanished_file(bundle, runtime):
    """A SKILL.md that is gone reads like an unknown skill."""
    frozen = bundle.subsystem(auto_refresh=None)
    session = await type(runtime)(subsystem=frozen).create_session()
    frozen.view("solver.react.decision")
    (bundle.root / "skills/acme/sales/SKILL.md").unlink()
    assert (await refused(session.load(["sales"]))).code == "skill_not_found"


async def test_too_large_body(make, bundle):
    """A SKILL.md over max_body_bytes does not load."""
    from kdskills.session import RuntimeLimits

    session = await make(limits=RuntimeLimits(max_body_bytes=200)).create_session()
    bundle.skill("acme.sales", "x" * 300)
    error = await refused(session.load(["sales"]))
    assert (error.code, error.details["reason"]) == ("skill_unreadable", "too_large")


# ---- removal and the gate on every use ----


async def test_removed_files_are_pruned(make, bundle, events):
    """What the live gate no longer grants is pruned at the next use, with an event; re-adding revives nothing."""
    runtime = make(events=events.append)
    session = await runtime.create_session(initial=["sales", "charts"])
    folder = bundle.root / "skills/acme/sales"
    folder.rename(bundle.root / "away")
    assert [skill.name for skill in await session.active()] == ["charts"]
    assert ("skill.pruned", "acme.sales") in [(event.type, event.data.get("id")) for event in events]
    (bundle.root / "away").rename(folder)
    assert [skill.name for skill in await session.active()] == ["charts"]


async def test_every_use_prunes(bundle):
    """Load, read, instructions and unload all meet the gate, not load alone."""
    from kdskills.session import SkillRuntime

    denied: dict[str, str] = {}
    subsystem = bundle.subsystem(filters=[lambda consumer, skills: dict(denied)])
    runtime = SkillRuntime(subsystem=subsystem)
    for use in ("instructions", "read", "unload", "load"):
        denied.clear()
        subsystem.refresh()
        session = await runtime.create_session(initial=["sales", "charts"])
        denied["acme.sales"] = "embargo"
        subsystem = bundle.subsystem(filters=[lambda consumer, skills: dict(denied)])
        runtime = SkillRuntime(subsystem=subsystem, store=runtime.store)
        session = await runtime.get_session(session.id)
        if use == "instructions":
            assert "sales" not in (await session.instructions()).text
        elif use == "read":
            assert (await refused(session.read("SKILL.md", skill="sales"))).code == "skill_not_found"
        elif use == "unload":
            assert names(await session.unload(["brief"])) == ["charts"]
        else:
            assert names(await session.load(["brief"], "add")) == ["charts", "brief"]


async def test_catalog_removal_prunes_all_sessions(bundle):
    """Removing from a mutable catalog takes the skill out of every session; adding it again revives nothing."""
    from kdskills.session import SkillRuntime

    catalog = SkillCatalog.from_directory(bundle.root / "skills")
    runtime = SkillRuntime(catalog=catalog)
    sessions = [await runtime.create_session(initial=["sales", "charts"]) for _ in range(3)]
    skill = catalog.gate("x").resolve("sales").skill
    await runtime.remove_skill("sales")
    await runtime.add_skill(skill)
    assert [[item.name for item in await session.active()] for session in sessions] == [["charts"]] * 3
    assert (await refused(runtime.add_skill(skill))).code == "skill_already_exists"
    await runtime.remove_skill("acme.sales")
    assert (await refused(runtime.remove_skill("sales"))).code == "skill_not_found"


async def test_only_a_catalog_changes(runtime):
    """A runtime over a subsystem has no add or remove."""
    assert (await refused(runtime.remove_skill("sales"))).code == "config_invalid"


async def test_catalog_from_directory(bundle, tmp_path):
    """A catalog holds every valid skill of a folder; a broken neighbour costs only itself."""
    broken = bundle.root / "skills/acme/broken"
    broken.mkdir()
    (broken / "SKILL.md").write_text("nothing")
    catalog = SkillCatalog.from_directory(bundle.root / "skills")
    assert sorted(catalog.gate("any").names) == ["base", "brief", "charts", "embargo", "report", "sales"]
    assert [item.code for item in catalog.diagnostics] == ["no_frontmatter"]
    with pytest.raises(KdskillsError) as caught:
        SkillCatalog.from_directory(tmp_path / "none")
    assert caught.value.code == "path_missing"


async def test_a_frozen_view_knows_one_consumer(bundle, make):
    """view= freezes policy; sessions of other consumers are refused."""
    view = bundle.subsystem().view("desk")
    runtime = make(view=view, consumer="desk")
    session = await runtime.create_session(initial=["acme.embargo"])
    assert session.consumer == "desk"
    assert (await refused(runtime.create_session(consumer="other"))).code == "policy_unavailable"


async def test_a_turn_freezes_its_view_but_removal_acts(bundle, make):
    """Under a frozen view new skills are not there, and removed ones are gone at once."""
    subsystem = bundle.subsystem()
    runtime = make(subsystem=subsystem)
    session = (await runtime.create_session(initial=["sales"])).within(
        TurnScope(view=subsystem.view("solver.react.decision"))
    )
    bundle.skill("acme.late")
    assert (await refused(session.load(["late"]))).code == "skill_not_found"
    (bundle.root / "skills/acme/sales").rename(bundle.root / "away")
    assert await session.active() == []
    assert (await refused(session.load(["sales"]))).code == "skill_not_found"


async def test_by_decides(make, bundle):
    """What only people start is unknown to a model, and loads for a person and stays."""
    bundle.skill("acme.menu", "Menu.", **{"disable-model-invocation": "true"})
    session = await make().create_session()
    assert (await refused(session.load(["acme.menu"]))).code == "skill_not_found"
    await session.load(["acme.menu"], by="user")
    assert [skill.full_id for skill in await session.active()] == ["acme.menu"]


# ---- policy plugins ----


@pytest.mark.parametrize("answer", [RuntimeError("no rules"), True, "no"], ids=["raises", "bool", "text"])
async def test_a_policy_that_fails_refuses(make, events, answer):
    """What cannot be asked is not loaded; the model reads nothing of why, the operator's events do."""

    def deny(request: AccessRequest) -> Denial | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    session = await make(deny=deny, events=events.append).create_session()
    reply = await session.call("skills.load", {"names": ["sales"]})
    assert (reply.ok, reply.error["code"], reply.error["who"]) == (False, "skill_denied", "operator")
    assert "no rules" not in reply.text
    assert await session.active() == []
    told = [event for event in events if event.type == "diagnostic"]
    assert [(event.data["code"], event.data["id"]) for event in told] == [("plugin_failed", "acme.sales")]
    assert "policy check" in told[0].data["message"]
    assert [event.data["code"] for event in events if event.type == "skill.refused"] == ["plugin_failed"]


async def test_deny_sees_and_refuses(make):
    """A Denial refuses a visible skill with its public text; the private reason stays out."""
    asked: list[AccessRequest] = []

    def deny(request: AccessRequest) -> Denial | None:
        asked.append(request)
        return Denial("ticket 7 open", "closed for stocktaking") if request.skill == "acme.sales" else None

    session = await make(deny=deny).create_session()
    reply = await session.call("skills.load", {"names": ["sales"]})
    assert (reply.error["code"], reply.error["who"], reply.error["message"]) == (
        "skill_denied",
        "operator",
        "closed for stocktaking",
    )
    assert "ticket" not in reply.text
    assert [(a.kind, a.consumer, a.session_id, a.skill, a.tool) for a in asked] == [
        ("load", "solver.react.decision", session.id, "acme.sales", "skills.load")
    ]
    assert asked[0].arguments_digest.startswith("sha256:")


async def test_unknown_sessions(runtime):
    """Every call on an unknown session is session_not_found, before its arguments are looked at."""
    for awaiting in (
        runtime.load("nope", []),
        runtime.unload("nope"),
        runtime.read("nope", ""),
        runtime.run_script("nope", ""),
        runtime.active("nope"),
        runtime.instructions("nope"),
        runtime.refresh("nope"),
        runtime.snapshot("nope"),
        runtime.get_session("nope"),
        runtime.describe("sales", session_id="nope"),
    ):
        error = await refused(awaiting)
        assert (type(error), error.code) == (SessionError, "session_not_found")
    reply = await runtime.call("nope", "skills.load", {"names": "broken"})
    assert (reply.ok, reply.error["code"]) == (False, "session_not_found")


def test_errors_are_of_the_model(runtime):
    """ToolCallRefused is what tools raise, and says who must act."""
    from kdskills.session.codes import CODES, refuse

    for code, facts in CODES.items():
        error = refuse(code, "said")
        assert isinstance(error, ToolCallRefused)
        assert (error.code, error.who) == (code, facts.who)


async def test_stale_is_told_once(make, bundle, events):
    """skill.stale is told once for each change, however many prompts are built."""
    session = await make(events=events.append).create_session(initial=["sales"])
    for body in ("One.", "Two."):
        bundle.skill("acme.sales", body)
        for _ in range(3):
            await session.instructions()
    assert [event.data for event in events if event.type == "skill.stale"] == [{"id": "acme.sales"}] * 2
