"""The view: numbers, names, lists, refusals by every way of naming a skill."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills import build_skills_instruction_block, get_skill, resolve_skill_ref
from kdskills.turn import Granted, Refused

REQUIRED = [{"id": "io.save", "required": True}]


@pytest.fixture
def world(write, build):
    """A bundle with one skill of each sort."""
    write("acme.brief")
    write("acme.denied")
    write("acme.zhidden", agent_disclosure="hidden")
    write("public.brief")
    write("public.plain")
    write("internal.core")
    write("acme.people", **{"disable-model-invocation": True})
    write("acme.message", insert="user-message")
    write("acme.agents", **{"user-invocable": False})
    write("acme.tooled", tools=REQUIRED)
    write("acme.forw", include_for=["w*"])
    write("acme.broken", body="x", description="")
    return build({"*": {"disabled": ["acme.denied"]}, "w": {}, "v": {"enabled": ["plain", "acme.b*"]}})


def test_lists_of_a_view(world) -> None:
    """`skills` is what can be loaded; `listed` leaves out hidden skills and those only people start; both are sorted."""
    view = world.view("w", tools=[])
    assert list(view.skills) == [
        "acme.agents",
        "acme.brief",
        "acme.forw",
        "acme.message",
        "acme.people",
        "acme.zhidden",
        "public.brief",
        "public.plain",
    ]
    assert list(view.listed) == ["acme.agents", "acme.brief", "acme.forw", "public.brief", "public.plain"]


def test_numbers_and_names(world) -> None:
    """Numbers count `listed` from 1; a name is the bare id where unique in `listed`, else the full id."""
    view = world.view("w", tools=[])
    assert dict(view.short_ids) == {
        "SK1": "acme.agents",
        "SK2": "acme.brief",
        "SK3": "acme.forw",
        "SK4": "public.brief",
        "SK5": "public.plain",
    }
    assert dict(view.names) == {
        "agents": "acme.agents",
        "acme.brief": "acme.brief",
        "forw": "acme.forw",
        "public.brief": "public.brief",
        "plain": "public.plain",
    }


@pytest.mark.parametrize(
    ("ref", "full_id", "via"),
    [
        ("SK2", "acme.brief", "short_id"),
        (" sk:2 ", "acme.brief", "short_id"),
        ("sk:SK2", "acme.brief", "short_id"),
        ("forw", "acme.forw", "name"),
        ("skill:forw", "acme.forw", "name"),
        ("acme.brief", "acme.brief", "full_id"),
        ("skills.skills.acme.brief", "acme.brief", "full_id"),
        ("brief", "public.brief", "bare_id"),
        ("plain", "public.plain", "name"),
        ("acme.zhidden", "acme.zhidden", "full_id"),
    ],
)
def test_resolve_by_each_spelling(world, ref: str, full_id: str, via: str) -> None:
    """Short ids and names of the view come first, then ids; a hidden skill resolves by its exact id."""
    found = world.view("w", tools=[]).resolve(ref)
    assert isinstance(found, Granted)
    assert (found.full_id, found.via, found.skill.full_id) == (full_id, via, full_id)
    assert [skill.full_id for skill in found.closure] == [full_id]


@pytest.mark.parametrize(
    ("ref", "code"),
    [
        ("", "invalid_ref"),
        ("  ", "invalid_ref"),
        ("a.b.c", "invalid_ref"),
        ("../../etc/passwd", "invalid_ref"),
        ("gone", "unknown_skill"),
        ("acme.gone", "unknown_skill"),
        ("SK99", "unknown_skill"),
        ("SK0", "unknown_skill"),
        ("SK02", "unknown_skill"),
        ("sk2", "unknown_skill"),
        ("ACME.brief", "unknown_skill"),
        ("zhidden", "unknown_skill"),
        ("acme.broken", "skill_invalid"),
        ("acme.denied", "denied"),
        ("internal.core", "internal"),
        ("acme.tooled", "tools_missing"),
        ("acme.people", "user_only"),
        ("acme.message", "user_only"),
    ],
)
def test_refusals(world, ref: str, code: str) -> None:
    """Each reference that is not to be had is refused with the code of the first step that says so."""
    found = world.view("w", tools=[]).resolve(ref)
    assert isinstance(found, Refused)
    assert (found.code, found.ref) == (code, ref)


def test_by_decides_step_7_only(world) -> None:
    """A person starts what a model may not, and the other way round; code may start both."""
    view = world.view("w")
    codes = {
        by: [
            getattr(view.resolve(ref, by=by), "code", "granted")
            for ref in ("acme.people", "acme.agents", "acme.denied")
        ]
        for by in ("model", "user", "code")
    }
    assert codes == {
        "model": ["user_only", "granted", "denied"],
        "user": ["granted", "model_only", "denied"],
        "code": ["granted", "granted", "denied"],
    }
    with pytest.raises(ValueError, match="model, user, code"):
        view.resolve("acme.brief", by="root")


def test_denied_by_every_way(write, build) -> None:
    """One gate: by exact id, prefix, short id, name, import and facade map, a denied skill is `denied`."""
    write("acme.secret")
    write("acme.top", imports=["secret"])
    before = build().view("w")
    number = next(short for short, full_id in before.short_ids.items() if full_id == "acme.secret")
    assert before.names["secret"] == "acme.secret"
    view = build({"*": {"disabled": ["secret"]}}).view("w")
    for ref in (
        "acme.secret",
        "sk:acme.secret",
        "skill:acme.secret",
        "skills.acme.secret",
        "skills.skills.acme.secret",
    ):
        assert view.resolve(ref).code == "denied"
    assert view.gate(number, numbers=before.short_ids).code == "denied"
    assert isinstance(view.resolve("secret"), Refused)
    assert "acme.secret" not in {*view.short_ids.values(), *view.names.values(), *view.skills}
    granted = view.resolve("acme.top")
    assert ([skill.full_id for skill in granted.closure], [entry.code for entry in granted.skipped]) == (
        ["acme.top"],
        ["denied"],
    )
    assert {entry["id"] for entry in view.picker()} == {"acme.top"}
    assert "secret" not in view.catalog().text


def test_refused_reads_like_unknown_to_a_model(world) -> None:
    """The public form of every refusal of one reference is the same, whatever the reason."""
    view = world.view("w", tools=[])
    for ref in ("acme.denied", "internal.core", "acme.tooled", "acme.gone", "a.b.c"):
        public = view.resolve(ref).public()
        assert (public.code, public.full_id, public.reason) == ("unknown_skill", None, f"there is no skill {ref!r}")


def test_hidden_is_in_no_list(world) -> None:
    """A hidden skill is in no number, name, catalog, picker or block's text, yet it is granted and in `skills`."""
    view = world.view("w")
    assert "acme.zhidden" in view.skills
    assert "acme.zhidden" not in {*view.short_ids.values(), *view.names, *view.names.values(), *view.listed}
    for form in ("gallery", "xml", "json"):
        assert "zhidden" not in view.catalog(form).text
    assert "acme.zhidden" not in {entry["id"] for entry in [*view.picker(), *world.picker()]}


