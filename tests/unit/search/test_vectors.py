"""Searching by meaning, too: both orders are fused, vectors are made once, and no embedder harms a search."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kdskills.errors import Diagnostic
from kdskills.search import Embedder, EmbedderGuard, vectors
from kdskills.turn import SkillView
from tests.unit.search.conftest import Build, Write

MEANINGS = (("car", "automobile", "vehicle"), ("cat", "feline"), ("rain", "weather", "umbrella"))


class Meanings:
    """Counts words of one meaning, in one number a meaning; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return how often each meaning stands in each text."""
        self.asked.append(list(texts))
        return [[float(sum(text.lower().count(word) for word in words)) for words in MEANINGS] for text in texts]

    @property
    def texts(self) -> list[str]:
        """The texts of skills it was asked for: questions are asked alone, and have one line."""
        return [text for texts in self.asked for text in texts if "\n" in text]


Make = Callable[..., SkillView]


@pytest.fixture
def garage(write: Write) -> None:
    """Write a few skills."""
    write("home.driver", "Starts the automobile.", body="Turn the key.")
    write("home.vet", "Heals a feline.", body="Be gentle.")
    write("home.forecast", "Tells the weather.", body="Look at the sky.")
    write("home.painter", "Paints walls.", body="Two coats.")


@pytest.fixture
def make(build: Build) -> Make:
    """Return a view whose searches ask an embedder: `make(embedder, {"writer": {...}}, "writer")`."""

    def view(embedder: Any, agents: dict[str, Any] | None = None, consumer: str | None = None) -> SkillView:
        return build(agents, embedder=EmbedderGuard("mine:x", lambda: embedder)).view(consumer)

    return view


def ids(view: SkillView, query: str, **options: Any) -> list[str]:
    """Return the full ids found."""
    return [hit.full_id for hit in view.search(query, **options).hits]


def codes(findings: Iterable[Diagnostic]) -> list[str]:
    """Return the codes of diagnostics."""
    return [finding.code for finding in findings]


def test_a_skill_is_found_by_meaning(garage: None, make: Make, build: Build) -> None:
    """A question that shares no word with a skill finds it, with an empty `why`; words alone find nothing."""
    assert ids(build().view(), "my car") == []
    view = make(Meanings())
    first = view.search("my car").hits[0]
    assert (first.full_id, dict(first.why)) == ("home.driver", {})
    result = view.search("my car")
    assert (result.total, result.more, result.abstained, result.diagnostics) == (3, False, False, ())


def test_both_orders_count(garage: None, make: Make) -> None:
    """A skill first in both orders is first; scores are sums of reciprocal ranks; equal ones stand by id."""
    hits = make(Meanings()).search("start the automobile, paint walls").hits
    assert hits[0].full_id == "home.driver"
    assert hits[0].score == pytest.approx(1 / 61 + 1 / 62, abs=1e-3)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert hits[0].why["description"] == ("start", "automobile")


def test_pages_and_namespaces_are_cut_of_the_fused_order(garage: None, write: Write, make: Make) -> None:
    """Pages join to the whole, and a namespace changes no score."""
    write("other.car", "A vehicle.", body="Wheels.")
    view = make(Meanings())
    whole = view.search("a car on a wall")
    pages = [hit for start in range(whole.total) for hit in view.search("a car on a wall", limit=1, offset=start).hits]
    assert tuple(pages) == whole.hits
    other = view.search("a car on a wall", namespace="other")
    assert [(hit.full_id, hit.score) for hit in other.hits] == [
        (hit.full_id, hit.score) for hit in whole.hits if hit.full_id == "other.car"
    ]
    assert other.total == 1


def test_what_is_out_of_reach_is_neither_embedded_nor_counted(garage: None, write: Write, make: Make) -> None:
    """A denied skill is sent to no embedder, and changes no answer."""
    agents = {"w": {"disabled": ["secret.*"]}}
    before = make(Meanings(), agents, "w").search("my car")
    for number in range(20):
        write(f"secret.car{number}", "A car, an automobile, a vehicle.")
    embedder = Meanings()
    assert make(embedder, agents, "w").search("my car") == before
    assert embedder.texts == []


def test_vectors_are_made_once(garage: None, write: Write, make: Make, tmp_path: Path) -> None:
    """Another process embeds the question alone, and after a change what changed; the file is closed to others."""
    assert ids(make(Meanings()), "my car")[0] == "home.driver"
    again = Meanings()
    assert ids(make(again), "my car")[0] == "home.driver"
    assert again.asked == [["my car"]]
    write("home.driver", "Parks the automobile.", body="Pull the brake.")
    changed = Meanings()
    make(changed).search("my car")
    assert changed.texts == ["driver\nParks the automobile.\nPull the brake."]
    (file,) = (tmp_path / "index").glob("*.vectors")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_a_damaged_cache_is_made_again(garage: None, make: Make, tmp_path: Path, damage: bytes | None) -> None:
    """A file that is cut, foreign or changed inside is never believed; the answer is the same."""
    answer = make(Meanings()).search("my car").hits
    (file,) = (tmp_path / "index").glob("*.vectors")
    data = file.read_bytes()
    row = data.rindex(b"\x00\x00\x80\x3f")  # a one, as a number of 32 bits
    file.write_bytes(data[:row] + b"\x00\x00\x00\x40" + data[row + 4 :] if damage is None else damage)
    embedder = Meanings()
    result = make(embedder).search("my car")
    assert (result.hits, codes(result.diagnostics)) == (answer, ["index_ignored"])
    assert len(embedder.texts) == 4


def test_without_a_folder_vectors_live_as_long_as_the_process(garage: None, build: Build, tmp_path: Path) -> None:
    """No file is written, and a second question embeds no skill."""
    embedder = Meanings()
    view = build(index_dir=None, embedder=EmbedderGuard("mine:x", lambda: embedder)).view()
    assert ids(view, "my car")[0] == ids(view, "a car")[0] == "home.driver"
    assert (len(embedder.texts), list(tmp_path.rglob("*.vectors"))) == (4, [])


class Answers:
    """Gives one answer to every question."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0

    def embed(self, texts: Sequence[str]) -> Any:
        """Return or raise the answer, made for so many texts."""
        self.calls += 1
        answer = self.answer(len(texts)) if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _endless() -> Iterator[float]:
    while True:
        yield 1.0


