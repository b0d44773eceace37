"""Findings for other programs: whatever stands in them, they are one valid log and one command each."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as SarifLog

from kdskills.errors import Diagnostic
from kdskills.errors.reports import ReportRow, ReportRule, Selection, github_commands, sarif_log

TEXTS = st.text(st.sampled_from("a:,%\r\n[]({})/\x1b\u202e\ud800é "), max_size=30)
FINDINGS = st.builds(
    Diagnostic,
    st.text("abc_", min_size=1),
    st.sampled_from(["error", "warning", "info"]),
    TEXTS,
    st.none() | TEXTS,
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
    fix=st.none() | TEXTS,
)
ROWS = st.lists(st.builds(ReportRow, FINDINGS, st.none() | TEXTS))


@given(ROWS)
def test_every_log_is_valid_sarif(rows):
    """The published schema takes a log of any texts; each result points to its rule, and what was accepted is suppressed."""
    document = sarif_log("tool", [ReportRule("abc", "A rule.", "Mend it.", "note", {"family": "f"})], rows)
    (run,) = SarifLog.model_validate(document).runs
    assert [run.tool.driver.rules[each.ruleIndex].id for each in run.results] == [row.finding.code for row in rows]
    assert [bool(each.suppressions) for each in run.results] == [row.accepted is not None for row in rows]


@given(TEXTS)
def test_no_text_becomes_a_link_or_placeholder(text):
    """A message of SARIF has no link and no placeholder in it, and read back by its rules it is the text."""
    row = ReportRow(Diagnostic("a", "error", text))
    message = sarif_log("tool", [], [row])["runs"][0]["results"][0]["message"]["text"]
    assert re.search(r"\[.*\]\(", message, re.DOTALL) is None
    assert re.search(r"(?<!\{)(\{\{)*\{(?!\{)", message) is None
    assert message.replace("{{", "{").replace("}}", "}").replace("] (", "](") == text.replace("] (", "](")


def read_command(line: str) -> tuple[str, dict[str, str], str]:
    """Read a workflow command as the runner of GitHub does."""
    name, _, data = line.removeprefix("::").partition("::")
    command, _, words = name.partition(" ")
    pairs = dict(word.split("=", 1) for word in words.split(","))
    for mark, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        pairs = {key: value.replace(mark, character) for key, value in pairs.items()}
        data = data.replace(mark, character) if mark not in {"%3A", "%2C"} else data
    return command, pairs, data


@given(ROWS)
def test_a_finding_is_one_command(rows):
    """Each finding nobody accepted is one line that the runner reads back: severity, file, line, code and message."""
    commands = list(github_commands(rows))
    findings = [row.finding for row in rows if row.accepted is None]
    assert [line for line in commands if re.search(r"[\r\n]", line)] == []
    names = {"error": "error", "warning": "warning", "info": "notice"}
    for line, finding in zip(commands, findings, strict=True):
        command, pairs, message = read_command(line)
        assert (command, pairs["title"]) == (names[finding.severity], finding.code)
        assert pairs.get("file", "") == (finding.path or "")
        assert pairs.get("line") == (str(finding.line) if finding.line else None)
        assert message == " ".join(filter(None, (finding.message or "", finding.fix))) or not finding.message


def test_a_command_by_the_letter():
    """Percent signs, line ends, and in properties colons and commas are written as GitHub asks."""
    finding = Diagnostic("code", "error", "100%\r\n::stop::x, y", "a:b,c%.md", 3, 7)
    expected = "::error file=a%3Ab%2Cc%25.md,line=3,col=7,title=code::100%25%0D%0A::stop::x, y"
    assert list(github_commands([ReportRow(finding)])) == [expected]


def test_what_is_selected():
    """A beginning selects and leaves out; what makes something unusable goes by its whole code alone."""
    selection = Selection(("name",), ("name_edge",))
    told = [code for code in ("name_missing", "name_edge_hyphen", "bom") if selection.tells(code, unusable=False)]
    assert told == ["name_missing"]
    assert [Selection((), (word,)).tells("not_utf8", unusable=True) for word in ("not", "all", "not_utf8")] == [
        True,
        True,
        False,
    ]
    assert Selection(("all", ""), ("nam", "nothing")).unknown(["name_missing"]) == ["", "nothing"]
