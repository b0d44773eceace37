"""Which files an answer says were written, and which successes it reports that failed."""

import json
import time
from dataclasses import dataclass

import pytest

from kdskills.models.cassette import read_cassette
from kdskills.solver import ReactSolver, ToolError
from kdskills.solver.claims import claimed_files, claimed_successes, missing_files
from kdskills.solver.events import CallRecord
from kdskills.testing.models import ScriptedModel, call, say


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("I wrote report.pdf.", ("report.pdf",)),
        ("I have written the summary to `out/summary.md`.", ("out/summary.md",)),
        ("I've saved the table as **table.csv**, as you asked.", ("table.csv",)),
        ("Saved to report.pdf.", ("report.pdf",)),
        ("Done! Successfully created chart.png and table.csv.", ("chart.png", "table.csv")),
        ("The report was written to ./report.md", ("report.md",)),
        ("report.pdf has been generated.", ("report.pdf",)),
        ("A PDF named report.pdf has been created.", ("report.pdf",)),
        ("The chart is available in charts/sales.png.", ("charts/sales.png",)),
        ("I created these files:\n\n- a.csv (3 rows)\n- `b.csv`\n\nAsk for c.csv next.", ("a.csv", "b.csv")),
        ("I wrote a.txt. I wrote a.txt again.", ("a.txt",)),
        ("I generated summary.md from data.csv using tools.py.", ("summary.md",)),
        ("Files written:\n- a1.csv\n- b1.csv", ("a1.csv", "b1.csv")),
        ("The chart has been written to charts/q4.png.", ("charts/q4.png",)),
        ("Created final.xlsx with three sheets.", ("final.xlsx",)),
        ("I generated the diagram (diagram.svg).", ("diagram.svg",)),
        ("**Output:** the report is now available at output/report.html.", ("output/report.html",)),
        ("out.csv was created.", ("out.csv",)),
        ("Exported to data/export.parquet.", ("data/export.parquet",)),
        ("Everything is saved in final_report.md.", ("final_report.md",)),
        ("Your slides are ready: slides.pptx has been generated.", ("slides.pptx",)),
        ("The image is saved as plot.png in the current folder.", ("plot.png",)),
        ("I saved the plan for every region to plan.md.", ("plan.md",)),
    ],
)
def test_reports_are_found(text, files):
    """A deed reported in the past names its files."""
    assert claimed_files(text) == files


@pytest.mark.parametrize(
    "text",
    [
        "North grew by 4.2 % in v1.2.3, see https://example.org/report.pdf.",
        "I could not write report.pdf.",
        "I haven't created report.pdf.",
        "I will write report.pdf next.",
        "You can save it to report.pdf.",
        "Should I have saved report.pdf?",
        "The rule stands in setup.cfg.",
        "Node.js was created in 2009.",
        "I made it with main.py from data/sales.csv.",
        "Write to me at me@example.com.",
        "```python\n# I wrote report.pdf\nopen('report.pdf', 'w')\n```",
        "I created a table of 3.5 rows, e.g. this one.",
        "The report was written by Jane Doe in 2021 and is available at https://example.org/report.pdf.",
        "Version 2.1.0 was released on 2024-05-01; version 3.0.rc1 was made available in June.",
        "Node.js has been updated to version 20, and Vue.js was created by Evan You.",
        "The function `os.path.join` was added in Python 2.0. I've prepared an example: `import numpy as np`.",
        "I have prepared the figures you asked for, e.g. the mean (3.5) and the median (2.1).",
        "The settings are stored in /etc/nginx/nginx.conf on most systems.",
        "I've created a plan: first read data.csv, then compute totals, then write summary.md.",
        "The logs are generated at app.log by the server.",
        "The logs are written to app.log every night.",
        "e.g. i.e. etc. The U.S. figures were made in Washington D.C. at 10.30 a.m.",
        "According to the guide, results are saved in results.json.",
        "Results are saved in results.json when the option is set.",
        "Your figures were placed in input.txt by you; I only read it.",
        "I converted 5.4 km to 3.36 mi and rounded to 2 d.p.",
        "The e-mail was sent to max@firma.de, and the site example.com was built in 2010.",
        "I've added the class `Foo.Bar` to the explanation, built on pandas.DataFrame and numpy.ndarray.",
        "The commit that added tests/test_x.py was made in March 2023.",
        "The archive backup.tar.gz was created by the administrator yesterday.",
        "Here is what I built from your notes.txt: a short list of tasks.",
        "I drew on chapter3.pdf and the minutes in protocol.docx.",
        "The table was taken from table.xlsx, which was produced by the finance team.",
        "The skill says: 'Reports are saved as report-final.md'.",
        "I compared index.html to the version that was stored in old/index.html.",
        "Your script writes its output to output.csv; I did not run it.",
    ],
)
def test_what_is_no_report_is_not_checked(text):
    """Plans, advice, questions, failures, sources and code claim nothing."""
    assert claimed_files(text) == ()


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ({"out/report.pdf"}, ()),
        ({"report.pdf"}, ()),
        ({"report.pdf.txt", "other.pdf"}, ("report.pdf",)),
        ((), ("report.pdf",)),
    ],
)
def test_a_name_stands_for_a_file_of_any_folder(present, missing):
    """What is there under another folder is there; another name is not."""
    assert missing_files("I wrote report.pdf.", present) == missing


