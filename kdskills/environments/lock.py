"""`kdskills.lock`: exact files of every environment, sorted, the same from the same facts.

The file is TOML and has one table `[environment."<key>"]` for each skill or script. Tables that others keep in it are not
looked at, and stay as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from kdskills.bundle.lock_file import LockFileInvalid, read_entries, table_text, write_text
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage, NodeSpec
from kdskills.execution.dirs import locked

TABLE: Final = "environment"
_HEX = re.compile(r"[0-9a-f]{64}")


def read_lock(path: Path) -> dict[str, LockedEnvironment]:
    """Return what the lock file at *path* has, by key, sorted; nothing when there is none.

    Raises EnvironmentFailed, `environment_lock_invalid`, for a file that is none, or an entry that could not be built.
    """
    with _telling():
        return read_entries(path, TABLE, _environment)


def write_lock(path: Path, environments: Mapping[str, LockedEnvironment]) -> bool:
    """Write *environments* as all that the lock file has, and return whether it changed; other tables stay.

    Raises EnvironmentFailed, `environment_lock_invalid`, for a file there that is none.
    """
    with locked(path.parent):
        return write_text(path, lock_text(path, environments))


def lock_text(path: Path, environments: Mapping[str, LockedEnvironment]) -> str:
    """Return what `write_lock` would write. Raises as it does."""
    with _telling():
        return table_text(path, TABLE, {key: _row(environment) for key, environment in environments.items()})


def stale_reason(environment: LockedEnvironment, spec: EnvironmentSpec, *, exact: bool = True) -> str:
    """Return in words why *environment* is not what *spec* asks for today; empty when it is.

    What has more than is asked for, as suggested packages are, and Python's beside Node's, is as good where it need not be *exact*.
    """
    covered = not exact and set(spec.requirements) <= set(environment.requirements)
    if environment.requirements != spec.requirements and not covered:
        dropped = sorted(set(environment.requirements) - set(spec.requirements))
        new = sorted(set(spec.requirements) - set(environment.requirements))
        words = (
            f"asked for now: {', '.join(new)}" if new else "",
            f"no longer: {', '.join(dropped)}" if dropped else "",
        )
        return "; ".join(filter(None, words)) or "its requirements have another order"
    speaks_python, speaks_node = exact or spec.requirements, exact or spec.node
    if speaks_python and environment.requires_python != spec.requires_python:
        return f"it needs Python {spec.requires_python or 'of any version'} now"
    return "its Node packages are others now" if speaks_node and environment.node != node_digest(spec.node) else ""


def node_digest(node: NodeSpec | None) -> str:
    """Return the hex digest of a manifest and its lock; empty for none."""
    if node is None:
        return ""
    parts = (hashlib.sha256(part or b"").digest() for part in (node.manifest, node.lock))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _row(environment: LockedEnvironment) -> dict[str, Any]:
    row = {name: value for name, value in asdict(environment).items() if name not in {"key", "packages"} and value}
    row |= {"requirements": list(environment.requirements)}
    packages = (asdict(package) for package in environment.packages)
    return row | {"package": [_without_build(package) for package in packages]}


def _without_build(package: dict[str, Any]) -> dict[str, Any]:
    """Leave out that a wheel is built with nothing."""
    build = [_without_build(part) for part in package.pop("build")]
    return package | ({"build": build} if build else {})


def _environment(key: str, row: dict[str, Any]) -> LockedEnvironment:
    packages = [_package(package) for package in row["package"]]
    names = [package.name for package in packages]
    if names != sorted(set(names)):
        raise ValueError(f"packages of {key} are not sorted, or there twice")
    requirements, texts = row["requirements"], [row.get("requires_python", ""), row["platform"], row.get("node", "")]
    if not all(isinstance(text, str) for text in (*requirements, *texts)) or not (
        _HEX.fullmatch(texts[2]) or not texts[2]
    ):
        raise ValueError(f"values of {key} are no texts")
    requires_python, platform, node = texts
    return LockedEnvironment(key, tuple(requirements), requires_python, platform, tuple(packages), node)


def _package(row: dict[str, Any]) -> LockedPackage:
    build = tuple(_package(part) for part in row.get("build", ()))
    package = LockedPackage(**{**row, "build": build})
    kinds = {field.name: {"size": int, "build": tuple}.get(field.name, str) for field in fields(LockedPackage)}
    if any(type(getattr(package, name)) is not kind for name, kind in kinds.items()) or package.size < 0:
        raise ValueError("a package has a value of another kind")
    try:
        parse = parse_sdist_filename if package.is_source else parse_wheel_filename
        name, version, *_ = parse(package.file)
        agrees = name == package.name == canonicalize_name(package.name) and str(version) == package.version
    except (InvalidWheelFilename, InvalidSdistFilename):
        agrees = False
    if any(part.is_source for part in build) or (build and not package.is_source):
        raise ValueError(f"{package.file[:200]!r} is built with what nothing is built with")
    if not agrees or not _HEX.fullmatch(package.sha256) or "/" in package.file:
        raise ValueError(f"{package.file[:200]!r} is no locked file of {package.name[:100]!r}")
    return package


@contextmanager
def _telling() -> Iterator[None]:
    """Say under the code of environments that the file is none."""
    try:
        yield
    except LockFileInvalid as error:
        raise EnvironmentFailed(
            error.message, code="environment_lock_invalid", who=error.who, **error.details
        ) from None
