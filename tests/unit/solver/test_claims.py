"""Which files an answer says were written."""

import pytest

from kdskills.solver.loop import claimed_files, missing_files


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
