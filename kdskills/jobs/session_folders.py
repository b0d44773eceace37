"""Folders of sessions in the store of artifacts, so that the next command of a session may run on any host.

What a session has is told by a *manifest*: each file with its mode, digest, and where its bytes lie. Bytes lie in *objects*: small
files many to one, a large one alone. Both are kept under their digests and never change. Which manifest counts stands in a row of
`kd_meta`, which moves in the transaction that ends the task, under that task's fence: a worker that was given up can move
neither, whatever it still puts into the store. See `docs/explanation/durability.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from kdskills.errors import Conflict, KdskillsError, NotFound, OperatorMustAct
from kdskills.execution.check import output_problem
from kdskills.execution.dirs import locked
from kdskills.jobs.artifacts import ArtifactStoreUnavailable, key_part
from kdskills.jobs.exchange import SessionFile, SessionFolder, SessionVersion
from kdskills.jobs.model import MIB, OPEN, OutputError, TaskHead, Value
from kdskills.jobs.records import in_states
from kdskills.skills.private_files import make_folder, open_private, private_folder, replace_file, write_private
from kdskills.storage.database import LazyModule, micros, upsert, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.artifacts import ArtifactKeeper, Blobs
    from kdskills.jobs.queue import Work
else:
    sa = LazyModule("sqlalchemy")

T = TypeVar("T")

SMALL: Final = 256 * 1024
"""Bytes of the largest file that shares an object with others."""
PACK: Final = 8 * MIB
"""Bytes of small files that one object takes."""
MANY: Final = 8
"""Objects of less than a quarter of `PACK` that are kept before they are made into one."""
MANIFEST_BYTES: Final = 16 * MIB
SCHEMA: Final[Literal["kdskills.session-folder/1"]] = "kdskills.session-folder/1"
TOP: Final = "session-folders"
NOTE: Final = "saved.json"
_LOCK: Final = ".saving"
_SPOOL: Final = ".spool-"
_LOOK_S: Final = 0.05
_DIGEST: Final = "^[0-9a-f]{64}$"
_NAME: Final = re.compile(r"([0-9]{10})-([0-9a-f]{64})")
_LOG: Final = logging.getLogger("kdskills.jobs")


class SessionFolderCorrupt(OperatorMustAct, code="session_corrupt"):
    """What the store has of a session's folder is not what was saved, or may not be brought to this host."""


class SessionFolderTooLarge(OperatorMustAct, code="session_too_large"):
    """A session's folder has more than may be saved; it stays on the host it is on."""


class FolderObject(Value):
    """Bytes of one or several files, in the store since `generation`."""

    generation: int = Field(ge=1)
    sha256: str = Field(pattern=_DIGEST)
    size: int = Field(ge=1)


class FolderFile(Value):
    """One file: which of the manifest's objects has its bytes, from `offset` on; an empty file needs none."""

    mode: Literal[0o600, 0o700]
    size: int = Field(ge=0)
    sha256: str = Field(pattern=_DIGEST)
    object: int | None = Field(None, ge=0)
    offset: int = Field(0, ge=0)


class FolderManifest(Value):
    """Everything a session's folder has in one generation."""

    schema_: Literal["kdskills.session-folder/1"] = Field(alias="schema")
    session: str
    generation: int = Field(ge=1)
    objects: tuple[FolderObject, ...] = ()
    files: dict[str, FolderFile] = Field(default_factory=dict)

    def problem(self, session: str, files: int, size: int) -> str | None:
        """Return why this is no folder of *session*, or more than so many files and bytes; None when all is well."""
        if self.session != session:
            return "it is another session's"
        if len(self.files) > files or sum(file.size for file in self.files.values()) > size:
            return f"it has more than {files} files or {size} bytes"
        if any(item.generation > self.generation for item in self.objects):
            return "it names objects of a later generation"
        for path, file in self.files.items():
            words = output_problem(path)
            if words is None and any(str(parent) in self.files for parent in PurePosixPath(path).parents):
                words = "lies below a file"
            if words is None and file.size and (file.object is None or file.object >= len(self.objects)):
                words = "has its bytes in no object"
            if words is None and file.object is not None and file.offset + file.size > self.objects[file.object].size:
                words = "reaches beyond its object"
            if words is not None:
                return f"the path {path[:80]!a} {words}"
        return None

    @property
    def entries(self) -> dict[str, SessionFile]:
        """The files as a version of a session folder has them."""
        return {path: SessionFile(file.mode, file.size, file.sha256) for path, file in self.files.items()}


