"""`exec.shell`: when it is offered, what it is asked to run, what of the turn's files it changes."""

import json

import pytest

from kdskills.execution import Artifact, ArtifactError, ExecResult, InputFile, IsolationLevel, Stream
from kdskills.session.approval import Denial
from kdskills.solver import PlainWiring
from kdskills.solver.shell import removed_files
from kdskills.solver.turn_tools import turn_path
from kdskills.testing.models import ScriptedModel, call, say


def answers(result):
    """Return the first call of each step after the load."""
    return [step.calls[0] for step in result.steps[1:] if step.calls]


async def shell(solve, *commands, **options):
    """Run commands with the skill `sales` loaded, and return their calls and the result."""
    replies = [call("skills_load", names=["sales"])]
    replies += [call("exec_shell", **(one if isinstance(one, dict) else {"command": one})) for one in commands]
    result = await solve([*replies, say("done")], **options)
    return answers(result), result


@pytest.mark.parametrize(
    ("level", "settings", "offered"),
    [
        (IsolationLevel.NAMESPACE, {}, True),
        (IsolationLevel.NAMESPACE, {"shell": False}, False),
        (IsolationLevel.NAMESPACE, {"run_scripts": False}, False),
        (IsolationLevel.RLIMIT, {"run_scripts": True}, False),
        (IsolationLevel.RLIMIT, {"run_scripts": True, "shell": True}, True),
    ],
)
async def test_the_shell_is_on_where_the_engine_isolates(solve, executor, level, settings, offered):
    """A bare engine is asked for twice: for scripts and for commands."""
    executor.level = level
    model = ScriptedModel([say("done")])
    await solve(model=model, **settings)
    assert ("exec.shell" in {tool.tool_id for tool in model.requests[0].tools}) is offered


async def test_a_command_is_bash_on_the_turns_files_and_loaded_skills(solve, executor):
    """Nothing of the host goes in: the turn's files, the loaded skills, and variables that name their folders."""
    await shell(solve, {"command": "ls", "timeout_s": 7}, files=[("a.txt", b"1")])
    (request,) = executor.requests
    assert request.argv == ("bash", "-c", "ls")
    assert [mount.id for mount in request.skills] == ["acme.sales"]
    assert [item.path for item in request.inputs] == ["data/sales.csv", "a.txt"]
    assert (request.env["SKILL_DIR"], request.env["KDSKILLS_TURN_DIR"]) == ("/skills/acme.sales", "/work")
    assert (request.workdir, request.limits.wall_s, request.outputs, request.network) == (".", 7, ("**",), "none")


async def test_hosts_granted_to_loaded_skills_may_be_reached(solve, executor):
    """Those of the loaded ones alone."""
    grants = {"acme.sales": ("example.org",), "acme.brief": ("other.example",)}
    await shell(solve, "curl https://example.org", network=grants)
    assert executor.requests[0].network == ("example.org",)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"command": "echo \0"}, "invalid_argument"),
        ({"command": " \n"}, "invalid_argument"),
        ({"command": "x" * 1_000_000}, "invalid_argument"),
        ({"command": "ls", "timeout_s": 1e9}, "invalid_argument"),
        ({"command": "ls", "workdir": "../.."}, "path_denied"),
        ({"command": "ls", "workdir": "/etc"}, "path_denied"),
        ({"command": "ls", "workdir": "/work/../etc"}, "path_denied"),
        ({"command": "ls", "workdir": "/skills/acme.brief"}, "resource_not_found"),
        ({"command": "ls", "workdir": "/skills/acme.sales/../.."}, "path_denied"),
        ({"command": "ls", "workdir": "none"}, "resource_not_found"),
        ({"command": "ls", "skill": "brief"}, "skill_not_active"),
        ({"command": "ls", "skill": "secret"}, "skill_not_active"),
    ],
)
async def test_hostile_arguments_are_refused_and_nothing_runs(solve, executor, arguments, code):
    """Each has a code the model can act on."""
    (refused,), _ = await shell(solve, arguments)
    assert refused.error == code
    assert executor.requests == []


class Policy(PlainWiring):
    """Refuses one file of a skill."""

    def deny(self, request):
        """Deny it, whoever asks."""
        return Denial("private") if request.path == "references/notes.md" else None


async def test_a_skill_of_which_a_policy_refuses_a_file_is_not_in_the_tree(solve, executor):
    """Inside nobody asks about single files, so it is all of a skill or nothing, and the refusal is told."""
    _, result = await shell(solve, "cat /skills/acme.sales/references/notes.md", wiring=Policy())
    (request,) = executor.requests
    assert (request.skills, "SKILL_DIR" in request.env) == ((), False)
    assert result.status == "final"


@pytest.mark.parametrize("run", [call("exec_shell", command="ls"), call("exec_python", code="print(1)")])
async def test_a_skill_that_is_not_shared_brings_no_network(solve, executor, run):
    """Nor are its secrets for the run, whichever tool runs it."""
    grants = {"acme.sales": ("example.org",)}
    replies = [call("skills_load", names=["sales"]), run, say("done")]
    await solve(replies, wiring=Policy(), network=grants)
    await solve(replies, network=grants)
    told = [(request.network, request.network_skills) for request in executor.requests]
    assert told == [("none", ()), (("example.org",), ("acme.sales",))]


async def test_what_a_command_removed_is_removed_from_the_turn(solve, executor):
    """Files handed in and data stay."""
    executor.outcome = {"files": {"b.txt": b"2"}}
    replies = [
        call("react_write", path="c.txt", text="3"),
        call("exec_shell", command="rm *; echo 2 > b.txt"),
        say("done"),
    ]
    result = await solve(replies, files=[("a.txt", b"1")])
    assert json.loads(result.steps[1].calls[0].result)["removed"] == ["c.txt"]
    assert [file.path for file in result.files] == ["b.txt"]


def test_what_was_not_collected_was_not_removed():
    """Only a whole collection tells that a file is gone."""
    inputs = (InputFile("a", b""), InputFile("b", b""))
    run = {"exit_code": 0, "signal": None, "stdout": Stream(), "stderr": Stream(), "duration_s": 1.0, "engine": "e"}
    run |= {"level": IsolationLevel.NAMESPACE, "limits_enforced": frozenset(), "status": "ok"}
    artifact = Artifact("a", 0, "", 0o644, b"")
    assert removed_files(inputs, ExecResult(**run)) == []
    assert removed_files(inputs, ExecResult(**run, artifacts=(artifact,))) == ["b"]
    missing = ArtifactError("**", "missing", "")
    assert removed_files(inputs, ExecResult(**run, artifact_errors=(missing,))) == ["a", "b"]
    lost = ArtifactError("x", "too_many", "")
    assert removed_files(inputs, ExecResult(**run, artifacts=(artifact,), artifact_errors=(lost,))) == []


async def test_an_image_without_bash_is_told(solve, executor):
    """The operator must cure it; the command is not to blame."""
    from kdskills.execution import ExecError

    async def run(request):
        executor.outcome = {}
        result = await type(executor).run(executor, request)
        from dataclasses import replace

        return replace(result, status="nonzero", error=ExecError("exec", "program_missing", "bash"))

    executor.run = run
    (refused,), _ = await shell(solve, "ls")
    assert refused.error == "interpreter_missing"


@pytest.mark.parametrize(
    ("path", "below"),
    [("/work/a/b", "a/b"), ("/work", "."), ("/work/", "."), ("turn:a", "a"), ("./a", "a"), (".", ".")],
)
def test_spellings_of_a_turns_path(path, below):
    """What a skill's text may say means the turn's file."""
    assert turn_path(path) == below
