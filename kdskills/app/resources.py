"""Where shipped bundles lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

import kdskills
from kdskills.errors import BadRequest


def shipped_folders() -> tuple[Path, ...]:
    """Return the folders that shipped bundles may lie in."""
    package = Path(kdskills.__file__).parent
    return package / "_bundles", package.parent / "bundles"


def shipped_bundle(name: str) -> Path:
    """Return the folder of the shipped bundle *name*. Raises BadRequest, `bundle_missing`."""
    for folder in shipped_folders():
        if (folder / name / "skills").is_dir():
            return folder / name
    raise BadRequest(f"no bundle named {name!r} is shipped", code="bundle_missing", name=name)