HOSTILE: dict[str, Any] = {
    "none": None,
    "text": "text",
    "mapping": {"data": []},
    "number": 5,
    "too few": [],
    "too many": lambda count: [[1.0]] * (count + 1),
    "endless rows": lambda count: iter(lambda: [1.0], None),
    "endless numbers": lambda count: [_endless()] * count,
    "empty": lambda count: [[]] * count,
    "words": lambda count: [["a", "b"]] * count,
    "not finite": lambda count: [[float("nan"), 1.0]] * count,
    "infinite": lambda count: [[float("inf"), 1.0]] * count,
    "too big": lambda count: [[1.7e308, 1.7e308]] * count,
    "raises": RuntimeError("no route \ud800 " + "x" * 10_000),
    "no JSON": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "exits": SystemExit(3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_embedder_that_fails_leaves_words(garage: None, make: Make, build: Build, name: str) -> None:
    """Whatever it answers or raises, the answer is that of words, a diagnostic says why, and it is left alone for a minute."""
    embedder = Answers(HOSTILE[name])
    view = make(embedder)
    result = view.search("paint the walls")
    assert result.hits == build().view().search("paint the walls").hits
    (finding,) = result.diagnostics
    assert (finding.code, finding.severity, "mine:x" in finding.message) == ("embedder_failed", "warning", True)
    assert len(finding.message.encode()) < 400
    assert codes(view.search("paint the walls").diagnostics) == ["embedder_failed"]
    assert embedder.calls == 1


def test_an_embedder_that_cannot_be_made_leaves_words(garage: None, build: Build) -> None:
    """A factory that raises is a failure like any other."""

    def fails() -> Embedder:
        raise RuntimeError("no such part")

    result = build(embedder=EmbedderGuard("mine:x", fails)).view().search("paint the walls")
    assert (result.hits[0].full_id, codes(result.diagnostics)) == ("home.painter", ["embedder_failed"])
    assert "no such part" in result.diagnostics[0].message


def test_an_embedder_that_hangs_is_not_waited_for(garage: None, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search waits no longer than it may, and while the call still hangs no further one is made."""
    monkeypatch.setattr(vectors, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(vectors, "PAUSE_SECONDS", 0.0)
    release, calls = threading.Event(), []

    class Hangs(Meanings):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            calls.append(texts)
            release.wait(60)
            return super().embed(texts)

    view = make(Hangs())
    for _ in range(3):
        result = view.search("paint the walls")
        assert (result.hits[0].full_id, codes(result.diagnostics)) == ("home.painter", ["embedder_failed"])
    assert len(calls) == 1
    release.set()
    monkeypatch.setattr(vectors, "WAIT_SECONDS", 30.0)
    assert _until(lambda: view.search("paint the walls"))


def _until(search: Callable[[], Any]) -> bool:
    """Search until no diagnostic is told, within half a minute."""
    end = time.monotonic() + 30
    while search().diagnostics:
        assert time.monotonic() < end
        time.sleep(0.05)
    return True


def test_a_half_made_set_is_not_ranked_by(garage: None, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While vectors are being made the answer is that of words, and says how many are missing; then it is both."""
    monkeypatch.setattr(vectors, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(vectors, "BATCH", 1)
    release = threading.Event()

    class Slow(Meanings):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            if "\n" in texts[0] and len(self.texts) == 2:
                release.wait(60)
            return super().embed(texts)

    view = make(Slow())
    result = view.search("my car")
    assert (result.hits, codes(result.diagnostics)) == ((), ["vectors_incomplete"])
    assert "2 of 4" in result.diagnostics[0].message
    release.set()
    assert _until(lambda: view.search("my car"))
    assert ids(view, "my car")[0] == "home.driver"


def test_a_text_that_is_refused_costs_its_own_skill_only(garage: None, write: Write, make: Make) -> None:
    """A text too long for the embedder is tried shorter; one refused however short ranks by words, and nothing else suffers."""
    write("home.long", "Drives an automobile.", body="word " * 1000)
    write("home.cursed", "Cursed automobile.")

    class Refuses(Meanings):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            if any("Cursed" in text or len(text) > 600 for text in texts):
                raise ValueError("input is too large to process")
            return super().embed(texts)

    embedder = Refuses()
    result = make(embedder).search("my car")
    assert [hit.full_id for hit in result.hits[:2]] == ["home.driver", "home.long"]
    assert ("home.cursed" in {hit.full_id for hit in result.hits}, result.diagnostics) == (False, ())
    assert ids(make(embedder), "cursed")[0] == "home.cursed"


@pytest.mark.parametrize(
    "query", ["", " ", "\x00", "\ud800\udfff", "x" * 300_000, "🙂" * 5000, "walls'; DROP TABLE vector; --"]
)
def test_questions_are_data(garage: None, make: Make, query: str) -> None:
    """Whatever is asked is answered, and what is sent is text of at most 4,000 characters."""
    embedder = Meanings()
    assert "embedder_failed" not in codes(make(embedder).search(query).diagnostics)
    assert all(len(text) <= 4000 and text.encode() for texts in embedder.asked for text in texts)


def test_another_dimension_makes_vectors_anew(garage: None, make: Make) -> None:
    """A server that now has another model under the name is noticed by the length of its vectors."""

    class Longer(Meanings):
        def embed(self, texts: Sequence[str]) -> list[list[float]]:
            return [[*row, 1.0] for row in super().embed(texts)]

    make(Meanings()).search("my car")
    longer = Longer()
    result = make(longer).search("my car")
    assert (result.hits[0].full_id, result.diagnostics, len(longer.texts)) == ("home.driver", (), 3)  # one has none
