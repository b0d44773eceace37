"""Measure the search of skills on any folder of skills and requests, or on generated ones, and print the table.

    python tests/benchmarks/search.py [FOLDER REQUESTS] [--count 10000] [--rounds 3] [--json]

REQUESTS has a JSON object a line: `request`, and the `skill` (id or full id) that should answer it. Beside the search stand
two baselines: BM25 over names and descriptions, and the alphabet, which is what a catalog without words shows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from kdskills.search.ranking import rarity
from kdskills.session import SkillRuntime
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot
from kdskills.turn import SkillsSubsystem, SkillView

CATALOG_TOKENS = 2560


class Request(NamedTuple):
    """A request, and the full ids of the skills that answer it."""

    text: str
    answers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; a bound of None is a figure to look at."""

    what: str
    value: float
    bound: float | None
    most: bool
    detail: str = ""

    @property
    def held(self) -> bool:
        """Whether the bound holds."""
        return self.bound is None or (self.value <= self.bound if self.most else self.value >= self.bound)


def generate(folder: Path, count: int, seed: int = 5) -> list[Request]:
    """Write *count* skills of 9 KB whose words are as unevenly spread as in a language; return a request for each of 400."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("aeioubcdfgklmnprstvz", k=dice.randrange(4, 11))) for _ in range(30_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    requests = []
    for number in range(count):
        topic = dice.sample(words[2000:], 6)
        name = f"{topic[0]}-{topic[1]}-{number}"
        place = folder / f"team{number // 200:03}" / name
        place.mkdir(parents=True)
        text = dice.choices(words, weights, k=1200)
        for position in dice.sample(range(1200), 60):
            text[position] = dice.choice(topic)
        body = "\n".join(" ".join(text[start : start + 14]) for start in range(0, 1200, 14))
        about = " ".join([*topic[:4], *dice.choices(words, weights, k=25)])
        (place / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {about}\n---\n# {topic[2]}\n\n{body}\n")
        if number % max(1, count // 400) == 0:
            question = " ".join([*dice.sample(topic, 4), *dice.choices(words, weights, k=12)])
            requests.append(Request(question, frozenset({f"team{number // 200:03}.{name}"})))
    return requests


def read_requests(path: Path, view: SkillView) -> list[Request]:
    """Return the requests of a file whose skill is there."""
    by_name: dict[str, set[str]] = {}
    for full_id, skill in view.listed.items():
        for name in {full_id, skill.id, skill.name}:
            by_name.setdefault(name, set()).add(full_id)
    rows = map(json.loads, path.read_text().splitlines())
    return [Request(row["request"], frozenset(by_name[row["skill"]])) for row in rows if row["skill"] in by_name]


def quality(name: str, rank: Callable[[str], Sequence[str]], requests: Sequence[Request]) -> list[Line]:
    """Return recall among the first 1, 3 and 5, MRR and NDCG@10."""
    places = []
    for request in requests:
        ranked = rank(request.text)
        places.append(next((place for place, full_id in enumerate(ranked) if full_id in request.answers), math.inf))
    count = len(places)
    bounds = {"first": 0.8, "first five": 0.965, "NDCG@10": 0.9} if name == "search" else {}
    values = {
        "first": sum(place < 1 for place in places) / count,
        "first three": sum(place < 3 for place in places) / count,
        "first five": sum(place < 5 for place in places) / count,
        "MRR": sum(1 / (place + 1) for place in places) / count,
        "NDCG@10": sum(1 / math.log2(place + 2) for place in places if place < 10) / count,
    }
    return [Line(f"{name}: {what}", value, bounds.get(what), most=False) for what, value in values.items()]


class Baseline:
    """BM25 over names and descriptions, and the alphabet."""

    def __init__(self, view: SkillView) -> None:
        self.ids = sorted(view.listed)
        words = {i: Counter(_words(f"{s.name} {s.description}")) for i, s in view.listed.items()}
        usual = statistics.mean(each.total() for each in words.values())
        self._shares: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for full_id, counts in words.items():
            norm = 1.2 * (0.25 + 0.75 * counts.total() / usual)
            for word, count in counts.items():
                self._shares[word][full_id] = count * 2.2 / (count + norm)

    def plain(self, query: str) -> list[str]:
        """Rank by names and descriptions."""
        scores: defaultdict[str, float] = defaultdict(float)
        for word in set(_words(query)) & self._shares.keys():
            weight = rarity(len(self.ids), len(self._shares[word]))
            for full_id, share in self._shares[word].items():
                scores[full_id] += weight * share
        return sorted(scores, key=lambda full_id: (-scores[full_id], full_id))[:100]

    def alphabet(self, _query: str) -> list[str]:
        """Rank by nothing."""
        return self.ids


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    gc.collect()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def first_seconds(folder: Path, index_dir: Path) -> tuple[float, float]:
    """Return what cold discovery and the building of the index cost a process of its own."""
    command = [sys.executable, __file__, "--first", str(index_dir), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cold, build = json.loads(done.stdout)
    return cold, build


def print_first(folder: Path, index_dir: Path) -> None:
    """Discover, then build, and print the seconds of both."""
    root = SkillRoot("bundle://bench", folder, "bench", "bundle")
    cold = seconds(lambda: SkillRegistry([root], index_dir=index_dir).snapshot())
    view = SkillsSubsystem(roots=[root], index_dir=index_dir, auto_refresh=None).view()
    print(json.dumps([cold, seconds(lambda: view.search("begin"))]))


def measure(folder: Path, work: Path, requests: list[Request] | Path, rounds: int) -> list[Line]:
    """Return every line of the table over one folder of skills."""
    root = SkillRoot("bundle://bench", folder, "bench", "bundle")

    def subsystem(turn: int) -> SkillsSubsystem:
        return SkillsSubsystem(roots=[root], index_dir=work / f"kept{turn}", auto_refresh=None)

    # Each in a process of its own: what the first of a process costs, every user's first command pays.
    firsts = [first_seconds(folder, work / f"kept{turn}") for turn in range(rounds)]
    cold, build = (statistics.median(times) for times in zip(*firsts, strict=True))
    opened = [subsystem(0).view() for _ in range(max(rounds, 5))]
    opens = [seconds(lambda view=view: view.search("begin")) for view in opened]
    view, count = opened[0], len(opened[0].listed)
    asked = read_requests(requests, view) if isinstance(requests, Path) else requests
    times = sorted(seconds(lambda text=request.text: view.search(text)) for request in asked for _ in range(rounds))
    size = sum(path.stat().st_size for path in (work / "kept0").glob("*.search"))
    p50, p95 = times[len(times) // 2], times[len(times) * 95 // 100]
    bound = 5.0 if count <= 3000 else 15.0
    lines = quality("search", lambda text: [hit.full_id for hit in view.search(text, limit=100).hits], asked)
    baseline = Baseline(view)
    lines += quality("names and descriptions", baseline.plain, asked) + quality("alphabet", baseline.alphabet, asked)
    shares = [asyncio.run(listed_share(subsystem(0), asked, turns)) for turns in (1, 2)]
    allowed = 1.2 * cold + 0.0005 * count
    return [
        *lines,
        Line("listed in a catalog of 2,560 tokens", shares[0], 0.93, most=False),
        Line("listed for a second request of a conversation", shares[1], None, most=False),
        Line("one query, p50 ms", p50 * 1000, bound, most=True, detail=f"p95 {p95 * 1000:.1f} ms"),
        Line(
            "build, to 1.2 cold discoveries and 0.5 ms a skill", build / allowed, 1.0, most=True,
            detail=f"{build / count * 1000:.2f} ms a skill, discovery {cold / count * 1000:.2f}",
        ),
        Line("open of a kept index, ms", statistics.median(opens) * 1000, 30.0, most=True),
        Line("memory of searching, MiB", memory(subsystem(0).view(), asked[:50]), 40.0, most=True),
        Line("index file, KiB a skill", size / count / 1024, None, most=True, detail=f"{size / 2**20:.1f} MiB"),
    ]  # fmt: skip


async def listed_share(subsystem: SkillsSubsystem, requests: Sequence[Request], turns: int) -> float:
    """Return how often the last of so many requests in a conversation has a skill that answers it in the prompt."""
    runtime = SkillRuntime(subsystem=subsystem)
    listed = 0
    for number, request in enumerate(requests):
        session = await runtime.create_session()
        for earlier in range(turns - 1):
            await session.instructions(request=requests[(7 * number + earlier + 3) % len(requests)].text)
        names = (await session.instructions(request=request.text)).listed
        ids = {subsystem.view(session.consumer).names[name] for name in names}
        listed += bool(ids & request.answers)
    return listed / len(requests)


def memory(view: SkillView, requests: Sequence[Request]) -> float:
    """Return the most MiB that opening the index and asking takes at any moment."""
    tracemalloc.start()
    for request in requests:
        view.search(request.text)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return peak


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit 1 when a bound is not held."""
    parser = argparse.ArgumentParser(description="Measure the search of skills.")
    parser.add_argument("folder", nargs="?", type=Path, help="folder of skills; generated ones when omitted")
    parser.add_argument("requests", nargs="?", type=Path, help="JSON lines with `request` and `skill`")
    parser.add_argument("--count", type=int, default=10_000, help="skills to generate")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--first", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.first is not None:
        print_first(options.folder, options.first)
        return 0
    if (options.folder is None) != (options.requests is None):
        parser.error("give a folder and its requests, or neither")
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as work:
        folder, requests = options.folder, options.requests
        if folder is None:
            folder = Path(work) / "skills"
            requests = generate(folder, options.count)
        lines = measure(folder.resolve(), Path(work), requests, options.rounds)
    if options.json:
        print(json.dumps([{**asdict(line), "held": line.held} for line in lines]))
    else:
        for line in lines:
            bound = "" if line.bound is None else f"{'at most' if line.most else 'at least'} {line.bound:g}"
            verdict = "" if line.bound is None else "held" if line.held else "missed"
            print(f"{line.what:52} {line.value:9.3f}  {bound:14} {verdict:6} {line.detail}".rstrip())
    return 0 if all(line.held for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
