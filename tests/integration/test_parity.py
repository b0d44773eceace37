"""The same skills on both sides of every wall: one program, identical answers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kdskills import SkillsSubsystem, load_bundle
from kdskills.execution import ExecRequest, SkillMount
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.conformance.packages import small_environment

PROGRAM = Path(__file__).with_name("parity_program.py")
ODD_REFS = [
    "",
    " ",
    "SK0",
    "SK1",
    "sk:2",
    "SK99",
    "nobody.nothing",
    "brief",
    "a.b.c",
    "press.*",
    "skills.press.brief",
    "Größe",
]
#: Modules that restored skills are made of, which an environment may bring, too.
SHADOWS = ("kdskills", "kdskills_runtime", "pydantic", "yaml", "typing", "json")
CONSUMERS = ["solver.react.decision", "answer.generator.strong", "desk.editor", "nobody.listed", None]


def make(name: str):
    """Return the engine *name*."""
    if name == "docker":
        from kdskills.builtin.executors.docker import DockerExecutor

        return DockerExecutor(ExecutionOptions())
    if name in {"bubblewrap", "bubblewrap-pool"}:
        from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor

        return BubblewrapExecutor(ExecutionOptions(pool=1 if name == "bubblewrap-pool" else 0))
    from kdskills.builtin.executors.subprocess import SubprocessExecutor

    return SubprocessExecutor(ExecutionOptions(allow_unisolated=True))


ENGINES = [
    pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")),
    pytest.param("bubblewrap-pool", marks=pytest.mark.needs("bubblewrap")),
    pytest.param("docker", marks=pytest.mark.needs("docker")),
    pytest.param("e2b", marks=pytest.mark.needs("e2b")),
    "subprocess",
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tmp_path_factory):
    """Return each engine in turn; the remote one with a server of its own."""
    if request.param != "e2b":
        yield make(request.param)
        return
    from kdskills.builtin.executors.e2b import E2bExecutor
    from kdskills.testing.e2b_server import E2bServer

    with E2bServer() as server:
        yield E2bExecutor(ExecutionOptions(e2b=server.options(), state_dir=tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def subsystem():
    """Return the skills of the press bundle."""
    top = Path(__file__).parents[2] / "bundles" / "press"
    return SkillsSubsystem(load_bundle(top).descriptor, bundle_root=top, roots=())


def mounts(subsystem, export) -> tuple[SkillMount, ...]:
    """Return a mount of every exported skill."""
    known = subsystem.snapshot.skills
    return tuple(SkillMount(row["id"], known[row["id"]].folder, row["tree"]) for row in export["skills"])


def in_process(refs):
    """Return the answers of what is active here."""
    spec = importlib.util.spec_from_file_location("parity_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.loads(json.dumps(module.answers(refs)))


def request_for(subsystem, view, refs, **changes) -> ExecRequest:
    """Return the program as generated code with the view's skills."""
    names = view.export_runtime_globals()
    fields = {
        "code": PROGRAM.read_text(),
        "globals": {**names, "REFS": refs},
        "skills": mounts(subsystem, names["SKILLS_DESCRIPTOR"]),
        "profile": "unsafe-local",
    }
    return ExecRequest(**{**fields, **changes})


@pytest.mark.parametrize("consumer", CONSUMERS)
async def test_packages_change_no_answer(engine, subsystem, consumer):
    """With an environment in place that brings modules of the same names, skills answer as on the host."""
    refs = [*sorted(subsystem.snapshot.skills), *ODD_REFS]
    with subsystem.activate(consumer, tools=["exec.python"]) as view:
        expected = in_process(refs)
        with small_environment(shadows=SHADOWS) as mount:
            result = await engine.run(request_for(subsystem, view, refs, environment=mount))
    assert (result.status, result.error, result.stderr.text) == ("ok", None, "")
    assert result.value == expected


@pytest.mark.parametrize("consumer", CONSUMERS)
async def test_every_engine_answers_as_the_host(engine, subsystem, consumer):
    """Visible ids, short ids, resolve of every ref, block bytes and refusal codes are identical."""
    refs = [*sorted(subsystem.snapshot.skills), *ODD_REFS]
    with subsystem.activate(consumer, tools=["exec.python"]) as view:
        expected = in_process(refs)
        result = await engine.run(request_for(subsystem, view, refs))
    assert (result.status, result.error) == ("ok", None), result.stderr.text
    assert list(result.value) == list(expected)
    for question, answer in expected.items():
        assert answer == result.value[question], question


async def test_the_far_side_sees_no_other_policy(engine, subsystem):
    """A view's export answers for its own consumer only."""
    view = subsystem.view("solver.react.decision")
    code = (PROGRAM.with_name("parity_other_consumer.py")).read_text()
    result = await engine.run(request_for(subsystem, view, [], code=code))
    assert result.value == {"code": "policy_unavailable", "hidden": [], "denied": None}, result.stderr.text


async def test_a_skill_that_differs_ends_the_run_before_the_program(engine, subsystem):
    """A descriptor whose digests are not those of the mounted skills is `skills_mismatch`; nothing ran."""
    view = subsystem.view("desk.editor")
    request = request_for(subsystem, view, [])
    export = json.loads(json.dumps(request.globals["SKILLS_DESCRIPTOR"]))
    row = export["skills"][0]
    for key in ("digest", "tree"):
        wrong = {**export, "skills": [{**row, key: row[key][:-4] + "0000"}, *export["skills"][1:]]}
        result = await engine.run(
            request_for(subsystem, view, [], globals={"SKILLS_DESCRIPTOR": wrong, "REFS": []}, code="print('ran')")
        )
        assert (result.status, result.exit_code, result.error.code) == ("refused", None, "skills_mismatch"), result
        assert result.stdout.data == b""


async def test_a_skill_that_is_not_mounted_ends_the_run(engine, subsystem):
    """A skill of the export without a mount is `skills_mismatch`."""
    view = subsystem.view("desk.editor")
    every = mounts(subsystem, view.export_runtime_globals()["SKILLS_DESCRIPTOR"])
    result = await engine.run(request_for(subsystem, view, [], skills=every[1:], code="print('ran')"))
    assert (result.status, result.error.code, result.stdout.data) == ("refused", "skills_mismatch", b"")


async def test_a_descriptor_that_cannot_be_read_ends_the_run(engine):
    """What is no export keeps the code of its own error; the program does not start."""
    request = ExecRequest(code="print('ran')", globals={"SKILLS_DESCRIPTOR": {"version": 99}}, profile="unsafe-local")
    result = await engine.run(request)
    assert (result.status, result.stdout.data) == ("refused", b""), result
    assert result.error.stage == "skills"


async def test_without_a_descriptor_nothing_is_active(engine):
    """Generated code without skills gets an error, not an empty default."""
    code = PROGRAM.with_name("parity_nothing_active.py").read_text()
    result = await engine.run(ExecRequest(code=code, profile="unsafe-local"))
    assert result.value == "no_active_subsystem", result.stderr.text


async def test_no_host_path_is_visible_inside(engine, subsystem):
    """What travels names places of the far side only."""
    if engine.name == "subprocess":
        pytest.skip("a program without a wall sees the host's paths anyway")
    view = subsystem.view("desk.editor")
    code = "import kdskills_runtime, json\nkdskills_runtime.report(json.dumps(SKILLS_DESCRIPTOR))\n"
    result = await engine.run(request_for(subsystem, view, [], code=code))
    assert str(Path(__file__).parents[2]) not in result.value
    assert "/skills/press.brief" in result.value
