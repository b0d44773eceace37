"""What a refused call is answered: first the one thing to do next, with the corrected call where it is certain."""

import re
from pathlib import Path

import pytest

from kdskills.errors import ToolCallRefused
from kdskills.session.advice import TURN_NEXT, RefusedCall, advised, next_of
from kdskills.session.codes import CODES
from kdskills.session.tools import failed, refused_call, schema
from kdskills.solver.agents import ENDS

TOOLS = ("skills_load", "skills_read", "skills_run_script", "files_grep", "files_glob", "react_write", "files_read")


def told(tool, arguments, code="invalid_argument", who="model", **details):
    """Return the wire form of a refused call of a skill tool."""
    refused = refused_call(tool, arguments, TOOLS)
    return advised({"code": code, "who": who, "message": "m", "details": details}, refused)


@pytest.mark.parametrize(
    ("tool", "given", "mended"),
    [
        ("skills_load", {"names": "sales"}, {"names": ["sales"]}),
        ("skills_load", {"name": "sales"}, {"names": ["sales"]}),
        ("skills_load", {"skill": ["sales"], "mode": "add"}, {"names": ["sales"], "mode": "add"}),
        ("skills_read", {"path": ["a.md"]}, {"path": "a.md"}),
        ("skills_read", {"path": "a.md", "offset": -5}, {"path": "a.md", "offset": 0}),
        ("skills_run_script", {"file": "scripts/a.py", "args": "x"}, {"path": "scripts/a.py", "args": ["x"]}),
    ],
)
def test_a_mistake_with_one_remedy_gives_the_corrected_call(tool, given, mended):
    """A list for a value, a bound, one argument under another name: the call stands there, after what to do."""
    wire = told(tool, given)
    assert wire["call"] == {"tool": tool, "arguments": mended}
    assert next(iter(wire)) == "next"


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("skills_load", {"names": [1]}),
        ("skills_load", {"names": []}),
        ("skills_read", {"path": "a.md", "lines": 3}),
        ("skills_read", {}),
        ("skills_run_script", {"script": "a", "words": "b"}),
        ("skills_load", '{"names": ["a'),
        ("skills_load", "no object"),
        ("skills_load", {"names": ["right"]}),
        ("skills_load", {"names": "sales, brief"}),
        ("skills_run_script", {"path": "scripts/a.py", "args": "--rows 3"}),
        ("skills_load", {"names": "x" * 1_000_000}),
        ("skills_load", {"name": "ä" * 1_000_000}),
        ("skills_read", {"file": {"a": [[[["x"]]]] * 9_000}}),
    ],
)
def test_nothing_is_guessed(tool, given):
    """What has no remedy, or several, is told in words alone, and starts with them."""
    wire = told(tool, given)
    assert "call" not in wire
    assert wire["next"].startswith("Send the call again")


def test_a_tool_without_arguments_is_called_without():
    """What was given to it is left out; where that is not taken either, or nobody knows its arguments, words say it."""
    wire = {"code": "invalid_argument", "who": "model", "message": "", "details": {}}

    def refuse(tool, arguments):
        raise ToolCallRefused("no")

    for form, check, corrected, words in (
        ({"properties": {}}, lambda tool, arguments: None, {}, "call"),
        ({"properties": {}}, refuse, None, "It takes no arguments."),
        ({}, refuse, None, "mended."),
    ):
        answer = advised(wire, RefusedCall("tools_now", {"zone": "x"}, form, check))
        assert (answer.get("call") or {}).get("arguments") == corrected
        assert words in answer["next"]


def test_a_call_that_was_cut_off_is_told_so():
    """Half an object is to be sent again, shorter, with what its arguments look like."""
    words = told("skills_load", '{"names": ["a')["next"]
    assert "cut off" in words
    assert '{"names": ["..."]}' in words


@pytest.mark.parametrize(
    ("code", "tool", "given", "details", "call"),
    [
        (
            *("skill_not_active", "skills_read", {"path": "a.md", "skill": "sales"}, {"name": "sales"}),
            {"tool": "skills_load", "arguments": {"names": ["sales"], "mode": "add"}},
        ),
        (
            *("skill_not_found", "skills_load", {"names": ["skill://acme/Sales/SKILL.md", "brief"]}),
            {"names": ["skill://acme/Sales/SKILL.md"], "near": ["acme-sales", "acme-sale"]},
            {"tool": "skills_load", "arguments": {"names": ["acme-sales", "brief"]}},
        ),
        (
            *("resource_not_found", "skills_read", {"path": "references/Guide.MD"}, {"siblings": ["guide.md", "b.md"]}),
            {"tool": "skills_read", "arguments": {"path": "references/guide.md"}},
        ),
        (
            *("path_denied", "skills_run_script", {"path": "sum.py"}, {"siblings": ["scripts/sum.py"]}),
            {"tool": "skills_run_script", "arguments": {"path": "scripts/sum.py"}},
        ),
        ("skill_not_found", "skills_load", {"names": ["sails"]}, {"names": ["sails"], "near": ["sales"]}, None),
        ("resource_not_found", "skills_read", {"path": "c.md"}, {"siblings": ["a.md", "b.md"]}, None),
    ],
)
def test_names_and_paths_are_corrected_by_their_spelling_only(code, tool, given, details, call):
    """A name that is there under another spelling is certain; one that is merely near is not."""
    assert told(tool, given, code, **details).get("call") == call