def test_name_is_unique_among_listed_only(write, build) -> None:
    """A hidden skill of the same bare id neither takes a name away nor is reached by it."""
    write("acme.x")
    write("public.x", agent_disclosure="hidden")
    view = build().view()
    assert dict(view.names) == {"x": "acme.x"}
    assert view.resolve("x").full_id == "acme.x"
    assert view.gate("x", names=False).full_id == "public.x"


def test_a_skill_called_like_a_number_is_named_in_full(write, build) -> None:
    """A name never shadows a short id."""
    write("acme.SK1", name="sk1", id="SK1")
    write("acme.a")
    view = build().view()
    assert dict(view.short_ids) == {"SK1": "acme.SK1", "SK2": "acme.a"}
    assert dict(view.names) == {"acme.SK1": "acme.SK1", "a": "acme.a"}


def test_star_binds_everybody(world) -> None:
    """The deny layer holds for listed, unlisted and anonymous consumers."""
    for consumer in ("w", "v", "never-heard-of", None, "*"):
        assert world.view(consumer).resolve("acme.denied").code == "denied"
        assert "acme.denied" not in world.view(consumer).skills


def test_consumers_match_exactly_and_default_is_a_plain_name(write, build) -> None:
    """Keys are compared as written; `default` means nothing special."""
    write("acme.a")
    write("acme.b")
    subsystem = build({"Writer": {"enabled": ["acme.a"]}, "default": {"enabled": ["acme.b"]}})
    assert list(subsystem.view("Writer").skills) == ["acme.a"]
    assert list(subsystem.view("writer").skills) == ["acme.a", "acme.b"]
    assert list(subsystem.view("default").skills) == ["acme.b"]


