"""A small skill on disk, for checks that mount one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdskills.skills.safe_open import tree_digest

SKILL_MD = "---\nname: small\ndescription: A skill for checks.\n---\nDo little.\n"
SAY_SH = '#!/bin/sh\nprintf "%s|%s|%s\\n" "$1" "$2" "$3"\n'


@contextmanager
def small_skill() -> Iterator[tuple[Path, str]]:
    """Make a skill with two scripts and give its folder and tree digest."""
    with tempfile.TemporaryDirectory(prefix="kdskills-conformance-") as top:
        folder = Path(top) / "small"
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(SKILL_MD, encoding="utf-8")
        (folder / "scripts" / "say.sh").write_text(SAY_SH, encoding="utf-8")
        source = Path(__file__).parents[1] / "programs" / "say.py"
        (folder / "scripts" / "say.py").write_bytes(source.read_bytes())
        yield folder, tree_digest(folder)
