"""Variables that begin with `KDSKILLS_`: every one is known, and a wrong one is told by its own name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kdskills.app import Settings, SettingsInvalid
from kdskills.app.settings import OTHER_PREFIXES, example_of, kind_of, known_variables, setting_rows, variable_of

NAME = re.compile(r"KDSKILLS_[A-Z0-9_]+")
#: Not variables: streams of the bus, names that tests make wrong on purpose, and words of documentation.
NO_VARIABLES = {
    *("KDSKILLS_COMMANDS", "KDSKILLS_RESULTS", "KDSKILLS_ANSWERS", "KDSKILLS_JOBS__NAME", "KDSKILLS_JOBS__SLOTZ"),
    *("KDSKILLS_ANY", "KDSKILLS_STATEDIR", "KDSKILLS_STREAM", "KDSKILLS_RUN_MARK"),
}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KDSKILLS_STATEDIR", "KDSKILLS_STATE_DIR"),
        ("KDSKILLS_DATABASE", "KDSKILLS_DATABASE_URL"),
        ("KDSKILLS_BUS__PROJECT", "KDSKILLS_BUS__PROJECTS"),
        ("KDSKILLS_JOBS_SLOTS", "KDSKILLS_JOBS__SLOTS"),
    ],
)
def test_a_name_of_no_setting_is_an_error(name: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped name is refused with the nearest one instead of being ignored."""
    monkeypatch.setenv(name, "x")
    for read in (Settings, Settings.load):
        with pytest.raises(SettingsInvalid) as refused:
            read()
        assert refused.value.details["errors"] == {name: f"there is no such setting; the nearest name is {near}"}


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("KDSKILLS_BUS__PROJECTS", "acme", "must be a list in JSON, such as KDSKILLS_BUS__PROJECTS='[\"local\"]'"),
        ("KDSKILLS_BUS__PROJECTS", '"acme"', "must be a list in JSON, such as KDSKILLS_BUS__PROJECTS='[\"local\"]'"),
        ("KDSKILLS_HOST_NAMES", "a,b", 'must be a list in JSON, such as KDSKILLS_HOST_NAMES=\'["one", "two"]\''),
        ("KDSKILLS_BUS__CHANNELS", "a=b", 'must be a table in JSON, such as KDSKILLS_BUS__CHANNELS=\'{"*": "*"}\''),
    ],
)
def test_a_list_that_is_no_json_has_an_example(
    name: str, value: str, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is no JSON names the variable, what it must be, and an example that works."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsInvalid) as refused:
        Settings.load()
    assert refused.value.details["errors"] == {name: example}
    assert name in refused.value.message
    monkeypatch.setenv(name, example.partition("='")[2].removesuffix("'"))
    assert Settings.load()


@pytest.mark.parametrize(
    ("name", "value"),
    [("KDSKILLS_BUS__SCOPES", '["everything"]'), ("KDSKILLS_POOL", "many"), ("KDSKILLS_JOBS__SLOTS", "x")],
)
def test_a_wrong_value_names_its_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that a setting does not take is told under the variable it came from."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsInvalid, match=name):
        Settings.load()


def test_every_example_is_what_it_says() -> None:
    """Examples of lists and tables are JSON of that kind, and are taken."""
    kinds = {name: kind_of(field) for name, field in setting_rows() if kind_of(field)}
    assert {kinds["bus.channels"], kinds["bus.projects"]} == {"table", "list"}
    for name, field in setting_rows():
        if kind_of(field):
            assert isinstance(json.loads(example_of(field)), dict if kind_of(field) == "table" else list), name


def test_tables_and_other_variables_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole table, one entry of a table, and variables that are no settings are taken."""
    monkeypatch.setenv("KDSKILLS_BUS", '{"concurrency": 3}')
    monkeypatch.setenv("KDSKILLS_MCP_TOKEN_ACME", "x")
    monkeypatch.setenv("KDSKILLS_CHAOS", "full")
    assert Settings.load().bus.concurrency == 3


def test_one_list_has_every_name_of_the_repository(repo: Path) -> None:
    """Whatever variable code, tests, scripts and pages name is in the one list."""
    known = known_variables() | NO_VARIABLES | {variable_of(name) for name, _ in setting_rows()}
    for top in ("kdskills", "runtime", "tests", ".ci", "docs"):
        for path in sorted((repo / top).rglob("*")):
            if not path.is_file() or path.suffix not in {".py", ".md", "", ".sh"}:
                continue
            names = set(NAME.findall(path.read_text(encoding="utf-8", errors="replace")))
            unknown = {name for name in names - known if not name.endswith("_") and not name.startswith(OTHER_PREFIXES)}
            assert unknown <= {"KDSKILLS_DATABASE", "KDSKILLS_BUS__PROJECT", "KDSKILLS_JOBS_SLOTS"}, path
