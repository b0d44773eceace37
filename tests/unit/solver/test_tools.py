"""Tools: typed functions, a bundle's `tools.py`, names."""

import json
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from kdskills.errors import BundleError, NameTaken, PluginInvalid, ToolCallRefused
from kdskills.solver import PlainWiring, ReactSolver, SolverTool, ToolContext, tool_from_function
from kdskills.solver.tools import ToolTable, load_bundle_tools
from kdskills.testing.models import ScriptedModel, call, say, together


class Place(BaseModel):
    """A place."""

    city: str
    inner: "Place | None" = None


def lookup(
    name: Annotated[str, Field(description="Whose.")],
    kind: Literal["mail", "phone"] = "mail",
    place: Place | None = None,
) -> dict:
    """Look somebody up.

    The rest is for people.
    """
    return {"name": name, "kind": kind, "city": place.city if place else None}


def test_a_typed_function_is_a_tool():
    """Parameters are arguments, the first paragraph is the description, no reference is left in the schema."""
    tool = tool_from_function(lookup)
    spec = tool.spec()
    assert (spec.name, spec.tool_id, spec.description) == ("tools_lookup", "tools.lookup", "Look somebody up.")
    schema = spec.input_schema
    assert schema["required"] == ["name"]
    assert schema["properties"]["name"] == {"description": "Whose.", "type": "string"}
    assert schema["properties"]["kind"]["enum"] == ["mail", "phone"]
    assert schema["additionalProperties"] is False
    assert "$ref" not in json.dumps(schema)


def test_a_property_named_title_or_default_survives():
    """Only JSON Schema's own words are dropped."""

    def book(title: str, default: int = 3) -> str:
        """Note a book."""
        return title

    assert set(tool_from_function(book).spec().input_schema["properties"]) == {"title", "default"}


def untyped(x):
    """Take something."""


def starred(*names: str):
    """Take many."""


def odd(x: Callable[[], int]):
    """Take odd things."""


@pytest.mark.parametrize("function", [untyped, starred, odd, 5, "name"])
def test_what_is_no_tool_is_refused(function):
    """A function without types, or no function, cannot be offered."""
    from kdskills.solver.tools import as_tool

    with pytest.raises(PluginInvalid):
        as_tool(function)


def test_unknown_arguments_are_refused_with_a_pointer():
    """Arguments are checked before a tool runs."""
    tool = tool_from_function(lookup)
    with pytest.raises(ToolCallRefused) as caught:
        tool.parse('{"name": "a", "place": {"city": 3}}')
    assert caught.value.details["errors"][0]["path"] == "/place/city"
    with pytest.raises(ToolCallRefused):
        tool.parse('{"name": "a", "extra": 1}')


TOOLS_PY = """\
from __future__ import annotations
from kdskills.solver import SolverTool, ToolContext, ToolError

def double(number: int) -> int:
    '''Double a number.'''
    return number * 2

async def active(call: ToolContext) -> list[str]:
    '''Say what is active.'''
    from kdskills import get_active_skills_subsystem
    assert get_active_skills_subsystem() is call.turn.subsystem
    return [one.name for one in await call.turn.session.active()]

def sees() -> bool:
    '''Say whether skills are active in the thread.'''
    from kdskills.turn import get_active_skills_subsystem
    return get_active_skills_subsystem() is not None

TOOLS = [double, active, sees]
"""


