"""`skills.run_script`: checks, request, result, environment, approval."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from kdskills.environments.codes import EnvironmentFailed
from kdskills.errors import ExecFailed, ExecRefused, KdskillsError
from kdskills.execution import Artifact, EnvironmentMount, ExecError, NetworkConnection, Stream
from kdskills.session import ApprovalRequest, Denial, FolderWorkspace, RuntimeLimits, TurnScope, allow, deny
from kdskills.session.scripts import tail_text


async def refused(awaiting):
    with pytest.raises(KdskillsError) as caught:
        await awaiting
    return caught.value


@pytest.fixture
def runner(make, executor):
    """Builds a runtime that runs scripts on the recording executor."""
    return lambda **options: make(run_scripts=True, executor=executor, **options)


@pytest.fixture
async def session(runner):
    """A session with `sales` loaded."""
    return await runner().create_session(initial=["sales"])


async def test_request(session, executor, bundle):
    """The executor gets an argument list, the read-only skill with its tree, an own environment and the limits."""
    await session.run_script("./scripts//total.py", args=["a b", "$HOME"], env={"MODE": "x"}, timeout_s=5)
    request = executor.requests[0]
    assert (request.script.skill, request.script.path, request.script.args) == (
        "acme.sales",
        "scripts/total.py",
        ("a b", "$HOME"),
    )
    assert (request.interpreter, request.stdin, request.network) == (("python3", "{path}"), b"", "none")
    assert dict(request.env) == {
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SKILL_DIR": "/skills/acme.sales",
        "KDSKILLS_SKILL_DIR": "/skills/acme.sales",
        "MODE": "x",
    }
    mount = request.skills[0]
    assert (mount.id, mount.root) == ("acme.sales", bundle.root / "skills/acme/sales")
    assert mount.tree == (await session.describe("sales")).tree_digest
    assert (request.limits.wall_s, request.limits.stdout, request.workdir) == (5, 256 * 1024, "/skills/acme.sales")
    assert (request.owner.agent, request.owner.conversation) == ("solver.react.decision", session.id)


class Packages:
    """Answers as it is told to."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def of_script(self, skill, script, folder):
        self.asked.append((skill.full_id, script, folder))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_script_gets_the_packages_of_its_skill(runner, executor, bundle):
    """What is built for the script goes with the request."""
    packages = Packages(EnvironmentMount("ab" * 32, bundle.root))
    session = await runner(packages=packages).create_session(initial=["sales"])
    await session.run_script("scripts/total.py")
    assert executor.requests[0].environment == packages.answer
    assert packages.asked == [("acme.sales", "scripts/total.py", bundle.root / "skills/acme/sales")]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("environment_missing", "environment_missing"),
        ("environment_lock_stale", "environment_lock_stale"),
        ("environment_conflict", "environment_conflict"),
        ("environment_lock_invalid", "environment_unusable"),
        ("environment_platform", "environment_unusable"),
    ],
)
async def test_packages_that_cannot_be_had_are_the_operators(runner, executor, code, told):
    """Nothing runs, the code says why, and no path of this host is told."""
    packages = Packages(EnvironmentFailed("/srv/secret/kdskills.lock is broken", code=code))
    session = await runner(packages=packages).create_session(initial=["sales"])
    error = await refused(session.run_script("scripts/total.py"))
    assert (error.code, error.who, error.details["reason"]) == (told, "operator", code)
    assert "/srv/secret" not in error.message
    assert executor.requests == []


