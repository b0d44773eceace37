"""The scripts of the press bundle do what their skills say, on the real data set and on hostile tables."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SKILLS = Path(__file__).parents[3] / "bundles" / "press" / "skills"
DATA = SKILLS.parent / "data" / "flights.csv"
PROFILE = SKILLS / "data/profile/scripts/profile.py"
SUMMARISE = SKILLS / "data/profile/scripts/summarise.py"
CHART = SKILLS / "data/chart/scripts/chart.py"
PRESS = SKILLS / "press/report/scripts/press.py"
SOURCE = "3|On-time data|https://example.org/on time"


def run(script: Path, *args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as an executor does: plain Python, no packages of ours in sight."""
    command = [sys.executable, "-B", "-W", "ignore", str(script), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def table(text: str) -> list[dict[str, str]]:
    """Read a printed CSV table."""
    return list(csv.DictReader(io.StringIO(text)))


def test_data_set_is_what_it_says(repo: Path) -> None:
    """The data set has the rows, columns and codes that its guide and origin note state."""
    with DATA.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4380
    assert {row["origin"] for row in rows} == {"EWR", "JFK", "LGA"}
    assert {row["carrier"] for row in rows} == {"UA", "B6", "EV", "DL"}
    assert "4,380" in (DATA.parent / "ORIGIN.md").read_text()
    assert all(int(row["cancelled"]) <= int(row["scheduled"]) for row in rows)
    assert all((row["mean_dep_delay_min"] == "") == (row["cancelled"] == row["scheduled"]) for row in rows)


def test_profile_of_the_data_set(tmp_path: Path) -> None:
    """The profile counts rows, types, gaps and ranges, and writes the same JSON to a file."""
    done = run(PROFILE, DATA, "--out", "p/profile.json", cwd=tmp_path)
    profile = json.loads(done.stdout)
    assert (done.returncode, profile["rows"], json.loads((tmp_path / "p/profile.json").read_text())) == (
        0,
        4380,
        profile,
    )
    columns = profile["columns"]
    assert (columns["date"]["type"], columns["date"]["first"], columns["date"]["last"]) == (
        "date",
        "2013-01-01",
        "2013-12-31",
    )
    assert (columns["scheduled"]["type"], columns["mean_dep_delay_min"]["type"], columns["origin"]["type"]) == (
        "integer",
        "number",
        "text",
    )
    assert {w["code"] for w in profile["warnings"] if w["column"] == "mean_dep_delay_min"} >= {"gaps"}


def test_profile_reads_json_and_warns(tmp_path: Path) -> None:
    """JSON lists are tables too; mixed types, constants, keys and repeated rows are warned of."""
    rows = [
        {"k": "a", "v": 1, "c": "x"},
        {"k": "b", "v": "two", "c": "x"},
        {"k": "b", "v": "two", "c": "x"},
        {"k": "d", "v": 4, "c": "x"},
        {"k": "e", "v": 5, "c": "x"},
    ]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    profile = json.loads(run(PROFILE, "t.json", cwd=tmp_path).stdout)
    assert {(w["column"], w["code"]) for w in profile["warnings"]} == {
        ("v", "mixed_types"),
        ("c", "constant"),
        ("*", "duplicates"),
    }


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.csv", b"", "empty"),
        ("bytes.csv", b"\xff\xfe\x00a", "cannot be read"),
        ("twice.csv", b"a,a\n1,2\n", "stands twice"),
        ("long.csv", b"a,b\n1,2,3\n", "row 2 has 3 cells"),
        ("bad.json", b"{not json", "not JSON"),
        ("list.json", b"[1, 2]", "list of objects"),
        ("none.json", b"[]", "list of objects"),
    ],
)
def test_unreadable_tables_are_one_sentence(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    """A table that cannot be read ends with exit code 2 and one sentence, never a traceback."""
    (tmp_path / name).write_bytes(content)
    done = run(PROFILE, name, cwd=tmp_path)
    assert (done.returncode, done.stdout, words in done.stderr, "Traceback" in done.stderr) == (2, "", True, False)


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """A file that is not there is said to be not there."""
    done = run(PROFILE, "nothing.csv", cwd=tmp_path)
    assert (done.returncode, "nothing.csv" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_summary_weights_means_by_departed_flights(tmp_path: Path) -> None:
    """Weighted means, sums and shares per airport agree with an independent computation."""
    args = [
        "--by",
        "origin",
        "--sum",
        "scheduled",
        "--wmean",
        "mean_dep_delay_min:departed",
        "--share",
        "late_arrivals:scheduled",
    ]
    done = run(SUMMARISE, DATA, *args, "--sort", "mean_dep_delay_min", "--out", "airports.csv", cwd=tmp_path)
    found = table(done.stdout)
    assert (tmp_path / "airports.csv").read_text() == done.stdout
    assert [row["origin"] for row in found] == ["EWR", "LGA", "JFK"]
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if row["origin"] == "EWR"]
    left = [
        (float(r["mean_dep_delay_min"]), int(r["scheduled"]) - int(r["cancelled"]))
        for r in rows
        if r["mean_dep_delay_min"]
    ]
    mean = sum(value * weight for value, weight in left) / sum(weight for _, weight in left)
    assert float(found[0]["mean_dep_delay_min"]) == pytest.approx(mean, abs=0.005)
    assert int(found[0]["scheduled"]) == sum(int(r["scheduled"]) for r in rows)
    share = 100 * sum(int(r["late_arrivals"]) for r in rows) / sum(int(r["scheduled"]) for r in rows)
    assert float(found[0]["late_arrivals_percent"]) == pytest.approx(share, abs=0.005)


def test_summary_buckets_and_filters(tmp_path: Path) -> None:
    """Months are the first seven characters of a date, and `--where` keeps matching rows."""
    done = run(
        SUMMARISE,
        DATA,
        "--by",
        "date",
        "--bucket",
        "month",
        "--where",
        "origin=JFK",
        "--sum",
        "cancelled",
        cwd=tmp_path,
    )
    rows = table(done.stdout)
    assert [row["date"] for row in rows] == [f"2013-{month:02d}" for month in range(1, 13)]
    assert sum(int(row["cancelled"]) for row in rows) == 541


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--by", "nope"], "no column is named 'nope'"),
        (["--by", "origin", "--sum", "carrier"], "which is no number"),
        (["--by", "origin", "--where", "origin=ZZZ"], "no row matches"),
        (["--by", "origin", "--sort", "nope"], "cannot sort by 'nope'"),
        (["--by", "origin", "--wmean", "mean_dep_delay_min"], "not of the form"),
    ],
)
def test_summary_never_guesses(args: list[str], words: str, tmp_path: Path) -> None:
    """A column that is not there, text as a number, or nothing left is an error in words."""
    done = run(SUMMARISE, DATA, *args, cwd=tmp_path)
    assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (2, True, False)


