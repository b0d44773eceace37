"""Turns that follow published skills: `exec.shell` and the file tools behind a real wall."""

import asyncio
import json
from pathlib import Path

import pytest

from kdskills.app import Host
from kdskills.bundle import load_bundle
from kdskills.session.approval import allow, deny
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say

pytestmark = pytest.mark.needs("bubblewrap")
DONE = (say("done"),)


@pytest.fixture
def bundle(tmp_path):
    """A skill as people publish them, one that is denied, and data."""
    root = tmp_path / "bundle"
    for name, tools in (("report", "allowed-tools: Bash(python3:*) Bash(sort:*) Read\n"), ("secret", "")):
        folder = root / "skills" / "acme" / name
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: d\n{tools}---\nUse Bash.\n")
        (folder / "scripts/total.py").write_text("import sys\nprint(sum(int(line) for line in sys.stdin))\n")
    (root / "data").mkdir()
    (root / "data/sales.txt").write_text("40\n2\n")
    (root / "skills_descriptor.yaml").write_text(
        "custom_skills_root: skills\nagents_config:\n  '*': {disabled: [acme.secret]}\n"
    )
    return root


@pytest.fixture
def follow(bundle, tmp_path):
    """Return a function that runs a scripted turn and gives its result and the decoded answers, one a call."""

    async def run(*replies, approve=None, wiring=None, files=(), last=DONE, **options):
        system = SolverSystem(
            bundle=load_bundle(bundle),
            model=ScriptedModel([call("skills_load", names=["report"]), *replies, *last]),
            executor="bubblewrap",
            settings=SolverSettings(work_dir=tmp_path / "turns", **options),
            approve=approve,
            wiring=wiring or Host(entry_points=False).wiring,
        )
        async with system:
            result = await ReactSolver(system).run("x", files=files)
        return result, [json.loads(step.calls[0].result or "{}") for step in result.steps[1:] if step.calls]

    return run


def shell(command, **arguments):
    """Return the reply that runs *command*."""
    return call("exec_shell", command=command, **arguments)


async def test_a_command_runs_a_skills_script_on_the_turns_files(follow):
    """Pipes, `$SKILL_DIR` and data work as the skill's text assumes; a file is there for the next command, and once."""
    result, answers = await follow(
        shell(
            "sort -n data/sales.txt | tee sorted.txt | python3 $SKILL_DIR/scripts/total.py > total.txt; cat total.txt"
        ),
        shell("cat /work/total.txt; rm sorted.txt; pwd", workdir="/work"),
        shell("ls; pwd", workdir="/skills/acme.report"),
    )
    assert [answer["stdout"] for answer in answers] == [
        "42\n",
        "42\n/work\n",
        "SKILL.md\nscripts\n/skills/acme.report\n",
    ]
    assert [item["path"] for item in answers[0]["artifacts"]] == ["sorted.txt", "total.txt"]
    assert (answers[1]["artifacts"], answers[1]["removed"]) == ([], ["sorted.txt"])
    assert [file.path for file in result.files] == ["total.txt"]


async def test_a_denied_skill_is_not_in_the_tree(follow):
    """The shell sees loaded skills alone, read-only, and no network."""
    _, (seen,) = await follow(
        shell(
            "ls /skills; touch $SKILL_DIR/x; grep -vc 'lo:\\|face\\|Inter' /proc/net/dev; grep -rl secret /skills /work"
        )
    )
    assert seen["stdout"] == "acme.report\n0\n"
    assert "Read-only" in seen["stderr"]


async def test_a_program_made_in_one_call_runs_in_the_next(follow):
    """Modes last as files do."""
    _, answers = await follow(
        shell("printf '#!/bin/bash\\necho ran\\n' > run.sh"), shell("chmod +x run.sh"), shell("./run.sh")
    )
    assert answers[2]["stdout"] == "ran\n"


async def test_long_output_is_shown_by_head_and_tail_with_a_file(follow):
    """The answer is short and names the turn's file with everything that was kept."""
    _, answers = await follow(
        shell("echo first; seq 1 20000; echo last"), shell("head -1 shell/1.stdout.txt; wc -l < shell/1.stdout.txt")
    )
    long = answers[0]["stdout"]
    assert (long.startswith("first\n"), long.endswith("last\n"), len(long) < 20_000) == (True, True, True)
    assert answers[0]["stdout_file"] == "shell/1.stdout.txt"
    assert answers[1]["stdout"] == "first\n20002\n"


@pytest.mark.parametrize(
    ("command", "status", "sign"),
    [
        (":(){ :|:& };:; sleep 30", {"timeout", "nonzero", "ok", "limit", "oom"}, ""),
        ("yes", {"timeout", "limit", "nonzero"}, "y\ny\n"),
        ("sleep 100 & disown; echo gone", {"ok"}, "gone"),
        ("dd if=/dev/zero of=big bs=1M count=200", {"nonzero", "limit"}, ""),
        ("ln -s /etc/passwd a; ln -s / root; mkfifo pipe; echo made", {"ok"}, "made"),
        ("exit 7", {"nonzero"}, ""),
    ],
)
async def test_hostile_commands_are_answers(follow, command, status, sign):
    """Bombs, floods, processes left behind, links and pipes: each is an answer in time, and no link comes back."""
    result, (answer,) = await asyncio.wait_for(follow(shell(command, timeout_s=4)), 60)
    assert answer["status"] in status
    assert sign in answer["stdout"]
    assert {file.path for file in result.files} <= {"shell/1.stdout.txt"}


