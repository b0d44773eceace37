"""What a view finds: ranking, policy, pages, hostile texts and questions, and what an author is told."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.search import SearchHit, SearchResult
from kdskills.search import texts as texts_module
from kdskills.turn import SkillView
from tests.unit.search.conftest import Build, Write


def ids(view: SkillView, query: str, **options: int | str) -> list[str]:
    """Return the full ids found."""
    return [hit.full_id for hit in view.search(query, **options).hits]  # type: ignore[arg-type]  # options of many types


@pytest.fixture
def office(write: Write) -> None:
    """Write a few skills of an office."""
    write("office.invoice-reader", "Reads invoices and extracts amounts.", body="# When to use\n\nFor scanned bills.")
    write("office.meeting-minutes", "Writes minutes of a meeting.", body="List decisions and who does what.")
    write(
        "office.trip-planner",
        "Plans business trips.",
        body="Compare trains and flights. Minutes between trains matter.",
    )
    write("code.reviewer", "Reviews pull requests.", body="Look for security problems in a pull request.")


def test_the_skill_whose_body_says_it_is_found(office: None, build: Build) -> None:
    """Words of the body find a skill whose name and description do not have them."""
    assert ids(build().view(), "something for scanned bills") == ["office.invoice-reader"]


def test_names_count_more_than_bodies(office: None, build: Build) -> None:
    """A word of the name weighs more than the same word in another skill's body."""
    assert ids(build().view(), "minutes") == ["office.meeting-minutes", "office.trip-planner"]


def test_a_hit_says_what_it_is_and_why(office: None, build: Build) -> None:
    """A hit has the number and name of its view, what loading costs, and the words that matched by field."""
    view = build().view()
    result = view.search("Review of a pull request")
    (hit,) = result.hits
    assert isinstance(hit, SearchHit)
    assert (hit.full_id, hit.name, hit.description) == ("code.reviewer", "reviewer", "Reviews pull requests.")
    assert view.short_ids[hit.short_id] == hit.full_id
    assert hit.tokens == view.listed[hit.full_id].tokens
    assert hit.why["description"] == ("Review", "pull", "request")
    assert hit.why["body"] == ("pull", "request")
    assert "lead" not in hit.why
    assert (result.total, result.more, result.abstained, result.diagnostics) == (1, False, False, ())


def test_neighbours_of_the_question_decide_between_equals(write: Write, build: Build) -> None:
    """Of two skills with the same words the one that has them side by side is better."""
    write("a.one", "Helps.", body="The heart is well. Attack the rate of failure in a queue.")
    write("a.two", "Helps.", body="The heart rate is well. Failure of a queue. Attack the.")
    assert ids(build().view(), "heart rate") == ["a.two", "a.one"]


def test_metadata_scripts_and_references_are_searched(write: Write, build: Build) -> None:
    """Tags, keywords, triggers and aliases, names and first lines of scripts, titles of references."""
    write("m.tags", "One.", tags=["kayak"])
    write("m.nested", "Two.", metadata={"keywords": "canoe", "triggers": "raft"})
    write("m.alias", "Three.", aliases=["gondola"])
    write("m.script", "Four.", files={"scripts/count_ferries.py": '"""Counts the vaporetto lines."""\nx = 1\n'})
    write("m.shell", "Five.", files={"scripts/run.sh": "#!/bin/sh\n# Starts the hovercraft\nexit 0\n"})
    write("m.reference", "Six.", files={"references/a.md": "# Submarine handbook\n\ntext"})
    view = build().view()
    expected = {
        "kayak": "m.tags",
        "canoe": "m.nested",
        "raft": "m.nested",
        "gondola": "m.alias",
        "ferries": "m.script",
        "vaporetto": "m.script",
        "hovercraft": "m.shell",
        "submarine": "m.reference",
    }
    assert {word: ids(view, word) for word in expected} == {word: [full_id] for word, full_id in expected.items()}


def test_equal_scores_are_ordered_by_id(write: Write, build: Build) -> None:
    """Skills of the same words stand in the order of their ids, on every page."""
    for number in random.Random(3).sample(range(40), 40):
        write(f"same.s{number:02}", "Sorts letters.")
    view = build().view()
    assert ids(view, "letters", limit=40) == [f"same.s{number:02}" for number in range(40)]
    assert ids(view, "letters", limit=7, offset=14) == [f"same.s{number:02}" for number in range(14, 21)]


