"""What MCP over HTTP adds to an operation: a call of a tool in time, beside the same operation called in the same process.

    python tests/benchmarks/doors.py [--calls 200] [--json]

A service runs on loopback in this process with a bundle of one skill; one client sends `tools/call` of `skills_list` over one
connection, and between two calls the operation itself is timed. `tools/list` is measured, too. The bound is on the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.doors.web import build_app

OVER_MS = 15.0
"""Most milliseconds that a call over HTTP may take more than its operation."""
LIST_KIB = 32.0
"""Most KiB that `tools/list` of the default profile may have."""
VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def question(method: str, **params: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return body and headers of a request."""
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": VERSION,
        "Mcp-Method": method,
    }
    if "name" in params:
        headers["Mcp-Name"] = params["name"]
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}, headers


async def timed(do: Callable[[], Awaitable[object]]) -> float:
    """Return how many milliseconds something takes."""
    began = time.perf_counter()
    await do()
    return (time.perf_counter() - began) * 1000


async def measured(folder: Path, calls: int) -> dict[str, float]:
    """Return medians in milliseconds, and the size of the list in KiB."""
    skill = folder / "bundle" / "skills" / "public" / "brief"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: brief\ndescription: Makes one page.\n---\nRead.\n")
    settings = Settings(
        state_dir=folder / "state", index_dir=folder / "index", bundle=folder / "bundle", requests_per_minute=0
    )
    host = Host(settings, entry_points=False)
    made, token = await host.tokens.create("local", "bench", ["skills:read", "work:run", "work:read"], who="bench")
    server = uvicorn.Server(uvicorn.Config(build_app(host), host="127.0.0.1", port=0, log_config=None, lifespan="on"))
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    context = Context(identity=made.identity)
    try:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, trust_env=False) as client:

            async def post(method: str, **params: Any) -> httpx.Response:
                body, headers = question(method, **params)
                answer = await client.post(url, json=body, headers=headers, timeout=60)
                assert answer.status_code == 200, answer.text
                return answer

            async def call() -> None:
                await post("tools/call", name="skills_list", arguments={})

            size = len((await post("tools/list")).content)
            await call()
            rows: dict[str, list[float]] = {"operation": [], "call": [], "list": []}
            for _ in range(calls):
                rows["operation"].append(await timed(lambda: host.invoke("skills.list", {}, context)))
                rows["call"].append(await timed(call))
                rows["list"].append(await timed(lambda: post("tools/list")))
    finally:
        server.should_exit = True
        await running
        await host.storage.aclose()
    return {f"{name}_ms": statistics.median(row) for name, row in rows.items()} | {"list_kib": size / 1024}


def main() -> int:
    """Measure, print, and return 1 when a bound is not held."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--calls", type=int, default=200)
    given.add_argument("--json", action="store_true")
    chosen = given.parse_args()
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as name:
        found = asyncio.run(measured(Path(name), chosen.calls))
    over = found["call_ms"] - found["operation_ms"]
    held = over <= OVER_MS and found["list_kib"] <= LIST_KIB
    if chosen.json:
        print(json.dumps({**found, "over_ms": over, "held": held}, indent=2))
        return int(not held)
    print(f"operation {found['operation_ms']:6.1f} ms")
    print(f"tools/call {found['call_ms']:5.1f} ms: {over:.1f} ms over the operation (bound: {OVER_MS:.0f})")
    print(f"tools/list {found['list_ms']:5.1f} ms, {found['list_kib']:.1f} KiB (bound: {LIST_KIB:.0f})")
    return int(not held)


if __name__ == "__main__":
    raise SystemExit(main())
