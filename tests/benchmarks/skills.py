"""Measure skills against their floor and print the table.

    python tests/benchmarks/skills.py [--count 10000] [--rounds 5] [--json]

Floor(N) is the least anybody must do to know N skills: scandir, read each SKILL.md, `CSafeLoader` on its frontmatter.
Every line alternates with the floor in one process, warm, and the median counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import yaml

from kdskills.prompts import CatalogFormat
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot
from kdskills.sources import SourcesPool, rewrite_citations
from kdskills.turn import SkillsSubsystem, SkillView

WORDS = [
    "answer",
    "archive",
    "audit",
    "brief",
    "chart",
    "citation",
    "column",
    "compare",
    "data",
    "draft",
    "evidence",
    "figure",
    "finding",
    "invoice",
    "ledger",
    "letter",
    "memo",
    "message",
    "metric",
    "minutes",
    "number",
    "outline",
    "page",
    "plan",
    "profile",
    "project",
    "query",
    "report",
    "request",
    "research",
    "review",
    "section",
    "source",
    "summary",
    "table",
    "task",
    "team",
    "ticket",
    "topic",
    "trend",
    "value",
    "week",
]

PER_NAMESPACE = 100
QUIET_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: `ratio` is what was measured, `bound` what may be, `aim` what should be."""

    what: str
    ratio: float
    bound: float
    aim: float | None
    detail: str

    @property
    def held(self) -> bool:
        """Whether the bound holds."""
        return self.ratio <= self.bound


def write_skills(folder: Path, count: int, seed: int = 7) -> None:
    """Write *count* skills of about 3 KB, a third with `tools.yaml`, all quietly old."""
    dice = random.Random(seed)
    old = time.time_ns() - QUIET_NS
    for number in range(count):
        place = folder / f"team-{number // PER_NAMESPACE:03}" / f"skill-{number:05}"
        place.mkdir(parents=True)
        (place / "SKILL.md").write_text(_skill_text(dice, f"skill-{number:05}"))
        os.utime(place / "SKILL.md", ns=(old, old))
        if number % 3 == 0:
            (place / "tools.yaml").write_text(_tools_text(dice))
            os.utime(place / "tools.yaml", ns=(old, old))
        os.utime(place, ns=(old, old))
    for place in (*folder.iterdir(), folder):
        os.utime(place, ns=(old, old))


def write_published(folder: Path, count: int, seed: int = 11) -> None:
    """Write *count* skills as they are published: name and description, 9 KB of body, some with references and scripts."""
    dice = random.Random(seed)
    old = time.time_ns() - QUIET_NS
    for number in range(count):
        name = f"{dice.choice(WORDS)}-{dice.choice(WORDS)}-{number:04}"
        place = folder / name
        place.mkdir(parents=True)
        extra = "license: MIT\n" if number % 3 == 0 else 'metadata:\n  version: "1.0"\n' if number % 3 == 1 else ""
        head = f"---\nname: {name}\ndescription: {_sentence(dice, 40)}\n{extra}---\n"
        (place / "SKILL.md").write_text(head + "\n".join(_sentence(dice, 14) for _ in range(90)))
        for below, share, ending in (("references", 0.4, "md"), ("scripts", 0.3, "py")):
            if dice.random() < share:
                (place / below).mkdir()
                for each in range(dice.randrange(1, 5)):
                    (place / below / f"part{each}.{ending}").write_text("# x\n")
        for each in (*place.rglob("*"), place):
            os.utime(each, ns=(old, old))
    os.utime(folder, ns=(old, old))


def published_floor(folder: str) -> None:
    """Do the least for published skills: scandir of all folders, read, `CSafeLoader` on the frontmatter."""
    with os.scandir(folder) as listed:
        entries = list(listed)
    for entry in entries:
        if entry.is_dir():
            published_floor(entry.path)
        elif entry.name == "SKILL.md":
            with open(entry.path, "rb") as stream:  # noqa: PTH123 - nothing but the read is measured
                data = stream.read()
            yaml.load(data[4 : data.index(b"\n---\n", 4)], Loader=yaml.CSafeLoader)


def published_look(paths: Sequence[str]) -> None:
    """Do the least to know that nothing changed: ask the system for each folder and skill file."""
    for path in paths:
        os.lstat(path)


def _sentence(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words)).capitalize() + "."


def _skill_text(dice: random.Random, name: str) -> str:
    when = "\n".join(f"  - {_sentence(dice, 7)}" for _ in range(3))
    head = (
        f"---\nname: {name}\ndescription: {_sentence(dice, 24)}\nversion: 1.{dice.randrange(9)}0\n"
        f"category: {dice.choice(WORDS)}\ntags: [{', '.join(dice.sample(WORDS, 4))}]\nwhen_to_use:\n{when}\n"
        f'metadata:\n  owner: {dice.choice(WORDS)}\n  code: "00{dice.randrange(999)}"\nlicense: Apache-2.0\n---\n'
    )
    lines = [f"# {name}"]
    size = len(head)
    while size < 3000:
        lines.append(f"{len(lines)}. {_sentence(dice, 12)}")
        size += len(lines[-1]) + 1
    return head + "\n".join(lines) + "\n"


