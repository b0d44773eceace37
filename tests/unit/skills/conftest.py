"""Skills on disk and a generator of odd ones, as found in the world."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PLAIN = b"---\nname: brief\ndescription: Turns long material into one page.\n---\n\n# Brief\n\nRead, then write.\n"


@pytest.fixture
def plain() -> bytes:
    """A skill file with nothing to say about, for a folder called `brief`."""
    return PLAIN


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Write a skill folder below tmp_path: `put("brief", data, **{"tools.yaml": b"..."})`."""

    def write(folder: str = "brief", data: bytes | str | None = PLAIN, name: str = "SKILL.md", **beside: bytes) -> Path:
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        if data is not None:
            (place / name).write_bytes(data.encode() if isinstance(data, str) else data)
        for file_name, content in beside.items():
            (place / file_name).write_bytes(content)
        return place

    return write


@pytest.fixture
def skill_text() -> Callable[..., str]:
    """Make a skill file of frontmatter lines: `skill_text("tags: [a]")`, for a folder called `brief`."""

    def make(lines: str = "", *, body: str = "Do it.\n") -> str:
        return f"---\nname: brief\ndescription: Turns long material into one page.\n{lines}\n---\n{body}"

    return make


_DESCRIPTIONS = (
    "Use this: it helps",
    "Make PDFs. Triggers: 'make a pdf', \"print\"",
    '"Quoted" start and more',
    "'Single' start: and more",
    "@mention first",
    "`code` first",
    "%percent first",
    "ends with colon:",
    "Ünïcode — dashes… “quotes” 🎉",
    ">-\n  folded\n  text: here",
    "|\n  literal: text\n  - dash",
    "plain # with a comment",
    "it's fine",
    "a\u2028b and more",
    "tab\there",
    "x" * 1500,
)
_EXTRAS = (
    "version: 2.50",
    "version: 1.0.0-beta+exp.sha",
    "license: Complete terms in LICENSE.txt",
    "metadata:\n  version: 1.0\n  author: someone\n  short-description: 'a: b'",
    "metadata: {author: a, tags: [x, y]}",
    "allowed-tools: Read, Grep, Bash(git add:*)",
    "allowed-tools:\n  - Read\n  - Bash",
    'allowed-tools: ["Read", "Write"]',
    "argument-hint: [file] [options]",
    "argument-hint: [issue-number]",
    "created: 2024-02-30",
    "tags: pdf, docs,, forms",
    "enabled: yes",
    "model: claude-opus",
    "disable-model-invocation: yes",
    "hooks:\n  PreToolUse:\n    - matcher: Bash\n      hooks:\n        - type: command\n          command: ./x.sh",
    "when_to_use:\n  - Note: this parses as a mapping\n  - plain",
    "# only a comment",
    "",
    "Triggers: ask: me",
    "context: fork",
    "1: numeric key",
    "ratio: 1:30",
)
_NAMES = (
    "brief",
    "Brief",
    "My Brief",
    "brief_v2",
    "-brief-",
    "br--ief",
    "навык",
    "ｂｒｉｅｆ",
    "007",
    "yes",
    "null",
    "x" * 90,
)


@pytest.fixture
def odd_skills() -> Callable[[int], Iterator[tuple[str, bytes]]]:
    """Yield (folder, skill file) pairs like those many publishers write; all must load leniently."""

    def generate(count: int) -> Iterator[tuple[str, bytes]]:
        dice = random.Random(7)
        for number in range(count):
            lines = [f"name: {dice.choice(_NAMES)}", f"description: {_DESCRIPTIONS[number % len(_DESCRIPTIONS)]}"]
            lines += dice.sample(_EXTRAS, dice.randint(0, 4))
            dice.shuffle(lines)
            close = dice.choice(("---", "---  ", "...", "---\t"))
            body = dice.choice(("# Title\n\ntext\n", "", "\n\n---\nmore\n", "x\n" * 150_000))
            text = "---\n" + "\n".join(lines) + f"\n{close}\n{body}"
            end = dice.choice(("\n", "\r\n", "\r"))
            bom = dice.choice((b"", b"\xef\xbb\xbf"))
            yield dice.choice(("brief", "other", "Some Folder")), bom + text.replace("\n", end).encode()

    return generate
