"""Imports: order, cycles, privacy, and what is left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills.model import Skill
from kdskills.skills.selection import KnownSkills, Rules, broken_imports, close, dependency_id, import_refusal


def skill(full_id: str, *imports: str, **fields) -> Skill:
    """Return a skill with these imports."""
    namespace, _, name = full_id.partition(".")
    return Skill(name=name, namespace=namespace, id=name, description=name, content=None, imports=imports, **fields)


def known(*skills: Skill, refused=()) -> KnownSkills:
    """Return what there is."""
    return KnownSkills({entry.full_id: entry for entry in skills}, dict(refused))


OPEN = Rules()


def ids(closure) -> list[str]:
    """Return the order as ids."""
    return [entry.full_id for entry in closure.order]


def test_dependencies_stand_before_dependents_once() -> None:
    """Depth first, dependencies first, each once, in order of first request."""
    c, b, a = skill("x.c"), skill("x.b", "c"), skill("x.a", "b", "c", "d")
    d = skill("x.d", "c")
    world = known(a, b, c, d)
    assert ids(close(world, OPEN, [a])) == ["x.c", "x.b", "x.d", "x.a"]
    assert ids(close(world, OPEN, [d, a, d])) == ["x.c", "x.d", "x.b", "x.a"]


def test_back_edges_are_skipped() -> None:
    """A cycle is cut at the edge that leads back, with `import_cycle` naming the way round."""
    a, b, c = skill("x.a", "b"), skill("x.b", "c"), skill("x.c", "a", "c")
    found = close(known(a, b, c), OPEN, [a])
    assert ids(found) == ["x.c", "x.b", "x.a"]
    assert [(finding.code, finding.severity, finding.ref) for finding in found.diagnostics] == [
        ("import_cycle", "warning", "x.c"),
        ("import_cycle", "warning", "x.c"),
    ]
    assert "x.a -> x.b -> x.c -> x.a" in found.diagnostics[0].message
    assert found.skipped == ()


def test_sibling_comes_before_public() -> None:
    """In `imports` a bare id means a sibling of the same namespace if there is one, else public's."""
    top = skill("acme.top", "dep", "only")
    world = known(top, skill("acme.dep"), skill("public.dep"), skill("public.only"))
    assert ids(close(world, OPEN, [top])) == ["acme.dep", "public.only", "acme.top"]


def test_a_refused_sibling_is_still_the_sibling() -> None:
    """A sibling that is invalid does not let public's shine through."""
    top = skill("acme.top", "dep")
    world = known(top, skill("public.dep"), refused={"acme.dep": "skill_invalid"})
    assert dependency_id(world, top, "dep") == "acme.dep"
    found = close(world, OPEN, [top])
    assert ids(found) == ["acme.top"]
    assert [(skipped.code, skipped.full_id) for skipped in found.skipped] == [("skill_invalid", "acme.dep")]


def test_skipped_dependencies_leave_a_record() -> None:
    """Unknown, denied and wrong imports are left out with code and chain; the parent stays."""
    top = skill("x.top", "mid")
    mid = skill("x.mid", "gone", "bad", "SK1", "a.b.c")
    world = known(top, mid, skill("x.bad"))
    policy = Rules(disabled=("x.bad",))
    found = close(world, policy, [top])
    assert ids(found) == ["x.mid", "x.top"]
    assert [(skipped.code, skipped.ref, skipped.details["chain"]) for skipped in found.skipped] == [
        ("unknown_skill", "gone", ["x.top", "x.mid", "public.gone"]),
        ("denied", "bad", ["x.top", "x.mid", "x.bad"]),
        ("unknown_skill", "SK1", ["x.top", "x.mid", "SK1"]),
        ("invalid_ref", "a.b.c", ["x.top", "x.mid", "a.b.c"]),
    ]
    assert {finding.code for finding in found.diagnostics} == {"import_skipped"}