def _tools_text(dice: random.Random) -> str:
    first, second = dice.sample(WORDS, 2)
    return f"- id: io.{first}\n  role: reader\n  why: {_sentence(dice, 6)}\n- id: web.{second}\n  required: false\n"


def floor(folder: Path) -> int:
    """Do the least: scandir, read, `CSafeLoader` on the frontmatter; return how many skills there are."""
    count = 0
    with os.scandir(folder) as namespaces:
        for namespace in namespaces:
            with os.scandir(namespace.path) as places:
                for place in places:
                    with os.scandir(place.path) as entries:
                        names = [entry.path for entry in entries if entry.name == "SKILL.md"]
                    for name in names:
                        with open(name, "rb") as stream:  # noqa: PTH123 - nothing but the read is measured
                            data = stream.read()
                        end = data.index(b"\n---\n", 4)
                        yaml.load(data[4:end], Loader=yaml.CSafeLoader)
                        count += 1
    return count


def _timed(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def against(base: Callable[[], object], call: Callable[[], object], rounds: int) -> tuple[float, str]:
    """Alternate *base* and *call*; return the ratio of their medians and what they took."""
    base_times, times = [], []
    for _ in range(rounds):
        base_times.append(_timed(base))
        times.append(_timed(call))
    bottom, top = statistics.median(base_times), statistics.median(times)
    return top / bottom, f"{top * 1000:.1f} ms against {bottom * 1000:.1f} ms"


# ---- lines ------------------------------------------------------------------------------------------------------


class Bench:
    """Generated skills in a folder of their own, and the lines measured over them."""

    def __init__(self, folder: Path, count: int, rounds: int) -> None:
        self.folder = folder
        self.count = count
        self.rounds = rounds
        self.index = folder / "index"
        self._made: dict[int, Path] = {}
        self._consumers = 0

    def skills(self, count: int) -> Path:
        """Return a folder with *count* skills."""
        if count not in self._made:
            place = self.folder / f"skills-{count}"
            write_skills(place, count)
            self._made[count] = place
        return self._made[count]

    def registry(self, count: int, *, index: bool = True) -> SkillRegistry:
        """Return a registry over *count* skills, not yet looked through."""
        root = SkillRoot("bundle://skills", self.skills(count), "bundle", "bundle")
        return SkillRegistry([root], index_dir=self.index if index else None)

    def _full(self, registry: SkillRegistry) -> SkillRegistry:
        found = registry.snapshot()
        if len(found.skills) != self.count:
            raise SystemExit(f"{len(found.skills)} of {self.count} skills were found: {found.diagnostics[:3]}")
        return registry

    def cold(self) -> Line:
        """Discovery with validation and digests, the index written."""

        def call() -> None:
            shutil.rmtree(self.index, ignore_errors=True)
            self._full(self.registry(self.count))

        ratio, detail = against(lambda: floor(self.skills(self.count)), call, self.rounds)
        return Line(f"cold discovery of {self.count:,}, index written", ratio, 2.5, 1.8, detail)

    def warm(self) -> Line:
        """Start from the index, every entry checked."""
        self._full(self.registry(self.count))
        ratio, detail = against(
            lambda: floor(self.skills(self.count)), lambda: self._full(self.registry(self.count)), self.rounds
        )
        return Line(f"warm start of {self.count:,} from the index", ratio, 0.5, 0.25, detail)

    def refresh(self) -> Line:
        """Refresh after one changed file."""
        registry = self._full(self.registry(self.count))
        file = self.skills(self.count) / "team-000" / "skill-00001" / "SKILL.md"
        text = file.read_text()
        turn = [0]

        def base() -> None:
            turn[0] += 1
            file.write_text(text + f"\nRound {turn[0]}.\n")
            floor(self.skills(self.count))

        def call() -> None:
            report = registry.refresh()
            if report.changed != ("team-000.skill-00001",):
                raise SystemExit(f"the refresh saw {report.changed}")

        ratio, detail = against(base, call, self.rounds)
        return Line(f"refresh after one changed file of {self.count:,}", ratio, 0.35, 0.15, detail)

    def published(self) -> list[Line]:
        """Start on 1,000 skills as they are published: without an index, from the index, and a look at all of them again."""
        folder = self.folder / "published"
        write_published(folder, 1000)
        root = SkillRoot("bundle://published", folder, "bundle", "bundle")

        def start(index: Path | None) -> SkillRegistry:
            registry = SkillRegistry([root], index_dir=index)
            if len(registry.snapshot().skills) != 1000:
                raise SystemExit(f"{len(registry.snapshot().skills)} of 1,000 published skills were found")
            return registry

        index = self.folder / "published-index"
        current = start(index)
        paths = [str(path) for path in folder.rglob("*") if path.is_dir() or path.name == "SKILL.md"]
        read, look = partial(published_floor, str(folder)), partial(published_look, paths)
        rounds = max(self.rounds, 15)
        lines = []
        for what, base, call, bound in (
            ("cold discovery of 1,000 published", read, lambda: start(None), 2.0),
            ("warm start of 1,000 published, to bare stats", look, lambda: start(index), 5.0),
            ("refresh of 1,000 published, to bare stats", look, current.refresh, 2.0),
        ):
            ratio, detail = against(base, call, rounds)
            lines.append(Line(what, ratio, bound, None, detail))
        return lines

    def memory(self) -> Line:
        """Growth of memory without bodies."""
        self._full(self.registry(self.count))
        grown = []
        for index in (True, False):
            gc.collect()
            tracemalloc.start()
            registry = self._full(self.registry(self.count, index=index))
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] / self.count / 1024)
            tracemalloc.stop()
            del registry
        return Line(
            "memory a skill without bodies, KiB", max(grown), 6.0, 3.0, f"warm {grown[0]:.2f}, cold {grown[1]:.2f}"
        )

    def catalogs(self) -> list[Line]:
        """A view and its catalog, whole and cut to a budget, for 100 and 1,000 skills."""
        lines = []
        for level, bound, aim in ((0, 1.0, 0.4), (4, 1.5, 0.7)):
            measured = {}
            for count in (100, 1000):
                system = self._system(count)
                for form in ("gallery", "xml"):
                    ratio, _ = against(
                        lambda count=count: floor(self.skills(count)),
                        lambda system=system, form=form, level=level, count=count: self._catalog(
                            system, form, level, count
                        ),
                        self.rounds,
                    )
                    measured[f"{form} {count:,}"] = ratio
            detail = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in measured.items())
            lines.append(Line(f"view + catalog, level {level}", max(measured.values()), bound, aim, detail))
        return lines

    def _system(self, count: int) -> SkillsSubsystem:
        root = SkillRoot("bundle://skills", self.skills(count), "bundle", "bundle")
        system = SkillsSubsystem(roots=[root], index_dir=self.index, auto_refresh=None)
        if len(system.registry) != count:
            raise SystemExit(f"{len(system.registry)} of {count} skills are in the subsystem")
        return system

    def _view(self, system: SkillsSubsystem) -> SkillView:
        self._consumers += 1  # another consumer each time, for views are kept
        return system.view(f"consumer-{self._consumers}")

    def _catalog(self, system: SkillsSubsystem, form: CatalogFormat, level: int, count: int) -> None:
        catalog = self._view(system).catalog(form, budget=4 * count if level else None)
        if catalog.level != level:
            raise SystemExit(f"the catalog is {catalog.level}, not {level}")

    def growth(self) -> list[Line]:
        """How views and citations grow with what they hold."""
        small, large = self._system(1000), self._system(self.count)
        most = 12.0 * self.count / 10_000
        ratio, detail = against(
            lambda: self._view(small).short_ids, lambda: self._view(large).short_ids, max(self.rounds, 5)
        )
        views = Line(f"view over {self.count:,} against 1,000", ratio, most, None, detail)
        ratio, detail = against(lambda: cite(2000), lambda: cite(4000), max(self.rounds, 5))
        return [views, Line("merge and rewrite at double size", ratio, 2.5, None, detail)]