class FolderPointer(Value):
    """The row that says which manifest of a session counts; without one the session was forgotten, and its files with it."""

    generation: int = 0
    manifest: str = ""
    size: int = 0
    project: str


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What is to be done for a manifest: objects that stay, where they have contents, and contents to send, one list an object."""

    objects: tuple[FolderObject, ...]
    places: Mapping[str, tuple[int, int]]
    missing: tuple[tuple[str, ...], ...]


def plan_folder(entries: Mapping[str, SessionFile], base: FolderManifest | None) -> FolderPlan:
    """Return how the contents of *entries* are kept, given what the manifest before has.

    An object of which less than half is still needed is written anew, and so are small ones when they are many: what is
    kept stays within twice of what is there, and a folder of small files within few objects, whatever changes how often.
    """
    sizes = {file.sha256: file.size for _, file in sorted(entries.items()) if file.size}
    places: dict[str, tuple[int, int]] = {}
    for file in base.files.values() if base is not None else ():
        if file.object is not None and sizes.get(file.sha256) == file.size:
            places.setdefault(file.sha256, (file.object, file.offset))
    needed: dict[int, int] = {}
    for sha256, (number, _) in places.items():
        needed[number] = needed.get(number, 0) + sizes[sha256]
    before = base.objects if base is not None else ()
    stays = [number for number, size in sorted(needed.items()) if 2 * size >= before[number].size]
    alone = {number for sha256, (number, _) in places.items() if sizes[sha256] > SMALL}
    crowd = {number for number in stays if before[number].size < PACK // 4} - alone
    if len(crowd) > MANY:
        stays = [number for number in stays if number not in crowd]
    renumbered = {number: index for index, number in enumerate(stays)}
    places = {
        sha256: (renumbered[before_index], offset)
        for sha256, (before_index, offset) in places.items()
        if before_index in renumbered
    }
    missing = [sha256 for sha256 in sizes if sha256 not in places]
    packs: list[list[str]] = []
    room = 0
    for sha256 in missing:
        if sizes[sha256] <= SMALL:
            if sizes[sha256] > room:
                packs.append([])
                room = PACK
            packs[-1].append(sha256)
            room -= sizes[sha256]
    large = [(sha256,) for sha256 in missing if sizes[sha256] > SMALL]
    return FolderPlan(tuple(before[number] for number in stays), places, (*large, *map(tuple, packs)))


@dataclass(frozen=True, slots=True)
class FolderNote:
    """What this host remembers of the last save or restore, beside the folder: `text` is the manifest, of `version` here.

    Until it is known whether the save counted, `before` is the digest of the manifest before it, empty for none.
    """

    version: str
    text: str
    before: str | None = None

    @property
    def manifest(self) -> str:
        """The digest of the manifest."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def is_of(self, pointer: FolderPointer | None) -> bool:
        """Whether the folder here goes on from what *pointer* says."""
        return ("" if pointer is None else pointer.manifest) in (self.manifest, self.before)


@dataclass(eq=False)
class FolderSave:
    """A save on its way: what the transaction that ends its task writes, and what could not be saved."""

    folders: SessionFolders
    session_key: str
    project: str
    before: FolderPointer | None = None
    after: FolderPointer | None = None
    manifest: FolderManifest | None = None
    version: str = ""
    errors: list[OutputError] = field(default_factory=list)
    active: bool = False

    def settle(self, link: sa.Connection) -> None:
        """Let the saved manifest count, and free the session for every host; one that was not saved stays with this host.

        Raises Conflict, and nothing is written, when another manifest counts by now.
        """
        if not self.active:
            return
        work, key = self.folders.work, self.session_key
        if self.after is not None and not put_pointer(work, link, key, self.before, self.after):
            raise Conflict("the session was saved by somebody else meanwhile", code="session_moved")
        sessions = work.tables.sessions
        host = work.host if self.errors else None
        link.execute(
            sessions.update().where(sessions.c.session_key == key).values(host=host, used_at=micros(utc_now()))
        )

    async def tidy(self) -> None:
        """Note that the save counts, and remove from the store what no manifest needs any more; what fails waits for the next."""
        if self.after is None or self.manifest is None:
            return
        note = FolderNote(self.version, manifest_text(self.manifest))
        await asyncio.to_thread(self.folders.write_note, self.session_key, note)
        manifest = manifest_key(self.session_key, self.after).rpartition("/")[2]
        needed = {object_name(item) for item in self.manifest.objects} | {manifest}
        try:
            await self.folders.sweep(self.session_key, self.after, needed)
        except KdskillsError as error:
            _LOG.warning("old files of a session stay in the store for now: %s", error.message)


