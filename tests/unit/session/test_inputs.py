"""Arguments and schemas of the four tools."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kdskills.errors import ToolCallRefused
from kdskills.session import SkillRuntime
from kdskills.session.tools import (
    INPUTS,
    LoadInput,
    ReadInput,
    RunScriptInput,
    UnloadInput,
    parse,
    pointer,
    schema,
    specs,
)


@pytest.mark.parametrize("tool", INPUTS)
def test_schema_is_plain(tool: str) -> None:
    """Every object refuses further keys; no $ref, anyOf or null; each field is described."""
    made = schema(tool, ["a", "b"])
    text = json.dumps(made)
    assert [
        word for word in ("$ref", "anyOf", "null", "$defs", "title") if f'"{word}"' in text or f": {word}" in text
    ] == []
    assert made["additionalProperties"] is False
    assert [name for name, field in made["properties"].items() if not field.get("description")] == []


def test_schema_order_is_stable() -> None:
    """The same tool gives the same bytes, fields in the order of the spec's table."""
    assert json.dumps(schema("skills.run_script")) == json.dumps(schema("skills.run_script"))
    assert list(schema("skills.run_script")["properties"]) == ["path", "skill", "args", "env", "workdir", "timeout_s"]


def test_enum_of_visible_names() -> None:
    """Names and skill list what is visible, up to 250; more than that are not listed in part."""
    assert schema("skills.load", ["a"])["properties"]["names"]["items"]["enum"] == ["a"]
    assert schema("skills.read", ["a"])["properties"]["skill"]["enum"] == ["a"]
    many = [f"s{number}" for number in range(250)]
    assert schema("skills.load", many)["properties"]["names"]["items"]["enum"] == many
    assert "enum" not in schema("skills.load", [*many, "one-more"])["properties"]["names"]["items"]
    assert "enum" not in schema("skills.load")["properties"]["names"]["items"]


def test_names_in_both_spellings() -> None:
    """Safe names suit every API, dotted ones are the ids."""
    safe, dots = specs(tuple(INPUTS), ()), specs(tuple(INPUTS), (), "dotted")
    assert [spec.name for spec in safe] == [
        "skills_load",
        "skills_search",
        "skills_unload",
        "skills_read",
        "skills_run_script",
    ]
    assert [spec.name for spec in dots] == list(INPUTS) == [spec.tool_id for spec in safe]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", spec.name) for spec in safe)


def test_defaults() -> None:
    """Left-out fields have the spec's defaults."""
    assert parse(LoadInput, {"names": ["a"]}).mode == "replace"
    assert parse(UnloadInput, {}).model_dump() == {"names": [], "all": False}
    assert parse(ReadInput, {"path": "p"}).model_dump() == {"path": "p", "skill": None, "encoding": "text", "offset": 0}
    run = parse(RunScriptInput, '{"path": "scripts/a.py"}')
    assert (run.args, run.env, run.workdir, run.timeout_s) == ([], {}, ".", None)


def test_null_where_a_model_says_nothing() -> None:
    """A null mode, skill or timeout means it was left out."""
    assert parse(LoadInput, '{"names": ["a"], "mode": null}').mode is None
    assert parse(ReadInput, '{"path": "p", "skill": null}').skill is None


@pytest.mark.parametrize(
    ("model", "arguments", "path"),
    [
        (LoadInput, {}, "/names"),
        (LoadInput, {"names": "sales"}, "/names"),
        (LoadInput, {"names": []}, "/names"),
        (LoadInput, {"names": ["a"] * 65}, "/names"),
        (LoadInput, {"names": ["a", 3]}, "/names/1"),
        (LoadInput, {"names": ["a"], "mode": "append"}, "/mode"),
        (LoadInput, {"names": ["a"], "session": "x"}, "/session"),
        (ReadInput, {"path": "p", "encoding": "utf8"}, "/encoding"),
        (ReadInput, {"path": "p", "offset": -1}, "/offset"),
        (RunScriptInput, {"path": "p", "args": "x"}, "/args"),
        (RunScriptInput, {"path": "p", "env": {"A": 1}}, "/env/A"),
        (RunScriptInput, {"path": "p", "timeout_s": 0}, "/timeout_s"),
        (RunScriptInput, {"path": "p", "timeout_s": float("nan")}, "/timeout_s"),
        (LoadInput, '{"names": [', ""),
        (LoadInput, "[]", ""),
        (LoadInput, "null", ""),
    ],
)
def test_wrong_shapes_have_a_pointer(model: Any, arguments: Any, path: str) -> None:
    """Each problem is invalid_argument with a JSON pointer to where it is."""
    with pytest.raises(ToolCallRefused) as caught:
        parse(model, arguments)
    assert (caught.value.code, caught.value.details["errors"][0]["path"]) == ("invalid_argument", path)


def test_values_are_not_repeated() -> None:
    """A problem never repeats what was given: it may be a secret."""
    with pytest.raises(ToolCallRefused) as caught:
        parse(RunScriptInput, {"path": "p", "env": {"TOKEN": ["hunter2"]}})
    assert "hunter2" not in json.dumps(caught.value.to_json())


def test_pointer_escapes() -> None:
    """Tilde and slash are escaped as JSON pointers want it."""
    assert pointer(["env", "a/b~c", 0]) == "/env/a~1b~0c/0"


async def test_a_corrected_call_names_no_skill_that_is_refused(bundle) -> None:
    """The same mistake with a name that may be loaded gives the call, with a denied or unknown one words alone."""
    bundle.skill("acme.open")
    bundle.skill("acme.shut")
    bundle.agents = {"*": {"disabled": ["acme.shut"]}}
    runtime = SkillRuntime(subsystem=bundle.subsystem())
    session = await runtime.create_session()
    calls = {}
    for name in ("open", "acme.open", "acme.shut", "shut", "none"):
        reply = await session.call("skills_load", {"names": name})
        calls[name] = reply.error.get("call")
        assert reply.error["code"] == "invalid_argument"
    assert [name for name, each in calls.items() if each] == ["open", "acme.open"]
    assert calls["open"] == {"tool": "skills_load", "arguments": {"names": ["open"]}}
