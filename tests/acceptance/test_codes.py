"""One table of codes: the same wrong call has the same code, and the same one who must act, at every door."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES
from kdskills.app.operations import Context
from kdskills.errors import Conflict

ROOT = Path(__file__).parents[2]

#: Operation, arguments, code, who must act.
CODES = [
    ("nothing", {}, "unknown_operation", "caller"),
    ("skills.list", {"nothing": 1}, "bad_request", "caller"),
    ("skills.run_cmd", {"skill_name": "x"}, "bad_request", "caller"),
    ("skills.run_cmd", {"skill_name": "x", "command": "true", "session_id": "a/b"}, "bad_request", "caller"),
    ("skills.run_cmd", {"skill_name": "x", "command": "true\0"}, "bad_request", "caller"),
    ("skills.task_status", {"task_id": "nothing"}, "not_found", "caller"),
    ("skills.load", {}, "invalid_argument", "model"),
    ("skills.load", {"names": "hello"}, "invalid_argument", "model"),
    ("skills.load", {"names": ["hello"], "mode": "neither"}, "invalid_argument", "model"),
    ("skills.load", {"names": ["hello"], "nothing": 1}, "invalid_argument", "model"),
    ("skills.load", {"names": ["a\0"]}, "invalid_argument", "model"),
    ("skills.load", {"names": ["nothing"]}, "skill_not_found", "model"),
    ("skills.unload", {}, "invalid_argument", "model"),
    ("skills.read", {}, "invalid_argument", "model"),
    ("skills.read", {"path": "a", "offset": -1}, "invalid_argument", "model"),
    ("skills.run_script", {"path": 1}, "invalid_argument", "model"),
    ("tokens.create", {"agent": "a", "scopes": ["nothing"]}, "scope_unknown", "caller"),
    ("tokens.create", {"agent": "a", "scopes": ["admin"], "allowed_tools": ["nothing"]}, "tool_unknown", "caller"),
]


@pytest.fixture
def doors():
    """The doors that take a call and give its answer, the bus among them."""
    made = {}
    for name in ("test_every_door", "test_every_door_nats"):
        spec = importlib.util.spec_from_file_location(f"doors_of_{name}", Path(__file__).parent / f"{name}.py")
        made[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made[name]
        spec.loader.exec_module(made[name])
    yield made["test_every_door"], made["test_every_door_nats"]
    for name in made:
        del sys.modules[f"doors_of_{name}"]


@pytest.fixture
async def host(tmp_path):
    """A Host with the `hello` bundle, whose bus may do everything."""
    settings = Settings(
        state_dir=tmp_path / "state",
        index_dir=tmp_path / "index",
        bundle=ROOT / "bundles" / "hello",
        bus={"scopes": sorted(SCOPES)},
        jobs={"idle_s": 1.0},
    )
    made = Host(settings, entry_points=False)
    yield made
    await made.work.aclose()
    await made.storage.aclose()


async def answers(open_door, host):
    """Return code and who of each call of the table at a door."""
    said = []
    async with open_door(host) as call:
        for operation, arguments, *_ in CODES:
            if operation == "nothing" and open_door.__name__ == "mcp":
                said.append(["nothing", "unknown_operation", "caller"])  # the protocol has an error of its own for it
                continue
            found = await call(operation, arguments)
            assert not found.ok, (operation, arguments)
            said.append([operation, found.value["code"], found.value["who"]])
    return said


TABLE = [[operation, code, who] for operation, _, code, who in CODES]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("door", ["cli", "http", "mcp"])
async def test_codes_at_a_door(doors, host, door):
    """Each wrong call of the table has its code at the command line, over HTTP and over MCP."""
    assert await answers(doors[0].DOORS[door], host) == TABLE


@pytest.mark.needs("nats")
@pytest.mark.timeout(200)
async def test_codes_over_the_bus(doors, host, bus):
    """Each wrong call of the table has its code over the bus."""
    assert await answers(doors[1].door(doors[0], bus), host) == TABLE


@pytest.mark.needs("bubblewrap")
@pytest.mark.timeout(200)
async def test_conflicts_have_one_code(doors, host):
    """A busy session and a key used twice are `conflict`, each with its reason, and 409 over HTTP."""
    async with doors[0].served(host) as (url, token):
        run = {"skill_name": "public.hello", "command": ["sleep", "60"], "session_id": "s1"}
        async with doors[0].httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:

            async def post(arguments, **headers):
                headers = {"Authorization": f"Bearer {token}", **headers}
                return await client.post("/projects/local/tools/skills.run_cmd_async", json=arguments, headers=headers)

            first = await post(run, **{"Idempotency-Key": "k"})
            assert first.status_code == 200, first.text
            task = first.json()["task_id"]
            again = await post({**run, "command": ["sleep", "61"]}, **{"Idempotency-Key": "k"})
            for _ in range(600):
                state = await host.call("skills.task_status", task_id=task)
                if state.status == "running":
                    break
                await asyncio.sleep(0.1)
            busy = await post({**run, "on_busy": "refuse"})
            with pytest.raises(Conflict) as refused:
                await host.invoke("skills.run_cmd_async", run | {"command": "true"}, Context(idempotency_key="k"))
            await host.call("skills.task_cancel", task_id=task)
    for answer, details in ((again, {"reason": "idempotency_key"}), (busy, {"reason": "session_busy", "holder": task})):
        told = json.loads(answer.text)
        assert (answer.status_code, told["code"], told["who"], told["details"]) == (409, "conflict", "caller", details)
    assert refused.value.code == "conflict"
