"""Towards a model a refused skill reads like an unknown one at every door, and nothing names places of this host."""

import json

import pytest

from kdskills.errors import ExecFailed, ExecRefused
from kdskills.session.codes import pathless
from kdskills.solver import ReactSolver
from kdskills.solver.turn_tools import for_program
from kdskills.testing.models import ScriptedModel, call, say

CODE = "```python\nprint(1)\n```"

DOORS = {
    "load": lambda name: call("skills_load", names=[name]),
    "add": lambda name: call("skills_load", names=["sales", name], mode="add"),
    "unload": lambda name: call("skills_unload", names=[name]),
    "read": lambda name: call("skills_read", path="SKILL.md", skill=name),
    "run": lambda name: call("skills_run_script", path="scripts/x.py", skill=name),
    "react": lambda name: call("react_read", refs=[f"sk:{name}"]),
    "react short": lambda name: call("react_read", refs=[f"skills.{name.partition('.')[2]}"]),
    "react long": lambda name: call("react_read", refs=[f"skills.{name}"]),
    "react file": lambda name: call("react_read", refs=[f"sk:{name}/SKILL.md"]),
    "code": lambda name: call("exec_python", task="count", skills=[name]),
}
KINDS = {
    "denied": "---\nname: wqzx1\ndescription: D.\n---\nBody\n",
    "started by people": "---\nname: wqzx1\ndescription: D.\ndisable-model-invocation: true\n---\nBody\n",
    "for others": "---\nname: wqzx1\ndescription: D.\ninclude_for: [someone.else]\n---\nBody\n",
    "broken": "---\nname: [\n---\nBody\n",
}


def answers(model):
    """Return everything a model was told, times left out and both names made one."""
    told = []
    for message in model.requests[-1].messages:
        if message.role == "tool":
            value = json.loads(message.text.replace("wqzx2", "wqzx1"))
            value.pop("duration_ms", None)
            told.append(value)
    return told, [request.instructions for request in model.requests]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_skill_reads_like_an_unknown_one(build, bundle_path, kind, door):
    """Whatever the reason and the door: not one byte tells the two apart."""
    folder = bundle_path / "skills" / "acme" / "wqzx1"
    folder.mkdir()
    (folder / "SKILL.md").write_text(KINDS[kind])
    if kind == "denied":
        rules = bundle_path / "skills_descriptor.py"
        rules.write_text(rules.read_text().replace('"acme.secret"', '"acme.secret", "acme.wqzx1"'))
    told = []
    for name in ("acme.wqzx1", "acme.wqzx2"):
        roles = {"solver.codegen": [say(CODE)]} if door == "code" else None
        model = ScriptedModel([call("skills_load", names=["brief"]), DOORS[door](name), say("ok")], roles=roles)
        async with build(model=model) as system:
            await ReactSolver(system).run("q")
        told.append(answers(model))
    assert told[0] == told[1]


async def test_generated_code_is_not_told_what_is_refused(build, executor, bundle_path):
    """A program's words go back to the model: its globals name no refused skill, neither as one nor in a rule."""
    rules = bundle_path / "skills_descriptor.py"
    rules.write_text(rules.read_text().replace('["acme.sales"]', '["acme.sales", "acme.future"]'))
    async with build([call("exec_python", code="print(SKILLS_DESCRIPTOR)"), say("ok")]) as system:
        await ReactSolver(system).run("q")
        whole = system.subsystem.view("solver.codegen", tools=system.tool_ids).export_runtime_globals()
    inner = executor.requests[0].globals["SKILLS_DESCRIPTOR"]
    assert "secret" in json.dumps(whole)
    assert not [name for name in ("secret", "brief", "future") if name in json.dumps(inner)]
    assert inner["agents_config"] == {"*": {"disabled": []}, "solver.codegen": {"enabled": ["acme.sales"]}}
    assert inner["skills"] == whole["SKILLS_DESCRIPTOR"]["skills"]


