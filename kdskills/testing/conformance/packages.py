"""A small environment on disk, for checks that give a program one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
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
    *, name: str = "", hostile: bool = False, big: bool = False, lean: bool = False
) -> Iterator[EnvironmentMount]:
    """Make an environment of a module, two programs and a Node module, and give its mount; *name* tells it from others. A
    *hostile* one brings modules that write `PLANTED` when they are imported, by the names of those others expect. In a *big*
    one lies a file of `BIG` bytes, a *lean* one has nothing but the module.
    """
    digest = hashlib.sha256(repr((name, hostile, big, lean)).encode()).hexdigest()[
        :32
    ]  # another content, another digest
    with tempfile.TemporaryDirectory(prefix="kdskills-conformance-") as top:
        Path(top).chmod(0o711)  # programs of a uid of their own pass it, as the folder of built environments
        root = Path(top).resolve() / digest
        planted = program("plant.py")
        files = _FILES | ({f"python/{name}.py": planted for name in PLANTED} if hostile else {})
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
