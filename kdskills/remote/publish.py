"""Publishes skills of bundles in a Codex session: as tools, or as folders that the server itself lists.

Route `tools`: each granted skill is a tool that returns its text, and any reference of it. Route `roots`: the granted skills are
written into a folder of their own, and the server gets its path. Either way the policy decides which skills are published. With
tools it is asked again at each call: a skill that was revoked meanwhile is answered like an unknown one.

The server's list of roots is one for the whole process, and a call replaces it whole. Only a server this client started is given
one, and every session of it that publishes must see the same skills.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
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
from kdskills.skills.private_files import make_folder, private_folder, write_private
from kdskills.skills.safe_open import read_file, walk_tree
from kdskills.turn import Granted, instruction_block

if TYPE_CHECKING:
    from kdskills.remote.core import SessionCore
    from kdskills.skills.model import Skill
    from kdskills.turn import SkillView


PUBLIC: Final = "public"
LONGEST_ROOT: Final = 64
_AS_TOOLS: Final = "publish with route='tools'"
_FORBIDDEN: Final = re.compile(r"[^A-Za-z0-9_]")


def tool_names(view: SkillView, python_tools: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Return `{namespace.tool: (full id, tool id)}` of a view's listed skills; the tool id is None for the skill itself.

    Raises:
        CatalogError: Two skills or tools would have one name.
    """
    python_tool_ids = frozenset(python_tools)
    names: dict[str, tuple[str, str | None]] = {}
    for full_id, skill in view.listed.items():
        top = f"{skill.namespace}.{skill.id.replace('-', '_')}"  # tools are named with underscores
        tool_ids = [tool.id for tool in skill.tools if tool.id in python_tool_ids]
        for tool_id in (None, *tool_ids):
            name = top if tool_id is None else f"{top}__{_FORBIDDEN.sub('_', tool_id)}"
            if name in names:
                raise _collision(name, names[name][0], full_id)
            names[name] = (full_id, tool_id)
    return names


def root_names(view: SkillView) -> dict[str, str]:
    """Return `{folder name: full id}` of a view's listed skills.

    Raises:
        CatalogError: Two skills would have one folder, or a name is too long.
    """
    names: dict[str, str] = {}
    for full_id, skill in view.listed.items():
        name = skill.id if skill.namespace == PUBLIC else f"{skill.namespace}-{skill.id}"
        if len(name) > LONGEST_ROOT:
            raise CatalogError(
                f"the folder of {full_id} would be called {name}, which is longer than {LONGEST_ROOT} characters",
                rule="root_name_long",
                suggestion=f"shorten the skill's id, or {_AS_TOOLS}",
            )
        if name in names:
            raise _collision(name, names[name], full_id)
        names[name] = full_id
    return names


