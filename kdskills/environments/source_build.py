"""One step of building a wheel, by the published interface of build backends; runs in a sandbox, where all it writes is doubted.

`python3 source_build.py ARCHIVE requires|more|wheel` unpacks ARCHIVE beside it. `requires` writes what the build requires to
`answer.json`, `more` what the backend asks for beyond that, and `wheel` makes a wheel in `dist/`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tarfile
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

USUAL = {"requires": ["setuptools>=40.8.0"], "build-backend": "setuptools.build_meta:__legacy__"}


def unpacked(archive: Path) -> Path:
    """Unpack a source distribution and return its folder."""
    folder = archive.parent / "source"
    with tarfile.open(archive, "r:gz") as tar:
        # Debian 12's Python, 3.11.2, has no filters; this runs behind the wall, where nothing outside can be overwritten.
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)  # noqa: S202
    (top,) = folder.iterdir()
    return top


def build_system(folder: Path) -> dict[str, Any]:
    """Return the table `build-system` of a source tree; what setuptools wants of one without."""
    project = folder / "pyproject.toml"
    table = tomllib.loads(project.read_text(encoding="utf-8")) if project.is_file() else {}
    return {**USUAL, **table.get("build-system", {})}


def backend(system: dict[str, Any]) -> Any:
    """Import the backend, from the source tree where that says so."""
    sys.path[:0] = [str(Path(path).resolve()) for path in system.get("backend-path", ())]
    module, _, attributes = system["build-backend"].partition(":")
    return reduce(getattr, filter(None, attributes.split(".")), importlib.import_module(module))


def main(archive: str, task: str) -> None:
    """Do one step."""
    work = Path.cwd()
    answer: Any
    os.chdir(unpacked(work / archive))
    system = build_system(Path.cwd())
    if task == "wheel":
        (work / "dist").mkdir()
        backend(system).build_wheel(str(work / "dist"))
        return
    if task == "more":
        ask = getattr(backend(system), "get_requires_for_build_wheel", list)
        answer = ask()
    else:
        answer = system["requires"]
    (work / "answer.json").write_text(json.dumps(list(answer)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