async def test_a_folder_swapped_for_a_link_changes_nothing_outside(follow, tmp_path):
    """What a command leaves in place of a file or folder of the turn is never followed."""
    _, answers = await follow(
        shell("mkdir a; echo 1 > a/one; echo 2 > two"),
        shell(f"rm -r a two; ln -s {tmp_path} a; ln -s /etc/passwd two"),
        shell("cat a/one two"),
    )
    assert answers[1]["removed"] == ["a/one"]
    assert (answers[2]["stdout"], "a/one" in answers[2]["stderr"]) == ("2\n", True)
    assert all("root:" not in json.dumps(answer) for answer in answers)
    assert not list(tmp_path.glob("one"))


async def test_a_person_sees_the_command_and_a_denied_one_does_not_run(follow):
    """`ApprovalRequest.argv` holds it; a denial reads like a refused tool."""
    asked = []

    async def approve(request):
        asked.append(request.argv)
        return deny("no") if "rm" in request.argv[2] else allow()

    result, _ = await follow(shell("echo hi; id -u"), shell("rm -rf ."), approve=approve)
    assert asked == [("bash", "-c", "echo hi; id -u"), ("bash", "-c", "rm -rf .")]
    assert [step.calls[0].error for step in result.steps[1:3]] == [None, "approval_denied"]


def sleeping(seconds):
    """Whether a process `sleep <seconds>` runs on this machine."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return any(line.split(b"\0")[:2] == [b"sleep", str(seconds).encode()] for line in lines)


def later(command, **arguments):
    """Return the reply that runs *command* in the background."""
    return shell(command, background=True, **arguments)


async def test_a_command_in_the_background_is_followed_and_its_files_come_back_once(follow):
    """Its own files alone: what the turn changed meanwhile stays as the turn has it."""
    result, answers = await follow(
        shell("echo 1 > a.txt"),
        later("echo begun; until [ -e /tmp/x ]; do sleep 1; touch /tmp/x; done; cat a.txt; echo new > b.txt"),
        call("files_edit", path="a.txt", old="1", new="2"),
        call("exec_shell_output", handle="sh1", wait_s=0),
        call("exec_shell_output", handle="sh1", wait_s=60),
        shell("cat a.txt b.txt"),
    )
    assert (answers[1]["handle"], answers[1]["status"], answers[3]["status"]) == ("sh1", "running", "running")
    assert (answers[4]["status"], answers[4]["stdout"]) == ("ok", "begun\n1\n")
    assert [item["path"] for item in answers[4]["artifacts"]] == ["b.txt"]
    assert answers[5]["stdout"] == "2\nnew\n"
    assert sorted(file.path for file in result.files) == ["a.txt", "b.txt"]


async def test_a_command_in_the_background_can_be_ended_and_is_told_of_once(follow):
    """After that its handle is no more."""
    result, answers = await follow(
        later("sleep 98761"),
        call("exec_shell_output", handle="sh1", end=True),
        call("exec_shell_output", handle="sh1"),
        call("exec_shell_output", handle="sh9"),
    )
    assert answers[1]["status"] == "cancelled"
    assert [step.calls[0].error for step in result.steps[3:5]] == ["invalid_argument", "invalid_argument"]
    assert not sleeping(98761)


async def test_a_turn_has_a_few_commands_in_the_background_and_ends_them(follow):
    """The fifth is refused; the four end with the turn, and one that ended by itself leaves its files."""
    replies = [later(f"sleep {98770 + number}") for number in range(4)]
    result, _ = await follow(later("echo 1 > own.txt"), shell("sleep 2"), *replies, later("sleep 98775"))
    assert [step.calls[0].error for step in result.steps[1:8]] == [None] * 6 + ["invalid_argument"]
    assert [file.path for file in result.files] == ["own.txt"]
    assert not any(sleeping(98770 + number) for number in range(6))


async def test_commands_end_with_a_turn_that_is_out_of_time_or_cancelled(follow):
    """However the turn ends."""
    result, _ = await follow(later("sleep 98780"), shell("sleep 50"), wall_s=4, last=())
    assert (result.status, sleeping(98780)) == ("budget", False)
    task = asyncio.create_task(follow(later("sleep 98781"), shell("sleep 98782")))
    for _ in range(300):
        await asyncio.sleep(0.1)
        if sleeping(98782):
            break
    assert sleeping(98781)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not sleeping(98781)
    assert not sleeping(98782)


async def test_what_a_skill_allows_runs_without_a_question(follow):
    """A command of other programs is asked about, and generated code is."""
    asked = []

    async def approve(request):
        asked.append(request.argv[-1])
        return deny("no")

    result, answers = await follow(
        shell("sort -n data/sales.txt | python3 $SKILL_DIR/scripts/total.py"),
        shell("cat data/sales.txt"),
        call("exec_python", code="print(1)"),
        later("python3 -c 'print(7)'"),
        call("exec_shell_output", handle="sh1", wait_s=60),
        approve=approve,
    )
    assert (answers[0]["stdout"], answers[4]["stdout"]) == ("42\n", "7\n")
    assert asked == ["cat data/sales.txt", "<code>"]
    assert [step.calls[0].error for step in result.steps[2:4]] == ["approval_denied"] * 2
