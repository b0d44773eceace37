"""What starting the command line loads: names first, models and rooms when a command needs them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kdskills.app import Host, Settings, operations
from kdskills.app.operations import OPERATIONS
from kdskills.app.operations.table import Operation, Shipped
from kdskills.app.plugins import plugin_manager

ROOT = Path(__file__).parents[3]
HELLO = ROOT / "bundles" / "hello"
HEAVY = {"pydantic_ai", "sqlalchemy", "alembic", "fastapi", "starlette", "nats", "mcp", "obstore", "docker"}

#: Parts of the Host that functions know by a protocol.
LOOSE = {("Wiring", "wiring"), ("Mapping", "operations")}

#: Runs a command and says on the last line of stderr what it loaded.
LOADED = """
import json, sys
from kdskills.doors.cli import main
sys.argv[0] = "kdskills"
try:
    main()
except SystemExit as ended:
    code = ended.code
print("\\n" + json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def run(code: str, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "COLUMNS": "100", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def loaded(*words: object, **env: str) -> tuple[int, set[str], str]:
    """Run a command; return its exit code, the modules it loaded, and what it printed."""
    done = run(LOADED, *words, **env)
    assert done.stderr, done
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return int(code or 0), set(modules), done.stdout


@pytest.mark.parametrize(
    "words", [("--help",), ("jobs", "--help"), ("tool", "--help"), ("run", "--help")], ids="-".join
)
def test_help_loads_nothing_that_work_needs(words):
    """Printing help loads neither settings nor a Host nor any room below it, whatever command it is about."""
    code, modules, printed = loaded(*words)
    rooms = {
        "kdskills.app.host",
        "kdskills.app.settings",
        "kdskills.execution",
        "kdskills.jobs",
        "kdskills.session",
        "kdskills.turn",
    }
    assert (code, modules & (HEAVY | rooms), "Usage" in printed) == (0, set(), True)


@pytest.mark.parametrize("words", [("--help",), ("token", "--help"), ("mcp", "--help")], ids="-".join)
def test_help_of_a_group_builds_no_model(words):
    """Commands are listed by one sentence each: no model of an operation is imported."""
    code, modules, printed = loaded(*words)
    assert (code, "kdskills.app.operations.models" in modules, "Usage" in printed) == (0, False, True)


@pytest.mark.parametrize("words", [("list", HELLO), ("why", "hello", "-b", HELLO)], ids=lambda words: words[0])
def test_looking_at_a_bundle_loads_no_service(words):
    """A command that only reads a bundle loads nothing of the service, of background work or of models."""
    code, modules, _ = loaded(*words)
    rooms = {
        "kdskills.app.work",
        "kdskills.jobs.client",
        "kdskills.session.runtime",
        "kdskills.solver",
        "kdskills.remote",
    }
    assert (code, modules & (HEAVY | rooms)) == (0, set())


def test_naming_operations_loads_no_models():
    """Name, scope and the locality of every operation are known before the first model is built."""
    code = """
import json, sys
from kdskills.app.operations import OPERATIONS
facts = [(o.name, o.scope, o.local, o.reads, o.ui_allowed) for o in OPERATIONS.values()]
print(json.dumps([len(facts), "pydantic" in sys.modules]))
"""
    assert json.loads(run(code).stdout) == [len(OPERATIONS), False]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_row_finds_its_implementation(name):
    """What a row promises is there: models, codes, a coroutine function, and one sentence of summary."""
    row = OPERATIONS[name]
    assert isinstance(row, Operation)
    assert (row.name, row.summary.endswith("."), callable(row.run)) == (name, True, True)
    assert row.input.model_json_schema()["type"] == row.output.model_json_schema()["type"] == "object"
    assert [code for code in row.errors if not isinstance(code, str)] == []


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_function_gets_what_its_parameters_name(name, tmp_path):
    """Every parameter but those of the call is an attribute of the Host, of the type the function expects."""
    host = Host(Settings(state_dir=tmp_path), entry_points=False)
    function = OPERATIONS[name].run.function
    for parameter, annotation in function.__annotations__.items():
        if parameter not in {"arguments", "context", "return"}:
            part = host if parameter == "host" else getattr(host, parameter)
            kinds = {kind.__name__ for kind in type(part).__mro__}
            word = annotation.partition("[")[0]
            assert word in kinds or (word, parameter) in LOOSE or (word == "Callable" and callable(part)), parameter


def test_no_two_rows_share_a_name():
    """The table is made from rows by name: a double would vanish in silence."""
    assert len(operations._ROWS) == len(OPERATIONS)


def test_the_table_cannot_be_changed():
    """Neither the table nor a row: every door of the process reads them."""
    with pytest.raises(TypeError):
        OPERATIONS["acme.new"] = OPERATIONS["skills.list"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        OPERATIONS["skills.list"].scope = "admin"  # type: ignore[misc]


def test_a_row_has_no_other_attributes():
    """What is not of an operation is an AttributeError with its name, also for what copies and inspects objects."""
    row = Shipped("acme.x", None, "showing:list_skills", profile="operator")
    with pytest.raises(AttributeError, match="nonsense"):
        row.nonsense  # noqa: B018  # the access is the test
    assert copy.copy(OPERATIONS["skills.why"]) == OPERATIONS["skills.why"]


def test_many_threads_get_one_implementation():
    """Threads that ask a fresh row for its parts at the same time get the same ones."""
    row = Shipped("acme.x", "Do it.", "showing:list_skills", profile="operator")
    gate, seen = threading.Barrier(8, timeout=60), []

    def ask() -> None:
        gate.wait()
        seen.append((row.input, row.output, row.run))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 8
    assert set(seen) == {(row.input, row.output, row.run)}


def test_models_for_plugins_are_names_of_the_room():
    """Plugins write their operations with `Input`, `Output` and `Finding`; other names are an AttributeError."""
    from kdskills.app.operations import Finding, Input, Output

    assert issubclass(Finding, Output)
    assert Input.model_config["extra"] == "forbid"
    with pytest.raises(AttributeError, match="Nothing"):
        operations.Nothing  # noqa: B018  # the access is the test


def test_shipped_plugins_bring_no_commands():
    """The command line without installed plugins asks none for commands; it may, because shipped ones have none."""
    hook = plugin_manager(entry_points=False).hook.kdskills_register_commands
    assert hook.get_hookimpls() == []


@pytest.fixture
def site(tmp_path):
    """A folder with an installed plugin that brings the command `ping`."""
    (tmp_path / "acme_ping.py").write_text(
        "from kdskills.hooks import hookimpl\n\n\n@hookimpl\ndef kdskills_register_commands(cli):\n"
        "    @cli.command()\n    def ping():\n        'Answer.'\n        print('pong')\n"
    )
    info = tmp_path / "acme_ping-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ping\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kdskills]\nacme = acme_ping\n")
    return tmp_path


def test_installed_plugins_bring_commands(site):
    """A plugin's command is in the help and runs; with entry points switched off it is not known."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    assert "ping" in loaded("--help", PYTHONPATH=path)[2]
    code, _, printed = loaded("ping", PYTHONPATH=path)
    assert (code, printed) == (0, "pong\n")
    assert loaded("ping", PYTHONPATH=path, KDSKILLS_ENTRY_POINTS="false")[0] == 2


def test_help_is_printed_though_settings_are_broken():
    """Who looks for help gets it; the command itself still stops with the operator's exit code."""
    broken = {"KDSKILLS_DRAIN_S": "soon"}
    assert loaded("list", "--help", **broken)[0] == 0
    code, _, printed = loaded("list", HELLO, "--json", **broken)
    assert (code, json.loads(printed)["error"]["code"]) == (4, "settings_invalid")
