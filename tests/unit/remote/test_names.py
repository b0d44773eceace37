"""Names of remote skills: one normalisation, and what a server would refuse, drop or shadow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote import CatalogError, RemoteSkillsFacade, ServerProfile
from kdskills.remote.names import check_name, check_neighbours, flatten
from kdskills.remote.ports import BUILT_IN_TOOLS

CODEX = ServerProfile.codex()
BUILT_INS = [
    "exec_command",
    "write_stdin",
    "apply_patch",
    "view_image",
    "request_user_input",
    "get_goal",
    "create_goal",
    "update_goal",
    "web_search",
    "tool_search",
    "exec",
    "wait",
]


def echo():
    return None


def test_white_space_around_a_name_is_dropped(session):
    """`strip()` is the only normalisation: inner spelling and case stay."""
    assert session.register("  Ship-Order \n", echo).name == "Ship-Order"
    assert [skill.name for skill in session.list()] == ["Ship-Order"]


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_blank_names_are_refused_in_these_words(session, name):
    """A blank name is a `ValueError` with the promised text, at every way in."""
    for call in (lambda: session.register(name, echo), lambda: session.unregister(name)):
        with pytest.raises(ValueError, match=r"^remote skill name must be non-empty$"):
            call()
    with pytest.raises(ValueError, match=r"^remote skill name must be non-empty$"), session.using(name, echo):
        pass


def test_a_name_is_text(session):
    """Anything but text is a `TypeError`, not a name made of its `repr`."""
    with pytest.raises(TypeError, match="int"):
        session.register(5, echo)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a", True),
        ("A_b-9", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a.b", False),
        ("a/b", False),
        ("naïve", False),
        ("a\nb", False),
        ("工具", False),
        ("<lambda>", False),
    ],
)
def test_names_match_the_pattern(session, name, fits):
    """`^[a-zA-Z0-9_-]{1,128}$`, with rule and suggestion when it does not."""
    if fits:
        assert session.register(name, echo).name == name
        return
    with pytest.raises(CatalogError) as refused:
        session.register(name, echo)
    assert refused.value.details["rule"] == "name_pattern"
    check_name(None, refused.value.details["suggestion"], CODEX)
    assert isinstance(refused.value, ValueError)
    assert session.list() == []


@pytest.mark.parametrize(
    ("namespace", "rule"),
    [
        ("shop", None),
        ("x" * 64, None),
        ("x" * 65, "namespace_pattern"),
        ("a.b", "namespace_pattern"),
        ("", "namespace_pattern"),
        ("functions", "reserved_namespace"),
        ("mcp", "reserved_mcp"),
        ("mcp__files", "reserved_mcp"),
        ("mcpx", None),
    ],
)
def test_namespaces_are_linted(session, namespace, rule):
    """A namespace is a name of at most 64 characters, not `functions`, `mcp` or `mcp__*`."""
    if rule is None:
        assert session.register("tool", echo, namespace=namespace).qualified_name == f"{namespace}.tool"
        return
    with pytest.raises(CatalogError) as refused:
        session.register("tool", echo, namespace=namespace)
    assert refused.value.details["rule"] == rule


@pytest.mark.parametrize("name", ["mcp", "mcp__files", "mcp__"])
def test_names_of_mcp_are_reserved(session, name):
    """The server keeps `mcp` and `mcp__*` for MCP servers."""
    with pytest.raises(CatalogError) as refused:
        session.register(name, echo)
    assert refused.value.details["rule"] == "reserved_mcp"


def test_built_ins_are_those_of_the_server():
    """The list of dropped names is the one the spec gives."""
    assert sorted(BUILT_INS) == sorted(BUILT_IN_TOOLS)


@pytest.mark.parametrize("name", BUILT_INS)
def test_built_ins_are_refused(session, name):
    """The server would accept such a skill and drop it in silence."""
    with pytest.raises(CatalogError) as refused:
        session.register(name, echo)
    assert refused.value.details["rule"] == "built_in"
    session.register(refused.value.details["suggestion"], echo)


def test_a_namespace_makes_a_built_in_name_free(session):
    """`shop.wait` is another tool than `wait`."""
    assert session.register("wait", echo, namespace="shop").qualified_name == "shop.wait"


def test_the_probe_extends_the_built_ins(client):
    """A profile's own built-ins count; an explicit profile comes before the client's."""
    client.profile = replace(CODEX, built_ins=CODEX.built_ins | {"dance"})
    with pytest.raises(CatalogError, match="dance"):
        RemoteSkillsFacade(client).session("t").register("dance", echo)
    RemoteSkillsFacade(client, profile=CODEX).session("t").register("dance", echo)


def test_a_profile_of_another_kind_is_not_believed(client):
    """Only a `ServerProfile` is one; else the rules of Codex hold."""
    client.profile = {"built_ins": []}
    with pytest.raises(CatalogError):
        RemoteSkillsFacade(client).session("t").register("exec", echo)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((None, "a-b"), (None, "a_b")),
        (("shop", "x"), (None, "shop__x")),
        (("my-shop", "x"), ("my_shop", "x")),
        (("a", "b__c"), ("a__b", "c")),
    ],
)
def test_names_equal_after_folding_are_refused(session, first, second):
    """One of them would shadow the other: refused in either order, by `register` and by `using`."""
    for one, other in ((first, second), (second, first)):
        session.clear()
        session.register(one[1], echo, namespace=one[0])
        with pytest.raises(CatalogError) as refused:
            session.register(other[1], echo, namespace=other[0])
        assert refused.value.details["rule"] == "folded_collision"
        assert refused.value.details["other"] == session.list()[0].qualified_name
        with pytest.raises(CatalogError), session.using(other[1], echo, namespace=other[0]):
            pass
        assert len(session.list()) == 1


def test_deferred_loading_needs_a_namespace(session):
    """Without one the server would refuse the whole catalog."""
    with pytest.raises(CatalogError) as refused:
        session.register("tool", echo, defer_loading=True)
    assert refused.value.details["rule"] == "defer_needs_namespace"
    assert session.register("tool", echo, namespace="n", defer_loading=True).defer_loading is True


def test_the_dispatcher_keeps_its_name(session):
    """`kdskills_call` is the tool under which catalogs travel."""
    with pytest.raises(CatalogError) as refused:
        session.register("kdskills_call", echo)
    assert refused.value.details["rule"] == "reserved_dispatcher"


WORDS = st.text(st.sampled_from("ab_-"), min_size=1, max_size=4)
NAMES = st.tuples(st.none() | WORDS, WORDS)


@given(st.lists(NAMES, max_size=6), NAMES)
def test_an_accepted_name_folds_to_nobody_elses(others, new):
    """Whatever is accepted beside others differs from each of them after folding, unless it is the same name."""
    try:
        check_neighbours(*new, others)
    except CatalogError:
        assert any(flatten(*other) == flatten(*new) and other != new for other in others)
    else:
        assert all(flatten(*other) != flatten(*new) for other in others if other != new)


@given(st.text(max_size=200))
def test_a_suggestion_is_itself_accepted(name):
    """Whoever follows the suggestion is not refused again for the pattern."""
    try:
        check_name(None, name, CODEX)
    except CatalogError as error:
        if error.details["rule"] in {"name_pattern", "built_in", "reserved_mcp"}:
            check_name(None, error.details["suggestion"], CODEX)
