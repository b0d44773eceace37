"""Every operation through every door: the same answers, the same refusals.

One scenario of calls is played at each door, over a state folder of its own. What the doors said is compared call by call;
ids, times and places are the only things that may differ.

A further door is a further class in `DOORS`: it opens over a Host and answers `call(name, arguments)`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import uvicorn
from click.testing import CliRunner
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES
from kdskills.app.operations import OPERATIONS
from kdskills.doors.cli.main import build_cli
from kdskills.doors.web import build_app

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Said:
    """What a door answered: `ok` with the operation's output, or a refusal as `{code, who, message, details}`."""

    ok: bool
    value: Any


def refusal(error: dict[str, Any]) -> Said:
    """Return a refusal in the one form it is compared in."""
    return Said(ok=False, value={name: error[name] for name in ("code", "who", "message", "details")})


Call = Callable[[str, dict[str, Any]], Any]


@contextlib.asynccontextmanager
async def served(host: Host) -> AsyncIterator[tuple[str, str]]:
    """Serve *host* over HTTP; give the address and a token that may do everything."""
    _, token = await host.tokens.create("local", "local", SCOPES, who="test")
    config = uvicorn.Config(build_app(host), host="127.0.0.1", port=0, log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    for _ in range(1200):
        if server.started or running.done():
            break
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", token
    finally:
        server.should_exit = True
        await running


@contextlib.asynccontextmanager
async def cli(host: Host) -> AsyncIterator[Call]:
    """`kdskills tool NAME --json …`."""

    def run(name: str, arguments: dict[str, Any]) -> Said:
        words = ["tool", name, "--json", json.dumps(arguments)]
        done = CliRunner().invoke(get_command(build_cli(host)), words, obj=host)
        value = json.loads(done.stdout)
        return Said(ok=True, value=value) if done.exit_code == 0 else refusal(value["error"])

    async def call(name: str, arguments: dict[str, Any]) -> Said:
        return await asyncio.to_thread(run, name, arguments)

    yield call


@contextlib.asynccontextmanager
async def http(host: Host) -> AsyncIterator[Call]:
    """`POST /projects/local/tools/NAME`."""
    async with served(host) as (url, token):
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as client:

            async def call(name: str, arguments: dict[str, Any]) -> Said:
                found = await client.post(f"/projects/local/tools/{name}", json=arguments)
                value = found.json()
                if found.status_code == 200:
                    return Said(ok=True, value=value)
                assert found.headers["content-type"] == "application/problem+json"
                return refusal({**value, "message": value["detail"]})

            yield call


@contextlib.asynccontextmanager
async def mcp(host: Host) -> AsyncIterator[Call]:
    """`tools/call` of the SDK's own client over HTTP."""
    async with served(host) as (url, token):
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=120, trust_env=False) as carrier,
            Client(streamable_http_client(f"{url}/mcp?profile=operator", http_client=carrier)) as client,
        ):

            async def call(name: str, arguments: dict[str, Any]) -> Said:
                found = await client.call_tool(name.replace(".", "_"), arguments)
                if not found.is_error:
                    return Said(ok=True, value=found.structured_content)
                return refusal(json.loads(found.content[0].text)["error"])

            yield call


DOORS: dict[str, Callable[[Host], Any]] = {"cli": cli, "http": http, "mcp": mcp}


# ---- the scenario ------------------------------------------------------------------------------------------------