def test_pages_join_to_the_whole(write: Write, build: Build) -> None:
    """Pages of any size give the same order as one page, beyond the part that is ordered anew by pairs, too."""
    dice = random.Random(5)
    for number in range(250):
        write(f"p.s{number:03}", "Weighs fruit.", body=" ".join(dice.choices(["apple", "pear", "plum", "fig"], k=30)))
    view = build().view()
    whole = ids(view, "apple pear plum", limit=1000)
    assert len(whole) == 250
    assert [
        found for start in range(0, 250, 33) for found in ids(view, "apple pear plum", limit=33, offset=start)
    ] == whole
    last = view.search("apple pear plum", limit=10, offset=245)
    assert (len(last.hits), last.total, last.more) == (5, 250, False)
    assert view.search("apple", limit=10).more


def test_a_namespace_narrows_without_changing_scores(office: None, build: Build) -> None:
    """Hits of one namespace have the scores they have among all."""
    view = build().view()
    everything = {hit.full_id: hit.score for hit in view.search("minutes of a pull request").hits}
    office_hits = view.search("minutes of a pull request", namespace="office")
    assert {hit.full_id: hit.score for hit in office_hits.hits} == {
        full_id: score for full_id, score in everything.items() if full_id.startswith("office.")
    }
    assert office_hits.total == 2


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": 1001}, {"offset": -1}, {"by": "nobody"}])
def test_options_out_of_range_are_refused(office: None, build: Build, options: dict[str, int]) -> None:
    """A page nobody can have is an error of the caller."""
    with pytest.raises(ValueError, match="limit is 1 to"):
        build().view().search("x", **options)  # type: ignore[arg-type]  # wrong on purpose


# ---- policy ------------------------------------------------------------------------------------------------------


QUESTIONS = (
    "minutes of a meeting",
    "pull request security",
    "invoice",
    "quantum",
    "plans trips by trains and flights",
)
OUT_OF_REACH = {
    "denied": ({"w": {"disabled": ["secret.*"]}}, {}),
    "denied to all": ({"*": {"disabled": ["secret.*"]}}, {}),
    "not enabled": ({"w": {"enabled": ["office.*", "code.*"]}}, {}),
    "hidden": ({}, {"agent_disclosure": "hidden"}),
    "for others": ({}, {"include_for": ["nobody"]}),
    "for people": ({}, {"disable-model-invocation": True}),
    "gated": ({}, {"files": {"tools.yaml": "- {id: lab.quantum, required: true}\n"}}),
    "of imports refused": ({"w": {"imports": "strict"}}, {"imports": ["nobody.nothing"]}),
    "invalid": ({}, {"description": ""}),
    "with broken tools": ({}, {"files": {"tools.yaml": "tools: 7\n"}}),
}


