"""How tests wait: for the thing itself, never for a time in which it probably happens."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 0.2  # between two looks at what a loop waits for
OVERLAP_S = 0.05  # what a handler of a race takes, so that others come meanwhile
FOREVER_S = 60  # from here on nobody sits it out: it is a program that has to be ended

#: Where a time has to pass, because nothing can be seen until it has.
ALLOWED = {
    "tests/benchmarks/jobs.py::waiting": "benchmark: what nothing costs is measured while nothing happens",
    "tests/benchmarks/fleet.py::idle": "benchmark: what a fleet costs is measured while nothing happens",
    "tests/benchmarks/remote.py::ship": "benchmark: both workers hold the call before one answers",
    "tests/integration/kill_payload.py::stay": "program that is killed",
    "tests/integration/nats/test_delivery.py::test_poison_is_ended": "nothing may come again: its time has to pass",
    "tests/integration/test_e2b.py::test_idle_and_hard_times_replace_a_sandbox": "the idle time itself",
    "tests/integration/test_e2b.py::test_cancelling_while_waiting_for_the_lease": "whether it waits yet is not to be seen; both are right",
    "tests/integration/test_docker.py::test_queued_runs_can_be_cancelled": "whether it waits yet is not to be seen; both are right",
    "tests/integration/web/test_connections.py::test_a_body_that_moves_is_taken": "a body has to take longer than its deadline",
    "tests/unit/stores/test_sql.py::test_a_full_write_lock_is_waited_for": "a writer that did not wait would be done by then",
    "kdskills/testing/conformance/ending.py::cancelling_the_task": "an engine's `run` shows nothing of the program before its end",
}


def _sleeps(tree: ast.AST, function: str = "", *, looping: bool = False) -> Iterator[tuple[str, int, float]]:
    """Give each sleep of a constant time that is too long where it stands: its function, line and seconds."""
    for node in ast.iter_child_nodes(tree):
        name, inside = function, looping
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, inside = node.name, False
        elif isinstance(node, ast.While | ast.For | ast.AsyncFor):
            inside = True
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sleep") and node.args:
            seconds = _constant(node.args[0])
            if seconds is not None and (LOOK_S if looping else OVERLAP_S) < seconds < FOREVER_S:
                yield function, node.lineno, seconds
        yield from _sleeps(node, name, looping=inside)


def _constant(node: ast.expr) -> float | None:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def test_tests_wait_for_the_thing_itself(repo: Path) -> None:
    """No test or check sleeps a fixed time in place of waiting for what it needs, but those that say why they must."""
    sleeping = {}
    for top in ("tests", "kdskills/testing"):
        for path in sorted((repo / top).rglob("*.py")):
            if "programs" not in path.parts:
                for function, line, seconds in _sleeps(ast.parse(path.read_text(encoding="utf-8"))):
                    sleeping[f"{path.relative_to(repo)}::{function}"] = f"line {line}: {seconds} s"
    assert {name: told for name, told in sleeping.items() if name not in ALLOWED} == {}
    assert set(ALLOWED) - set(sleeping) == set()


def test_the_check_sees_a_sleep() -> None:
    """A pause between looks and a program without end are no sleeps; a second before an assertion is one."""
    source = """
async def waits():
    while not ready():
        await asyncio.sleep(0.1)
    time.sleep(600)
    await asyncio.sleep(0)

def hopes():
    time.sleep(1)
"""
    assert list(_sleeps(ast.parse(source))) == [("hopes", 9, 1.0)]
