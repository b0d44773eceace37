"""`kdskills bench`: run a benchmark of the source checkout and print its table of ratios."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

import kdskills
from kdskills.doors.cli.output import failing
from kdskills.errors import BadRequest


def folder() -> Path:
    """Return the folder of benchmarks, which come with the source and not with the wheel."""
    return Path(kdskills.__file__).parents[1] / "tests" / "benchmarks"


def names() -> list[str]:
    """Return the benchmarks there are."""
    return sorted(path.stem for path in folder().glob("*.py"))


def run(name: str, arguments: list[str]) -> int:
    """Run the benchmark *name* in this process and return its exit code: 1 when a bound is not held.

    Raises:
        BadRequest: `benchmark_missing`.
    """
    if name not in names():
        available_names = ", ".join(names()) or "none: benchmarks come with a source checkout"
        raise BadRequest(
            f"there is no benchmark {name!r}; there are {available_names}", code="benchmark_missing", name=name
        )
    before = sys.argv
    sys.argv = [f"kdskills bench {name}", *arguments]
    try:
        runpy.run_path(str(folder() / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return 0


def command(ctx: typer.Context, name: Annotated[str, typer.Argument(help="Benchmark: `skills`, `imports`, …")]) -> None:
    """Run a benchmark and print its table of ratios; exit 1 when a bound is not held."""
    with failing(as_json=False):
        code = run(name, list(ctx.args))
    raise typer.Exit(code)