async def test_a_command_line_in_path_is_taken_apart(session, executor):
    """Arguments packed into the path become arguments when the first word is a script, and the answer says so."""
    reply = await session.call("skills.run_script", {"path": "scripts/total.py 'a b' --top=3", "args": ["z"]})
    assert (executor.requests[0].script.path, executor.requests[0].script.args) == (
        "scripts/total.py",
        ("a b", "--top=3", "z"),
    )
    assert reply.result["path"] == "scripts/total.py"
    assert reply.result["note"] == 'path held a command line: ran scripts/total.py with args ["a b", "--top=3", "z"]'
    plain = await session.call("skills.run_script", {"path": "scripts/total.py", "args": ["z"]})
    assert "note" not in plain.result


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("scripts/none.py a b", "resource_not_found"),
        ("scripts/total.py 'a", "resource_not_found"),
        ("scripts/../total.py a", "path_denied"),
        ("python3 scripts/total.py", "path_denied"),
        ("scripts/total.py a > out.txt", "invalid_argument"),
        ("scripts/total.py a && rm x", "invalid_argument"),
        ("scripts/total.py " + "x " * 300, "invalid_argument"),
    ],
)
async def test_what_is_no_command_line_stays_a_path(session, executor, path, code):
    """Only a script of the skill in front makes it one; no shell reads it, and the bounds of arguments hold."""
    assert (await refused(session.run_script(path))).code == code
    assert executor.requests == []


async def test_a_script_with_blanks_in_its_name_is_itself(session, executor, bundle):
    """A file of that very name comes first."""
    bundle.file("acme.sales", "scripts/total.py a.py", "print(2)\n")
    await session.run_script("scripts/total.py a.py")
    assert (executor.requests[0].script.path, executor.requests[0].script.args) == ("scripts/total.py a.py", ())


async def test_the_request_passes_the_executors_own_check(session, executor):
    """What the tool builds is what engines accept."""
    from kdskills.execution.check import check_request

    await session.run_script("scripts/total.py", args=["1"], env={"A": "b"})
    plan = check_request(executor.requests[0])
    assert plan.argv == ("python3", "/skills/acme.sales/scripts/total.py", "1")


async def test_host_environment_stays_out(session, executor, monkeypatch):
    """Nothing of the host process reaches the script."""
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    await session.run_script("scripts/total.py")
    assert "hunter2" not in repr(executor.requests[0])


@pytest.mark.parametrize(
    ("status", "facts", "code", "timed_out"),
    [
        ("ok", {"exit_code": 0}, 0, False),
        ("nonzero", {"exit_code": 3}, 3, False),
        ("timeout", {"exit_code": None, "signal": 9}, 124, True),
        ("nonzero", {"exit_code": None, "signal": 11}, 139, False),
        ("oom", {"exit_code": None, "signal": 9}, 137, False),
        ("oom", {"exit_code": 0, "signal": 9}, 137, False),
        ("limit", {"exit_code": None, "signal": 25}, 153, False),
        ("cancelled", {"exit_code": None, "signal": 15}, 143, False),
    ],
)
async def test_results(session, executor, exec_result, status, facts, code, timed_out):
    """A non-zero exit is a result; 124 on timeout, 128+n on signal n, never 0 for a killed script."""
    executor.answer = lambda request: exec_result(status, **facts)
    reply = await session.call("skills_run_script", {"path": "scripts/total.py"})
    assert reply.ok
    assert (reply.result["status"], reply.result["exit_code"], reply.result["timed_out"]) == (status, code, timed_out)
    assert (reply.result["engine"], reply.result["level"], reply.result["duration_ms"]) == ("fake", "namespace", 250)


async def test_output_keeps_the_tail(session, executor, exec_result):
    """Truncated output begins at a character; bad bytes become U+FFFD."""
    data = "äöü".encode()[1:] + b"\xff end"
    executor.answer = lambda request: exec_result(stdout=Stream(data, 999, True), stderr=b"oops")
    found = await session.run_script("scripts/total.py")
    assert (found.stdout, found.stdout_truncated) == ("öü\ufffd end", True)
    assert (found.stderr, found.stderr_truncated) == ("oops", False)