def archive() -> str:
    """Return a skill as a zip in base64, the same bytes every time."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as out:
        text = b"---\nname: brief\ndescription: Makes one page.\n---\nRead, then write.\n"
        out.writestr(zipfile.ZipInfo("brief/SKILL.md"), text)
        out.writestr(zipfile.ZipInfo("brief/scripts/hello.py"), b"print('hello')\n")
    return base64.b64encode(made.getvalue()).decode()


@dataclass(frozen=True)
class Step:
    """One call; texts like `$task` in arguments stand for what an earlier answer kept under that name.

    With `until` it is repeated until its answer is so, and the last answer counts.
    """

    name: str
    arguments: dict[str, Any]
    keep: tuple[str, Callable[[Any], Any]] | None = None
    until: Callable[[Any], bool] | None = None


def run_cmd(*words: str, **more: Any) -> dict[str, Any]:
    """Return arguments of a command of the uploaded skill."""
    return {"skill_name": "public.brief", "command": list(words), "session_id": "s1", **more}


SCENARIO = [
    Step("project_skills.upload", {"data": archive()}, ("version", lambda said: said["version"])),
    Step("projects.list", {}),
    Step("project_skills.upload", {"data": "é"}),
    Step("project_skills.upload", {"data": base64.b64encode(b"no zip").decode()}),
    Step("project_skills.upload", {}),
    Step("project_skills.list", {}),
    Step("project_skills.get", {"skill": "brief"}),
    Step("project_skills.get", {"skill": "nothing"}),
    Step("project_skills.get", {}),
    Step("project_skills.versions", {"skill": "brief"}),
    Step("project_skills.inspect", {"skill": "brief"}),
    Step("project_skills.inspect", {"skill": "nothing"}),
    Step("project_skills.diff", {"skill": "brief"}),
    Step("project_skills.diff", {"skill": "brief", "base": "sha256:0"}),
    Step("project_skills.archive", {"skill": "brief", "limit": 64}),
    Step("project_skills.file", {"skill": "brief", "path": "SKILL.md"}),
    Step("project_skills.file", {"skill": "brief", "path": "../SKILL.md"}),
    Step("project_skills.patch", {"skill": "brief", "enabled": False}),
    Step("project_skills.patch", {"skill": "brief", "enabled": "perhaps"}),
    Step("skills.why", {"ref": "public.brief"}),
    Step("project_skills.patch", {"skill": "brief", "enabled": True}),
    Step("project_skills.activate", {"skill": "brief", "version_hash": "$version"}),
    Step("project_skills.activate", {"skill": "brief", "version_hash": "sha256:0"}),
    Step("skills.list", {}),
    Step("skills.list", {"nothing": 1}),
    Step("skills.list", {"sort": "tokens", "filter": "MAKES page", "state": "listed"}),
    Step("skills.list", {"state": "refused"}),
    Step("skills.list", {"sort": "size"}),
    Step("skills.list", {"limit": 1}),
    Step("skills.list", {"cursor": "nothing"}),
    Step("skills.matrix", {"consumers": ["local"], "filter": "page"}),
    Step("skills.matrix", {"query": "one page, made of what is read", "state": "listed", "limit": 5}),
    Step("skills.matrix", {"sort": "size"}),
    Step("skills.search", {"query": "one page, made of what is read"}),
    Step("skills.search", {"query": "page* NEAR/2 \"makes\" OR -- \0", "limit": 1, "namespace": "public"}),
    Step("skills.search", {"query": "zyzzyva"}),
    Step("skills.search", {"query": "page", "limit": 0}),
    Step("skills.search", {}),
    Step("skills.show", {"ref": "public.brief"}),
    Step("skills.show", {"ref": "public.nothing"}),
    Step("skills.findings", {"ref": "public.brief"}),
    Step("skills.findings", {"ref": "public.nothing"}),
    Step("skills.files", {"ref": "public.brief"}),
    Step("skills.files", {"ref": "public.nothing"}),
    Step("skills.file", {"ref": "public.brief", "path": "scripts/hello.py"}),
    Step("skills.file", {"ref": "public.brief", "path": "../SKILL.md"}),
    Step("skills.render", {}),
    Step("skills.why", {"ref": "public.brief", "by": "nobody"}),
    Step("skills.load", {"names": ["brief"], "session_id": "c1"}),
    Step("skills.load", {"names": ["nothing"], "session_id": "c1"}),
    Step("skills.read", {"path": "scripts/hello.py", "skill": "brief", "session_id": "c1"}),
    Step("skills.read", {"path": "/etc/passwd", "skill": "brief", "session_id": "c1"}),
    Step("skills.run_script", {"path": "scripts/hello.py", "skill": "brief", "session_id": "c1"}),
    Step("skills.unload", {"names": ["brief"], "session_id": "c1"}),
    Step("skills.activate", {"skill_name": "public.brief", "session_id": "s1"}),
    Step("skills.activate", {"skill_name": "public.nothing"}),
    Step("skills.run_cmd", run_cmd("sh", "-c", "echo out; echo err >&2; exit 3")),
    Step("skills.run_cmd", run_cmd("sh", "-c", "echo kept > left.txt", outputs=["left.txt"], workdir="session")),
    Step("skills.run_cmd", run_cmd()),
    Step("skills.run_cmd", run_cmd("true", timeout_sec=1e9)),
    Step("skills.run_cmd_async", run_cmd("echo", "later"), ("task", lambda said: said["task_id"])),
    Step("skills.task_watch", {"task_id": "$task", "timeout_sec": 60}),
    Step("skills.task_status", {"task_id": "$task"}),
    Step("skills.task_status", {}),
    Step("skills.task_logs", {"task_id": "$task"}),
    Step("skills.task_logs", {"task_id": "task_nothing"}),
    Step("skills.task_cancel", {"task_id": "$task"}),
    Step("tasks.again", {"task_id": "$task"}, ("again", lambda said: said["task_id"])),
    Step("tasks.again", {"task_id": "task_nothing"}),
    Step("skills.task_watch", {"task_id": "$again", "timeout_sec": 60}),
    Step("skills.start_job", {"skill_name": "public.brief", "session_id": "s2",
                              "steps": [{"name": "one", "command": ["echo", "one"]}]},
         ("job", lambda said: said["job_id"])),
    Step("skills.job_watch", {"job_id": "$job", "timeout_sec": 60}),
    Step("skills.job_status", {"job_id": "$job"}),
    Step("jobs.again", {"job_id": "$job"}, ("again", lambda said: said["job_id"])),
    Step("jobs.again", {"job_id": "$job", "version": "older"}),
    Step("skills.job_watch", {"job_id": "$again", "timeout_sec": 60}),
    Step("skills.job_cancel", {"job_id": "$job"}),
    Step("skills.job_status", {"job_id": "job_nothing"}),
    Step("skills.run_service", {"skill_name": "public.brief", "session_id": "s3", "command": ["sleep", "600"]},
         ("service", lambda said: said["task_id"])),
    Step("skills.task_status", {"task_id": "$service"}, until=lambda said: bool(said["ready_at"])),
    Step("skills.task_cancel", {"task_id": "$service", "reason": "enough"}),
    Step("skills.task_watch", {"task_id": "$service", "timeout_sec": 60}),
    Step("turns.start", {"max_steps": 9}, ("turn", lambda said: said["turn_id"])),
    Step("turns.start", {"max_steps": 0}),
    Step("turns.start", {"skills": ["nothing"]}),
    Step("turns.watch", {"turn_id": "$turn", "timeout_sec": 60}),
    Step("turns.watch", {"turn_id": "../nothing"}),
    Step("turns.list", {"status": "final"}),
    Step("turns.list", {"cursor": "nothing"}),
    Step("turns.get", {"turn_id": "$turn"}),
    Step("turns.get", {"turn_id": "nothing"}),
    Step("turns.compare", {"turn_id": "$turn", "second_id": "$turn"}),
    Step("turns.compare", {"turn_id": "$turn"}),
    Step("turns.file", {"turn_id": "$turn", "path": "nothing"}),
    Step("turns.file", {"turn_id": "$turn"}),
    Step("turns.stop", {"turn_id": "$turn"}),
    Step("turns.stop", {"turn_id": "nothing"}),
    Step("evals.start", {"kind": "nothing"}),
    Step("evals.status", {"job_id": "job_nothing"}),
    Step("evals.cancel", {"job_id": "job_nothing"}),
    Step("evals.list", {}),
    Step("evals.list", {"limit": 0}),
    Step("evals.get", {"number": 1}),
    Step("evals.get", {}),
    Step("tasks.list", {"session_id": "s1"}),
    Step("jobs.list", {}),
    Step("artifacts.get", {"artifact_id": "art_nothing"}),
    Step("tokens.create", {"agent": "writer", "scopes": ["skills:read"]}, ("token", lambda said: said["id"])),
    Step("tokens.create", {"agent": "writer", "scopes": ["everything"]}),
    Step("tokens.change", {"id": "$token", "label": "of the writer", "requests_per_minute": 60}),
    Step("tokens.change", {"id": "$token", "scopes": ["skills:read", "admin"]}),
    Step("tokens.revoke", {"id": "$token"}),
    Step("tokens.revoke", {"id": "nothing"}),
    Step("tokens.list", {"project": "local"}),
    Step("fleet.show", {}),
    Step("metrics.show", {}),
    Step("metrics.show", {"nothing": 1}),
    Step("fleet.drain", {"host": "nowhere"}),
    Step("fleet.undrain", {"host": "nowhere"}),
    Step("fleet.undrain", {}),
    Step("quota.show", {}),
    Step("quota.show", {"project": 3}),
    Step("fleet.evict", {"host": "nowhere", "force": True}),
    Step("fleet.evict", {"force": True}),
    Step("audit_log.list", {"project": "local", "action": "skill"}),
    Step("audit_log.list", {"since": "never"}),
    Step("plugins", {}),
    Step("schemas.show", {"name": "tools"}),
    Step("skills.publish", {}),
    Step("skills.publish", {"project": 3}),
    Step("doctor", {}),
    Step("codex.probe", {}),
    Step("codex.receipts", {"session": "nothing"}),
    Step("project_skills.delete", {"skill": "brief"}),
    Step("project_skills.delete", {"skill": "brief"}),
]  # fmt: skip

#: What is an id, a time, or a place.
CHANGING = [
    (re.compile(r"\b(task|job|art)_[A-Za-z0-9]{8,}\b"), r"<\1>"),
    (re.compile(r'"duration_ms": \d+'), "<took>"),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\bkd_[0-9a-f]{16}_[A-Za-z0-9_-]{43}"), "<token>"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[0-9:.]+(Z|\+00:00)?"), "<time>"),
]
CHANGING_FIELDS = re.compile(
    r"(^|_)(ms|seconds|duration_ms|duration_sec|duration_s|generation)$|^created_by$|^trace_id$|^host$|^id$|_at$"
)


def settled(value: Any, folder: Path) -> Any:
    """Return *value* without ids, times and places."""
    if isinstance(value, dict):
        return {
            name: "<changes>" if CHANGING_FIELDS.search(name) and item is not None else settled(item, folder)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [settled(item, folder) for item in value]
    if isinstance(value, str):
        text = value.replace(str(folder), "<folder>")
        for pattern, instead in CHANGING:
            text = pattern.sub(instead, text)
        return text
    return value


async def play(door: str, folder: Path) -> list[tuple[str, Said]]:
    """Play the scenario at a door and return what was said."""
    settings = Settings(
        state_dir=folder / "state",
        index_dir=folder / "index",
        bundle=ROOT / "bundles" / "hello",
        executor="bubblewrap",
        codex_binary=str(folder / "no-codex"),
        jobs={"idle_s": 2.0},
    )
    host = Host(settings, entry_points=False)
    kept: dict[str, Any] = {}
    said: list[tuple[str, Said]] = []
    try:
        async with DOORS[door](host) as call:
            for step in SCENARIO:
                arguments = {name: kept.get(value[1:], value) if isinstance(value, str) and value[:1] == "$" else value
                             for name, value in step.arguments.items()}  # fmt: skip
                found = await call(step.name, arguments)
                for _ in range(600):
                    if step.until is None or step.until(found.value):
                        break
                    await asyncio.sleep(0.2)
                    found = await call(step.name, arguments)
                if step.keep is not None:
                    assert found.ok, (door, step.name, found.value)
                    kept[step.keep[0]] = step.keep[1](found.value)
                said.append((step.name, found))
            for name in sorted(name for name, operation in OPERATIONS.items() if operation.local):
                if door != "cli":
                    said.append((name, await call(name, {"path": "/etc"})))
    finally:
        await host.work.aclose()
        await host.storage.aclose()
    return said


def test_the_scenario_has_every_operation() -> None:
    """No operation is forgotten, and each that may be refused for its arguments is."""
    called = {step.name for step in SCENARIO}
    assert called == {name for name, operation in OPERATIONS.items() if not operation.local}


async def test_every_door_says_the_same(tmp_path: Path) -> None:
    """Answers, codes, words and details are those of the command line at every door."""
    first, *others = DOORS
    for door in DOORS:
        (tmp_path / door).mkdir()
    expected = [(name, said) for name, said in await play(first, tmp_path / first)]
    wanted = [(name, said.ok, shown(name, said.value, tmp_path / first)) for name, said in expected]
    assert {said.ok for _, said in expected} == {True, False}
    for door in others:
        found = await play(door, tmp_path / door)
        compared = [(name, said.ok, shown(name, said.value, tmp_path / door)) for name, said in found]
        differing = [pair for pair in zip(wanted, compared, strict=False) if pair[0] != pair[1]]
        assert (door, differing) == (door, [])
        rest = compared[len(wanted) :]
        assert {name for name, *_ in rest} == {name for name, operation in OPERATIONS.items() if operation.local}
        assert [(name, ok, value["code"]) for name, ok, value in rest] == [
            (name, False, "local_only") for name, *_ in rest
        ]


def without_paths(value: Any) -> Any:
    """Return *value* without paths of the machine."""
    if isinstance(value, dict):
        return {name: without_paths(item) for name, item in value.items() if name != "path"}
    return [without_paths(item) for item in value] if isinstance(value, list) else value


def shown(name: str, value: Any, folder: Path) -> Any:
    """Return what of an answer is compared: what only the account of the machine is told is left out."""
    value = settled(value, folder)
    if name == "projects.list" and "projects" in value:
        return [row["project"] for row in value["projects"]]
    if name in {"skills.show", "skills.list"}:
        return without_paths(value)
    if name == "quota.show" and "quotas" in value:
        return [row["quota"] for row in value["quotas"]]
    if name in {"fleet.show", "metrics.show"}:
        return sorted(value)  # hosts, workers and ages are of this moment
    if name == "tokens.list":
        return sorted(row["agent"] for row in value["tokens"] if row["agent"] == "writer")
    if name == "audit_log.list" and "events" in value:
        return [(row["action"], row["subject"], row["facts"]) for row in value["events"]]
    return value
