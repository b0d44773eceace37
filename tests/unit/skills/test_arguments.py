"""Filling arguments into a body."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills import SkillArgument, parse_skill_bytes, render_body

ONE = [SkillArgument("name"), SkillArgument("mode", default="fast")]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("Hi $name!", "Hi Ann!"),
        ("Hi {{ name }}!", "Hi Ann!"),
        ("{{name}}", "Ann"),
        ("{{  name\t}}", "Ann"),
        ("$mode", "fast"),
        (r"\$name", "$name"),
        (r"\\$name", r"\$name"),
        (r"\$", "$"),
        ("$2x $1 ${PATH} ${name}", "$2x $1 ${PATH} ${name}"),
        ("$names", "$names"),
        ("$name_x", "$name_x"),
        ("$name.x $name-y", "Ann.x Ann-y"),
        ("$$name", "$Ann"),
        ("cost $", "cost $"),
        ("{{ name", "{{ name"),
        ("{{ na me }}", "{{ na me }}"),
        ("{ name }", "{ name }"),
        ("{{\nname\n}}", "{{\nname\n}}"),
        ("", ""),
        ("$é", "$é"),
        ("{{{ name }}}", "{Ann}"),
    ],
)
def test_placeholders(body: str, text: str) -> None:
    """Both spellings are filled; everything else is text."""
    assert render_body(body, ONE, {"name": "Ann"}).text == text


def test_defaults_and_absence() -> None:
    """A declared argument without value has its default, else nothing; a blank value is a value."""
    assert render_body("[$name][$mode]", ONE, {}).text == "[][fast]"
    assert render_body("[$mode]", ONE, {"mode": ""}).text == "[]"


def test_one_pass_only() -> None:
    """Inserted values are not looked at again."""
    assert render_body("$name $mode", ONE, {"name": "$mode {{ mode }} \\$x", "mode": "$name"}).text == (
        "$mode {{ mode }} \\$x $name"
    )


def test_undeclared_names_stay_with_one_warning_each() -> None:
    """An undeclared name stays, whatever the values hold, and is reported once with its place."""
    found = render_body("a\n $other {{ other }} $name {{ third }}", ONE, {"other": "x", "name": "n"})
    assert found.text == "a\n $other {{ other }} n {{ third }}"
    assert [(f.code, f.severity, f.ref, f.line, f.column) for f in found.diagnostics] == [
        ("unknown_placeholder", "warning", "other", 2, 2),
        ("unknown_placeholder", "warning", "third", 2, 27),
    ]


def test_without_arguments_bodies_are_verbatim() -> None:
    """A body of a skill without arguments is not touched."""
    body = r"\$x $y {{ z }} ${P}"
    assert (render_body(body, [], {"y": "1"}).text, render_body(body, [], {}).diagnostics) == (body, ())


def test_mappings_declare_too() -> None:
    """Arguments may be mappings; of two the first counts."""
    given_ = [{"name": "a", "default": 1.5}, {"name": "b"}, {"name": "a", "default": "later"}]
    assert render_body("$a $b.", given_, {}).text == "1.5 ."


def test_a_hint_declares_arguments() -> None:
    """`argument-hint` makes `$ARGUMENTS` work."""
    found = parse_skill_bytes(
        b"---\nname: b\ndescription: d\nargument-hint: <f>\n---\nOn $ARGUMENTS.", folder="b"
    ).skill
    assert found is not None
    assert render_body(found.body, found.arguments, {"ARGUMENTS": "x y"}).text == "On x y."


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", [5], {}),
        (5, [], {}),
        ("x", "abc", {}),
        ("x", [], []),
        ("x", [{"no": "name"}], {}),
        ("x", [{"name": 5}], {}),
    ],
)
def test_wrong_types_raise(arguments: tuple) -> None:
    """Wrong types are the caller's mistake."""
    with pytest.raises(TypeError):
        render_body(*arguments)


@given(st.text(max_size=60), st.text(max_size=20))
def test_a_value_arrives_as_it_is(around: str, value: str) -> None:
    """Whatever the value, it stands in the text unchanged, and text without signs stays."""
    around = around.replace("$", "").replace("{", "").replace("\\", "")
    assert render_body(f"{around}$name {around}", ONE, {"name": value}).text == f"{around}{value} {around}"


@pytest.mark.parametrize("between", [" ", "\n", " \n\n"])
def test_many_unknown_names_cost_linear_time(between: str) -> None:
    """Each unknown name is found at its own line and column, and eight times as many cost no more than each for itself."""

    def cost(body: str) -> float:
        started = time.process_time()
        render_body(body, [SkillArgument("x")], {})
        return time.process_time() - started

    body = between.join(f"$v{number}" for number in range(100_000))
    few = between.join(f"$v{number}" for number in range(12_500))
    # what grows with the square costs 64 times as much; a busy machine no more than a few
    assert min(cost(body) for _ in range(2)) < 24 * min(cost(few) for _ in range(3))
    found = render_body(body, [SkillArgument("x")], {}).diagnostics
    lines = body.split("\n")
    assert all(lines[f.line - 1][f.column - 1 :].startswith(f"${f.ref}") for f in found[:: 20_000 + 1])
    assert len(found) == 100_000
