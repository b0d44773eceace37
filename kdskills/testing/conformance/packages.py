"""A small environment on disk, for checks that give a program one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kdskills.execution import EnvironmentMount
from kdskills.testing.conformance.common import program

PLANTED: Final = (
    "json",
    "traceback",
    "ast",
    "signal",
    "sitecustomize",
    "usercustomize",
    "kdskills_runtime",
    "kdskills",
    "pydantic",
)
"""Names of modules that whatever starts generated code imports, or would import, from folders on its path."""
BIG: Final = 40 * 1024 * 1024

_FILES: Final = {
    "python/packed.py": "NAME = 'packed'\n",
    "bin/say-packed": '#!/bin/sh\necho "said $1"\n',
    "bin/say-python": "#!/usr/bin/env python3\nimport packed\n\nprint(packed.NAME)\n",
    "node_modules/packed/index.js": "module.exports = 'packed'\n",
}


@contextmanager
def small_environment(
    *, name: str = "", shadows: Sequence[str] = (), big: bool = False, lean: bool = False
) -> Iterator[EnvironmentMount]:
    """Make an environment of a module, two programs and a Node module, and give its mount; *name* tells it from others.

    *shadows* are names of further modules, which write `PLANTED` when they are imported. In a *big* one lies a file of `BIG`
    bytes, a *lean* one has nothing but modules.
    """
    content = repr((name, shadows, big, lean)).encode()
    digest = hashlib.sha256(content).hexdigest()[:32]  # another content, another digest
    with tempfile.TemporaryDirectory(prefix="kdskills-conformance-") as top:
        Path(top).chmod(0o711)  # programs of a uid of their own pass it, as the folder of built environments
        root = Path(top).resolve() / digest
        files = _FILES | {f"python/{module}.py": program("plant.py") for module in shadows}
        for path, text in files.items():
            if lean and not path.startswith("python/"):
                continue
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        if big:
            with (root / "python/big").open("wb") as stream:
                stream.truncate(BIG)
        for item in (root, *root.rglob("*")):
            item.chmod(0o755 if item.is_dir() or item.parent.name == "bin" else 0o644)
        yield EnvironmentMount(digest, root)
