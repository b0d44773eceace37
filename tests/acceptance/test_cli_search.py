"""Finding and listing skills at the command line: what people read at any width, pages, hostile words, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of an invoice reader and of thirty skills with much to say."""
    texts = {"office.invoice-reader": ("Reads invoices and extracts amounts.", "For scanned bills.")}
    for number in range(30):
        texts[f"press.desk-{number:02}"] = ("Keeps the calendar of a desk. " * 8, f"Tide table {'very ' * number}.")
    for full_id, (about, body) in texts.items():
        namespace, _, name = full_id.partition(".")
        folder = tmp_path / "b/skills" / namespace / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {about}\n---\n{body}\n")
    return tmp_path / "b"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_hit_is_two_lines_at_any_width(run: Run, bundle: Path, width: int) -> None:
    """One line says what was found and the words that matched, one what it does, cut to the width of the terminal."""
    done = run("search", bundle, "calendar", "tide", "-n", "3", COLUMNS=str(width))
    head, columns, *lines = done.stdout.splitlines()
    assert (head, columns.split()) == ("b for an anonymous consumer", ["skill", "score", "~tokens", "matched"])
    assert [line.split()[1] for line in lines[:6:2]] == ["press.desk-00", "press.desk-01", "press.desk-02"]
    assert {line.split("calendar")[0].strip() for line in lines[1:6:2]} == {"Keeps the"}
    assert all(len(line) <= max(width, 64) for line in lines[:6])
    if width >= 80:
        assert all(line.endswith("description: calendar; body: tide") for line in lines[:6:2])
    assert lines[6:] == ["3 hits of 30; for the next: --offset 3"]


def test_pages_join_to_the_whole(run: Run, answer: Callable[..., Any], bundle: Path) -> None:
    """The hint after a page leads to the next one, to the last, and to a plain word behind it."""
    whole = [hit["full_id"] for hit in answer("search", bundle, "tide", "-n", "100")["hits"]]
    pages = [answer("search", bundle, "tide", "-n", "12", "--offset", str(start)) for start in (0, 12, 24)]
    assert [hit["full_id"] for page in pages for hit in page["hits"]] == whole
    assert [(page["offset"], page["total"], page["more"]) for page in pages] == [
        (0, 30, True),
        (12, 30, True),
        (24, 30, False),
    ]
    assert run("search", bundle, "tide", "-n", "12", "--offset", "24").stdout.splitlines()[-1] == "hits 25 to 30"
    beyond = run("search", bundle, "tide", "--offset", "30")
    assert (beyond.returncode, beyond.stdout.splitlines()[1:]) == (1, ["no more hits: there are 30 in all"])


def test_nothing_says_what_to_try(run: Run, answer: Callable[..., Any], bundle: Path) -> None:
    """Exit code 1, why there is nothing, and the commands that help on: no word anywhere, or none that fits well enough."""
    done = run("search", bundle, "zyzzyva")
    assert (done.returncode, done.stderr) == (1, "")
    assert "nothing fits: no skill that was searched has any of these words" in done.stdout
    assert all(words in done.stdout for words in ("kdskills list --filter WORD", "kdskills why SKILL"))
    weak = "will it be the desk or an umbrella in Lisbon tomorrow afternoon with sunshine and a gentle breeze"
    assert "none fits well enough" in run("search", bundle, weak).stdout
    assert [answer("search", bundle, words)["abstained"] for words in ("zyzzyva", weak)] == [False, True]
    other = run("search", bundle, "invoices", "--namespace", "press")
    assert (other.returncode, "nothing fits" in other.stdout) == (1, True)