def test_tail_only_cuts_a_cut_character():
    """Untruncated output keeps its first bytes, however bad; a whole character is not cut."""
    assert tail_text(b"\xa4a", False) == "\ufffda"
    assert tail_text("äa".encode(), True) == "äa"
    assert tail_text(b"", True) == ""
    assert tail_text(b"\x80\x80\x80\x80", True) == "\ufffd"


@pytest.mark.parametrize(
    ("answer", "code", "who"),
    [
        (ExecRefused("no engine"), "executor_unavailable", "operator"),
        (ExecRefused("bad", code="bad_request"), "executor_failed", "operator"),
        (ExecRefused("none", code="environment_missing"), "environment_missing", "operator"),
        (ExecFailed("broke"), "executor_failed", "operator"),
        ("infra_error", "executor_failed", "operator"),
        ("refused", "executor_unavailable", "operator"),
        ("missing", "interpreter_missing", "operator"),
    ],
)
async def test_executor_trouble(session, executor, exec_result, answer, code, who):
    """Trouble of the executor is told as no defect of the script."""

    def reply(request):
        if isinstance(answer, Exception):
            raise answer
        if answer == "missing":
            return exec_result("infra_error", error=ExecError("exec", "program_missing", "python3"))
        return exec_result(answer)

    executor.answer = reply
    error = await refused(session.run_script("scripts/total.py"))
    assert (error.code, error.who) == (code, who)
    assert "no defect of the script" in error.message


async def test_order_of_checks(make, runner, bundle):
    """session, enabled, shape, active, skill, path text, existence, suffix, deny, approval: each earlier one wins."""
    bundle.file("acme.sales", "scripts/x.rb", "puts 1")
    assert (await refused(make().run_script("none", "scripts/x"))).code == "session_not_found"
    off = await make().create_session(initial=["sales"])
    assert (await refused(off.run_script("", timeout_s=-1))).code == "run_disabled"
    assert (await off.call("skills.run_script", {"path": 3})).error["code"] == "run_disabled"
    asked = []

    def never(request):
        asked.append(request.kind)
        return Denial("d", "denied by plugin") if request.kind == "run" else None

    session = await runner(deny=never, script_approval="deny").create_session()
    assert (await refused(session.run_script("", skill="nope"))).code == "invalid_argument"
    assert (await refused(session.run_script("x.py", skill="nope"))).code == "no_active_skills"
    await session.load(["sales"])
    assert (await refused(session.run_script("x.py", skill="nope"))).code == "skill_not_found"
    assert (await refused(session.run_script("x.py", skill="brief"))).code == "skill_not_active"
    assert (await refused(session.run_script("x.py"))).details["reason"] == "outside_scripts"
    assert (await refused(session.run_script("scripts/none.rb"))).code == "resource_not_found"
    assert (await refused(session.run_script("scripts"))).details["reason"] == "outside_scripts"
    assert (await refused(session.run_script("scripts/x.rb"))).code == "extension_not_allowed"
    assert "run" not in asked
    assert (await refused(session.run_script("scripts/total.py"))).code == "skill_denied"


@pytest.mark.parametrize(
    "path", ["scripts/../../brief/SKILL.md", "/scripts/x.py", "scripts\\x.py", "scripts/x\0.py", "../scripts/x.py"]
)
async def test_hostile_script_paths(session, executor, path):
    """No form leads out of scripts/, and nothing is run."""
    assert (await refused(session.run_script(path))).code == "path_denied"
    assert executor.requests == []


async def test_linked_script(session, executor, bundle):
    """A linked script or folder is refused."""
    folder = bundle.root / "skills/acme/sales/scripts"
    (folder / "sh.py").symlink_to("/bin/sh")
    (folder / "bin").symlink_to("/bin", target_is_directory=True)
    for path in ("scripts/sh.py", "scripts/bin/sh"):
        assert (await refused(session.run_script(path))).details["reason"] == "symlink"
    assert executor.requests == []