def test_enabled_lists(write, build) -> None:
    """An empty list is no allow-list; a list of wrong entries only allows nothing; `false` allows nothing."""
    write("acme.a")
    codes = [
        build({"w": {"enabled": value}}).view("w").resolve("acme.a")
        for value in ([], None, True, ["gone"], [""], ["a"], False, ["acme.a"])
    ]
    assert [getattr(found, "code", "granted") for found in codes] == [
        "granted",
        "granted",
        "granted",
        "not_enabled",
        "not_enabled",
        "not_enabled",
        "not_enabled",
        "granted",
    ]


def test_tools_of_all_forms(world) -> None:
    """Ids, mappings and objects open the gate; `None` has none; `[]` shuts it."""
    assert "acme.tooled" in world.view("w").skills
    for tools in (["io.save"], [{"id": "io.save"}], [{"tool_id": "io.save"}], [{"name": "io.save"}], "io.save"):
        assert "acme.tooled" in world.view("w", tools).skills
    assert "acme.tooled" in world.view("w", [SimpleNamespace(id="io.save")]).skills
    assert "acme.tooled" in world.view("w", [SimpleNamespace(name="io.save")]).skills
    assert "acme.tooled" not in world.view("w", []).skills
    assert world.view("w", []).resolve("acme.tooled").details["missing"] == ["io.save"]


def test_broken_tools_file_never_opens(write, build) -> None:
    """A skill whose `tools.yaml` is unusable is invalid, not free."""
    write("acme.a", files={"tools.yaml": "tools: [}"})
    view = build().view(tools=[])
    assert view.resolve("acme.a").code == "skill_invalid"


def test_include_internal(world) -> None:
    """Only `include_internal` opens the namespace; the picker never shows it."""
    assert "internal.core" not in world.view("w").skills
    view = world.view("w", include_internal=True)
    assert "internal.core" in view.skills
    assert "internal.core" in view.listed
    assert "internal.core" not in {entry["id"] for entry in view.picker()}


def test_rules_that_match_nothing_are_reported(world, build) -> None:
    """Each rule without effect is a warning of the view it belongs to, and of the subsystem."""
    subsystem = build({"*": {"disabled": ["gone.*"]}, "w": {"enabled": ["brief", "zzz"], "disabled": ["SKx"]}})
    found = [(entry.code, entry.severity, entry.ref) for entry in subsystem.view("w").diagnostics]
    assert found == [("rule_matches_nothing", "warning", ref) for ref in ("gone.*", "SKx", "zzz")]
    assert {entry.ref for entry in subsystem.diagnostics if entry.code == "rule_matches_nothing"} == {
        "gone.*",
        "SKx",
        "zzz",
    }
    assert world.view("w").diagnostics == ()


def test_a_rule_may_match_an_invalid_skill(write, build) -> None:
    """A rule about a skill that could not be loaded is not without effect."""
    write("acme.broken", description="")
    assert build({"w": {"disabled": ["acme.broken"]}}).view("w").diagnostics == ()