def _collision(name: str, first: str, second: str) -> CatalogError:
    return CatalogError(
        f"{first} and {second} would both be called {name}",
        rule="published_twice",
        suggestion="rename one of them, or grant only one to this consumer",
    )


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What was published.

    Attributes:
        route: `tools` or `roots`.
        digest: Digest of the view.
        names: `{name the model sees: full id}`: the reverse map.
        skills: Published skills with digests of their texts, by full id.
        folder: The root folder passed to the server, for route `roots`.
        diagnostics: Findings about the texts.
    """

    route: Literal["tools", "roots"]
    digest: str
    names: Mapping[str, str]
    skills: tuple[ReceiptSkillEntry, ...]
    folder: str | None = None
    diagnostics: tuple[Diagnostic, ...] = field(default=())


def receipts(texts: Mapping[str, tuple[str, tuple[Diagnostic, ...]]]) -> tuple[ReceiptSkillEntry, ...]:
    """Return the entries of published texts for a receipt."""
    return tuple(
        ReceiptSkillEntry(full_id, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest())
        for full_id, (text, _) in sorted(texts.items())
    )


def text_of(view: SkillView, full_id: str) -> tuple[str, tuple[Diagnostic, ...]]:
    """Return the text of a skill with what it imports, dependencies first; empty when it is refused."""
    resolution = view.resolve(full_id)
    if not isinstance(resolution, Granted):
        return "", ()
    block = instruction_block(view, (resolution,))
    return str(block), tuple(block.diagnostics)


ROOTS: Final = "kdskills-roots"
MAX_FILE: Final = 16 * 1024 * 1024
_SKILL_FILE: Final = "SKILL.md"


async def publish_roots(core: SessionCore, view: SkillView) -> PublishReport:
    """Publish by route `roots`; see `publish`."""
    core.live()
    home = _owned_home(core)
    check_same_view(view, (session.view_digest for session in other_sessions(core)))
    names = root_names(view)
    texts = {full_id: text_of(view, full_id) for full_id in view.listed}
    bodies = {full_id: text for full_id, (text, _) in texts.items()}
    folder, notes = await core.owner.blocking(_write, home, view, names, bodies)
    try:
        await _set_roots(core, [str(folder)])
    except BaseException:  # raised again: a folder that the server does not use is deleted
        shutil.rmtree(folder, ignore_errors=True)
        raise
    old, core.roots_folder = core.roots_folder, str(folder)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    core.roots_digest = core.view_digest = view.digest
    core.published = receipts(texts)
    diagnostics = (*(note for _, notes_of in texts.values() for note in notes_of), *notes)
    return PublishReport("roots", view.digest, MappingProxyType(names), core.published, str(folder), diagnostics)


async def take_roots_away(core: SessionCore) -> None:
    """Remove the roots of this session from the server's list; roots of another session stay."""
    folder = core.roots_folder
    if folder is None:
        return
    folders = [session.roots_folder for session in other_sessions(core) if session.roots_folder is not None]
    await _set_roots(core, folders[-1:])
    core.roots_folder = core.roots_digest = None
    shutil.rmtree(folder, ignore_errors=True)


def other_sessions(core: SessionCore) -> list[SessionCore]:
    """Return the other open sessions of the same server."""
    return [session for session in core.owner.sessions() if session is not core]


async def _set_roots(core: SessionCore, folders: list[str]) -> None:
    await core.owner.call(core.owner.client.request, "skills/extraRoots/set", extraRoots=folders)


def _owned_home(core: SessionCore) -> Path:
    """Return the home of a server this client started over its pipes.

    Raises:
        CatalogError: Another program started the server, or it does not support roots.
    """
    client = core.owner.client
    home = getattr(client, "codex_home", None)
    if not getattr(client, "owned", False) or not isinstance(home, str):
        raise CatalogError(
            "roots are seen by every session of a server, so only a server this client started is given any",
            rule="roots_not_owned",
            suggestion=f"start the server with spawn(), or {_AS_TOOLS}",
        )
    if core.owner.profile.probed and not core.owner.profile.extra_roots:
        raise CatalogError(
            "this server does not take skill roots",
            rule="roots_unknown",
            suggestion=f"{_AS_TOOLS}, or use a newer server",
        )
    return Path(home)


def check_same_view(view: SkillView, digests: Iterable[str | None]) -> None:
    """Refuse a view that differs from those published by other sessions, because every session of a server sees all roots."""
    if any(digest not in {None, view.digest} for digest in digests):
        raise CatalogError(
            "another session of this server published other skills, and roots are seen by every session",
            rule="roots_differ",
            suggestion=f"give each view a server of its own, or {_AS_TOOLS}",
        )


def _write(
    home: Path, view: SkillView, names: dict[str, str], texts: dict[str, str]
) -> tuple[Path, tuple[Diagnostic, ...]]:
    """Write the skills into a fresh folder below the server's home, readable by this user only.

    Raises:
        CatalogError: The folder cannot be written; whatever was written is deleted again.
    """
    top = folder = home / ROOTS
    notes: list[Diagnostic] = []
    try:
        private_folder(top)
        folder = Path(tempfile.mkdtemp(dir=top))
        for name, full_id in names.items():
            skill = view.listed[full_id]
            target = folder / name
            make_folder(target)
            head = yaml.safe_dump({"name": name, "description": skill.description}, sort_keys=False, allow_unicode=True)
            write_private(target / _SKILL_FILE, f"---\n{head}---\n{texts[full_id]}\n")
            notes += _copy_files(skill, target)
    except BaseException as error:
        if folder != top:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CatalogError(
                f"the skills cannot be written to {folder}: {error.strerror or error}",
                rule="roots_not_written",
                suggestion=f"make room in the server's home, or {_AS_TOOLS}",
            ) from error
        raise
    return folder, tuple(notes)