CELLS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00\r\n"), max_size=12)


@settings(max_examples=12, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6))
def test_profile_never_crashes(rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever cells a table holds, the profile is JSON or one sentence."""
    folder = tmp_path_factory.mktemp("odd")
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("left", "right"), *rows])
    done = run(PROFILE, "t.csv", cwd=folder)
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["table"] == "t.csv" if done.returncode == 0 else done.returncode == 2


def test_chart_is_well_formed_and_accessible(tmp_path: Path) -> None:
    """A bar chart is XML, has a title and description, one bar a row, and hostile text stays text."""
    (tmp_path / "t.csv").write_text("name,value\n<script>alert(1)</script>,3\nb&c,-1.5\nlast,2\n")
    done = run(
        CHART,
        "t.csv",
        "--x",
        "name",
        "--y",
        "value",
        "--title",
        'A "title" <b>',
        "--highlight",
        "last",
        "--out",
        "f/fig.svg",
        cwd=tmp_path,
    )
    root = ET.parse(tmp_path / "f/fig.svg").getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    assert done.returncode == 0
    assert root.find("s:title", space).text == 'A "title" <b>'
    assert "<script>alert(1)</script> 3" in root.find("s:desc", space).text
    assert len(root.findall("s:rect", space)) == 1 + 3
    assert root.findall(".//s:script", space) == []


def test_line_chart_has_a_line_per_series_and_gaps(tmp_path: Path) -> None:
    """Each series is one path; an empty cell breaks the line instead of dropping it to zero."""
    (tmp_path / "t.csv").write_text("m,s,v\n1,a,1\n2,a,\n3,a,2\n1,b,2\n2,b,3\n3,b,4\n")
    run(
        CHART,
        "t.csv",
        "--kind",
        "line",
        "--x",
        "m",
        "--y",
        "v",
        "--series",
        "s",
        "--title",
        "T",
        "--out",
        "fig.svg",
        cwd=tmp_path,
    )
    root = ET.parse(tmp_path / "fig.svg").getroot()
    lines = [p.get("d") for p in root.iter("{http://www.w3.org/2000/svg}path") if p.get("fill") == "none"]
    assert [line.count("M") for line in lines] == [2, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n", "no rows"),
        ("a,b\n1,x\n", "no number"),
        ("a,b\n1,\n", "is empty"),
        ("a,b\n1,inf\n", "cannot be drawn"),
        ("c,b\n1,2\n", "no column"),
    ],
)
def test_chart_refuses_in_words(text: str, words: str, tmp_path: Path) -> None:
    """A table that cannot be drawn is refused with a sentence, and no figure is left behind."""
    (tmp_path / "t.csv").write_text(text)
    done = run(CHART, "t.csv", "--x", "a", "--y", "b", "--title", "T", "--out", "fig.svg", cwd=tmp_path)
    assert (done.returncode, words in done.stderr, (tmp_path / "fig.svg").exists()) == (2, True, False)


REPORT = """# Newark waits longest

The mean is **15.8 minutes** [[S:3]]. A [link](https://example.org/a) and a [trap](javascript:alert(1)).

![Delay by airport [[S:3]]](fig.svg)

| airport | minutes |
|---|---|
| Newark | 15.8 |

1. one
2. two <script>alert(1)</script>

```
[[S:9]] stays code
```
"""


@pytest.mark.needs("documents")
def test_report_is_self_contained_and_cited(tmp_path: Path) -> None:
    """HTML and PDF come from one text: figure inlined, citations linked to their source, no script, nothing loaded."""
    (tmp_path / "report.md").write_text(REPORT)
    (tmp_path / "fig.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><rect width="5" height="5"/></svg>'
    )
    done = run(PRESS, "report.md", "--html", "r.html", "--pdf", "r.pdf", "--source", SOURCE, cwd=tmp_path)
    page = (tmp_path / "r.html").read_text()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.pdf").read_bytes().startswith(b"%PDF-")
    assert '<a href="#source-3">1</a>' in page
    assert 'href="https://example.org/on%20time"' in page
    assert "[[S:9]] stays code" in page
    assert "data:image/svg+xml;base64," in page
    assert ("<script" in page, 'href="javascript' in page, 'src="http' in page) == (False, False, False)


@pytest.mark.needs("documents")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# T\n\nClaim [[S:4]].\n", "citation 4"),
        ("# T\n\n![f](../../../etc/hostname.svg)\n", "outside the report's folder"),
        ("# T\n\n![f](missing.svg)\n", "cannot be read"),
        ("# T\n\n![f](fig.exe)\n", "only svg, png and jpg"),
    ],
)
def test_report_refuses_in_words_and_writes_nothing(text: str, words: str, tmp_path: Path) -> None:
    """A missing source or figure stops the press before any file is written."""
    (tmp_path / "report.md").write_text(text)
    done = run(PRESS, "report.md", "--html", "r.html", "--pdf", "r.pdf", "--source", SOURCE, cwd=tmp_path)
    assert (done.returncode, words in done.stderr, sorted(p.name for p in tmp_path.iterdir())) == (
        2,
        True,
        ["report.md"],
    )


def test_hello_greets(tmp_path: Path) -> None:
    """The tutorial's script prints its one line."""
    script = SKILLS.parents[1] / "hello/skills/hello/scripts/greet.py"
    assert run(script, "Ada", "--language", "fr", cwd=tmp_path).stdout == "Bonjour, Ada!\n"