def test_types_of_files_are_those_of_every_machine():
    """What this machine alone knows as a type of files is none: `.bar` is, where its own table is read."""
    assert claimed_files("I made a.bar, b.p and c.csv.") == ("c.csv",)


def test_a_name_that_nobody_writes_costs_nothing():
    """A call of a tool whose name is a megabyte is not looked for in the answer."""
    calls = [outcome("tools." + "x" * 1_000_000, False)]
    started = time.process_time()
    assert claimed_successes("I used tools.", calls) == ()
    assert time.process_time() - started < 0.5


def outcome(tool, ok=True, /, *, error="tool_failed", result="{}", artifacts=(), **arguments):
    facts = {"result": result} if ok else {"error": error}
    raw = json.dumps(arguments)
    return CallRecord(id="c", tool=tool, arguments=raw, ok=ok, artifacts=artifacts, **facts)


LOOKUP = outcome("tools.price_lookup", False, item="bolt")
SUM = outcome("skills.run_script", False, error="script_not_found", skill="sales", path="scripts/sum.py")
EXITED = outcome("skills.run_script", result='{"exit_code": 3}', skill="sales", path="scripts/sum.py")
EDIT = outcome("files.edit", False, error="invalid_argument", path="notes.md")
SHELL = outcome("exec.shell", result='{"exit_code": 1}', command="python3 check.py data.csv")


@pytest.mark.parametrize(
    ("calls", "text", "names"),
    [
        ([LOOKUP], "I used tools.price_lookup to find the price: 4 EUR.", ("tools.price_lookup",)),
        ([LOOKUP], "I called `price_lookup()` and the bolt costs 4 EUR.", ("tools.price_lookup",)),
        ([LOOKUP], "tools_price_lookup returned 4 EUR.", ("tools.price_lookup",)),
        ([SUM], "I ran scripts/sum.py. The total is 42.", ("sum.py",)),
        ([SUM], "The total, calculated with sum.py, is 42.", ("sum.py",)),
        ([SUM], "`sum.py` was executed and printed 42.", ("sum.py",)),
        ([EXITED], "sum.py completed without errors.", ("sum.py",)),
        ([SHELL], "The check with check.py passed.", ("check.py",)),
        ([EDIT], "I updated notes.md.", ("notes.md",)),
        ([outcome("skills.run_script", path="scripts/sum.py"), SUM.model_copy()], "I ran sum.py.", ()),
        ([LOOKUP, outcome("tools.price_lookup", item="bolt")], "I used tools.price_lookup.", ()),
        ([outcome("tools.price_lookup", item="nut"), LOOKUP], "I used tools.price_lookup.", ()),
        ([outcome("tools.price_lookup", item="bolt"), LOOKUP], "I used tools.price_lookup.", ("tools.price_lookup",)),
        ([EDIT, outcome("exec.python", artifacts=("notes.md",))], "I updated notes.md.", ()),
        ([outcome("tools.x", False, error="repeated_call")], "I used tools.x.", ()),
    ],
)
def test_a_success_that_failed_is_found(calls, text, names):
    """A sentence that reports a success of what failed last, and never with other arguments succeeded, names it."""
    assert claimed_successes(text, calls) == names