def manifest_text(manifest: FolderManifest) -> str:
    """Return a manifest as it is kept: the same for the same folder."""
    return manifest.model_dump_json(by_alias=True, exclude_defaults=True)


def folder_prefix(session_key: str, project: str) -> str:
    """Return what the keys of a session begin with."""
    return f"{TOP}/{key_part(project)}/{session_key}"


def object_name(item: FolderObject) -> str:
    """Return the last part of an object's key."""
    return f"{item.generation:010d}-{item.sha256}"


def manifest_key(session_key: str, pointer: FolderPointer) -> str:
    """Return where a manifest lies in the store."""
    return f"{folder_prefix(session_key, pointer.project)}/{pointer.generation:010d}-{pointer.manifest}.json"


def read_note(folder: Path) -> FolderNote | None:
    """Return what is remembered beside a session's folder; None for nothing. Blocks."""
    try:
        return FolderNote(**json.loads((folder / NOTE).read_bytes()))
    except FileNotFoundError:
        return None


def read_pointer(work: Work, link: sa.Connection, session_key: str) -> FolderPointer | None:
    """Return what counts of a session; None when it was never saved."""
    meta = work.tables.meta
    text = link.execute(sa.select(meta.c.value).where(meta.c.name == f"session:{session_key}")).scalar()
    return None if text is None else FolderPointer.model_validate_json(text)


def put_pointer(
    work: Work, link: sa.Connection, session_key: str, before: FolderPointer | None, after: FolderPointer
) -> bool:
    """Let *after* count in the place of *before*; False when something else does by now."""
    meta, name = work.tables.meta, f"session:{session_key}"
    if before is None:
        new = upsert(link.dialect.name, meta).values(name=name, value=after.model_dump_json())
        return link.execute(new.on_conflict_do_nothing().returning(meta.c.name)).first() is not None
    change = meta.update().where(meta.c.name == name, meta.c.value == before.model_dump_json())
    return link.execute(change.values(value=after.model_dump_json())).rowcount > 0