@pytest.mark.parametrize(
    "env",
    [
        {"PATH": "/x"},
        {"HOME": "/x"},
        {"PYTHONPATH": "/x"},
        {"PYTHONHOME": "/x"},
        {"KDSKILLS_SKILL_DIR": "/x"},
        {"KDSKILLS_ANY": "/x"},
        {"LD_PRELOAD": "/x.so"},
        {"BASH_ENV": "/x"},
        {"NODE_OPTIONS": "-r x"},
        {"PYTHONSTARTUP": "x"},
        {"1A": "x"},
        {"A=B": "x"},
        {"A B": "x"},
        {"": "x"},
        {"Ä": "x"},
        {"A": "x\0"},
        {"A" * 257: "x"},
        {"A": "x" * 32769},
        {f"V{number}": "" for number in range(257)},
        {f"V{number}": "x" * 30000 for number in range(9)},
    ],
    ids=lambda env: next(iter(env))[:20],
)
async def test_refused_environment(session, executor, env):
    """Names that steer the interpreter, bad names and big values are invalid_argument; values are not repeated."""
    error = await refused(session.run_script("scripts/total.py", env=env))
    assert error.code == "invalid_argument"
    assert executor.requests == []
    assert "-r x" not in json.dumps(error.to_json())


@pytest.mark.parametrize("args", [["x"] * 257, ["a\0b"], ["x" * (16 * 1024 + 1)]], ids=["many", "nul", "long"])
async def test_refused_arguments(session, args):
    """Too many, too long and NUL arguments are invalid_argument."""
    assert (await refused(session.run_script("scripts/total.py", args=args))).code == "invalid_argument"


@pytest.mark.parametrize("seconds", [0, -1, 60.1, float("inf"), float("nan")])
async def test_refused_timeout(session, seconds):
    """A call may ask for less time than the limit, never for more."""
    assert (await refused(session.run_script("scripts/total.py", timeout_s=seconds))).code == "invalid_argument"


async def test_interpreters(runner, executor, bundle):
    """Shell and node scripts have their interpreter, callers add suffixes; others are the author's to mend."""
    for suffix in ("sh", "bash", "js", "mjs", "cjs", "rb", "SH"):
        bundle.file("acme.sales", f"scripts/x.{suffix}", "x")
    session = await runner(interpreters={".rb": ["ruby", "-w", "{path}"]}).create_session(initial=["sales"])
    used = {}
    for suffix in ("sh", "bash", "js", "mjs", "cjs", "rb", "SH"):
        await session.run_script(f"scripts/x.{suffix}")
        used[suffix] = executor.requests[-1].interpreter[0]
    assert used == {
        "sh": "bash",
        "bash": "bash",
        "js": "node",
        "mjs": "node",
        "cjs": "node",
        "rb": "ruby",
        "SH": "bash",
    }
    bundle.file("acme.sales", "scripts/noext", "x")
    error = await refused(session.run_script("scripts/noext"))
    assert (error.code, error.who) == ("extension_not_allowed", "author")


async def test_workdir(session, executor, bundle):
    """Workdir only sets the current directory; the script stays relative to the skill."""
    await session.run_script("scripts/total.py", workdir="references")
    assert (executor.requests[0].workdir, executor.requests[0].script.path) == (
        "/skills/acme.sales/references",
        "scripts/total.py",
    )
    for workdir, code in (
        ("nowhere", "resource_not_found"),
        ("SKILL.md", "resource_not_found"),
        ("../brief", "path_denied"),
        ("/tmp", "path_denied"),
        ("turn:", "resource_not_found"),
        ("a\0", "invalid_argument"),
    ):
        assert (await refused(session.run_script("scripts/total.py", workdir=workdir))).code == code
    (bundle.root / "skills/acme/sales/out").symlink_to("/tmp", target_is_directory=True)
    assert (await refused(session.run_script("scripts/total.py", workdir="out"))).code == "path_denied"