def test_filters_deny_by_union(world, build) -> None:
    """Each filter is asked with consumer and skills; what any of them denies is `plugin_denied`; order does not matter."""
    asked = []

    def one(consumer, skills):
        asked.append((consumer, len(skills)))
        return {"acme.brief": "quota", "acme.gone": "x"}

    def two(consumer, skills):
        return {"public.plain": "closed"} if consumer == "w" else {}

    for filters in ((one, two), (two, one)):
        view = build(filters=filters).view("w")
        assert [view.resolve(ref).code for ref in ("acme.brief", "public.plain")] == ["plugin_denied"] * 2
        assert view.resolve("acme.brief").details == {"rule": "quota", "source": "plugin"}
        assert "public.plain" in build(filters=filters).view("v").skills
    assert asked[0] == ("w", 11)


def test_a_failing_filter_opens_nothing(world, build) -> None:
    """A filter that raises stops the view instead of leaving its denials out."""

    def broken(consumer, skills):
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        build(filters=(broken,)).view("w")


def test_view_is_frozen(world) -> None:
    """Neither a view nor its mappings can be changed."""
    view = world.view("w")
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.consumer = "v"
    for mapping in (view.skills, view.listed, view.short_ids, view.names):
        with pytest.raises(TypeError):
            mapping["SK1"] = "acme.denied"


def test_views_are_shared_and_older_ones_stay(world, write) -> None:
    """The same question gets the same view until something changes; an older view keeps what it had."""
    old = world.view("w", ["b", "a"])
    assert world.view("w", ["a", "b"]) is old
    write("acme.new")
    assert world.view("w", ["a", "b"]) is old
    world.refresh()
    new = world.view("w", ["a", "b"])
    assert ("acme.new" in old.skills, "acme.new" in new.skills) == (False, True)


def test_digest(world, build) -> None:
    """The digest changes with consumer, tools, internal, rules and skills, and with nothing else."""
    base = world.view("w", []).digest
    assert world.view("w", []).digest == base
    others = [
        world.view("v", []),
        world.view(None, []),
        world.view("w"),
        world.view("w", ["io.save"]),
        world.view("w", [], include_internal=True),
        build({"w": {"disabled": ["acme.brief"]}}).view("w", []),
        build({"*": {"disabled": ["acme.denied"]}, "w": {}, "v": {}}).view("w", []),
    ]
    assert len({base, *(view.digest for view in others)}) == len(others) + 1


# ---- closure, catalog, picker, explain -------------------------------------------------------------------------------


def test_closure_of_references(write, build) -> None:
    """References of every spelling are answered in order; a string is one; refusals are listed."""
    write("acme.a", imports=["b"])
    write("acme.b")
    write("acme.c", imports="b")
    view = build({"w": {"disabled": ["c"]}}).view("w")
    closure = view.closure(["SK1", "acme.b", "acme.c", "gone", "a"])
    assert closure.ids == ("acme.b", "acme.a")
    assert [(entry.ref, entry.code) for entry in closure.refused] == [("acme.c", "denied"), ("gone", "unknown_skill")]
    assert view.closure("acme.a").ids == ("acme.b", "acme.a")
    assert view.closure([]).order == ()


def test_private_dependencies_live_inside_the_closure_only(write, build) -> None:
    """A dependency that is not enabled, or internal, comes with its importer and is refused by itself."""
    write("acme.top", imports=["internal.core", "low"])
    write("acme.low")
    write("internal.core")
    view = build({"w": {"enabled": ["acme.top"]}}).view("w")
    assert list(view.skills) == ["acme.top"]
    assert [skill.full_id for skill in view.resolve("acme.top").closure] == ["internal.core", "acme.low", "acme.top"]
    assert [view.resolve(ref).code for ref in ("internal.core", "acme.low")] == ["internal", "not_enabled"]