def test_private_internal_dependency_by_root() -> None:
    """An internal dependency comes along for a bundle's importer and not for a user root's, in one closure."""
    secret = skill("internal.s")
    trusted, other = skill("x.trusted", "internal.s", layer="bundle"), skill("x.other", "internal.s", layer="user")
    world = known(secret, trusted, other)
    assert ids(close(world, OPEN, [other])) == ["x.other"]
    assert ids(close(world, OPEN, [other, trusted])) == ["x.other", "internal.s", "x.trusted"]
    assert [entry.code for entry in close(world, OPEN, [other]).skipped] == ["internal"]


def test_strict_refuses_the_parent_with_the_chain() -> None:
    """Under `strict` one refused import, at any depth, refuses the parent and says which way."""
    top, mid, low = skill("x.top", "mid"), skill("x.mid", "low"), skill("x.low", "gone")
    fine = skill("x.fine", "leaf")
    world = known(top, mid, low, fine, skill("x.leaf"))
    policy = Rules(imports="strict")
    assert broken_imports(world, policy, list(world.skills.values())) == {"x.top", "x.mid", "x.low"}
    refused = import_refusal(world, policy, top, "top")
    assert (refused.code, refused.full_id, refused.ref) == ("import_refused", "x.top", "top")
    assert refused.details == {"chain": ["x.top", "x.mid", "x.low", "public.gone"], "code": "unknown_skill"}
    assert import_refusal(world, policy, fine, "fine") is None


def test_strict_allows_cycles() -> None:
    """A cycle is no refusal: its back edge is skipped under each policy."""
    a, b = skill("x.a", "b"), skill("x.b", "a")
    policy = Rules(imports="strict")
    assert broken_imports(known(a, b), policy, [a, b]) == frozenset()


def test_long_chains_need_no_recursion() -> None:
    """A chain as long as a root has skills is walked, and its refusal's chain is cut for people."""
    count = 5_000
    skills = [skill(f"x.s{number}", f"s{number + 1}") for number in range(count)]
    world = known(*skills)
    found = close(world, OPEN, [skills[0]])
    assert len(found.order) == count
    assert found.order[0].full_id == f"x.s{count - 1}"
    chain = found.skipped[0].details["chain"]
    assert (len(chain), chain[0], chain[1], chain[-1]) == (17, "x.s0", "…", f"public.s{count}")
    assert len(broken_imports(world, Rules(imports="strict"), skills)) == count


NAMES = [f"n{number}" for number in range(7)]


@given(
    st.fixed_dictionaries({name: st.lists(st.sampled_from([*NAMES, "gone"]), max_size=4) for name in NAMES}),
    st.sets(st.sampled_from(NAMES)),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
)
def test_closures_of_any_graph(graph, denied, asked) -> None:
    """In any graph each skill stands once, nothing denied comes in, and only back edges break the order."""
    world = known(*(skill(f"x.{name}", *imports) for name, imports in graph.items()))
    policy = Rules(disabled=tuple(f"x.{name}" for name in sorted(denied)))
    granted = [world.skills[f"x.{name}"] for name in asked if name not in denied]
    found = close(world, policy, granted)
    order = ids(found)
    assert len(order) == len(set(order))
    assert set(order).isdisjoint(f"x.{name}" for name in denied)
    assert {entry.full_id for entry in granted} <= set(order)
    cyclic = {finding.ref for finding in found.diagnostics if finding.code == "import_cycle"}
    for place, full_id in enumerate(order):
        wanted = {f"x.{name}" for name in graph[full_id[2:]]} & set(order)
        assert wanted <= set(order[:place]) or full_id in cyclic
    strict = Rules(disabled=policy.disabled, imports="strict")
    broken = broken_imports(world, strict, granted)
    for entry in granted:
        assert (entry.full_id in broken) is (import_refusal(world, strict, entry, "r") is not None)


@pytest.mark.parametrize("imports", ["private", "listed"])
def test_refused_imports_keep_the_parent(imports: str) -> None:
    """Under `private` and `listed` a refused import never takes its parent with it."""
    top = skill("x.top", "gone")
    assert ids(close(known(top), Rules(imports=imports), [top])) == ["x.top"]