@pytest.mark.parametrize(
    ("workdir", "inside", "told"),
    [
        (".", ".", "/work"),
        ("", ".", "/work"),
        ("./", ".", "/work"),
        ("turn:.", ".", "/work"),
        ("references", "references", "/work/references"),  # the skill has one, too
        ("turn:references", "references", "/work/references"),
        ("scripts", "/skills/acme.sales/scripts", "/skills/acme.sales/scripts"),  # only the skill has one
        ("$SKILL_DIR", "/skills/acme.sales", "/skills/acme.sales"),
        ("${SKILL_DIR}/references", "/skills/acme.sales/references", "/skills/acme.sales/references"),
    ],
)
async def test_scripts_start_among_the_turns_files(session, executor, exec_result, tmp_path, workdir, inside, told):
    """Paths of the user's files mean what they say; the skill's own are below $SKILL_DIR, and the answer names both."""
    work = FolderWorkspace(tmp_path / "turn")
    (work.root / "references").mkdir()
    executor.answer = lambda request: exec_result()
    result = await session.within(TurnScope(workspace=work)).run_script("scripts/total.py", workdir=workdir)
    assert executor.requests[0].workdir == inside
    assert (result.to_json()["workdir"], result.to_json()["skill_dir"]) == (told, "/skills/acme.sales")


@pytest.mark.parametrize(
    "workdir", ["$SKILL_DIR/..", "$SKILL_DIR//etc", "turn:..", "$SKILL_DIRECTORY", "${SKILL_DIR}x"]
)
async def test_no_workdir_leads_out(session, tmp_path, workdir):
    """What names no folder of the turn or the skill is refused."""
    inside = session.within(TurnScope(workspace=FolderWorkspace(tmp_path / "turn")))
    refusal = await refused(inside.run_script("scripts/total.py", workdir=workdir))
    assert refusal.code in {"path_denied", "resource_not_found"}


async def test_turn_files(session, executor, exec_result, tmp_path: Path):
    """Turn files go in as copies, produced ones come back, unchanged ones are not told, inputs stay."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "sales.csv").write_text("a,b\n")
    work = FolderWorkspace(tmp_path / "turn", mounts={"data": data}, protected={"in.txt"})
    (work.root / "in.txt").write_text("input")
    (work.root / "kept.txt").write_text("kept")
    (work.root / "out").mkdir()
    produced = {"out/chart.svg": b"<svg/>", "kept.txt": b"kept", "in.txt": b"changed", "data/sales.csv": b"changed"}

    def answer(request):
        import hashlib

        files = tuple(
            Artifact(path, len(body), hashlib.sha256(body).hexdigest(), 0o644, body) for path, body in produced.items()
        )
        return exec_result(artifacts=files)

    executor.answer = answer
    inside = session.within(TurnScope(workspace=work))
    found = await inside.run_script("scripts/total.py", workdir="turn:out")
    request = executor.requests[0]
    assert sorted(item.path for item in request.inputs) == ["data/sales.csv", "in.txt", "kept.txt"]
    assert (request.workdir, request.outputs, request.env["KDSKILLS_TURN_DIR"]) == ("out", ("**",), "/work")
    assert [(item.path, item.size, item.media_type) for item in found.artifacts] == [
        ("out/chart.svg", 6, "image/svg+xml")
    ]
    assert [path for path, _ in found.dropped] == ["in.txt", "data/sales.csv"]
    assert (work.root / "out/chart.svg").read_bytes() == b"<svg/>"
    assert ((work.root / "in.txt").read_text(), (data / "sales.csv").read_text()) == ("input", "a,b\n")
    assert (await refused(inside.run_script("scripts/total.py", workdir="turn:none"))).code == "resource_not_found"
    assert (await refused(inside.run_script("scripts/total.py", workdir="turn:../x"))).code == "path_denied"


async def test_script_env_is_secret(runner, executor, events):
    """The operator's secrets reach the script and nothing else."""
    runtime = runner(script_env=lambda skill: {"TOKEN": SecretStr("hunter2-" + skill.id)}, events=events.append)
    session = await runtime.create_session(initial=["sales"])
    reply = await session.call("skills.run_script", {"path": "scripts/total.py", "env": {"MODE": "hunter3"}})
    assert executor.requests[0].env["TOKEN"] == "hunter2-sales"
    told = reply.text + repr(events) + json.dumps((await session.snapshot()).to_json())
    assert "hunter" not in told
    assert [event.type for event in events] == ["skill.loaded", "script.started", "script.finished"]