def test_internal_dependency_of_a_user_root(write, build, root) -> None:
    """A user root's skill cannot pull internal skills in."""
    write("internal.core")
    write("x.top", root="more", imports=["internal.core"])
    view = build(roots=(root("user", "more"),)).view()
    granted = view.resolve("public.top")
    assert [skill.full_id for skill in granted.closure] == ["public.top"]
    assert [entry.code for entry in granted.skipped] == ["internal"]


def test_strict_imports_in_a_view(write, build) -> None:
    """Under `strict` a parent with a refused import is in no list and refused with the chain, by every way."""
    write("acme.top", imports=["mid"])
    write("acme.mid", imports=["bad"])
    write("acme.bad")
    write("acme.fine")
    view = build({"w": {"imports": "strict", "disabled": ["bad"]}}).view("w")
    assert list(view.skills) == ["acme.fine"]
    refused = view.resolve("acme.top")
    assert (refused.code, refused.details["chain"]) == ("import_refused", ["acme.top", "acme.mid", "acme.bad"])
    assert view.explain("acme.top").code == "import_refused"
    assert any("acme.bad" in note for note in view.explain("acme.top").notes)


def test_imports_apply_no_step_7(write, build) -> None:
    """What only people start may be imported by what a model starts."""
    write("acme.top", imports=["people"])
    write("acme.people", **{"disable-model-invocation": True})
    assert build().view().closure("acme.top").ids == ("acme.people", "acme.top")


def test_catalog_of_a_view(world) -> None:
    """The catalog shows `listed` with the view's numbers and names, the same each time."""
    view = world.view("v", [])
    text = view.catalog().text
    assert text.splitlines()[2::2] == ["[SK1] acme.brief", "[SK2] public.plain"]
    assert view.catalog().text == text
    xml = view.catalog("xml", locations="logical").text
    assert "skill://acme/brief/SKILL.md" in xml
    assert str(view.skills["acme.brief"].path) in view.catalog("xml", locations="host").text
    assert view.catalog(budget=5).tokens <= 5


def test_picker(world) -> None:
    """The picker leaves out hidden, internal and agent-only skills; patterns and refs narrow it, numbers never match."""
    ids = [entry["id"] for entry in world.view("w", []).picker()]
    assert ids == ["acme.brief", "acme.forw", "acme.message", "acme.people", "public.brief", "public.plain"]
    assert [entry["id"] for entry in world.view("w").picker(["brief", "acme.f*"])] == ["acme.forw", "public.brief"]
    assert world.view("w").picker("plain") == [
        {"id": "public.plain", "name": "plain", "description": "About plain.", "when_to_use": [], "namespace": "public"}
    ]
    assert world.view("w").picker([]) == []
    assert world.view("w").picker(["SK1"]) == []
    whole = [entry["id"] for entry in world.picker()]
    assert whole == [*ids[:4], "acme.tooled", *ids[4:]]


def test_explain_lists_every_step(world) -> None:
    """All seven steps with rule, source and result, and the outcome `resolve` gives."""
    view = world.view("v", [])
    granted = view.explain("acme.brief")
    assert (granted.granted, granted.code, [step.step for step in granted.steps]) == (
        True,
        "granted",
        [1, 2, 3, 4, 5, 6, 7],
    )
    assert {step.result for step in granted.steps} == {"pass"}
    assert (granted.steps[4].rule, granted.steps[4].source) == ("acme.b*", "agents_config.v.enabled")
    denied = view.explain("acme.denied")
    assert denied.code == view.resolve("acme.denied").code == "denied"
    assert [(step.step, step.code) for step in denied.steps if step.result == "refuse"] == [
        (2, "denied"),
        (5, "not_enabled"),
    ]
    assert (denied.steps[1].rule, denied.steps[1].source) == ("acme.denied", "agents_config.*.disabled")