def test_a_tool_that_is_none_is_corrected_when_one_is_meant():
    """Its own name, without what stands before it, means a tool, a skill's name to load it; a mere end means nothing."""

    def check(tool, arguments):
        return None

    def call(tool):
        refused = RefusedCall(tool, {"path": "a"}, {}, check, TOOLS, ("sales",))
        return advised({"code": "tool_not_found", "who": "model", "message": "", "details": {}}, refused).get("call")

    assert call("run_script") == {"tool": "skills_run_script", "arguments": {"path": "a"}}
    assert call("Sales") == {"tool": "skills_load", "arguments": {"names": ["sales"], "mode": "add"}}
    assert call("RunScript") == {"tool": "skills_run_script", "arguments": {"path": "a"}}
    assert call("script") is None
    assert call("read") is None
    assert call("") is None


def test_a_pattern_of_files_is_no_expression():
    """`*.csv` given to the search in lines is what the list of files takes."""

    def check(tool, arguments):
        return None

    refused = RefusedCall("files_grep", {"pattern": "*.csv"}, {}, check, TOOLS)
    wire = advised({"code": "invalid_argument", "who": "model", "message": "", "details": {}}, refused)
    assert wire["call"] == {"tool": "files_glob", "arguments": {"pattern": "*.csv"}}


@pytest.mark.parametrize("code", ["skill_not_active", "skill_not_found", "resource_not_found", "invalid_argument", "x"])
@pytest.mark.parametrize("detail", [None, 5, [1, None], {"a": 1}, "text", [["x"]]])
@pytest.mark.parametrize(
    "form", [{}, {"properties": 3}, {"properties": {"a": True}, "required": 7}, {"required": ["b"]}]
)
def test_details_and_schemas_of_others_break_nothing(code, detail, form):
    """Tools and servers of others fill details and schemas with anything: the answer is words."""

    def check(tool, arguments):
        raise ToolCallRefused("no")

    details = dict.fromkeys(("name", "names", "near", "siblings"), detail)
    for given in ({"a": 1, "names": 3, "path": None, "skill": []}, "{", "\ud800"):
        wire = advised(
            {"code": code, "who": "model", "message": "m", "details": details},
            RefusedCall("tools_x", given, form, check, TOOLS),
        )
        assert wire["next"]
        assert "call" not in wire


def test_bounds_of_others_break_nothing():
    """A bound that is no number is no bound."""
    form = {"properties": {"a": {"type": "integer", "minimum": "x", "maximum": []}}}
    refused = RefusedCall("tools_x", {"a": 4}, form, lambda tool, arguments: None, ())
    assert "call" not in advised({"code": "invalid_argument", "who": "model", "message": "", "details": {}}, refused)


def test_every_code_says_what_to_do_next():
    """One sentence or two for each code, and for any other by who must act."""
    texts = {code: next_of(code, entry.who) for code, entry in CODES.items()} | dict(TURN_NEXT)
    assert [code for code, text in texts.items() if not re.fullmatch(r"[A-Z].*\.", text)] == []
    assert not CODES.keys() & TURN_NEXT.keys()
    assert {next_of("another", who)[-1] for who in ("model", "caller", "author", "operator", "user")} == {"."}


def test_codes_of_the_solver_have_their_words():
    """Each code that the page names beside those of the runtime tools has words of its own."""
    page = Path("docs/reference/solver.md").read_text()
    named = re.search(r"Codes beside those of the runtime tools: (.*?)\.", page, re.DOTALL)[1]
    codes = {*re.findall(r"`([a-z_]+)`", named), *(code for code, _ in ENDS.values())}
    assert codes - {"nothing_read"} <= TURN_NEXT.keys() | CODES.keys()


def test_a_refusal_keeps_its_form():
    """Code, who, message and details stand as before, behind what is new."""
    error = ToolCallRefused("no", code="conflict", a=1)
    wire = failed("skills.load", error).error
    assert {name: wire[name] for name in ("code", "who", "message", "details")} == error.to_json()["error"]
    assert schema("skills.load")["required"] == ["names"]