async def test_a_granted_skill_has_its_network(runner, executor, events, exec_result):
    """A script is run with what its namespace and full id are granted, and each connection is an event."""
    row = NetworkConnection("pypi.org", 443, "ok", "203.0.113.5", 10, 20, 0.5)
    executor.answer = lambda request: exec_result(connections=(row,))
    full_id = (await (await runner().create_session(initial=["sales"])).active())[0].full_id
    grants = {full_id.partition(".")[0]: ["a.example"], full_id: ["pypi.org"], "other.sales": ["b.example"]}
    session = await runner(network=grants, events=events.append).create_session(initial=["sales"])
    await session.run_script("scripts/total.py")
    assert executor.requests[0].network == ("a.example", "pypi.org")
    assert executor.requests[0].network_skills == (full_id,)
    told = next(event for event in events if event.type == "script.connection")
    assert (told.data["host"], told.data["outcome"], told.data["received"]) == ("pypi.org", "ok", 20)


# ---- approval ----


async def test_approval_modes(runner, executor):
    """Allow never asks, deny refuses, ask without anybody is approval_unavailable."""
    for mode, code, who in (("deny", "approval_denied", "user"), ("ask", "approval_unavailable", "operator")):
        session = await runner(script_approval=mode).create_session(initial=["sales"])
        error = await refused(session.run_script("scripts/total.py"))
        assert (error.code, error.who) == (code, who)
    assert executor.requests == []


@pytest.mark.parametrize(("remember", "asks"), [("call", 4), ("session", 2), ("always", 1)])
async def test_remembered_answers(runner, executor, remember, asks):
    """An answer holds for the call, the session, or always."""
    asked: list[ApprovalRequest] = []

    async def approve(request):
        asked.append(request)
        return allow(remember)

    runtime = runner(script_approval="ask", approve=approve)
    for _ in range(2):
        session = await runtime.create_session(initial=["sales"])
        for _ in range(2):
            await session.run_script("scripts/total.py", args=["1"], env={"B": "2", "A": "1"})
    assert len(asked) == asks
    assert (asked[0].skill, asked[0].path, asked[0].origin, asked[0].executor) == (
        "acme.sales",
        "scripts/total.py",
        None,
        "fake",
    )
    assert (asked[0].argv, asked[0].env_names) == (("python3", "{path}", "1"), ("A", "B"))
    assert asked[0].tree_digest == executor.requests[0].skills[0].tree


async def test_who_approves_sees_the_hosts(runner):
    """A request names what the script may reach, and an answer that is remembered holds for these hosts alone."""
    asked = []

    async def approve(request):
        asked.append(request.network)
        return allow("always")

    grants = {"acme.sales": ["pypi.org"]}
    session = await runner(script_approval="ask", approve=approve, network=grants).create_session(initial=["sales"])
    for _ in range(2):
        await session.run_script("scripts/total.py")
    grants["acme.sales"] = ["pypi.org", "other.example"]
    await session.run_script("scripts/total.py")
    assert asked == [("pypi.org",), ("other.example", "pypi.org")]


async def test_a_changed_tree_asks_again(runner, bundle):
    """An answer binds to the files: one changed byte anywhere in the skill asks again."""
    asked = []

    async def approve(request):
        asked.append(request.tree_digest)
        return allow("always")

    session = await runner(script_approval="ask", approve=approve).create_session(initial=["sales"])
    await session.run_script("scripts/total.py")
    bundle.file("acme.sales", "references/guide.md", "changed")
    await session.run_script("scripts/total.py")
    assert len(set(asked)) == 2


