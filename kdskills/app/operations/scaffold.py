"""`new`: the files to begin a bundle, a skill or a plugin with; `plugins`: what is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from kdskills.app.host import Host

SUFFIX: Final = ".tmpl"


class NewInput(Input):
    """What to begin, and where."""

    kind: Literal["bundle", "skill", "plugin"] = Field(description="What to begin.")
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)] = Field(
        description="Lower-case letters, digits and single hyphens; the folder gets this name."
    )
    into: Path = Field(Path(), description="Folder that the new folder is made in.")


class NewOutput(Output):
    """What was made."""

    kind: str
    path: str
    files: tuple[str, ...]


async def new(host: Host, arguments: NewInput, context: Context) -> NewOutput:
    """Make a folder with the files to begin with, whole or not at all."""
    return await asyncio.to_thread(_make, arguments)


def _make(arguments: NewInput) -> NewOutput:
    target = arguments.into / arguments.name
    if not arguments.into.is_dir():
        raise BadRequest(f"{arguments.into} is not a folder", code="path_missing", path=str(arguments.into))
    if os.path.lexists(target):
        raise Conflict(f"{target} is there already", code="path_exists", path=str(target))
    work = Path(tempfile.mkdtemp(prefix=f".{arguments.name}-", dir=arguments.into))
    try:
        files = tuple(
            sorted(_fill(resources.files("kdskills.app") / "templates" / arguments.kind, work, "", arguments.name))
        )
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return NewOutput(kind=arguments.kind, path=str(target), files=files)


def _fill(source: Traversable, target: Path, below: str, name: str) -> list[str]:
    """Write the templates of *source* below *target*; return their paths."""
    paths: list[str] = []
    for item in source.iterdir():
        path = f"{below}{_filled(item.name, name)}"
        if item.is_dir():
            (target / path).mkdir()
            paths += _fill(item, target, f"{path}/", name)
        else:
            path = path.removesuffix(SUFFIX)
            (target / path).write_text(_filled(item.read_text(encoding="utf-8"), name), encoding="utf-8")
            paths.append(path)
    return paths


def _filled(text: str, name: str) -> str:
    words = {
        "__name__": name,
        "__module__": name.replace("-", "_"),
        "__title__": name.replace("-", " ").capitalize(),
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return text


class PluginsInput(Input):
    """Nothing to say."""


class PluginRow(Output):
    """One plugin and the hooks it answers."""

    name: str
    shipped: bool
    hooks: tuple[str, ...]


class PluginsOutput(Output):
    """Plugins in the order they were registered, and names they registered, by kind."""

    plugins: tuple[PluginRow, ...]
    registered: dict[str, tuple[str, ...]]


async def plugins(host: Host, arguments: PluginsInput, context: Context) -> PluginsOutput:
    """List plugins and what they registered."""
    rows = []
    for name, plugin in host.plugins.list_name_plugin():
        callers = host.plugins.get_hookcallers(plugin) or []
        hooks = tuple(sorted({caller.name for caller in callers}))
        rows.append(PluginRow(name=name, shipped=name.startswith("kdskills.builtin."), hooks=hooks))
    registers = host.registers
    names = {
        "executors": tuple(name for name, _ in registers.executors.items()),
        "models": tuple(name for name, _ in registers.models.items()),
        "stores": tuple(name for name, _ in registers.stores.items()),
        "tools": tuple(name for name, _ in registers.tools.items()),
        "interpreters": tuple(name for name, _ in registers.interpreters.items()),
    }
    return PluginsOutput(plugins=tuple(rows), registered=names)


NEW = Implementation(NewInput, NewOutput, ("path_missing", "path_exists"), new)
PLUGINS = Implementation(PluginsInput, PluginsOutput, (), plugins)