async def test_a_bundles_tools_are_offered_and_run_with_the_turns_skills_active(build, bundle_path):
    """`tools.py` is the bundle's own code; plain functions run in a thread that sees the turn, too."""
    (bundle_path / "tools.py").write_text(TOOLS_PY)
    model = ScriptedModel(
        [
            call("tools_double", number=21),
            call("tools.active"),
            call("tools_sees"),
            call("tools_double", number="x"),
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", skills=["sales"])
    answers = [one.result or one.error for step in result.steps for one in step.calls]
    assert answers == ["42", '["sales"]', "true", "invalid_argument"]
    assert not (bundle_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("source", "line", "said"),
    [
        ("x = 1\nraise SystemExit(3)\n", 2, "SystemExit"),
        ("def f(:\n", 1, "SyntaxError"),
        ("x = 1\n", 1, "no list TOOLS"),
        ("TOOLS = [5]\n", 1, "PluginInvalid"),
        ("def f(x):\n    'd'\nTOOLS = [f]\n", 1, "PluginInvalid"),
    ],
)
def test_broken_tools_name_file_and_line(tmp_path, source, line, said):
    """The author of the bundle is told where to look."""
    path = tmp_path / "tools.py"
    path.write_text(source)
    with pytest.raises(BundleError, match=said) as caught:
        load_bundle_tools(path)
    assert (caught.value.code, caught.value.details["line"]) == ("bundle_tools_failed", line)


async def _body(arguments, call: ToolContext):
    return None


class Nothing(BaseModel):
    """No arguments."""


def named(tool_id):
    return SolverTool(tool_id, "d", Nothing, _body)


def test_a_bundle_does_not_take_foreign_names(tmp_path):
    """A bundle's tools stand under tools.*"""
    path = tmp_path / "tools.py"
    path.write_text(
        "from kdskills.solver import SolverTool\nfrom pydantic import BaseModel\n"
        "TOOLS = [SolverTool('react.read', 'd', BaseModel, None)]\n"
    )
    with pytest.raises(BundleError, match=r"tools\.<name>"):
        load_bundle_tools(path)


def test_two_tools_of_one_spelling_are_refused():
    """`a.b_c` and `a_b.c` would both be `a_b_c`."""
    with pytest.raises(NameTaken):
        ToolTable([named("a.b_c"), named("a_b.c")])


@pytest.mark.parametrize("tool_id", ["skills.load", "skills_load", "skills.mine", "kd.x", "react.read"])
async def test_reserved_names_are_refused_at_the_start(build, tool_id):
    """Nobody registers over the tools of skills or of the solver."""
    with pytest.raises(NameTaken):
        async with build(tools=[named(tool_id)]):
            pass


async def test_tools_of_the_wiring_are_offered_and_open_the_gates_of_skills(build, bundle_path):
    """All ids together are the view's tools: a skill that needs one is there when it is."""
    (bundle_path / "skills/acme/sales/tools.yaml").write_text("- {id: tools.lookup, required: true}\n")
    async with build() as system, ReactSolver(system).prepare_session("x") as turn:
        assert "acme.sales" not in turn.view.skills
    wiring = PlainWiring(tools=[tool_from_function(lookup)])
    async with build(wiring=wiring, shell=False) as system, ReactSolver(system).prepare_session("x") as turn:
        assert "acme.sales" in turn.view.skills
        assert [spec.tool_id for spec in turn.tool_specs()] == [
            "skills.load",
            "skills.unload",
            "skills.read",
            "skills.run_script",
            "react.read",
            "react.write",
            "exec.python",
            "tools.lookup",
        ]


async def test_the_tools_of_skills_open_gates_too(build, bundle_path):
    """A bundle whose every skill needs `skills.run_script` is visible where scripts run, and only there."""
    for name in ("sales", "brief"):
        (bundle_path / f"skills/acme/{name}/tools.yaml").write_text("- {id: skills.run_script, required: true}\n")
    async with build(shell=False) as system, ReactSolver(system).prepare_session("x") as turn:
        assert sorted(turn.view.skills) == ["acme.brief", "acme.sales"]
        assert len(turn.tool_specs()) == 7
    async with build(engine=None) as system, ReactSolver(system).prepare_session("x") as turn:
        assert dict(turn.view.skills) == {}


class Figure(BaseModel):
    """A figure."""

    name: str
    value: float


async def test_what_a_tool_gives_becomes_json(solve):
    """Models by their fields, text as it is, anything else by its words; what has no JSON form is a failed tool."""

    def figure() -> Figure:
        """Give a model."""
        return Figure(name="é", value=1.5)

    def path() -> object:
        """Give a path."""
        from pathlib import PurePosixPath

        return {"at": PurePosixPath("/a"), "set": {1}}

    def text() -> str:
        """Give text."""
        return '{"not": parsed}'

    def nothing() -> None:
        """Give nothing."""

    names = ("figure", "path", "text", "nothing")
    result = await solve(
        [together(*(call(f"tools_{name}") for name in names)), say("ok")], tools=[figure, path, text, nothing]
    )
    assert [one.result for one in result.steps[0].calls] == [
        '{"name": "é", "value": 1.5}',
        '{"at": "/a", "set": [1]}',
        '{"not": parsed}',
        "null",
    ]