async def test_a_change_while_asking_is_refused(runner, bundle, executor):
    """The tree is hashed again right before the run."""

    async def approve(request):
        bundle.file("acme.sales", "scripts/total.py", "import os  # another script\n")
        return allow()

    session = await runner(script_approval="ask", approve=approve).create_session(initial=["sales"])
    assert (await refused(session.run_script("scripts/total.py"))).code == "approval_denied"
    assert executor.requests == []


async def test_a_no(runner, executor, events):
    """A no is approval_denied with its reason, and told."""

    async def approve(request):
        return deny("not today")

    runtime = runner(script_approval="ask", approve=approve, events=events.append)
    session = await runtime.create_session(initial=["sales"])
    error = await refused(session.run_script("scripts/total.py"))
    assert (error.code, error.details["reason"], executor.requests) == ("approval_denied", "not today", [])
    assert [event.type for event in events][1:] == ["approval.requested", "approval.decided"]


async def test_foreign_skills_always_ask(runner, bundle):
    """While a remote skill is loaded every run asks, whatever script_approval says."""
    bundle.skill("mcp-shop.tools", "Foreign.")
    bundle.file("mcp-shop.tools", "scripts/go.py", "print(1)")
    session = await runner().create_session(initial=["sales", "mcp-shop.tools"])
    for skill in ("sales", "mcp-shop.tools"):
        path = "scripts/total.py" if skill == "sales" else "scripts/go.py"
        assert (await refused(session.run_script(path, skill=skill))).code == "approval_unavailable"


async def test_output_limit_is_asked_of_the_executor(runner, executor):
    """max_output_bytes and the default time go into the request."""
    limits = RuntimeLimits(max_output_bytes=2048, script_timeout_s=7)
    session = await runner(limits=limits, profile="calm").create_session(initial=["sales"])
    await session.run_script("scripts/total.py")
    request = executor.requests[0]
    assert (request.limits.stdout, request.limits.stderr, request.limits.wall_s, request.profile) == (
        2048,
        2048,
        7,
        "calm",
    )


async def test_cancelling_a_run(session, executor, runner, events):
    """Cancelling ends the run with CancelledError and tells script.finished cancelled."""

    class Hanging:
        name, level = "hanging", executor.level
        ended = False
        began = asyncio.Event()

        async def run(self, request):
            self.began.set()
            try:
                await asyncio.sleep(60)
            finally:
                self.ended = True

    hanging = Hanging()
    runtime = runner(events=events.append)
    object.__setattr__(runtime.config, "executor", hanging)
    inside = await runtime.create_session(initial=["sales"])
    run = asyncio.create_task(inside.run_script("scripts/total.py"))
    await hanging.began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert hanging.ended
    assert events[-1].data["status"] == "cancelled"


async def test_hidden_skills_stay_hidden_in_events(runner, bundle, events):
    """Events name a hidden skill by its alias, and so does the result."""
    bundle.file("acme.secret", "scripts/go.py", "print(1)")
    session = await runner(events=events.append).create_session(initial=["acme.secret"])
    reply = await session.call("skills_run_script", {"path": "scripts/go.py"})
    assert reply.ok
    assert "secret" not in reply.text + repr(events)


async def test_a_lost_turn_folder_is_no_defect_of_the_script(session, tmp_path):
    """When the turn's files cannot be read the model is told so in a reply."""
    work = FolderWorkspace(tmp_path / "turn")
    work.root.rmdir()
    reply = await session.within(TurnScope(workspace=work)).call("skills_run_script", {"path": "scripts/total.py"})
    assert reply.error["code"] == "executor_failed"
    assert "no defect of the script" in reply.error["message"]
