"""Route `roots`: granted skills as folders the server lists itself.

The server's list of roots is one for the whole process, and a call replaces it whole. Only a server this client started is given
one, and every session of it that publishes must see the same skills.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import yaml

from kdskills.errors import Diagnostic, FileRefused
from kdskills.remote.ports import CatalogError
from kdskills.remote.publish_names import root_names
from kdskills.remote.publish_parts import PublishReport, receipts, text_of
from kdskills.skills.private_files import make_folder, private_folder, write_private
from kdskills.skills.safe_open import read_file, walk_tree

if TYPE_CHECKING:
    from kdskills.remote.core_session import SessionCore
    from kdskills.skills.model import Skill
    from kdskills.turn import SkillView

ROOTS: Final = "kdskills-roots"
MAX_FILE: Final = 16 * 1024 * 1024
_SKILL_FILE: Final = "SKILL.md"


async def publish_roots(core: SessionCore, view: SkillView) -> PublishReport:
    """Publish by route `roots`; see `kdskills.remote.publish.publish`.

    Raises:
        CatalogError: The server is not this client's own, sessions differ, or names collide.
    """
    core.live()
    home = _owned_home(core)
    check_same_view(view, (session.view_digest for session in other_sessions(core)))
    names = root_names(view)
    texts = {full_id: text_of(view, full_id) for full_id in view.listed}
    bodies = {full_id: text for full_id, (text, _) in texts.items()}
    folder, notes = await core.driver.blocking(_write, home, view, names, bodies)
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
    return PublishReport("roots", view.digest, MappingProxyType(names), core.published, str(folder), tuple(diagnostics))


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
    await core.driver.call(core.owner.client.request, "skills/extraRoots/set", extraRoots=folders)


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
            suggestion="start the server with spawn(), or publish with route='tools'",
        )
    if core.owner.profile.probed and not core.owner.profile.extra_roots:
        raise CatalogError(
            "this server does not take skill roots",
            rule="roots_unknown",
            suggestion="publish with route='tools', or use a newer server",
        )
    return Path(home)


def check_same_view(view: SkillView, digests: Iterable[str | None]) -> None:
    """Refuse a view that differs from those published by other sessions, because every session of a server sees all roots.

    Raises:
        CatalogError: `roots_differ`.
    """
    if any(digest not in {None, view.digest} for digest in digests):
        raise CatalogError(
            "another session of this server published other skills, and roots are seen by every session",
            rule="roots_differ",
            suggestion="give each view a server of its own, or publish with route='tools'",
        )


def _write(
    home: Path, view: SkillView, names: dict[str, str], texts: dict[str, str]
) -> tuple[Path, tuple[Diagnostic, ...]]:
    """Write the skills into a fresh folder below the server's home, readable by this user only.

    Raises:
        CatalogError: The folder cannot be written; whatever was written is deleted again.
    """
    top = home / ROOTS
    try:
        private_folder(top)
        folder = Path(tempfile.mkdtemp(dir=top))
    except OSError as error:
        raise _write_error(top, error) from error
    try:
        notes: list[Diagnostic] = []
        for name, full_id in names.items():
            skill = view.listed[full_id]
            target = folder / name
            make_folder(target)
            head = yaml.safe_dump({"name": name, "description": skill.description}, sort_keys=False, allow_unicode=True)
            write_private(target / _SKILL_FILE, f"---\n{head}---\n{texts[full_id]}\n")
            notes += _copy_files(skill, target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _write_error(folder, error) from error
        raise
    return folder, tuple(notes)


def _write_error(folder: Path, error: OSError) -> CatalogError:
    return CatalogError(
        f"the skills cannot be written to {folder}: {error.strerror or error}",
        rule="roots_not_written",
        suggestion="make room in the server's home, or publish with route='tools'",
    )


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
