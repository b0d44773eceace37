"""Publishes skills of bundles in a Codex session: as tools, or as folders that the server itself lists.

As tools, each granted skill returns its text, and any reference of it; the policy is asked again at each call. The server's list of
roots is one for the whole process, and a call replaces it whole: only a server this client started is given one, and every session
of it that publishes must see the same skills.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from kdskills.errors import Diagnostic, FileRefused
from kdskills.remote.calls import ReceiptSkillEntry
from kdskills.remote.dispatch import NotRegistered
from kdskills.remote.names import check_neighbours
from kdskills.remote.ports import CatalogError, JsonObject
from kdskills.session.reading import skill_file
from kdskills.session.workspace import clean_path
from kdskills.skills.folder import skill_bytes
from kdskills.skills.private_files import make_folder, private_folder, write_private
from kdskills.skills.safe_open import walk_shown
from kdskills.turn import Granted, instruction_block

if TYPE_CHECKING:
    from kdskills.remote.core import SessionCore
    from kdskills.remote.registry import RemoteSkill
    from kdskills.turn import SkillView


PUBLIC: Final = "public"
LONGEST_ROOT: Final = 64
ROOTS: Final = "kdskills-roots"
MAX_FILE: Final = 16 * 1024 * 1024
MAX_PART: Final = 1024 * 1024
"""Bytes of a reference a tool returns."""

_SKILL_FILE: Final = "SKILL.md"
_AS_TOOLS: Final = "publish with route='tools'"
_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9_]")
_PART: Final[JsonObject] = {
    "type": "object",
    "properties": {
        "part": {"type": "string", "description": "Path of one reference of the skill; without it, its instructions."}
    },
    "additionalProperties": False,
}

Renew = Callable[[], "SkillView"]
Names = Mapping[str, tuple[str, str | None]]
"""`{name the model sees: (full id, tool id)}`; the tool id is None for the skill itself."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What was published."""

    route: Literal["tools", "roots"]
    digest: str  # of the view
    names: Mapping[str, str]  # `{name the model sees: full id}`: the reverse map
    skills: tuple[ReceiptSkillEntry, ...]  # with digests of their texts, by full id
    folder: str | None = None  # the root folder passed to the server, for route `roots`
    diagnostics: tuple[Diagnostic, ...] = field(default=())  # about the texts


async def publish(
    core: SessionCore,
    view: SkillView,
    *,
    route: str = "tools",
    python_tools: Mapping[str, Callable[..., Any]] | None = None,
    renew: Renew | None = None,
) -> PublishReport:
    """As `AsyncRemoteSkillSession.publish`; raises `ValueError` for an unknown route."""
    if route not in ("tools", "roots"):
        raise ValueError(f"route is tools or roots, not {route!r}")
    async with core.owner.turnstile(ROOTS):  # one at a time: each is compared with what other sessions published
        home = _owned_home(core) if route == "roots" else None
        functions = python_tools if python_tools is not None and home is None else {}
        digests = {other.roots_digest if home is None else other.view_digest for other in core.owner.others(core)}
        if digests - {None, view.digest}:
            words = "another session of this server published other skills, and roots are seen by every session"
            advice = f"give each view a server of its own, or {_AS_TOOLS}"
            raise CatalogError(words, rule="roots_differ", suggestion=advice)
        names = _names(view, route, functions)
        texts = {full_id: text_of(view, full_id) for full_id in view.listed}
        notes = [note for _, text_notes in texts.values() for note in text_notes]
        if home is None:
            _replace_tools(core, names, _tool_skills(core, view, names, functions, renew or (lambda: view)))
        else:
            notes += await _replace_roots(core, home, view, names, {key: text for key, (text, _) in texts.items()})
            _replace_tools(core, (), ())
        core.view_digest = view.digest
        core.published = tuple(
            ReceiptSkillEntry(full_id, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())
            for full_id, (text, _) in sorted(texts.items())
        )
        if home is None:
            await take_roots_away(core)
        reverse = MappingProxyType({name: full_id for name, (full_id, _) in names.items()})
        shown: Literal["tools", "roots"] = "tools" if home is None else "roots"
        return PublishReport(shown, view.digest, reverse, core.published, core.roots_folder, tuple(notes))


async def take_roots_away(core: SessionCore) -> None:
    """Remove the roots of this session from the server's list; roots of another session stay."""
    folder = core.roots_folder
    if folder is None:
        return
    folders = [other.roots_folder for other in core.owner.others(core) if other.roots_folder is not None]
    await _set_roots(core, folders[-1:])
    core.roots_folder = core.roots_digest = None
    shutil.rmtree(folder, ignore_errors=True)


def _names(view: SkillView, route: str, python_tools: Collection[str]) -> Names:
    """Return the names of a view's listed skills and of those of their tools that are in *python_tools*."""
    names: dict[str, tuple[str, str | None]] = {}
    for full_id, skill in view.listed.items():
        if route == "roots":
            top = skill.id if skill.namespace == PUBLIC else f"{skill.namespace}-{skill.id}"
            if len(top) > LONGEST_ROOT:
                words = f"the folder of {full_id} would be called {top}, which is longer than {LONGEST_ROOT} characters"
                raise CatalogError(words, rule="root_name_long", suggestion=f"shorten the skill's id, or {_AS_TOOLS}")
        else:
            top = f"{skill.namespace}.{skill.id.replace('-', '_')}"  # tools are named with underscores
        for tool_id in (None, *(tool.id for tool in skill.tools if tool.id in python_tools)):
            name = top if tool_id is None else f"{top}__{_FORBIDDEN.sub('_', tool_id)}"
            if name in names:
                words = f"{names[name][0]} and {full_id} would both be called {name}"
                advice = "rename one of them, or grant only one to this consumer"
                raise CatalogError(words, rule="published_twice", suggestion=advice)
            names[name] = (full_id, tool_id)
    return names