@pytest.mark.parametrize(
    ("ref", "code", "step"),
    [
        ("a.b.c", "invalid_ref", 1),
        ("gone", "unknown_skill", 1),
        ("acme.broken", "skill_invalid", 1),
        ("internal.core", "internal", 3),
        ("acme.forw", "not_for_consumer", 4),
        ("public.brief", "not_enabled", 5),
        ("acme.brief", "granted", None),
    ],
)
def test_explain_agrees_with_resolve(world, ref: str, code: str, step: int | None) -> None:
    """The first refusing step carries the code of the outcome."""
    explanation = world.view("v", []).explain(ref)
    first = next((entry for entry in explanation.steps if entry.result == "refuse"), None)
    assert explanation.code == code
    assert (first.step, first.code) == (step, code) if first else step is None
    assert explanation.to_json()["code"] == code
    assert str(explanation).splitlines()[0].endswith(code)


def test_explain_notes_hiding_and_imports(write, build) -> None:
    """Facts that decide nothing are notes: hiding, imports left out."""
    write("acme.a", imports=["gone"], agent_disclosure="hidden")
    notes = build().view().explain("acme.a").notes
    assert len(notes) == 2
    assert "gone" in notes[0]
    assert "hidden" in notes[1]


# ---- adding a denial never shows more --------------------------------------------------------------------------------

REFS = ["acme.a", "a", "sk:acme.b", "b", "public.a", "internal.i", "SK1", "SK2", "acme.top", "top", "zzz"]
RULE = st.sampled_from(["*", "acme.*", "a", "b", "acme.top", "public.a", "internal.*", "?cme.b", ""])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    enabled=st.lists(RULE, max_size=3),
    disabled=st.lists(RULE, max_size=2),
    everyone=st.lists(RULE, max_size=2),
    more=RULE,
    imports=st.sampled_from(["private", "listed", "strict"]),
)
def test_adding_a_deny_never_shows_more(write, build, enabled, disabled, everyone, more, imports) -> None:
    """One more denial, of the consumer or of all, never adds a skill to lists or closures, nor grants a reference."""
    for full_id, options in {
        "acme.a": {},
        "acme.b": {"imports": ["a"]},
        "acme.top": {"imports": ["b", "internal.i"]},
        "public.a": {},
        "internal.i": {},
    }.items():
        write(full_id, **options)
    rules = {"enabled": enabled, "disabled": disabled, "imports": imports}
    before = build({"*": {"disabled": everyone}, "w": rules}).view("w")
    for agents in (
        {"*": {"disabled": [*everyone, more]}, "w": rules},
        {"*": {"disabled": everyone}, "w": rules | {"disabled": [*disabled, more]}},
        {"*": {"disabled": everyone}, "w": rules | {"imports": "strict"}},
    ):
        after = build(agents).view("w")
        assert set(after.skills) <= set(before.skills)
        assert set(after.listed) <= set(before.listed)
        assert set(after.closure(list(after.skills)).ids) <= set(before.closure(list(before.skills)).ids)
        for ref in REFS:
            found = after.gate(ref, numbers=before.short_ids, names=False)
            if isinstance(found, Granted):
                assert isinstance(before.gate(ref, names=False), Granted)


@pytest.mark.parametrize("ref", [None, 5, True, ["acme.brief"], {"id": "x"}, b"acme.brief", "", "  ", "a.b.c"])
def test_what_is_no_reference_is_refused_by_every_way_in(world, ref) -> None:
    """Models and callers pass anything: it is `invalid_ref` or None, never an exception."""
    view = world.view("w")
    assert view.resolve(ref).code == "invalid_ref"
    assert view.explain(ref).to_json()["code"] == "invalid_ref"
    with world.activate("w"):
        assert (get_skill(ref), resolve_skill_ref(ref)) == (None, None)
        assert [refused.code for refused in build_skills_instruction_block([ref]).refused] == ["invalid_ref"]


def test_a_reason_repeats_only_the_beginning_of_a_long_reference(world) -> None:
    """A megabyte passed as a reference does not become a megabyte of reason in logs and events."""
    for ref in ("x" * 10**6, "acme." + "x" * 10**6, "a.b." + "x" * 10**6):
        assert len(world.view("w").resolve(ref).reason) < 400
