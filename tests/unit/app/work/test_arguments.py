"""Arguments of the work operations: everything out of shape is refused before anything runs, with its path."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import OPERATIONS, Context
from kdskills.app.operations.calling import validated
from kdskills.app.operations.work_run import body_hash, inputs_of, job_spec, task_spec, timeout_of
from kdskills.app.work import RunPlace
from kdskills.errors import BadRequest
from kdskills.execution import IsolationLevel
from kdskills.jobs.model import FromArtifact, Inline, OnHttp, OnPattern, OnPort, Placement, Scope, graph_problem
from kdskills.jobs.settings import JobsSettings

TWELVE = (
    "skills.activate", "skills.run_cmd", "skills.run_cmd_async", "skills.run_service", "skills.start_job",
    "skills.task_status", "skills.job_status", "skills.task_watch", "skills.job_watch", "skills.task_cancel",
    "skills.job_cancel", "skills.task_logs",
)  # fmt: skip
RUN = {"skill_name": "acme.main", "command": "ls"}
SERVICE = RUN | {"session_id": "s"}
JOB = {"skill_name": "acme.main", "session_id": "s", "steps": [{"name": "a", "command": "ls"}]}
PLACED = RunPlace(
    Placement(engine="wall", skill_name="acme.main", version_hash="sha256:0"), IsolationLevel.NAMESPACE, has_files=True
)
LIMITS = JobsSettings()


def paths(operation: str, arguments: dict) -> list[str]:
    """Return the paths of what is wrong with arguments."""
    with pytest.raises(BadRequest) as refused:
        validated(OPERATIONS[operation], arguments)
    assert refused.value.code == "bad_request"
    return [item["path"] for item in refused.value.details["errors"]]


def test_the_twelve_are_in_the_table() -> None:
    """Every operation of the contract is there under its exact name, with the scope it needs."""
    assert [name for name in TWELVE if name not in OPERATIONS] == []
    scopes = {name: OPERATIONS[name].scope for name in TWELVE}
    reading = {"skills.task_status", "skills.job_status", "skills.task_watch", "skills.job_watch", "skills.task_logs"}
    assert {name for name, scope in scopes.items() if scope == "work:read"} == reading
    assert {scope for name, scope in scopes.items() if name not in reading} == {"work:run"}


@pytest.mark.parametrize("name", TWELVE)
def test_unknown_arguments_are_refused(name: str) -> None:
    """An argument nobody knows is refused, at any operation."""
    with pytest.raises(BadRequest) as refused:
        validated(OPERATIONS[name], {"no_such_argument": 1})
    assert "/no_such_argument" in [item["path"] for item in refused.value.details["errors"]]


@pytest.mark.parametrize("name", TWELVE)
def test_a_door_can_describe_its_arguments(name: str) -> None:
    """Every input and output has a JSON Schema."""
    assert OPERATIONS[name].input.model_json_schema()["additionalProperties"] is False
    assert OPERATIONS[name].output.model_json_schema()["type"] == "object"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"skill_name": ""}, "/skill_name"),
        ({"skill_name": 3}, "/skill_name"),
        ({"command": ""}, "/command"),
        ({"command": "  "}, "/command"),
        ({"command": ["", "x"]}, "/command"),
        ({"command": "a\0b"}, "/command"),
        ({"command": ["a", "b\0"]}, "/command/1"),
        ({"command": "\ud800"}, "/command"),
        ({"session_id": ""}, "/session_id"),
        ({"session_id": "../up"}, "/session_id"),
        ({"session_id": "a/b"}, "/session_id"),
        ({"session_id": "a b"}, "/session_id"),
        ({"session_id": "a\n"}, "/session_id"),
        ({"session_id": "ä"}, "/session_id"),
        ({"session_id": "x" * 129}, "/session_id"),
        ({"workdir": "/etc"}, "/workdir"),
        ({"workdir": "../x"}, "/workdir"),
        ({"workdir": "a/../../b"}, "/workdir"),
        ({"workdir": ""}, "/workdir"),
        ({"env": {"1A": "x"}}, "/env"),
        ({"env": {"LD_PRELOAD": "x"}}, "/env"),
        ({"env": {"PATH": "x"}}, "/env"),
        ({"env": {"KDSKILLS_TURN_DIR": "x"}}, "/env"),
        ({"env": {"A": "x\0"}}, "/env/A"),
        ({"env": {"A": "x" * 40_000}}, "/env"),
        ({"env": {"A": 1}}, "/env/A"),
        ({"env": {f"A{number}": "" for number in range(257)}}, "/env"),
        ({"outputs": ["/etc/passwd"]}, "/outputs"),
        ({"outputs": ["../../etc/passwd"]}, "/outputs"),
        ({"outputs": ["a//b"]}, "/outputs"),
        ({"outputs": ["a\\b"]}, "/outputs"),
        ({"outputs": ["x"] * 65}, "/outputs"),
        ({"inputs": [{"path": "../x", "text": ""}]}, "/inputs/0/path"),
        ({"inputs": [{"path": "/x", "text": ""}]}, "/inputs/0/path"),
        ({"inputs": [{"path": "x"}]}, "/inputs/0"),
        ({"inputs": [{"path": "x", "text": "", "artifact_id": "a"}]}, "/inputs/0"),
        ({"inputs": [{"path": "x", "text": ""}, {"path": "x", "text": ""}]}, "/inputs"),
        ({"inputs": [{"path": "x", "text": ""}, {"path": "x/y", "text": ""}]}, "/inputs"),
        ({"timeout_sec": 0}, "/timeout_sec"),
        ({"timeout_sec": -1}, "/timeout_sec"),
        ({"timeout_sec": float("inf")}, "/timeout_sec"),
        ({"timeout_sec": float("nan")}, "/timeout_sec"),
        ({"timeout_sec": 86_401}, "/timeout_sec"),
        ({"on_busy": "ignore"}, "/on_busy"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("operation", ["skills.run_cmd", "skills.run_cmd_async"])
def test_commands_out_of_shape(operation: str, change: dict, path: str) -> None:
    """Each wrong argument of a command is refused under its path."""
    assert path in paths(operation, RUN | change)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"session_id": None}, "/session_id"),
        ({"ready": {}}, "/ready"),
        ({"ready": {"pattern": "x", "tcp_port": 1}}, "/ready"),
        ({"ready": {"pattern": "("}}, "/ready/pattern"),
        ({"ready": {"pattern": ""}}, "/ready/pattern"),
        ({"ready": {"tcp_port": 0}}, "/ready/tcp_port"),
        ({"ready": {"tcp_port": 65_536}}, "/ready/tcp_port"),
        ({"ready": {"http": {"port": 80, "path": "health"}}}, "/ready/http/path"),
        ({"ready": {"http": {"port": 80, "path": "/a b"}}}, "/ready/http/path"),
        ({"ready": {"http": {"port": 80, "path": "/a\r\nHost: x"}}}, "/ready/http/path"),
        ({"startup_timeout_sec": 0}, "/startup_timeout_sec"),
        ({"restart": -1}, "/restart"),
        ({"expose_ports": [0]}, "/expose_ports/0"),
        ({"expose_ports": ["80"]}, "/expose_ports/0"),
        ({"expose_ports": [80, 80]}, "/expose_ports"),
        ({"expose_ports": list(range(1, 18))}, "/expose_ports"),
        ({"timeout_sec": 5}, "/timeout_sec"),
    ],
)
def test_services_out_of_shape(change: dict, path: str) -> None:
    """Each wrong argument of a service is refused under its path; services have no timeout."""
    assert path in paths("skills.run_service", SERVICE | change)


def step(name: str, **more: object) -> dict:
    """A step."""
    return {"name": name, "command": "true"} | more


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"steps": []}, "/steps"),
        ({"steps": [step("a"), step("a")]}, "/steps"),
        ({"steps": [step("a", needs=["b"])]}, "/steps"),
        ({"steps": [step("a", needs=["a"])]}, "/steps"),
        ({"steps": [step("a", needs=["b"]), step("b", needs=["a"])]}, "/steps"),
        ({"steps": [step("a b")]}, "/steps/0/name"),
        ({"steps": [step("a\n")]}, "/steps/0/name"),
        ({"steps": [step("a", retry=11)]}, "/steps/0/retry"),
        ({"steps": [step("a", workdir="../x")]}, "/steps/0/workdir"),
        ({"steps": [step("a", env={"IFS": "x"})]}, "/steps/0/env"),
        ({"steps": [step("a", outputs=["../x"])]}, "/steps/0/outputs"),
        ({"steps": [step(str(number)) for number in range(257)]}, "/steps"),
        ({"max_concurrency": 0}, "/max_concurrency"),
        ({"max_wall_time_sec": 0}, "/max_wall_time_sec"),
        ({"session_id": "a/b"}, "/session_id"),
        ({"env": {"PYTHONPATH": "x"}}, "/env"),
    ],
)
def test_jobs_out_of_shape(change: dict, path: str) -> None:
    """Each wrong argument of a job is refused under its path, graphs that cannot run among them."""
    assert path in paths("skills.start_job", JOB | change)


@pytest.mark.parametrize(
    ("operation", "arguments", "path"),
    [
        ("skills.task_status", {}, "/"),
        ("skills.task_status", {"task_id": "t", "tail_bytes": -1}, "/tail_bytes"),
        ("skills.task_status", {"task_id": "t", "tail_bytes": 1024 * 1024 + 1}, "/tail_bytes"),
        ("skills.task_status", {"task_id": "t", "query_command": "x"}, "/"),
        ("skills.task_status", {"provider": "cmd", "task_id": "t"}, "/"),
        ("skills.task_status", {"provider": "cmd", "query_command": "x"}, "/"),
        ("skills.task_status", {"provider": "cmd", "skill_name": "x", "query_command": ""}, "/query_command"),
        ("skills.task_status", {"provider": "slurm", "task_id": "t"}, "/provider"),
        ("skills.job_status", {}, "/job_id"),
        ("skills.job_status", {"job_id": "j", "tail_bytes": -1}, "/tail_bytes"),
        ("skills.task_watch", {"task_id": "t", "poll_interval_sec": 0}, "/poll_interval_sec"),
        ("skills.task_watch", {"task_id": "t", "heartbeat_sec": 0}, "/heartbeat_sec"),
        ("skills.task_watch", {"task_id": "t", "timeout_sec": -1}, "/timeout_sec"),
        ("skills.task_watch", {"task_id": "t", "dedupe_key": ""}, "/dedupe_key"),
        ("skills.job_watch", {"job_id": "j", "after_seq": -1}, "/after_seq"),
        ("skills.task_cancel", {"task_id": ""}, "/task_id"),
        ("skills.task_cancel", {"task_id": "t", "reason": "x\0"}, "/reason"),
        ("skills.job_cancel", {"job_id": "j", "reason": "x" * 1025}, "/reason"),
        ("skills.task_logs", {"task_id": "t", "stream": "both"}, "/stream"),
        ("skills.task_logs", {"task_id": "t", "limit": -1}, "/limit"),
        ("skills.task_logs", {"task_id": "t", "limit": 1024 * 1024 + 1}, "/limit"),
        ("skills.task_logs", {"task_id": "t", "offset": 2**63}, "/offset"),
        ("skills.activate", {"skill_name": "x", "timeout_sec": 601}, "/timeout_sec"),
    ],
)
def test_questions_out_of_shape(operation: str, arguments: dict, path: str) -> None:
    """Each wrong argument of a question is refused under its path."""
    assert path in paths(operation, arguments)


def test_values_of_arguments_are_not_repeated() -> None:
    """A refusal names variables and never their values."""
    with pytest.raises(BadRequest) as refused:
        validated(OPERATIONS["skills.run_cmd"], RUN | {"env": {"LD_PRELOAD": "hush-hush", "B": "hush\0"}})
    assert "hush" not in str(refused.value.to_json())


NAMES = st.sampled_from("abcdef")


@given(needs=st.dictionaries(NAMES, st.lists(NAMES, max_size=4).map(tuple), max_size=6))
def test_a_graph_without_problems_can_be_ordered(needs: dict[str, tuple[str, ...]]) -> None:
    """What is accepted has an order in which every step comes after those it needs; what is refused has none."""
    problem = graph_problem(list(needs.items())) if needs else None
    order: list[str] = []
    while True:
        free = [name for name in needs if name not in order and set(needs[name]) <= set(order)]
        if not free:
            break
        order += free
    assert (problem is None) == (len(order) == len(needs))


# ---- what is submitted ----


def run_spec(**change: object):
    """Return the task of a command."""
    return task_spec(validated(OPERATIONS["skills.run_cmd_async"], RUN | change), PLACED, Scope(), LIMITS)


def test_text_is_for_a_shell_and_a_list_is_not() -> None:
    """Text runs by the shell inside the sandbox, a list by execve as it is."""
    assert run_spec(command="a; b").command.argv == ("/bin/sh", "-c", "a; b")
    assert run_spec(command=["a; b", "$X"]).command.argv == ("a; b", "$X")


@pytest.mark.parametrize(
    ("workdir", "cwd"), [("skill", "/skills/acme.main"), ("session", "."), (".", "."), ("a/b", "a/b")]
)
def test_where_a_command_starts(workdir: str, cwd: str) -> None:
    """The skill's folder, the session's folder, or a folder inside that one."""
    assert run_spec(workdir=workdir).command.cwd == cwd


def test_a_skill_without_files_has_no_folder() -> None:
    """Starting in the folder of a skill that has none is refused, with what to say instead."""
    bare = RunPlace(PLACED.placement, PLACED.level, has_files=False)
    given = validated(OPERATIONS["skills.run_cmd"], RUN)
    with pytest.raises(BadRequest) as refused:
        task_spec(given, bare, Scope(), LIMITS)
    assert refused.value.details["errors"][0]["path"] == "/workdir"


def test_the_callers_variables_come_last_and_as_they_are() -> None:
    """Values arrive byte-exact and beat ours; ours tell where things are."""
    odd = "$HOME `id` \"'\n\\"
    env = run_spec(env={"ODD": odd, "LANG": "de_DE.UTF-8"}).command.env
    assert (env["ODD"], env["LANG"], env["KDSKILLS_SKILL_DIR"]) == (odd, "de_DE.UTF-8", "/skills/acme.main")


def test_times_have_defaults_and_bounds() -> None:
    """Each kind of command has its own default and its own longest time."""
    given = validated(OPERATIONS["skills.run_cmd"], RUN)
    assert task_spec(given, PLACED, Scope(), LIMITS, sync=True).command.timeout_s == 60
    assert run_spec().command.timeout_s == LIMITS.task_timeout_s
    assert run_spec(timeout_sec=86_400).command.timeout_s == 86_400
    long = validated(OPERATIONS["skills.run_cmd"], RUN | {"timeout_sec": 121})
    with pytest.raises(BadRequest) as refused:
        task_spec(long, PLACED, Scope(), LIMITS, sync=True)
    assert refused.value.details["errors"] == [{"path": "/timeout_sec", "problem": "must be at most 120"}]
    assert timeout_of(None, 60, 30) == 30


def test_inputs_are_bytes_or_artifacts() -> None:
    """Text becomes UTF-8, base64 stays, artifacts are named."""
    given = validated(
        OPERATIONS["skills.run_cmd"],
        RUN | {"inputs": [
            {"path": "a", "text": "ä\0"}, {"path": "b", "content_base64": "AP8="}, {"path": "c", "artifact_id": "art_1"},
        ]},
    )  # fmt: skip
    assert inputs_of(given.inputs, LIMITS) == (
        Inline(path="a", content_base64=base64.b64encode("ä\0".encode()).decode()),
        Inline(path="b", content_base64="AP8="),
        FromArtifact(path="c", artifact_id="art_1"),
    )


@pytest.mark.parametrize(
    ("inputs", "path"),
    [
        ([{"path": "a", "content_base64": "%%%"}], "/inputs/0/content_base64"),
        ([{"path": "a", "content_base64": "QQ"}], "/inputs/0/content_base64"),
        ([{"path": "a", "text": "x" * 11}], "/inputs/0"),
        ([{"path": "a", "text": "x" * 9}, {"path": "b", "text": "y" * 9}], "/inputs"),
    ],
)
def test_inputs_beyond_the_settings(inputs: list[dict], path: str) -> None:
    """What is no base64 or too large, one by one or together, is refused under its path."""
    given = validated(OPERATIONS["skills.run_cmd"], RUN | {"inputs": inputs})
    with pytest.raises(BadRequest) as refused:
        inputs_of(given.inputs, JobsSettings(input_bytes=10, files_bytes=15))
    assert refused.value.details["errors"][0]["path"] == path


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ({"pattern": "^up"}, OnPattern(pattern="^up")),
        ({"tcp_port": 80}, OnPort(tcp_port=80)),
        ({"http": {"port": 80}}, OnHttp(port=80, path="/")),
    ],
)
def test_services_say_when_they_are_ready(ready: dict, expected: object) -> None:
    """Each of the three ways to be ready arrives as it was said, and a service has no timeout."""
    given = validated(OPERATIONS["skills.run_service"], SERVICE | {"ready": ready, "expose_ports": [80], "restart": 2})
    spec = task_spec(given, PLACED, Scope(), LIMITS)
    assert spec.service is not None
    assert (spec.service.ready, spec.service.expose_ports, spec.service.restart) == (expected, (80,), 2)
    assert (spec.mode, spec.command.timeout_s) == ("service", None)


def test_steps_inherit_from_their_job() -> None:
    """A step has the job's folder and variables unless it says otherwise, and at most the job's time."""
    given = validated(
        OPERATIONS["skills.start_job"],
        JOB | {
            "workdir": "session", "env": {"A": "job", "B": "job"}, "max_wall_time_sec": 90, "max_concurrency": 3,
            "steps": [step("a"), step("b", workdir="skill", env={"B": "step"}, timeout_sec=5, retry=1, needs=["a"])],
        },
    )  # fmt: skip
    spec = job_spec(given, PLACED, Scope(), LIMITS)
    first, second = spec.steps
    assert (first.command.cwd, first.command.env["B"], first.command.timeout_s) == (".", "job", 90)
    assert (second.command.cwd, second.command.env["A"], second.command.env["B"]) == (
        "/skills/acme.main",
        "job",
        "step",
    )
    assert (second.command.timeout_s, second.retry, second.needs, spec.max_concurrency) == (5, 1, ("a",), 3)


def test_one_body_has_one_hash() -> None:
    """Arguments that mean the same are the same body; another operation, value or caller is another."""
    one = validated(OPERATIONS["skills.run_cmd"], RUN)
    same = validated(OPERATIONS["skills.run_cmd"], RUN | {"workdir": "skill"})
    other = validated(OPERATIONS["skills.run_cmd"], RUN | {"workdir": "session"})
    first = body_hash("skills.run_cmd", one, Scope())
    assert first == body_hash("skills.run_cmd", same, Scope())
    assert first != body_hash("skills.run_cmd", other, Scope())
    assert first != body_hash("skills.run_cmd_async", one, Scope())
    assert first != body_hash("skills.run_cmd", one, Scope(agent="other"))


async def test_callers_need_the_scope(make_host) -> None:
    """Reading needs one scope and starting another; a list of allowed tools narrows both."""
    from kdskills.errors import CallRefused

    host = make_host()
    reader = Identity(scopes=frozenset({"work:read"}))
    for name, arguments in (("skills.run_cmd", RUN), ("skills.task_cancel", {"task_id": "t"})):
        with pytest.raises(CallRefused) as refused:
            await host.invoke(name, arguments, Context(identity=reader))
        assert refused.value.code == "scope_missing"
    few = Identity(scopes=LOCAL.scopes, allowed_tools=frozenset({"skills.task_status"}))
    with pytest.raises(CallRefused) as refused:
        await host.invoke("skills.run_cmd", RUN, Context(identity=few))
    assert refused.value.code == "tool_not_allowed"
    query = {"provider": "cmd", "skill_name": "acme.main", "query_command": "ls"}
    with pytest.raises(CallRefused) as refused:
        await host.invoke("skills.task_status", query, Context(identity=reader))
    assert refused.value.code == "scope_missing"


def test_inputs_refuse_themselves() -> None:
    """The models hold for callers in Python too."""
    with pytest.raises(ValidationError):
        OPERATIONS["skills.run_cmd"].input(skill_name="x", command="ls", workdir="../x")