def text_of(view: SkillView, full_id: str) -> tuple[str, tuple[Diagnostic, ...]]:
    """Return the text of a skill with what it imports, dependencies first; empty when it is refused."""
    resolution = view.resolve(full_id)
    if not isinstance(resolution, Granted):
        return "", ()
    block = instruction_block(view, (resolution,))
    return str(block), tuple(block.diagnostics)


def _owned_home(core: SessionCore) -> Path:
    """Return the home of the server; raises `CatalogError` for one that this client did not start, or without roots."""
    core.live()
    client = core.owner.client
    home = getattr(client, "codex_home", None)
    if not getattr(client, "owned", False) or not isinstance(home, str):
        words = "roots are seen by every session of a server, so only a server this client started is given any"
        raise CatalogError(words, rule="roots_not_owned", suggestion=f"start the server with spawn(), or {_AS_TOOLS}")
    if core.owner.profile.probed and not core.owner.profile.extra_roots:
        words = "this server does not take skill roots"
        raise CatalogError(words, rule="roots_unknown", suggestion=f"{_AS_TOOLS}, or use a newer server")
    return Path(home)


async def _set_roots(core: SessionCore, folders: list[str]) -> None:
    await core.owner.call(core.owner.client.request, "skills/extraRoots/set", extraRoots=folders)


async def _replace_roots(
    core: SessionCore, home: Path, view: SkillView, names: Names, texts: dict[str, str]
) -> list[Diagnostic]:
    """Give the server a new folder of skills in place of this session's last one; returns warnings about files left out."""
    with contextlib.ExitStack() as failing:
        try:
            folder, notes = await core.owner.blocking(_write, home, view, names, texts, failing)
        except OSError as error:
            words = f"the skills cannot be written to {home / ROOTS}: {error.strerror or error}"
            advice = f"make room in the server's home, or {_AS_TOOLS}"
            raise CatalogError(words, rule="roots_not_written", suggestion=advice) from error
        await _set_roots(core, [folder])
        failing.pop_all()
    old, core.roots_folder, core.roots_digest = core.roots_folder, folder, view.digest
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return notes


def _write(
    home: Path, view: SkillView, names: Names, texts: dict[str, str], failing: contextlib.ExitStack
) -> tuple[str, list[Diagnostic]]:
    """Write the skills into a fresh private folder, which *failing* deletes; returns warnings about links and unreadable files."""
    folder = Path(tempfile.mkdtemp(dir=private_folder(home / ROOTS)))
    failing.callback(shutil.rmtree, folder, ignore_errors=True)
    notes = []
    for name, (full_id, _) in names.items():
        skill, target = view.listed[full_id], make_folder(folder / name)
        head = yaml.safe_dump({"name": name, "description": skill.description}, sort_keys=False, allow_unicode=True)
        write_private(target / _SKILL_FILE, f"---\n{head}---\n{texts[full_id]}\n")
        if skill.folder is None:
            continue
        for entry in walk_shown(skill.folder):
            if entry.path == _SKILL_FILE:
                continue
            try:
                data = skill_bytes(skill, entry.path, MAX_FILE)
            except FileRefused as error:
                message = f"{entry.path} is not published: {error.message}"
                notes.append(Diagnostic("file_not_published", "warning", message, ref=skill.full_id))
                continue
            make_folder((target / entry.path).parent)
            write_private(target / entry.path, data)
    return str(folder), notes


def _tool_skills(
    core: SessionCore, view: SkillView, names: Names, python_tools: Mapping[str, Callable[..., Any]], look: Renew
) -> list[RemoteSkill]:
    skills = []
    for name, (full_id, tool_id) in names.items():
        skill = view.listed[full_id]
        if tool_id is None:
            description = f"Instructions of the skill {skill.name}: {skill.description}"
            options: dict[str, Any] = {"description": description, "input_schema": _PART, "idempotent": True}
            handler: Callable[..., Any] = _reader(look, name, full_id)
        else:
            reasons = (skill_tool.why for skill_tool in skill.tools if skill_tool.id == tool_id)
            options = {"description": next(reasons, None) or None}
            handler = _guarded(look, name, full_id, python_tools[tool_id])
        namespace, _, tool = name.rpartition(".")
        skills.append(core.registry.build(tool, handler, namespace=namespace, **options))
    return skills


def _replace_tools(core: SessionCore, names: Collection[str], skills: Sequence[RemoteSkill]) -> None:
    """Register skills in place of those published before; what the program registered itself stays."""
    published = {
        skill.qualified_name
        for skill in core.registry.bases()
        if core.published_tools.get(skill.qualified_name) is skill
    }
    others = [entry for entry in core.registry.skills() if entry.qualified_name not in published]
    neighbours = [(entry.namespace, entry.name) for entry in others]
    # All are checked before the first change, so that all are published or none.
    for entry in skills:
        check_neighbours(entry.namespace, entry.name, neighbours)
    for name in published.difference(names):
        core.registry.unregister(name)
    core.published_tools = {entry.qualified_name: core.registry.register(entry) for entry in skills}


def _reader(look: Renew, name: str, full_id: str) -> Callable[..., Any]:
    def read(part: str | None = None) -> str:
        view = look()
        resolution = view.resolve(full_id)
        if not isinstance(resolution, Granted):
            raise NotRegistered(name)
        if part is None or not part.strip():
            return text_of(view, full_id)[0]
        data = skill_file(resolution.skill, clean_path(part), MAX_PART)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{part!r} is no text") from error

    return read


def _guarded(look: Renew, name: str, full_id: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(look().resolve(full_id), Granted):
            raise NotRegistered(name)
        return handler(*args, **kwargs)

    return call