def _copy_files(skill: Skill, target: Path) -> list[Diagnostic]:
    """Copy the further files of a skill; return a warning for each link and each file that cannot be read."""
    if skill.folder is None:
        return []
    notes = []
    for entry in walk_tree(skill.folder):
        if entry.path == _SKILL_FILE:
            continue
        try:
            data = read_file(skill.folder, entry.path, limit=MAX_FILE).data
        except FileRefused as error:
            message = f"{entry.path} is not published: {error.message}"
            notes.append(Diagnostic("file_not_published", "warning", message, ref=skill.full_id))
            continue
        target_file = target / entry.path
        make_folder(target_file.parent)
        write_private(target_file, data)
    return notes


Renew = Callable[[], "SkillView"]

MAX_PART: Final = 1024 * 1024
"""Bytes of a reference a tool returns."""

_PART: Final[JsonObject] = {
    "type": "object",
    "properties": {
        "part": {"type": "string", "description": "Path of one reference of the skill; without it, its instructions."}
    },
    "additionalProperties": False,
}


async def publish(
    core: SessionCore,
    view: SkillView,
    *,
    route: str = "tools",
    python_tools: Mapping[str, Callable[..., Any]] | None = None,
    renew: Renew | None = None,
) -> PublishReport:
    """Publish the skills of a view in a session, as `AsyncRemoteSkillSession.publish` tells.

    Raises:
        ValueError: There is no such route.
        CatalogError: Names collide or do not fit, or this server cannot have roots.
    """
    if route not in ("tools", "roots"):
        raise ValueError(f"route is tools or roots, not {route!r}")
    async with core.owner.turnstile(ROOTS):  # one at a time: each is compared with what other sessions published
        if route == "roots":
            report = await publish_roots(core, view)
            _withdraw(core, keep=())
            return report
        report = publish_tools(core, view, python_tools=python_tools or {}, renew=renew)
        await take_roots_away(core)
        return report


def _withdraw(core: SessionCore, keep: Iterable[str]) -> None:
    """Unregister the skills published as tools, except those named in *keep*."""
    for name in _published_names(core) - set(keep):
        core.registry.unregister(name)
    core.published_tools = {}


def _published_names(core: SessionCore) -> set[str]:
    """Return the names whose base is a published skill; the program may have registered its own function instead."""
    bases, published = core.registry.bases(), core.published_tools
    return {skill.qualified_name for skill in bases if published.get(skill.qualified_name) is skill}


def publish_tools(
    core: SessionCore,
    view: SkillView,
    *,
    python_tools: Mapping[str, Callable[..., Any]],
    renew: Renew | None,
) -> PublishReport:
    """Publish by route `tools`; see `publish`."""
    check_same_view(view, (session.roots_digest for session in other_sessions(core)))
    names = tool_names(view, python_tools)
    texts = {full_id: text_of(view, full_id) for full_id in view.listed}
    look = renew or (lambda: view)
    new_skills = []
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
        new_skills.append(core.registry.build(tool, handler, namespace=namespace, **options))
    published = _published_names(core)
    others = [entry for entry in core.registry.skills() if entry.qualified_name not in published]
    neighbours = [(entry.namespace, entry.name) for entry in others]
    # All are checked before the first change, so that all are published or none.
    for entry in new_skills:
        check_neighbours(entry.namespace, entry.name, neighbours)
    _withdraw(core, keep=names)
    core.published_tools = {entry.qualified_name: core.registry.register(entry) for entry in new_skills}
    core.published = receipts(texts)
    core.view_digest = view.digest
    diagnostics = tuple(note for _, notes in texts.values() for note in notes)
    reverse = {name: full_id for name, (full_id, _) in names.items()}
    return PublishReport("tools", view.digest, MappingProxyType(reverse), core.published, None, diagnostics)


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