class SessionFolders:
    """Folders of sessions as one worker saves and restores them; *read* asks the database, and waits for one that is away.

    The store is that of *keeper*, and is first asked when a folder is to be saved or brought.
    """

    def __init__(
        self,
        work: Work,
        keeper: ArtifactKeeper,
        read: Callable[[Callable[[sa.Connection], T]], Coroutine[Any, Any, T]] | None = None,
    ) -> None:
        self.work = work
        self._keeper = keeper
        self._read: Any = read or work.database.read
        self._settings = work.settings

    @property
    def _blobs(self) -> Blobs:
        return self._keeper.store.blobs

    def _folder(self, session_key: str) -> Path:
        return self.work.attempts.session_dir(session_key)

    async def bring(self, head: TaskHead) -> None:
        """Bring the session's folder to this host before its command runs, unless what is here goes on from what was saved.

        Raises SessionFolderCorrupt for a store that has something else than what was saved, ArtifactStoreUnavailable, and
        OSError; the folder here is then as it was.
        """
        if head.spec.session_id is None:
            return
        key, noted = head.session_key, await asyncio.to_thread(read_note, self._folder(head.session_key))
        if self._settings.session_folders == "host" and noted is None and (self._folder(key) / "current").exists():
            return  # it was never anywhere else
        if (await self._behind(key))[0]:
            async with self._alone(key) as spool:
                await self._bring(key, spool)

    async def _behind(self, session_key: str) -> tuple[bool, FolderPointer | None]:
        """Return whether the folder here does not go on from what counts, and that."""
        pointer = await self._pointer(session_key)
        note = await asyncio.to_thread(read_note, self._folder(session_key))  # after the row, which moves after it
        return (pointer is not None if note is None else not note.is_of(pointer)), pointer

    async def _bring(self, key: str, spool: Path) -> None:
        behind, pointer = await self._behind(key)
        if not behind:
            return  # another command of the session was quicker, and may have changed it since
        if pointer is None or not pointer.manifest:  # it was forgotten, and begins anew
            empty = FolderManifest(schema=SCHEMA, session=key, generation=1)
            await asyncio.to_thread(self._replace, key, empty, {})
            (self._folder(key) / NOTE).unlink(missing_ok=True)
            if pointer is not None:
                await asyncio.to_thread(self.write_note, key, FolderNote("", "", pointer.manifest))
        else:
            await self._restore(key, pointer, spool)

    @contextlib.asynccontextmanager
    async def saving(self, head: TaskHead) -> AsyncIterator[FolderSave]:
        """Give the save of a session's folder after a run of its task; what cannot be saved is told in its `errors`.

        Everything is in the store when the block begins, though nothing of it counts before `settle`; until the block
        ends nobody else on this host saves the session.
        """
        if self._settings.session_folders == "host" or head.spec.session_id is None:
            yield FolderSave(self, head.session_key, head.scope.project)
            return
        async with self._saving(head.session_key, head.scope.project) as save:
            yield save

    @contextlib.asynccontextmanager
    async def _saving(self, session_key: str, project: str) -> AsyncIterator[FolderSave]:
        async with self._alone(session_key) as spool:
            save = FolderSave(self, session_key, project, await self._pointer(session_key), active=True)
            try:
                await self._save(save, spool)
            except (KdskillsError, OSError) as error:
                code, words = ("session_not_saved", str(error))
                if isinstance(error, KdskillsError):
                    code, words = error.code, error.message
                _LOG.warning("the folder of a session stays on this host: %s", words)
                message = f"the session's files were not saved and stay on their host: {words}"
                save.errors, save.after = [OutputError(path=".", code=code, message=message)], None
            yield save

    async def tend(self) -> None:
        """Save what stayed on this host, as the store was away or the setting another, and forget what was unused for long."""
        if self._settings.session_folders == "store":
            for key, project in await self.work.database.read(self._idle_here):
                async with self._saving(key, project) as save:
                    if any(error.code == ArtifactStoreUnavailable.code for error in save.errors):
                        break
                    with contextlib.suppress(Conflict):  # something of it began meanwhile, and saves it
                        await self.work.database.write(partial(self._settle_idle, save=save))
                        await save.tidy()
        await self.forget_unused()

    def _idle_here(self, link: sa.Connection, session_key: str | None = None) -> list[tuple[str, str]]:
        """Return sessions bound to this host, or only the one, of which nothing is to be done, each with its project."""
        sessions, tasks = self.work.tables.sessions, self.work.tables.tasks
        project = sa.select(tasks.c.project).where(tasks.c.session_key == sessions.c.session_key).limit(1)
        rows: sa.Select[Any] = sa.select(sessions.c.session_key, project.scalar_subquery().label("project"))
        rows = self._unused(rows).where(sessions.c.host == self.work.host)
        if session_key is not None:
            rows = rows.where(sessions.c.session_key == session_key)
        return [(row.session_key, row.project) for row in link.execute(rows) if row.project is not None]

    def _settle_idle(self, link: sa.Connection, *, save: FolderSave) -> None:
        self.work.queue.hold_claims(link)
        if not self._idle_here(link, save.session_key):
            raise Conflict("the session is in use", code="session_moved")
        save.settle(link)

    def _unused(self, rows: sa.Select[Any]) -> sa.Select[Any]:
        """Return those of *rows* of sessions of which nothing waits or runs."""
        sessions = self.work.tables.sessions
        for table in (self.work.tables.tasks, self.work.tables.jobs):
            open_ = sa.exists().where(table.c.session_key == sessions.c.session_key, in_states(table, OPEN))
            rows = rows.where(~open_)
        return rows

    async def sweep(self, session_key: str, pointer: FolderPointer, needed: set[str]) -> None:
        """Remove what the store has of a session up to a generation, but for names that are *needed*.

        Whatever has a later generation is left: another host may be at it.
        """
        for key in await self._blobs.keys(folder_prefix(session_key, pointer.project)):
            name = key.rpartition("/")[2]
            parts = _NAME.match(name)
            if parts is not None and name not in needed and int(parts[1]) <= pointer.generation:
                await self._blobs.delete(key)

    async def forget_unused(self) -> int:
        """Forget folders of sessions unused for as long as they are kept; return how many.

        A row without a manifest is left for as long again. The round that removes it looks once more for what a host that
        was given up may have put into the store since.
        """
        keep_s = self._settings.session_store_keep_s
        if not keep_s:
            return 0  # for ever
        forgotten = await self.work.database.write(
            partial(self._forget_rows, before=micros(utc_now()) - round(keep_s * 1e6))
        )
        for key, pointer in forgotten:
            await self.sweep(key, pointer, set())
            if not pointer.manifest:
                await self.work.database.write(partial(self._remove_rows, key=key, pointer=pointer))
        return len(forgotten)

    def _forget_rows(self, link: sa.Connection, *, before: int) -> list[tuple[str, FolderPointer]]:
        """Take their manifests from sessions that were unused since *before*, a batch at most, and return what counted."""
        self.work.queue.hold_claims(link)  # nothing of them begins meanwhile
        sessions, meta = self.work.tables.sessions, self.work.tables.meta
        query = sa.select(sessions.c.session_key, meta.c.value).where(
            meta.c.name == sa.literal("session:") + sessions.c.session_key, sessions.c.used_at < before
        )
        forgotten: list[tuple[str, FolderPointer]] = []
        for row in link.execute(self._unused(query).limit(self._settings.retention_batch)).all():
            pointer = FolderPointer.model_validate_json(row.value)
            if pointer.manifest:
                put_pointer(self.work, link, row.session_key, pointer, pointer.model_copy(update={"manifest": ""}))
                mine = sessions.update().where(sessions.c.session_key == row.session_key)
                link.execute(mine.values(host=None, used_at=micros(utc_now())))
            forgotten.append((row.session_key, pointer))
        return forgotten

    def _remove_rows(self, link: sa.Connection, *, key: str, pointer: FolderPointer) -> None:
        sessions, meta = self.work.tables.sessions, self.work.tables.meta
        row_is = (meta.c.name == f"session:{key}", meta.c.value == pointer.model_dump_json())
        if link.execute(meta.delete().where(*row_is)).rowcount:
            link.execute(sessions.delete().where(sessions.c.session_key == key))

    def write_note(self, session_key: str, note: FolderNote) -> None:
        """Remember what was saved or restored. Blocks."""
        facts = {"version": note.version, "text": note.text, "before": note.before}
        replace_file(self._folder(session_key) / NOTE, json.dumps(facts).encode(), durable=True)

    async def _pointer(self, session_key: str) -> FolderPointer | None:
        pointer: FolderPointer | None = await self._read(partial(read_pointer, self.work, session_key=session_key))
        return pointer

    @contextlib.asynccontextmanager
    async def _alone(self, session_key: str) -> AsyncIterator[Path]:
        """Give an empty folder beside the session's files; nobody else on this host saves or restores them meanwhile."""
        top = self._folder(session_key)

        def make_spool() -> Path:
            for leftover in top.glob(f"{_SPOOL}*"):
                shutil.rmtree(leftover)  # of a worker that was killed
            spool = top / f"{_SPOOL}{secrets.token_hex(6)}"
            spool.mkdir(mode=0o700)
            return spool

        private_folder(private_folder(top.parent) / top.name)
        with contextlib.ExitStack() as locks:
            while True:
                with contextlib.suppress(BlockingIOError):
                    locks.enter_context(locked(top / _LOCK, wait=False))
                    break
                await asyncio.sleep(_LOOK_S)
            spool = await asyncio.to_thread(make_spool)
            try:
                yield spool
            finally:
                await asyncio.to_thread(shutil.rmtree, spool, ignore_errors=True)

    async def _save(self, save: FolderSave, spool: Path) -> None:
        """Put what the store has not of the session's folder into it, the manifest last; nothing when all of it is there."""
        key, pointer, project = save.session_key, save.before, save.project
        note = await asyncio.to_thread(read_note, self._folder(key))
        if pointer is not None and (note is None or not note.is_of(pointer)):
            return  # nothing ran here, as what was saved could not be brought
        saved = None if pointer is None or not pointer.manifest else pointer
        if saved is not None and note is not None and saved.manifest == note.manifest:
            current = await asyncio.to_thread(SessionFolder(self._folder(key)).version_name)
            if current == note.version:
                return  # and the store is not asked
        base = None if saved is None else await self._base(key, saved, note, spool)

        def take() -> tuple[SessionVersion, FolderPlan] | None:
            with SessionFolder(self._folder(key)).reading() as version:
                if saved is None and not version.entries:
                    return None
                self._require_bounds(version)
                plan = plan_folder(version.entries, base)
                digests = {sha256 for group in plan.missing for sha256 in group}
                for path, file in version.entries.items():
                    if file.sha256 in digests:  # whatever becomes of the version while this is sent
                        os.link(version.folder / path, spool / file.sha256, follow_symlinks=False)
                        digests.discard(file.sha256)
                return version, plan

        snapshot = await asyncio.to_thread(take)
        if snapshot is None:
            return
        version, plan = snapshot
        generation = 1 if pointer is None else pointer.generation + 1
        objects, places = list(plan.objects), dict(plan.places)
        for group in plan.missing:
            pack = spool / "pack"
            packed, offsets = await asyncio.to_thread(_pack, [spool / sha256 for sha256 in group], pack)
            item = FolderObject(generation=generation, sha256=packed, size=pack.stat().st_size)
            target = f"{folder_prefix(key, project)}/{object_name(item)}"
            if await self._blobs.size(target) != item.size:  # a save that was broken off may have sent it
                await self._blobs.save(target, pack)
            places |= {sha256: (len(objects), offset) for sha256, offset in zip(group, offsets, strict=True)}
            objects.append(item)
        files = {}
        for path, file in sorted(version.entries.items()):
            index, offset = places.get(file.sha256, (None, 0))
            files[path] = FolderFile.model_validate(file._asdict() | {"object": index, "offset": offset})
        save.manifest = FolderManifest(
            schema=SCHEMA, session=key, generation=generation, objects=tuple(objects), files=files
        )
        save.version = version.folder.name
        text = manifest_text(save.manifest)
        note = FolderNote(save.version, text, "" if pointer is None else pointer.manifest)
        size = len(text.encode())
        after = FolderPointer(generation=generation, manifest=note.manifest, size=size, project=project)
        await asyncio.to_thread(write_private, spool / "manifest", text)
        await self._blobs.save(manifest_key(key, after), spool / "manifest")
        await asyncio.to_thread(self.write_note, key, note)
        save.after = after

    def _require_bounds(self, version: SessionVersion) -> None:
        settings, size = self._settings, sum(file.size for file in version.entries.values())
        if len(version.entries) > settings.session_store_files or size > settings.session_store_bytes:
            bounds = f"{settings.session_store_files} files of {settings.session_store_bytes} bytes in all"
            words = f"it has {len(version.entries)} files of {size} bytes, and {bounds} may be saved"
            raise SessionFolderTooLarge(words, files=len(version.entries), bytes=size)

    async def _base(
        self, session_key: str, pointer: FolderPointer, note: FolderNote | None, spool: Path
    ) -> FolderManifest | None:
        """Return the manifest that counts; None when the store has it no more, so that everything is sent anew."""
        try:
            if note is None or note.manifest != pointer.manifest:
                return self._checked(session_key, await self._manifest_of(session_key, pointer, spool))
            if await self._blobs.size(manifest_key(session_key, pointer)) == pointer.size:
                return self._checked(session_key, note.text)
            problem = "the list of its files is not in the store"  # nor may be what it names
        except SessionFolderCorrupt as error:
            problem = error.message
        _LOG.error("a session's folder is saved anew as a whole: %s", problem)
        return None

    async def _manifest_of(self, session_key: str, pointer: FolderPointer, spool: Path) -> str:
        if pointer.size > MANIFEST_BYTES:
            raise SessionFolderCorrupt(f"a session's list of files has {pointer.size} bytes", session=session_key)
        target = spool / "manifest"
        await self._fetch(manifest_key(session_key, pointer), target, pointer.size, pointer.manifest)
        return await asyncio.to_thread(target.read_text, encoding="utf-8", errors="replace")

    def _checked(self, session_key: str, text: str) -> FolderManifest:
        try:
            manifest = FolderManifest.model_validate_json(text)
        except ValidationError as error:
            words = f"a session's list of files is not understood: {error.errors()[0]['msg']}"
            raise SessionFolderCorrupt(words, session=session_key) from None
        settings = self._settings
        problem = manifest.problem(session_key, settings.session_store_files, settings.session_store_bytes)
        if problem is not None:
            raise SessionFolderCorrupt(f"a session's saved folder is refused: {problem}", session=session_key)
        return manifest

    async def _restore(self, session_key: str, pointer: FolderPointer, spool: Path) -> None:
        """Bring what *pointer* says here; contents that are here already are not asked for."""
        text = await self._manifest_of(session_key, pointer, spool)
        manifest = self._checked(session_key, text)
        contents = {file.sha256: file for file in manifest.files.values() if file.size}

        def link_here() -> dict[str, tuple[Path, int]]:
            local: dict[str, tuple[Path, int]] = {}
            with SessionFolder(self._folder(session_key)).reading() as version:
                for path, file in version.entries.items():
                    if file.sha256 in contents and file.sha256 not in local:
                        os.link(version.folder / path, spool / file.sha256, follow_symlinks=False)
                        local[file.sha256] = spool / file.sha256, 0
            return local

        sources = await asyncio.to_thread(link_here)
        for sha256, file in contents.items():
            if sha256 in sources or file.object is None:
                continue
            item, target = manifest.objects[file.object], spool / f"object-{file.object}"
            if not target.exists():
                key = f"{folder_prefix(session_key, pointer.project)}/{object_name(item)}"
                await self._fetch(key, target, item.size, item.sha256)
            sources[sha256] = target, file.offset
        version = await asyncio.to_thread(self._replace, session_key, manifest, sources)
        await asyncio.to_thread(self.write_note, session_key, FolderNote(version, text))

    async def _fetch(self, key: str, target: Path, size: int, sha256: str) -> None:
        """Write a key to *target*. Raises SessionFolderCorrupt when it is not there, or other bytes are, or more."""
        hasher, came = hashlib.sha256(), 0
        try:
            async with contextlib.aclosing(self._blobs.read(key)) as chunks:
                with open_private(target, "xb") as sink:
                    async for chunk in chunks:
                        came += len(chunk)
                        if came > size:
                            break
                        hasher.update(chunk)
                        await asyncio.to_thread(sink.write, chunk)
        except NotFound:
            raise SessionFolderCorrupt("a part of a session's saved folder is not in the store", key=key) from None
        if came != size or hasher.hexdigest() != sha256:
            raise SessionFolderCorrupt("a part of a session's saved folder is not what was saved", key=key)

    def _replace(self, session_key: str, manifest: FolderManifest, sources: Mapping[str, tuple[Path, int]]) -> str:
        """Make *manifest* the folder here, from contents in *sources*; return the name of the version."""

        def build(current: SessionVersion, new: Path) -> None:
            for path, entry in manifest.entries.items():
                target = new / path
                make_folder(target.parent)
                if current.entries.get(path) == entry:  # versions never change, so they may share files
                    os.link(current.folder / path, target, follow_symlinks=False)
                    continue
                hasher = hashlib.sha256()
                with open_private(target, "xb") as sink:
                    os.fchmod(sink.fileno(), entry.mode)
                    for chunk in _slice(*sources[entry.sha256], entry.size) if entry.size else ():
                        hasher.update(chunk)
                        sink.write(chunk)
                    sink.flush()
                    os.fsync(sink.fileno())
                if hasher.hexdigest() != entry.sha256:
                    raise SessionFolderCorrupt("a file of a session is not what was saved", path=path)

        return SessionFolder(self._folder(session_key)).replace(manifest.entries, build)


def _slice(source: Path, offset: int, size: int) -> Iterator[bytes]:
    with source.open("rb") as stream:
        stream.seek(offset)
        while size and (chunk := stream.read(min(size, MIB))):
            size -= len(chunk)
            yield chunk


def _pack(sources: Sequence[Path], target: Path) -> tuple[str, list[int]]:
    """Write files, each named by its digest, one after the other; return the digest of all and where each begins."""
    everything, offsets = hashlib.sha256(), []
    target.unlink(missing_ok=True)
    with open_private(target, "xb") as sink:
        for source in sources:
            offsets.append(sink.tell())
            content = hashlib.sha256()
            for chunk in _slice(source, 0, source.stat().st_size):
                content.update(chunk)
                everything.update(chunk)
                sink.write(chunk)
            if content.hexdigest() != source.name:
                raise SessionFolderCorrupt("a file of a session changed on this host's disk", sha256=source.name)
    return everything.hexdigest(), offsets