def test_words_are_words(run: Run, answer: Callable[..., Any], bundle: Path) -> None:
    """Syntax of engines and shells, options behind `--`, line feeds and a megabyte find or find not, without an error."""
    found = ["office.invoice-reader"]
    for words in (
        ['"invoices"', "NEAR/2", "amounts*"],
        ["--", "--invoices", "-amounts"],
        ["invoices\n\tamounts"],
        ["invoices", "';", "--", "amounts;"],
        ["invoices " * 110_000],
        ["name:invoices", "{}", "^amounts", "%"],
    ):
        done = run("search", bundle, "--json", *words)
        assert (done.returncode, done.stderr) == (0, ""), words[:2]
        assert [hit["full_id"] for hit in json.loads(done.stdout)["hits"]] == found
    assert [run("search", bundle, words).returncode for words in ("", " ", "!?", "the of and")] == [1] * 4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "usage"),
        (["x", "--limit", "0"], "usage"),
        (["x", "-n", "101"], "usage"),
        (["x", "--offset", "-1"], "usage"),
        (["x", "--offset", "many"], "usage"),
        (["x", "--nothing"], "usage"),
        (["a\udc80"], "bad_request"),
        (["x" * (1024 * 1024 + 1)], "bad_request"),
    ],
    ids=range(8),
)
def test_wrong_calls_end_with_2(run: Run, bundle: Path, words: list[str], code: str) -> None:
    """No words, numbers out of bounds, bytes that are no text: exit code 2 and a code, never a traceback."""
    done = run("search", bundle, *words, "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, code)


def test_hostile_skills_cannot_forge_lines(run: Run, bundle: Path) -> None:
    """Escapes, markup and line feeds of a description or of words reach no terminal."""
    folder = bundle / "skills/office/odd"
    folder.mkdir()
    text = 'name: odd\ndescription: "walrus \\e[2J [bold]x[/bold]\\nSK9  forged.skill  9.99"\n'
    (folder / "SKILL.md").write_text(f"---\n{text}---\nDo it.\n")
    done = run("search", bundle, "walrus", "[red]walrus", "\x1b[2J", COLUMNS="120")
    assert (done.returncode, "\x1b" in done.stdout, "[bold]x[/bold]" in done.stdout) == (0, False, True)
    assert [line for line in done.stdout.splitlines() if line.lstrip().startswith("SK9")] == []


# ---- list ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A bundle with a skill in each state, of different sizes."""
    fronts = {
        "a.zebra": ("Straße und Zebra", "word " * 300, ""),
        "a.listed": ("Reads PDF forms", "word", ""),
        "a.hush": ("Hidden forms", "word " * 50, "agent_disclosure: hidden\n"),
        "a.person": ("Forms for people", "word", "disable-model-invocation: true\n"),
        "a.denied": ("Reads PDF forms, denied", "word " * 20, ""),
        "a.invalid": ("", "word", ""),
    }
    for full_id, (about, body, front) in fronts.items():
        folder = tmp_path / "m/skills" / full_id.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {folder.name}\ndescription: {about}\n{front}---\n{body}\n")
    (tmp_path / "m/skills_descriptor.yaml").write_text("agents_config: {'*': {disabled: [a.denied]}}\n")
    return tmp_path / "m"


def test_list_is_sorted_as_asked(answer: Callable[..., Any], mixed: Path) -> None:
    """By id without an option; by tokens the dearest first; by name; by state from listed to invalid."""

    def ids(*options: str) -> list[str]:
        return [row["full_id"].removeprefix("a.") for row in answer("list", mixed, *options)["skills"]]

    by_id = ["denied", "hush", "invalid", "listed", "person", "zebra"]
    assert ids() == ids("--sort", "id") == by_id
    assert ids("--sort", "tokens") == ["zebra", "hush", "denied", "listed", "person", "invalid"]
    assert ids("--sort", "name") == ["invalid", "denied", "hush", "listed", "person", "zebra"]
    assert ids("--sort", "state") == ["listed", "zebra", "hush", "person", "denied", "invalid"]


def test_list_is_narrowed_as_asked(answer: Callable[..., Any], run: Run, mixed: Path) -> None:
    """All words must stand in id, name or description, in any case; a state stands alone or beside them."""

    def ids(*options: str) -> list[str]:
        found = answer("list", mixed, *options)
        rows = [row["full_id"] for row in found["skills"]]
        assert set(found["visible"]) <= set(rows)
        return [full_id.removeprefix("a.") for full_id in rows]

    assert ids("--filter", "FORMS pdf") == ["denied", "listed"]
    assert ids("--filter", "STRASSE") == ["zebra"]
    assert ids("--filter", "a. ze") == ["zebra"]
    assert ids("--filter", "pdf zebra") == []
    assert ids("--filter", '" * NEAR') == []
    states = {"listed": ["listed", "zebra"], "hidden": ["hush"], "unlisted": ["person"], "refused": ["denied"]}
    assert {state: ids("--state", state) for state in states} == states
    assert ids("--state", "invalid") == ["invalid"]
    assert ids("--state", "listed", "--filter", "forms", "--sort", "tokens") == ["listed"]
    assert run("list", mixed, "--filter", "zebra").stdout.count("a.") == 1


@pytest.mark.parametrize(
    "options", [("--sort", "size"), ("--state", "gone"), ("--filter", "a\udc80"), ("--filter", "x" * 4001)]
)
def test_list_refuses_what_it_does_not_know(answer: Callable[..., Any], mixed: Path, options: tuple[str, str]) -> None:
    """Another order or state, bytes that are no text and a filter without end are wrong calls."""
    assert answer("list", mixed, *options)["error"]["code"] == "bad_request"