async def test_naming_a_skill_gives_generated_code_no_network(build, executor):
    """Generated code reaches what loaded skills are granted; naming one that is not loaded gives nothing."""
    replies = [
        call("exec_python", code="1", skills=["acme.sales"]), call("skills_load", names=["acme.sales"]),
        call("exec_python", code="2"), call("exec_shell", command="curl https://pypi.org/"), say("ok"),
    ]  # fmt: skip
    async with build(replies, network={"acme.sales": ("pypi.org",)}) as system:
        await ReactSolver(system).run("q")
    assert [request.network for request in executor.requests] == ["none", ("pypi.org",), ("pypi.org",)]


def test_an_allow_list_that_names_nothing_here_allows_nothing():
    """Leaving names out never widens what is allowed."""
    rules = {
        "w": {"enabled": ["acme.a"], "disabled": ["acme.b", "lab.*"], "imports": "strict"},
        "*": {"enabled": False},
    }
    exported = {
        "SKILLS_DESCRIPTOR": {
            "skills": [{"id": "lab.zzz"}],
            "agents_config": rules,
            "activation": {"refused": {"acme.a": "denied"}},
        }
    }
    inner = for_program(exported)["SKILLS_DESCRIPTOR"]
    assert inner["agents_config"] == {
        "w": {"enabled": False, "disabled": ["lab.*"], "imports": "strict"},
        "*": {"enabled": False},
    }
    assert inner["activation"] == {"refused": {}}
    assert exported["SKILLS_DESCRIPTOR"]["agents_config"] is rules


@pytest.mark.parametrize(
    "error",
    [
        ExecRefused("what a run needs cannot be prepared: [Errno 28] No space left on device: '/var/cache/x/rootfs'"),
        ExecRefused("bad input /home/me/file", code="bad_request"),
        ExecFailed("bwrap: cannot mount /home/me/.cache/kdskills/1"),
    ],
)
async def test_a_failing_engine_names_no_place_of_this_host(build, executor, error):
    """The model learns that it is not to blame, not where things lie."""
    executor.error = error
    model = ScriptedModel(
        [
            call("skills_load", names=["sales"]),
            call("skills_run_script", path="scripts/sum.py"),
            call("exec_python", code="1"),
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        await ReactSolver(system).run("q")
    told = [message.text for message in model.requests[-1].messages if message.role == "tool"][1:]
    assert all("no defect" in text for text in told)
    assert not [text for text in told if "/var/" in text or "/home/" in text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no /etc/passwd, '/a b'", "no …, '… b'"),
        ("see https://example.org/a and scripts/x.py", "see https://example.org/a and scripts/x.py"),
        ("skill://acme/sales and 1/2", "skill://acme/sales and 1/2"),
    ],
)
def test_paths_are_left_out_of_words_for_models(text, shown):
    """Absolute paths go; addresses and relative paths stay."""
    assert pathless(text) == shown


async def test_generated_code_is_asked_about_beside_a_remote_skill(build, bundle_path, executor):
    """While such a skill is loaded every run asks; with nobody to ask it is refused."""
    folder = bundle_path / "skills" / "mcp-shop" / "prices"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: prices\ndescription: Reads prices.\n---\nBody\n")
    replies = [call("skills_load", names=["mcp-shop.prices"]), call("exec_python", code="1"), say("ok")]
    async with build(replies) as system:
        result = await ReactSolver(system).run("q")
    assert [one.error for step in result.steps for one in step.calls] == [None, "approval_unavailable"]
    assert executor.requests == []


async def test_text_of_a_remote_skill_stands_in_the_result(build, bundle_path):
    """Reading such a skill gives its text with its origin in a pinned result; the prompt never holds it."""
    folder = bundle_path / "skills" / "mcp-shop" / "prices"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: prices\ndescription: Reads prices.\n---\nForeign words\n")
    model = ScriptedModel([call("react_read", refs=["sk:mcp-shop.prices"]), say("ok")])
    async with build(model=model) as system:
        await ReactSolver(system).run("q")
    request = model.requests[-1]
    told = [message for message in request.messages if message.role == "tool"]
    assert len(told) == 1
    assert "Foreign words" in told[0].text
    assert '"origin": "mcp:shop"' in told[0].text
    assert str(told[0].pin).startswith("skill:mcp-shop.prices@sha256:")
    assert "Foreign words" not in request.instructions