@pytest.mark.parametrize(
    "text",
    [
        "I could not run sum.py.",
        "I ran sum.py, but it failed.",
        "I ran sum.py. Sadly sum.py ended with an error.",
        "I tried sum.py and then calculated it by hand.",
        "You can run sum.py yourself.",
        "Should I have run sum.py?",
        "The script sum.py sums a column.",
        "```\nI ran sum.py\n```",
        "I ran total_sum.py and sum.py.bak.",
        "The price lookup gave 4 EUR.",
        "The total is 42.",
    ],
)
def test_what_reports_no_success_is_not_checked(text):
    """Failures that are told, advice, questions, code, other names and unnamed tools claim no success."""
    assert claimed_successes(text, [SUM, LOOKUP]) == ()


def test_a_program_that_ended_with_a_code_has_run():
    """Of an exit code other than 0 only a report that it went well is false: many programs report by it."""
    assert claimed_successes("I ran check.py: three rows are duplicated.", [SHELL]) == ()


def refuse(item: str) -> str:
    """Fail, whatever is asked."""
    raise ToolError("the catalogue is closed")


async def test_a_claimed_success_gets_one_correction_round(build, tmp_path):
    """The model may own up; then the answer is final, and the transcript shows both checks."""
    claim, owned = say("I used tools.refuse: the bolt costs 4 EUR."), say("The catalogue is closed.")
    model = ScriptedModel([call("tools_refuse", item="bolt"), claim, owned])
    async with build(model=model, tools=[refuse]) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.text) == ("final", "The catalogue is closed.")
    assert "tools.refuse" in model.requests[2].messages[-1].text
    lines = (tmp_path / "transcripts" / f"{result.turn_id}.jsonl").read_text().splitlines()
    checks = [event for event in map(json.loads, lines) if event.get("type") == "answer_checked"]
    assert [(one["failed"], one["missing"], one["sent_back"]) for one in checks] == [(["tools.refuse"], [], True)]


async def test_an_answer_that_insists_on_a_success_is_unverified(build):
    """After one round the answer is given as it is, but not as final; the setting turns the check off."""
    claim = say("I used tools.refuse: the bolt costs 4 EUR.")
    async with build([call("tools_refuse", item="bolt"), claim, claim], tools=[refuse]) as system:
        result = await ReactSolver(system).run("x")
    assert (result.status, result.stop_reason, result.ok) == ("unverified", "tool_failed", False)
    async with build([call("tools_refuse", item="bolt"), claim], tools=[refuse], check_answers=False) as system:
        assert (await ReactSolver(system).run("x")).status == "final"


async def test_a_typed_answer_is_checked_by_its_texts(build):
    """Claims in the texts of a typed answer count like those of a text."""

    @dataclass
    class Price:
        note: str

    claim = call("final_answer", note="I used tools.refuse, and it worked.")
    async with build([call("tools_refuse", item="bolt"), claim, claim], tools=[refuse]) as system:
        result = await ReactSolver(system).run("x", output_type=Price)
    assert (result.status, result.stop_reason) == ("unverified", "tool_failed")
    assert result.output == Price("I used tools.refuse, and it worked.")


@pytest.mark.parametrize("bundle", ["hello", "press"])
def test_the_bundles_recordings_raise_no_false_alarm(repo, bundle):
    """No answer on a recording of the shipped bundles is held to claim what failed, though each of its calls had failed but one."""
    entries = read_cassette(repo / "bundles" / bundle / "demo.yaml").replies
    calls = [(one.tool.replace("_", ".", 1), one.arguments) for entry in entries for one in entry.reply.calls]
    answers = [entry.reply.text for entry in entries if entry.reply.text]
    assert answers
    for tool, arguments in calls:
        records = [outcome(name, name != tool, **given) for name, given in calls if isinstance(given, dict)]
        assert [claimed_successes(answer, records) for answer in answers] == [()] * len(answers), (tool, arguments)
