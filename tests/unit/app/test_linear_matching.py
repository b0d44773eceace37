"""Patterns and hostile texts: whoever gives either cannot keep this process busy.

No time is measured: each text is so long that work which grows with its square would never end within a test's limit.
"""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from kdskills.app.logs import without_secrets
from kdskills.app.operations.work_run import Ready
from kdskills.errors import BadRequest
from kdskills.execution.check import compile_glob
from kdskills.jobs.companion import LineFinder
from kdskills.jobs.exchange import check_service
from kdskills.jobs.model import OnPattern, ServiceSpec
from kdskills.models.cassette import stable_text
from kdskills.remote.dispatch.payloads import redact
from kdskills.remote.ports import CatalogError
from kdskills.remote.schemas.checks import checked_schema, faults
from kdskills.skills.fields import _TOOL_NAME
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import _split, trim_body
from kdskills.skills.refs import compile_rules
from kdskills.solver.claims import claimed_files, claimed_successes
from kdskills.solver.events import CallRecord
from kdskills.solver.turn_tools import extract_code

MANY = 300_000
HOSTILE = ("(a+)+$", "^(a|a)+$", "(a|aa)+$", "([a-z]+)*1", "(.*a){12}$")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", HOSTILE)
def test_readiness_is_looked_for_in_linear_time(pattern: str) -> None:
    """A pattern that takes a backtracking engine for ever is through a long line at once."""
    assert LineFinder(pattern).feed(b"a" * 60_000 + b"!\n") is False
    assert LineFinder(pattern).feed(b"aaaaaaaaaaaaaa1\naaaaaaaaaaaaaa\n") is True


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(", "(a{1000}){1000}"])
def test_patterns_without_linear_matching_are_refused(pattern: str) -> None:
    """Look-around, references back and giant repetitions are refused with the call."""
    with pytest.raises(ValidationError, match="linear time"):
        Ready(pattern=pattern)
    with pytest.raises(BadRequest, match=r"ready\.pattern"):
        check_service(ServiceSpec(ready=OnPattern(pattern=pattern)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", HOSTILE)
def test_schemas_are_checked_in_linear_time(pattern: str) -> None:
    """Patterns of a remote skill's schema match values and names of properties in linear time."""
    text = "a" * 5000 + "!"
    inner = {"type": "string", "pattern": pattern}
    schema = {
        "type": "object",
        "properties": {"x": inner},
        "patternProperties": {pattern: {}},
        "additionalProperties": False,
    }
    assert checked_schema(schema, "a schema") == schema
    assert len(faults(schema, {"x": text, text: 1})) == 2


def test_words_of_faults_are_the_validators() -> None:
    """Values that do not fit have the words they had."""
    schema = {
        "properties": {"x": {"pattern": "^b"}},
        "patternProperties": {"^y": {"type": "string"}},
        "additionalProperties": False,
    }
    assert faults(schema, {"x": "a", "y1": 1, "z": 1}) == [
        "$: Additional properties are not allowed ('z' was unexpected)",
        "$.x: 'a' does not match '^b'",
        "$.y1: 1 is not of type 'string'",
    ]
    more = {"patternProperties": {"^y": {}}, "additionalProperties": {"type": "string"}}
    assert faults(more, {"y": 1, "z": 1}) == ["$.z: 1 is not of type 'string'"]


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(?=a)"},
        {"patternProperties": {r"(a)\1": {}}},
        {"patternProperties": {"a": {}}, "unevaluatedProperties": False},
    ],
)
def test_schemas_without_linear_matching_are_refused(schema: dict) -> None:
    """A schema whose patterns no engine matches in linear time is refused where it is registered."""
    with pytest.raises(CatalogError, match=r"linear time|not supported"):
        checked_schema(schema, "a schema")


@pytest.mark.timeout(60)
def test_globs_are_matched_in_linear_time() -> None:
    """Globs of outputs and rules of a policy with many stars are through a long name at once."""
    stars, name = "*a" * 100 + "b", "a" * 10_000
    assert compile_glob(stars).matches((name,)) is False
    assert compile_rules((f"public.{stars}",), bare="public").match(f"public.{name}") is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "a-" * MANY,
        "token" * MANY,
        "token " * MANY,
        "bearer" * MANY,
        "://a:" * MANY,
        "kd_" * MANY,
        "/a" * MANY,
        "token=" * MANY,
    ],
)
def test_secrets_are_masked_in_linear_time(text: str) -> None:
    """Log lines, errors of handlers and recordings of any text are looked through at once."""
    assert without_secrets(text)
    assert redact(text, {})
    assert stable_text(text + " /kdskills-turn-1").endswith(" <turn>")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["```x\n" * MANY, "```\n" * MANY, "`" * MANY, "```" + "a" * MANY])
def test_code_is_found_in_linear_time(text: str) -> None:
    """Fenced code is found at once in what a model wrote, whatever it wrote."""
    assert isinstance(extract_code(text), str)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "I wrote " + "a.txt " * 50_000,
        "I wrote " + "a/" * MANY,
        "I wrote x.md from" + " " * MANY + "b.md",
        "x.md was" + " aly" * MANY,
        "saved to " * MANY,
        "```\n~~~\n" * MANY,
        "I wrote:\n" + "- a.md\n" * 50_000,
        "a." * MANY,
    ],
)
def test_claims_are_found_in_linear_time(text: str) -> None:
    """Files that an answer says were written are looked for at once, whatever a model wrote."""
    assert isinstance(claimed_files(text), tuple)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "computed " * MANY,
        "I ran x.py " * 50_000,
        "x.py " * MANY,
        "x" * MANY + ".py",
        "I " + "a" * MANY,
        "-" * MANY,
        "was aly" * MANY,
    ],
)
def test_successes_are_found_in_linear_time(text: str) -> None:
    """What an answer says succeeded is looked for at once, whatever a model wrote or called."""
    command = json.dumps({"command": text})
    calls = [CallRecord(id="c", tool="exec.shell", arguments=json.dumps({"command": "x.py"}), ok=False, error="e")]
    calls.append(CallRecord(id="d", tool="exec.shell", arguments=command, ok=False, error="e"))
    assert isinstance(claimed_successes(text, calls), tuple)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    ["---\n" * MANY, "---" + " " * MANY, "\n" * MANY, "--- \t" * MANY, " \t" * MANY, "---\na: b\n" + "--- x\n" * MANY],
)
def test_files_are_split_in_linear_time(text: str) -> None:
    """The head of a skill file is found at once, whatever the file holds."""
    _split(text.encode(), FileFindings("lenient", "SKILL.md"))
    trim_body(text)
    assert len(_TOOL_NAME.findall("(" * MANY + text)) < len(text) + MANY


def test_masks_are_as_before() -> None:
    """Secrets are masked with the same words before them."""
    assert without_secrets("my-api_key=abcdef and db.password = abcdefgh") == "my-api_key=*** and db.password = ***"
    assert without_secrets("nothing to hide: here") == "nothing to hide: here"
