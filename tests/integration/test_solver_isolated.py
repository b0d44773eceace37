"""Turns whose scripts and generated code run behind a real wall."""

import asyncio
import json

import pytest

from kdskills.app import Host
from kdskills.bundle import load_bundle
from kdskills.solver import CODEGEN, ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say, together

pytestmark = pytest.mark.needs("bubblewrap")

SCRIPTS = {
    "sum.py": "import csv, pathlib\nrows = list(csv.DictReader(open('data/sales.csv')))\n"
    "total = sum(int(row['total']) for row in rows)\npathlib.Path('total.txt').write_text(str(total))\nprint(total)\n",
    "hang.py": "import time\nprint('begun', flush=True)\ntime.sleep(600)\n",
    "flood.py": "import sys\nfor _ in range(4000):\n    sys.stdout.write('x' * 4096)\nprint('\\nlast line')\n",
    "link.py": "import os\nos.symlink('/etc/hostname', 'stolen.txt')\nopen('good.txt', 'w').write('ok')\n",
}

PROBE = """\
import json
from kdskills import get_active_skills_subsystem, get_skill
from kdskills.turn import get_active_view

view = get_active_view()
assert get_active_skills_subsystem() is not None
found = {
    "consumer": view.consumer,
    "listed": sorted(view.listed),
    "short": dict(view.short_ids),
    "sales": get_skill("acme.sales").body,
    "brief": get_skill("acme.brief"),
    "secret": get_skill("acme.secret"),
    "code": view.resolve("acme.secret").code,
}
print(json.dumps(found))
open("made.txt", "w").write("by code")
"""


@pytest.fixture
def bundle(tmp_path):
    """A bundle with scripts that behave and misbehave."""
    root = tmp_path / "bundle"
    for name in ("sales", "brief", "secret"):
        folder = root / "skills" / "acme" / name
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: d\n---\nText of {name}.\n")
    for name, text in SCRIPTS.items():
        (root / "skills/acme/sales/scripts" / name).write_text(text)
    (root / "data").mkdir()
    (root / "data/sales.csv").write_text("region,total\nnorth,40\nsouth,2\n")
    (root / "skills_descriptor.yaml").write_text(
        "custom_skills_root: skills\nagents_config:\n  '*': {disabled: [acme.secret]}\n"
        "  solver.codegen: {enabled: [acme.sales]}\n"
    )
    return root


async def run(bundle, tmp_path, replies, *, executor="bubblewrap", **options):
    model = ScriptedModel(replies, roles=options.pop("roles", None))
    settings = SolverSettings(work_dir=tmp_path / "turns", **options)
    seen = []
    system = SolverSystem(
        bundle=load_bundle(bundle),
        model=model,
        executor=executor,
        settings=settings,
        sinks=(seen.append,),
        wiring=Host(entry_points=False).wiring,
    )
    async with system:
        result = await ReactSolver(system).run("x")
    return result, seen


def answer(result, step):
    return json.loads(result.steps[step].calls[0].result)


async def test_a_script_reads_the_data_and_its_file_comes_back(bundle, tmp_path):
    """Inputs go in, outputs come out, and the event says which wall and which limits held."""
    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py", workdir="turn:."),
        say("42"),
    ]
    result, seen = await run(bundle, tmp_path, replies)
    assert answer(result, 1)["stdout"] == "42\n"
    assert [(file.path, file.size) for file in result.files] == [("total.txt", 2)]
    finished = next(event for event in seen if event.type == "script.finished")
    assert (finished.engine, finished.level) == ("bubblewrap", "namespace")
    assert {"wall", "network"} <= set(finished.limits)


async def test_scripts_that_hang_flood_or_plant_links_are_results(bundle, tmp_path):
    """Each is an answer the model can act on, in time, and nothing of the host comes back."""
    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/hang.py", timeout_s=5, workdir="turn:."),
        call("skills_run_script", path="scripts/flood.py", workdir="turn:."),
        call("skills_run_script", path="scripts/link.py", workdir="turn:."),
        say("done"),
    ]
    result, _ = await asyncio.wait_for(run(bundle, tmp_path, replies), 100)
    hung, flooded, linked = (answer(result, step) for step in (1, 2, 3))
    assert (hung["status"], hung["exit_code"], hung["stdout"]) == ("timeout", 124, "begun\n")
    assert (flooded["status"], flooded["stdout_truncated"]) == ("ok", True)
    assert "last line" in result.steps[2].calls[0].result
    assert [item["path"] for item in linked["artifacts"]] == ["good.txt"]
    assert [file.path for file in result.files] == ["good.txt"]


async def test_generated_code_sees_the_skills_of_codegen_and_no_others(bundle, tmp_path):
    """Inside the sandbox the same skills are in force, with the numbers of the host; what is refused there is unknown here."""
    replies = [call("exec_python", code=PROBE), say("done")]
    result, _ = await run(bundle, tmp_path, replies)
    found = answer(result, 0)
    assert found["status"] == "ok", found
    assert json.loads(found["stdout"]) == {
        "consumer": CODEGEN,
        "listed": ["acme.sales"],
        "short": {"SK1": "acme.sales"},
        "sales": "Text of sales.",
        "brief": None,
        "secret": None,
        "code": "unknown_skill",
    }
    assert [file.path for file in result.files] == ["made.txt"]


async def test_code_written_for_a_task_runs_and_its_mistakes_name_their_line(bundle, tmp_path):
    """A program that raises is a result with the exception and its own line numbers."""
    program = "```python\nimport math\n\nraise ValueError('boom')\n```"
    replies = [call("exec_python", task="do it"), say("done")]
    result, _ = await run(bundle, tmp_path, replies, roles={CODEGEN: [say(program)]})
    record = next(one for step in result.steps for one in step.calls)
    found = json.loads(record.result)
    assert found["status"] == "nonzero"
    assert "ValueError: boom" in found["error"]["exception"] + found["error"]["message"] + found["stderr"]
    assert "line 3" in (found["error"].get("traceback") or "") + found["stderr"]


async def test_two_programs_at_once_do_not_see_each_other(bundle, tmp_path):
    """Calls of one reply run in sandboxes of their own."""
    first = "import os, time\nopen('a.txt', 'w').write('a')\ntime.sleep(0.3)\nprint(sorted(os.listdir('.')))\n"
    second = "import os, time\nopen('b.txt', 'w').write('b')\ntime.sleep(0.3)\nprint(sorted(os.listdir('.')))\n"
    replies = [together(call("exec_python", code=first), call("exec_python", code=second)), say("done")]
    result, _ = await run(bundle, tmp_path, replies)
    shown = [json.loads(one.result)["stdout"] for one in result.steps[0].calls]
    assert shown == ["['a.txt', 'data']\n", "['b.txt', 'data']\n"]
    assert [file.path for file in result.files] == ["a.txt", "b.txt"]