def cite(size: int) -> None:
    """Merge *size* rows into as many others, half of them known, and rewrite as many citations."""
    prior = [{"sid": sid, "url": f"https://example.org/{sid}", "title": f"Page {sid}"} for sid in range(1, size + 1)]
    new = [{"sid": sid, "url": f"https://example.org/{sid + size // 2}", "title": "New"} for sid in range(1, size + 1)]
    merged = SourcesPool.from_rows(prior).merge(new)
    text = "".join(f"Line {sid} says so [[S:{sid}]].\n" for sid in range(1, size + 1))
    rewritten = rewrite_citations(text, merged.sid_map)
    if rewritten.dropped:
        raise SystemExit(f"{len(rewritten.dropped)} citations were dropped")


def measure(count: int = 10_000, rounds: int = 5) -> list[Line]:
    """Measure every line of the table over generated skills in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="kdskills-bench-") as folder:
        bench = Bench(Path(folder), count, rounds)
        floor(bench.skills(count))
        lines = [line() for line in (bench.cold, bench.warm, bench.refresh)]
        return [*lines, *bench.published(), *bench.catalogs(), bench.memory(), *bench.growth()]


def render(lines: Sequence[Line]) -> str:
    """Return the table as text."""
    rows = [("what", "ratio", "bound", "aim", "held", "measured")]
    rows += [
        (line.what, f"{line.ratio:.2f}", f"{line.bound:g}", "-" if line.aim is None else f"{line.aim:g}",
         "yes" if line.held else "NO", line.detail)
        for line in lines
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit 1 when a bound is not held."""
    parser = argparse.ArgumentParser(description="Measure skills against their floor.")
    parser.add_argument("--count", type=int, default=10_000, help="skills to generate")
    parser.add_argument("--rounds", type=int, default=5, help="alternations; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    lines = measure(options.count, options.rounds)
    print(json.dumps([{**asdict(line), "held": line.held} for line in lines]) if options.json else render(lines))
    return 0 if all(line.held for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
