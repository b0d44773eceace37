"""Rules and tools in few words, for models with a small window."""

import json

import pytest

from kdskills.bundle import load_bundle
from kdskills.errors import ModelFailed
from kdskills.session.tools import rules_text
from kdskills.skills.model import estimate_tokens
from kdskills.solver import PlainWiring, ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say

MOST = 900


def sent_tokens(request):
    """Estimate the tokens of rules and tools in a request, without skills."""
    tools = [[tool.name, tool.description, tool.input_schema] for tool in request.tools]
    rules = request.instructions.partition("<available_skills>\n")[0]
    return estimate_tokens(json.dumps(tools)) + estimate_tokens(rules)


@pytest.mark.parametrize("bundle", ["hello", "press"])
async def test_rules_and_tools_take_few_tokens(executor, tmp_path, bundle):
    """With every tool on, before and after a skill is loaded: at most 900 tokens beside the skills."""
    name = {"hello": "hello", "press": "flights"}[bundle]
    model = ScriptedModel([call("skills_load", names=[name]), say("ok")])
    settings = SolverSettings(brief="always", work_dir=tmp_path)
    shipped = load_bundle(f"bundles/{bundle}")
    parts = {"model": model, "executor": executor, "settings": settings, "wiring": PlainWiring()}
    async with SolverSystem(bundle=shipped, **parts) as system:
        await ReactSolver(system).run("Sum it up.")
    before, after = model.requests
    assert {"exec_shell", "exec_python", "files_read", "react_write"} <= {tool.name for tool in before.tools}
    assert "skills_run_script" in {tool.name for tool in after.tools}
    assert sent_tokens(before) <= MOST
    assert sent_tokens(after) <= MOST


@pytest.mark.parametrize("window", [1_024, 4_096, 8_191])
async def test_many_skills_take_no_more(executor, build, bundle_path, window):
    """Where not all skills fit, and one is searched for, too: rules and tools stay at 900 tokens, the names in them not counted."""
    for number in range(120):
        folder = bundle_path / "skills" / "acme" / f"helper-{number}"
        folder.mkdir()
        (folder / "SKILL.md").write_text(f"---\nname: helper-{number}\ndescription: Helps {'well ' * 20}.\n---\nDo.\n")
    model = ScriptedModel([call("skills_load", names=["sales"]), say("ok")], context_window=window)
    async with build(model=model) as system:
        await ReactSolver(system).run("Which region grew?")
    for request in model.requests:
        assert "skills_search" in {tool.name for tool in request.tools}
        names = [tool.input_schema["properties"]["names"]["items"].get("enum", ()) for tool in request.tools[:1]]
        assert sent_tokens(request) - estimate_tokens(json.dumps(names)) <= MOST


@pytest.mark.parametrize(
    ("settings", "window", "brief"),
    [
        ({}, None, False),
        ({}, 8_192, False),
        ({}, 8_191, True),
        ({"window": 4_096}, None, True),
        ({"window": 32_000}, 4_096, False),
        ({"brief": "always"}, None, True),
        ({"brief": "never"}, 2_048, False),
    ],
)
async def test_a_small_window_asks_for_few_words(build, settings, window, brief):
    """By itself below 8,192 tokens, as the settings or the provider say; always and never as asked for."""
    model = ScriptedModel([say("ok")], context_window=window)
    async with build(model=model, **settings) as system:
        await ReactSolver(system).run("x")
    assert model.requests[0].instructions.startswith("Skills help" if brief else "Skills are")


async def test_only_what_is_of_use_is_offered(build):
    """Files and scripts after a load, never a load of what is loaded; the other form offers all of it from the start."""
    for form, first, second in (
        ("always", {"skills_load"}, {"skills_load", "skills_read"}),
        ("never", {"skills_load", "skills_unload", "skills_read"}, {"skills_load", "skills_unload", "skills_read"}),
    ):
        model = ScriptedModel([call("skills_load", names=["sales"]), say("ok")])
        async with build(model=model, brief=form) as system:
            await ReactSolver(system).run("x")
        names = [{tool.name for tool in request.tools if tool.name.startswith("skills_")} for request in model.requests]
        assert [each - {"skills_run_script"} for each in names] == [first, second]
    load = ScriptedModel([call("skills_load", names=["sales"]), say("ok")])
    async with build(model=load, brief="always") as system:
        await ReactSolver(system).run("x")
    choices = [request.tools[0].input_schema["properties"]["names"]["items"]["enum"] for request in load.requests]
    assert choices == [["brief", "sales"], ["brief"]]