@pytest.mark.parametrize(("agents", "front"), OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_what_a_consumer_may_not_have_changes_nothing_it_sees(
    office: None, write: Write, build: Build, agents: dict[str, Any], front: dict[str, Any]
) -> None:
    """A hundred skills out of reach change no hit, score, total or word of an answer."""
    before = [build(agents).view("w", tools=["x"]).search(query) for query in QUESTIONS]
    body = "Minutes of a meeting, pull request, security, invoice, trains, flights, quantum. " * 5
    for number in range(100):
        write(f"secret.s{number}", body=body, **({"description": "Minutes and invoices."} | front))
    view = build(agents).view("w", tools=["x"])
    assert [view.search(query) for query in QUESTIONS] == before
    assert len(view.state.snapshot.skills) + len(view.state.snapshot.invalid) == 104


WORD = st.sampled_from(
    ["minutes", "meeting", "pull", "request", "security", "invoice", "trains", "quantum", "office", "code", "reviewer"]
)


@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(
    reason=st.sampled_from(sorted(OUT_OF_REACH)),
    secrets=st.lists(st.lists(WORD, max_size=30).map(" ".join), min_size=1, max_size=8),
    question=st.lists(WORD, min_size=1, max_size=8).map(" ".join),
)
def test_no_words_out_of_reach_change_an_answer(
    office: None, write: Write, build: Build, reason: str, secrets: list[str], question: str
) -> None:
    """Whatever skills out of reach say, however many they are and why, answers stay equal, page by page."""
    agents, front = OUT_OF_REACH[reason]

    def ask() -> list[SearchResult]:
        view = build(agents).view("w", tools=["x"])
        whole = [view.search(question, limit=limit, offset=offset) for limit, offset in ((10, 0), (1, 0), (2, 1))]
        return [*whole, view.search(question, namespace="office"), view.search(question, namespace="secret")]

    before = ask()
    folders = [
        write(f"secret.s{number}", body=text, **({"description": f"Says {text}."} | front))
        for number, text in enumerate(secrets)
    ]
    after = ask()
    for folder in folders:
        shutil.rmtree(folder)
    assert after == before


def test_words_of_skills_out_of_reach_take_the_way_of_unknown_words(
    office: None, write: Write, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question of words that only denied skills have reads the same rows of the index as one of words nobody has."""
    for number in range(50):
        write(f"secret.s{number}", "Bends quarks.", body="Quarks in a chromodynamic lattice. " * 20)
    view = build({"w": {"disabled": ["secret.*"]}}).view("w")
    view.search("begin")
    index = view.state.search_index()
    original, asked = index._blobs, []

    def noting(statement: str, keys: Sequence[int]) -> dict[int, bytes]:
        asked.append((statement, len(keys)))
        return original(statement, keys)

    monkeypatch.setattr(index, "_blobs", noting)
    denied = view.search("bend quarks in a chromodynamic lattice")
    ways, asked[:] = list(asked), []
    assert denied == view.search("bind quirks in a chromosomic latrine")
    assert (denied.hits, denied.total, denied.abstained) == ((), 0, False)
    assert asked == ways


def test_only_what_the_asker_may_start_is_found(write: Write, build: Build) -> None:
    """What a model is shown but a person may not start is left out when a person asks."""
    write("a.both", "Sorts letters.")
    write("a.models", "Sorts letters.", **{"user-invocable": False})
    write("a.people", "Sorts letters.", **{"disable-model-invocation": True})
    view = build().view()
    assert ids(view, "letters") == ["a.both", "a.models"]
    assert ids(view, "letters", by="user") == ["a.both"]


def test_a_skill_found_is_one_the_gate_grants(office: None, write: Write, build: Build) -> None:
    """Every hit resolves, by its full id, short id and name."""
    write("code.denied", "Reviews pull requests.")
    view = build({"w": {"disabled": ["denied", "code.denied"]}}).view("w", tools=["x"])
    hits = view.search("minutes invoices trips pull requests").hits
    assert len(hits) == 4
    for hit in hits:
        assert {view.resolve(ref).full_id for ref in (hit.full_id, hit.short_id, hit.name)} == {hit.full_id}


def test_what_is_dropped_of_the_best_hundred_leaves_no_gap(write: Write, build: Build) -> None:
    """Hits after the hundredth move up behind what an order left, page by page; the query handed over is bounded."""
    for number in range(130):
        write(f"n.s{number:03}", "Sorts letters.")
    queries: list[str] = []

    def order(consumer: str | None, query: str, hits: Sequence[SearchHit]) -> tuple[Sequence[SearchHit], tuple[()]]:
        queries.append(query)
        return hits[97:], ()

    view = build(hit_order=order).view()
    left = [f"n.s{number:03}" for number in range(97, 130)]
    question = "letters" + " " * 5000
    assert ids(view, question, limit=33) == left
    assert ids(view, question, limit=20, offset=2) == left[2:22]
    last = view.search(question, limit=5, offset=30)
    assert ([hit.full_id for hit in last.hits], last.total, last.more) == (left[30:], 33, False)
    assert set(queries) == {question[:4000]}
    assert view.search("zyzzyva").hits == ()
    assert len(queries) == 3  # nobody is asked about nothing


# ---- nothing fits ------------------------------------------------------------------------------------------------


def test_a_question_no_skill_serves_finds_nothing(write: Write, build: Build) -> None:
    """Where the best is too weak the answer is empty and says so; where no word stands anywhere it is empty."""
    for number in range(60):
        write(f"n.s{number}", f"Tool number {number}.", body="The weather of a deployment. " + "cluster " * number)
    view = build().view()
    weak = view.search("what will the weather be like in Lisbon tomorrow afternoon and should I bring an umbrella")
    assert (weak.hits, weak.total, weak.more, weak.abstained) == ((), 0, False, True)
    nothing = view.search("zyzzyva")
    assert (nothing.hits, nothing.total, nothing.abstained) == ((), 0, False)


def test_one_word_of_a_name_is_enough(office: None, build: Build) -> None:
    """A question of one word is answered, however little one word can weigh."""
    assert ids(build().view(), "planner") == ["office.trip-planner"]


# ---- hostile -----------------------------------------------------------------------------------------------------

HOSTILE = [
    "",
    " ",
    '"',
    "'; DROP TABLE term; --",
    '"pull request" NEAR/2 security',
    "pull AND (request OR NOT)",
    "pull* ^request",
    "name:pull {name body}: request",
    "pull\x00request",
    "\x00",
    "\ud800pull\udfff request",
    "pull" * 300_000,
    "pull request " * 80_000,
    "🙂" * 5000 + " pull",
    "ﷺ" * 2000,
    " ".join(f"w{number}" for number in range(3000)),
    "a\u0301" * 3000,
    "\u202epull request",
    "[[" * 1000 + "{{pull}}",
    "%s %d {0} \\x00 \\u0000",
]


@pytest.mark.parametrize("query", HOSTILE, ids=range(len(HOSTILE)))
def test_no_question_is_a_command_or_an_error(office: None, build: Build, query: str) -> None:
    """Syntax of other engines, NUL, half characters and a megabyte of words find or find not."""
    result = build().view().search(query)
    assert result.total == len(result.hits) <= 4
    assert result.diagnostics == ()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(query=st.text(max_size=400))
def test_any_text_is_a_question(office: None, build: Build, query: str) -> None:
    """Any text has an answer, the same twice."""
    view = build().view()
    assert view.search(query) == view.search(query)


def test_without_a_package_it_needs_the_search_says_so(office: None, tmp_path: Path) -> None:
    """Where PyStemmer or SQLite is missing, as in an image made by others, the call is refused with a code, and nothing else is."""
    program = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from kdskills import SkillsSubsystem\nfrom kdskills.errors import KdskillsError\n"
        "view = SkillsSubsystem({}, bundle_root=sys.argv[2], index_dir=None).view()\n"
        "print(len(view.listed))\n"
        "for _ in range(2):\n"
        "    try: view.search('x')\n"
        "    except KdskillsError as error: print(error.code, error.details['module'])\n"
    )
    for module in ("Stemmer", "sqlite3"):
        command = [sys.executable, "-c", program, module, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("4\n" + f"search_unavailable {module}\n" * 2, "")


def test_repeating_words_raises_no_skill(write: Write, build: Build) -> None:
    """A skill that repeats what people ask for stands behind one that is about it, in body, description and name."""
    write("good.pdf-forms", "Fills in PDF forms.", body="Open the form, read its fields, fill them in, save the PDF.")
    write("bad.body", "Helps with everything.", body="fill pdf forms " * 20_000)
    write("bad.lead", "Helps with everything.", body="fill pdf forms " * 100)
    write("bad.description", "pdf forms fill " * 60)
    write("bad.words", "Helps.", tags=["pdf", "forms", "fill"] * 200)
    for number in range(30):
        write(f"other.s{number}", "Something else.", body="Fields of a form of a table.")
    assert ids(build().view(), "fill in pdf forms")[0] == "good.pdf-forms"


def test_a_megabyte_of_words_costs_what_64_kib_cost(write: Write, build: Build) -> None:
    """What stands beyond the first 64 KiB of a body is not read into the index."""
    write("big.one", "Big.", body="filler " * 9000 + "needle " * 100 + "filler " * 100_000)
    write("big.two", "Big.", body="filler " * 9362 + "needle")
    view = build().view()
    assert ids(view, "needle") == ["big.one"]
    assert "big.two" in ids(view, "filler")


def test_broken_texts_are_searched_as_far_as_they_go(write: Write, build: Build) -> None:
    """Bytes that are no UTF-8 in scripts, links, folders and FIFOs among them spoil nothing."""
    folder = write(
        "odd.one", "Odd.", files={"scripts/ok.py": "# finds the walrus\n", "references/a.md": "# Walrus book\n"}
    )
    (folder / "scripts" / "bytes.py").write_bytes(b"\xff\xfe# seal\n\x00")
    (folder / "scripts" / "link.py").symlink_to("/etc/passwd")
    (folder / "scripts" / "deeper").mkdir()
    os.mkfifo(folder / "scripts" / "fifo.py")
    (folder / "references" / "loop.md").symlink_to("loop.md")
    outside = write("odd.two", "Odd, too.")
    (outside / "scripts").symlink_to("/etc")
    view = build().view()
    assert ids(view, "walrus") == ["odd.one"]
    assert ids(view, "passwd") == ids(view, "root bash") == []


def test_a_folder_of_too_many_files_is_not_looked_into(write: Write, build: Build) -> None:
    """A skill with thousands of references costs the listing of a thousand names, and is found by the rest of it."""
    files = {f"references/r{number}.md": "# Walrus\n" for number in range(texts_module.MAX_ENTRIES + 1)}
    write("big.one", "Weighs ships.", body="Anchors.", files=files)
    write("small.one", "Weighs boats.", files={"references/deep/er/r.md": "# Walrus\n", "references/a.md": "# Seal\n"})
    view = build().view()
    assert ids(view, "walrus") == []
    assert (ids(view, "anchors"), ids(view, "seal")) == (["big.one"], ["small.one"])


def test_a_skill_that_is_gone_is_found_by_its_listing(write: Write, build: Build) -> None:
    """A file that vanished since discovery takes down nobody: the skill is found by name and description."""
    folder = write("gone.skill", "Counts penguins.", body="Also seals.")
    write("here.skill", "Counts seals.")
    view = build().view()
    (folder / "SKILL.md").unlink()
    assert ids(view, "penguins") == ["gone.skill"]
    assert ids(view, "seals") == ["here.skill"]
