"""Layers of skills per name: one base, one layer per open window, newest visible."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kdskills.remote import RemoteSkill, ServerProfile
from kdskills.remote.registry import RemoteSkillRegistry

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": True}


def named(name, word="base", namespace=None):
    return RemoteSkill(name, handler=lambda: word, description=word, input_schema=SCHEMA, namespace=namespace)


def words(session):
    return [(skill.name, skill.description) for skill in session.list()]


def test_register_replaces_the_base_and_keeps_its_place(session):
    """A second `register` changes the skill, not its position, and leaves a diagnostic."""
    for name in ("a", "b", "c"):
        session.register(name, print, description="one")
    session.register("a", print, description="two")
    assert words(session) == [("a", "two"), ("b", "one"), ("c", "one")]
    assert [(d.code, d.ref) for d in session.diagnostics] == [("remote_skill_overwritten", "a")]


def test_register_under_a_window_stays_hidden(session):
    """The window stays visible; the diagnostic says so, and the new base appears when the window is left."""
    session.register("a", print, description="old base")
    with session.using("a", print, description="window"):
        session.register("a", print, description="new base")
        assert words(session) == [("a", "window")]
        assert [d.code for d in session.diagnostics] == ["shadowed_by_window"]
    assert words(session) == [("a", "new base")]


def test_a_window_alone_takes_its_name_with_it(session):
    """What no base holds is gone after the window."""
    with session.using("a", print) as same:
        assert [skill.name for skill in same.list()] == ["a"]
    assert session.list() == []


def test_a_base_first_written_under_a_window_stays(session):
    """Leaving the window shows the base that was registered meanwhile, at the same place."""
    with session.using("a", print, description="window"):
        session.register("b", print, description="b")
        session.register("a", print, description="base")
    assert words(session) == [("a", "base"), ("b", "b")]


def test_windows_left_out_of_order_remove_their_own_layer(session):
    """Not the newest layer is popped, but the window's own."""
    session.register("a", print, description="base")
    first, second = session.using("a", print, description="first"), session.using("a", print, description="second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert words(session) == [("a", "second")]
    second.__exit__(None, None, None)
    assert words(session) == [("a", "base")]


def test_equal_windows_are_two_layers(session):
    """Two windows with the very same skill do not stand for one another."""
    session.register("a", print, description="base")
    one, two = session.using("a", print, description="same"), session.using("a", print, description="same")
    one.__enter__()
    two.__enter__()
    two.__exit__(None, None, None)
    assert words(session) == [("a", "same")]
    one.__exit__(None, None, None)
    assert words(session) == [("a", "base")]


def test_unregister_drops_all_layers(session):
    """Base and windows go together; the window closes quietly afterwards."""
    session.register("a", print)
    with session.using("a", print):
        assert session.unregister(" a ") is True
        assert session.list() == []
        assert session.unregister("a") is False
    assert session.list() == []


def test_unregister_wants_the_qualified_name(session):
    """A skill in a namespace is not dropped by its bare name."""
    session.register("tool", print, namespace="shop")
    assert session.unregister("tool") is False
    assert session.unregister("shop.tool") is True


def test_clear_says_how_many_were_visible(session):
    """Layers of one name count once."""
    session.register("a", print)
    session.register("b", print)
    with session.using("a", print), session.using("c", print):
        assert session.clear() == 3
        session.register("a", print, description="after")
    assert words(session) == [("a", "after")]
    assert session.clear() == 1
    assert session.clear() == 0


def test_a_name_registered_again_after_unregister_goes_to_the_end(session):
    """Only `register` over a base keeps the place."""
    session.register("a", print)
    session.register("b", print)
    session.unregister("a")
    session.register("a", print)
    assert [skill.name for skill in session.list()] == ["b", "a"]
    assert session.diagnostics == []


def test_the_body_of_a_window_may_raise(session):
    """The layer goes, and the body's error is what the caller sees."""
    with pytest.raises(KeyError, match="mine"), session.using("a", print):
        raise KeyError("mine")
    assert session.list() == []


def test_schemas_are_copied_in_and_out(session):
    """Nobody changes a registered schema through a dict he gave or got."""
    given = {"type": "object", "properties": {"x": {"type": "string"}}}
    made = session.register("a", print, input_schema=given, output_schema=given)
    before = session.dynamic_tools()
    given["properties"]["x"]["type"] = "integer"
    made.input_schema["properties"].clear()
    made.output_schema.clear()
    session.list()[0].input_schema.clear()
    session.dynamic_tools()[0]["inputSchema"].clear()
    assert session.dynamic_tools() == before
    assert session.list()[0].output_schema == {"type": "object", "properties": {"x": {"type": "string"}}}


def test_a_skill_carries_the_parameters_of_register(session):
    """What `register` was given is on the skill it returns and lists."""

    def handler():
        return None

    made = session.register(
        "a",
        handler,
        description="d",
        input_schema={"type": "object"},
        output_schema={"type": "string"},
        namespace="n",
        deadline_seconds=None,
        idempotent=True,
        defer_loading=True,
    )
    assert (made.name, made.handler, made.description, made.namespace) == ("a", handler, "d", "n")
    assert (made.input_schema, made.output_schema) == ({"type": "object"}, {"type": "string"})
    assert (made.deadline_seconds, made.idempotent, made.defer_loading) == (None, True, True)
    assert session.list() == [made]
    assert session.register("b", print).deadline_seconds == 120.0


def test_diagnostics_are_bounded(session):
    """A program that registers in a loop does not fill the memory; the newest findings stay."""
    for number in range(1200):
        session.register("a", print, description=str(number))
    assert len(session.diagnostics) == 1000


@pytest.mark.parametrize("deadline", [0, -1, float("nan")])
def test_a_deadline_is_positive_or_none(session, deadline):
    """A deadline no call could meet is refused at once."""
    with pytest.raises(ValueError, match="deadline_seconds"):
        session.register("a", print, deadline_seconds=deadline)


def test_a_handler_can_be_called(session):
    """What cannot be called is refused at `register`, not at the first call."""
    with pytest.raises(TypeError, match="str"):
        session.register("a", "print")


def test_the_decorator_returns_the_handler_unchanged(session):
    """`skill()` registers under the function's own name, or another, and hands the function back."""

    def ship(order: str):
        """Book a parcel."""
        return order

    assert session.skill()(ship) is ship
    assert session.skill(name="other", namespace="n", idempotent=True)(ship) is ship
    assert [skill.qualified_name for skill in session.list()] == ["ship", "n.other"]
    assert session.list()[1].idempotent is True


@pytest.mark.parametrize(
    ("tool", "namespace", "found"),
    [
        ("a", None, "plain"),
        (" a ", None, "plain"),
        ("a", "n", "spaced"),
        ("n.a", None, "spaced"),
        ("n__a", None, "spaced"),
        ("A", None, None),
        ("a", "m", None),
        ("n__a", "n", None),
        ("", None, None),
    ],
)
def test_calls_find_their_skill(tool, namespace, found):
    """By name and namespace as they came, by qualified name, or by the flat name old servers use."""
    registry = RemoteSkillRegistry(ServerProfile.codex())
    registry.register(named("a", "plain"))
    registry.register(named("a", "spaced", "n"))
    skill = registry.find(tool, namespace)
    assert (skill.description if skill else None) == found


def test_threads_may_use_one_registry(session):
    """Windows of many threads leave nothing behind and take nothing of others."""
    session.register("base", print)
    failures = []

    def work(number):
        try:
            for _ in range(50):
                with session.using("shared", print, description=str(number)), session.using(f"own{number}", print):
                    assert f"own{number}" in {skill.name for skill in session.list()}
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [skill.name for skill in session.list()] == ["base"]


class Layers(RuleBasedStateMachine):
    """Any order of register, open, close, unregister and clear agrees with a plain model of stacks."""

    def __init__(self):
        super().__init__()
        self.registry = RemoteSkillRegistry(ServerProfile.codex())
        self.model = {}
        self.open = []
        self.number = 0

    def fresh(self, name):
        self.number += 1
        return named(name, str(self.number))

    @rule(name=st.sampled_from("abc"))
    def register(self, name):
        skill = self.fresh(name)
        self.registry.register(skill)
        self.model.setdefault(name, [None, []])[0] = skill.description

    @rule(name=st.sampled_from("abc"))
    def enter(self, name):
        skill = self.fresh(name)
        layer = self.registry.open(skill)
        self.model.setdefault(name, [None, []])[1].append(skill.description)
        self.open.append((layer, name, skill.description))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data):
        layer, name, word = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        there = word in self.model.get(name, [None, []])[1]
        assert self.registry.close(layer) is there
        if there:
            self.model[name][1].remove(word)
            if self.model[name] == [None, []]:
                del self.model[name]

    @rule(name=st.sampled_from("abc"))
    def unregister(self, name):
        assert self.registry.unregister(name) is (self.model.pop(name, None) is not None)

    @rule()
    def clear(self):
        assert self.registry.clear() == len(self.model)
        self.model.clear()

    @invariant()
    def same(self):
        seen = [(skill.name, skill.description) for skill in self.registry.skills()]
        assert seen == [(name, (windows or [base])[-1]) for name, (base, windows) in self.model.items()]


TestLayers = Layers.TestCase
TestLayers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