async def test_a_load_is_answered_by_what_to_do_next(build):
    """Few words: what is loaded, what to do, and the request again; what stands in the prompt is not said twice."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("ok")])
    async with build(model=model, brief="always") as system:
        result = await ReactSolver(system).run("Sum it up.")
    told = json.loads(model.requests[1].messages[-1].text)
    assert (told["loaded"], told["task"]) == (["sales"], "Sum it up.")
    assert "<active_skills>" in told["next"]
    assert [use.name for use in result.skills_used] == ["sales"]


async def test_arguments_left_out_are_still_taken(build):
    """What the few words do not name works as before."""
    model = ScriptedModel([call("react_write", path="a.bin", b64="AAE="), say("ok")])
    async with build(model=model, brief="always") as system:
        result = await ReactSolver(system).run("x")
    shown = next(tool for tool in model.requests[0].tools if tool.name == "react_write")
    assert "b64" not in shown.input_schema["properties"]
    assert [(file.path, file.size) for file in result.files] == [("a.bin", 2)]


async def test_a_repeated_call_is_not_offered_next(build):
    """A small model repeats what it is offered: after `repeated_call` the tool is left out of one request."""
    again = call("react_read", refs=["turn:none.md"])
    model = ScriptedModel([again, again, again, say("ok")])
    async with build(model=model, brief="always") as system:
        await ReactSolver(system).run("x")
    offered = ["react_read" in {tool.name for tool in request.tools} for request in model.requests]
    assert offered == [True, True, True, False]


async def test_errors_come_without_schemas(build):
    """A small model reads what to do, not a schema; the other form gives the schema as before."""
    for form, expected in (("always", False), ("never", True)):
        model = ScriptedModel([call("react_write", path="a", content="x"), say("ok")])
        async with build(model=model, brief=form) as system:
            await ReactSolver(system).run("x")
        error = json.loads(model.requests[1].messages[-1].text)["error"]
        assert ("schema" in error["details"]) is expected
        assert next(iter(error)) == "next"
        assert "text" in error["next"]


async def test_a_tool_of_a_bundle_keeps_its_words(build):
    """Tools of bundles and plugins are offered as they are."""

    def lookup(name: str, depth: int = 1) -> str:
        """Look a name up, with everything that is known about it."""
        return name

    model = ScriptedModel([say("ok")])
    async with build(model=model, tools=[lookup], brief="always") as system:
        await ReactSolver(system).run("x")
    spec = next(tool for tool in model.requests[0].tools if tool.tool_id == "tools.lookup")
    assert spec.description == "Look a name up, with everything that is known about it."
    assert set(spec.input_schema["properties"]) == {"name", "depth"}


def test_brief_rules_name_exactly_the_tools():
    """Each tool of the list, in its spelling, and no other."""
    text = rules_text(["skills.load", "skills.read"], style="dotted", brief=True)
    assert "skills.load" in text
    assert "skills.read" in text
    assert "run_script" not in text
    assert rules_text([], brief=True) == ""


async def test_a_result_that_does_not_fit_is_halved(build):
    """A window nobody knew: the last result is halved until the request fits, and the cut is told."""

    class Narrow(ScriptedModel):
        async def reply(self, request):
            if sum(len(message.text) for message in request.messages) > 5_000:
                raise ModelFailed("too long", code="context_full")
            return await super().reply(request)

    model = Narrow([call("react_read", refs=["turn:long.txt"]), say("ok")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", files=[("long.txt", b"word\n" * 6_000)])
    assert result.status == "final"
    assert len(model.requests[-1].messages[-1].text) < 5_000
    assert [cut.kind for cut in result.context] == ["results"] * len(result.context)
    assert result.context
