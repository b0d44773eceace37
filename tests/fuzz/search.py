"""Fuzzes the search of skills: what is asked, among ordinary and hostile skills.

Without a fuzzer, random questions: `python tests/fuzz/search.py 100000 [SEED]`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw, scratch

from kdskills.turn import SkillsSubsystem, SkillView

WORDS = (
    '"', "'", " NEAR ", "NEAR/2", "*", "^", ":", "name:", "{name body}:", " AND ", " OR ", " NOT ", "(", ")", "-", "+",
    "%", "_", "?", ";", "--", "/*", "\x00", "\ud800", "\udfff", "\ufffe", "\ufeff", "\u202e", "\u200d", "\u0301", "\u00ad",
    "invoice", "Invoices", "walrusFish2", "GPUs", "S3", "meeting", "minutes", "the", "of", "naïve", "Straße", "ﷺ", "ﬁ",
    "отчёты", "αναφορές", "数据分析", "データ", "한국어", "ไทย", "हिन्दी", "தமிழ்", "العربية", "🙂", "👨‍👩‍👧", "𝕱", "\U000e0041",
    " ", "\n", "\t", "\x1b[31m", "{{ x }}", "$x", "../", "[[", "'; DROP TABLE term; --", "0", "1e999", "a" * 300,
)  # fmt: skip
SKILLS = 300


@cache
def _view() -> SkillView:
    """Return a view of ordinary and hostile skills, searched once."""
    top, dice = scratch(), random.Random(11)
    for number in range(SKILLS):
        folder = top / "skills" / f"team{number % 7}" / f"{dice.choice(('invoice', 'meeting', 'walrus'))}-{number}"
        folder.mkdir(parents=True)
        body = " ".join(dice.choices(WORDS, k=dice.randrange(200)))
        plain = [word for word in WORDS if word.isprintable()]
        about = f"Does {' '.join(dice.choices(plain, k=20))}"
        front = {"name": folder.name, "description": about, "tags": dice.choices(plain, k=3)}
        if number % 20 == 0:
            body = f"{dice.choice(WORDS)} " * 30_000
        lines = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items())
        text = f"---\n{lines}\n---\n# {folder.name}\n\n{body}\n"
        (folder / "SKILL.md").write_bytes(text.encode("utf-8", "replace").replace(b"\x00", b" "))
        if number % 10 == 3:
            _add_files(folder, dice)
    agents = {"asker": {"disabled": ["team3.*"]}}
    subsystem = SkillsSubsystem({"agents_config": agents}, bundle_root=top, index_dir=None, auto_refresh=None)
    view = subsystem.view("asker")
    assert len(view.listed) > SKILLS // 2
    view.search("invoice")
    return view


def _add_files(folder: Path, dice: random.Random) -> None:
    """Give a skill files that are no text, links, and what would block."""
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "bytes.py").write_bytes(dice.randbytes(4000))
    (scripts / "walrus.py").write_bytes(b'"""Feeds the walrus \xff\x00"""')
    (scripts / "loop").symlink_to("loop")
    os.mkfifo(scripts / "fifo.py")
    (folder / "references").symlink_to("/etc")


def check(data: bytes) -> None:
    """No question raises, leaves the gate, or is answered in two ways; the answer is sorted, and can be sent."""
    draw = Draw(data)
    limit, offset = 1 + draw.number(40), draw.choice((0, 0, 0, 1, 5, 100, 2**63))
    namespace, by = draw.choice((None, None, "team1", "team3", "\ud800")), draw.choice(("model", "user", "code"))
    query = draw.pumped(1_000_000).decode("utf-8", "surrogatepass" if draw.flag() else "replace") if data else ""
    _answer(query, limit=limit, offset=offset, namespace=namespace, by=by)


def _answer(query: str, **options: object) -> None:
    view = _view()
    result = view.search(query, **options)  # type: ignore[arg-type]  # drawn
    assert result.diagnostics == ()
    assert len(result.hits) <= min(result.total, options["limit"])  # type: ignore[call-overload]  # drawn
    order = [(-hit.score, hit.full_id) for hit in result.hits]
    assert order == sorted(set(order))
    for hit in result.hits:
        assert view.resolve(hit.full_id).full_id == hit.full_id
        assert not hit.full_id.startswith("team3.")
        assert hit.why
    json.dumps([[hit.full_id, hit.score, dict(hit.why)] for hit in result.hits], allow_nan=False).encode()


def _random_question(dice: random.Random) -> str:
    kind = dice.randrange(8)
    if kind == 0:
        return dice.randbytes(dice.randrange(300)).decode("latin-1")
    if kind == 1:
        return "".join(map(chr, (dice.randrange(0x110000) for _ in range(dice.randrange(200)))))
    if kind == 2 and dice.random() < 0.01:
        return dice.choice(WORDS) * (1_000_000 // dice.randrange(1, 9))
    return dice.choice(("", " ", "\n")).join(dice.choices(WORDS, k=dice.randrange(1, 60)))


def main(count: int, seed: int) -> None:
    """Ask *count* random questions; the first that fails is printed."""
    dice = random.Random(seed)
    for number in range(count):
        query = _random_question(dice)
        options = {
            "limit": dice.choice((1, 10, 1000)),
            "offset": dice.choice((0, 0, 7)),
            "namespace": dice.choice((None, None, "team1")),
            "by": dice.choice(("model", "user", "code")),
        }
        try:
            _answer(query, **options)
        except Exception as error:
            error.add_note(f"question {number} of seed {seed}: {query[:2000]!r} with {options}")
            raise
    sys.stdout.write(f"{count:,} questions, 0 errors\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
