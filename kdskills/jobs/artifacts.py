"""Files that work left behind, kept by content: in a local folder, S3, Azure or Google's storage.

The bytes of an artifact are kept once per project under `artifacts/{project}/sha256/…`; who made them, and under which name,
stands in the table `kd_artifacts`. What is read back is checked against its digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.errors import NotFound
from kdskills.jobs.blobs import (
    ArtifactCorrupt,
    Blobs,
    artifact_id,
    blob_key,
    mime_of,
    open_blobs,
)
from kdskills.jobs.model import ArtifactRef, Scope, TaskHead
from kdskills.skills.private_files import open_private, private_folder, write_private
from kdskills.storage.database import Database, LazyModule, micros, moment_of, upsert, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import OutFile
    from kdskills.jobs.records import WorkTables
else:
    sa = LazyModule("sqlalchemy")

LINK: Final = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Stored:
    """What was kept: digest in hex, and bytes."""

    sha256: str
    size: int


class ArtifactStore:
    """Keeps files of projects by content, so that storing one twice costs nothing and never changes anything."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def check(self) -> None:
        """Ask whether the storage is there. Raises ArtifactStoreUnavailable."""
        await self._blobs.check()

    async def measure(self, source: Path) -> Stored:
        """Return digest and size of a file, which is not kept. Raises OSError."""

        def hashed() -> Stored:
            with source.open("rb") as stream:
                hasher = hashlib.file_digest(stream, "sha256")
                return Stored(hasher.hexdigest(), stream.tell())

        return await asyncio.to_thread(hashed)

    async def save(self, project: str, source: Path) -> Stored:
        """Keep the file at *source*, which must not change meanwhile. Raises OSError, ArtifactStoreUnavailable."""
        content = await self.measure(source)
        key = blob_key(project, content.sha256)
        if await self._blobs.size(key) != content.size:
            await self._blobs.save(key, source)
        return content

    async def read(self, project: str, sha256: str) -> AsyncIterator[bytes]:
        """Stream the bytes of a digest. Raises NotFound, `artifact_missing`.

        Raises ArtifactCorrupt after the last chunk, when what came is not what was stored.
        """
        hasher = hashlib.sha256()
        async for chunk in self._blobs.read(blob_key(project, sha256)):
            hasher.update(chunk)
            yield chunk
        if hasher.hexdigest() != sha256:
            raise ArtifactCorrupt(f"the artifact {sha256[:12]}… is not what was stored", sha256=sha256)

    async def fetch(self, project: str, sha256: str, target: Path) -> int:
        """Write the bytes of a digest to *target*, whole and checked or not at all, and return their number.

        Raises NotFound and ArtifactCorrupt, as `read`.
        """
        part = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.part")
        size = 0
        try:
            with open_private(part, "xb") as sink:
                async for chunk in self.read(project, sha256):
                    size += len(chunk)
                    await asyncio.to_thread(sink.write, chunk)
                sink.flush()
                await asyncio.to_thread(os.fsync, sink.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return size

    async def piece(self, project: str, sha256: str, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end*; only whole contents can be checked against the digest. Raises NotFound."""
        return await self._blobs.piece(blob_key(project, sha256), begin, end) if end > begin else b""

    async def has(self, project: str, sha256: str) -> bool:
        """Whether the bytes of a digest are kept for this project."""
        return await self._blobs.size(blob_key(project, sha256)) is not None

    async def link(self, project: str, sha256: str, expires: timedelta = LINK) -> str | None:
        """Return a link that reads these bytes until it expires, or None where the storage has no such links."""
        return await self._blobs.sign(blob_key(project, sha256), expires)

    async def delete(self, project: str, sha256: str) -> None:
        """Forget the bytes of a digest; the caller knows that no artifact of the project has them any more."""
        await self._blobs.delete(blob_key(project, sha256))

    async def aclose(self) -> None:
        """Close connections."""
        await self._blobs.aclose()


def open_artifacts(url: str) -> ArtifactStore:
    """Open the store at *url*; as `open_blobs`."""
    return ArtifactStore(open_blobs(url))


STALE: Final = timedelta(minutes=2)
"""A note older than this is of a process that died while it deleted."""

INPUT_KEEP: Final = timedelta(days=8)
"""How long an input is kept that no task owns: longer than any task waits."""

WAIT_S: Final = 0.2
CACHE_S: Final = 86_400.0
_LOCK: Final = 2_037_582


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """An artifact as its row tells it: content, name and where it came from."""

    id: str
    project: str
    agent: str
    task_id: str | None
    job_id: str | None
    path: str
    sha256: str
    size: int
    mime: str
    mode: int
    skill_name: str
    version_hash: str
    created_at: datetime


class ArtifactKeeper:
    """Keeps outputs of tasks and finds them again; *cache* is a folder of copies on this host, for inputs of programs."""

    def __init__(self, store: ArtifactStore, database: Database, tables: WorkTables, cache: Path) -> None:
        self.store = store
        self._database = database
        self._tables = tables
        self._cache = cache

    async def keep(self, head: TaskHead, files: Sequence[OutFile], folder: Path) -> tuple[ArtifactRef, ...]:
        """Store a task's outputs from its attempt's *folder*; doing it again for the same task gives the same ids."""
        refs: list[ArtifactRef] = []
        for item in files:
            content = await self.store.measure(folder / item.file)
            ref = ArtifactRef(
                artifact_id=artifact_id(head.id, item.path),
                path=item.path,
                size=content.size,
                sha256=content.sha256,
                mime=mime_of(item.path),
                mode=item.mode,
            )
            placement = head.spec.placement
            provenance = head.scope.model_dump(exclude={"alias"}) | {
                "task_id": head.id,
                "job_id": head.job_id,
                "skill_name": placement.skill_name,
                "version_hash": placement.version_hash,
            }
            await self._note_down(provenance, ref)
            await self.store.save(head.scope.project, folder / item.file)
            refs.append(ref)
        return tuple(refs)

    async def find(self, scope: Scope, item: str) -> ArtifactRow:
        """Return an artifact of the caller's project. Raises NotFound, also for another project's."""
        table = self._tables.artifacts
        query = table.select().where(
            table.c.id == item, table.c.tenant == scope.tenant, table.c.project == scope.project
        )
        row = await self._database.read(lambda link: link.execute(query).mappings().first())
        if row is None:
            raise NotFound(f"there is no artifact {item!r}", artifact_id=item)
        names = [field.name for field in fields(ArtifactRow)]
        return ArtifactRow(**{name: row[name] for name in names} | {"created_at": moment_of(row["created_at"])})

    async def require(self, scope: Scope, items: Sequence[str]) -> None:
        """Raise NotFound for the first of *items* that is no artifact of the caller's project."""
        table = self._tables.artifacts
        mine = (table.c.tenant == scope.tenant, table.c.project == scope.project)
        query = table.select().with_only_columns(table.c.id).where(table.c.id.in_(sorted(set(items))), *mine)
        present = set(await self._database.read(lambda link: list(link.execute(query).scalars())))
        for item in items:
            if item not in present:
                raise NotFound(f"there is no artifact {item!r}", artifact_id=item)

    async def fetch(self, scope: Scope, item: str) -> Path:
        """Return a copy of an artifact on this host, which nobody may change. Raises NotFound."""
        artifact = await self.find(scope, item)
        folder = self._cache / hashlib.sha256(artifact.project.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        target = folder / artifact.sha256
        await asyncio.to_thread(_tidy, folder)
        if not await asyncio.to_thread(_touched, target):
            await self.store.fetch(artifact.project, artifact.sha256, target)
        return target

    async def forget(self, task_ids: Sequence[str]) -> None:
        """Forget the artifacts of these tasks, and the bytes no other artifact of their project has."""
        if not task_ids:
            return
        loose = await self._database.write(lambda link: self._remove(link, tuple(task_ids)))
        for project, sha256 in loose:
            await self.store.delete(project, sha256)
            await self._database.write(partial(self._done, note=_note(project, sha256)))

    async def keep_input(self, scope: Scope, data: bytes) -> str:
        """Store an input that came with a call and return its id; it stays `INPUT_KEEP` after it last came."""
        folder = self._cache / "coming"
        source = folder / secrets.token_hex(12)
        await asyncio.to_thread(_tidy, folder)
        await asyncio.to_thread(write_private, source, data)
        try:
            content = await self.store.measure(source)
            item = artifact_id(f"input of {scope.tenant}", f"{scope.project}/{content.sha256}").replace("art_", "inp_")
            ref = ArtifactRef(artifact_id=item, path="", size=content.size, sha256=content.sha256)
            await self._note_down(scope.model_dump(exclude={"alias"}), ref)
            await self.store.save(scope.project, source)
        finally:
            source.unlink(missing_ok=True)
        return item

    async def _note_down(self, whose: Mapping[str, str | None], ref: ArtifactRef) -> None:
        """Add the row of an artifact, when nobody is deleting its bytes: those stored from now on stay."""
        while True:
            if await self._database.write(partial(self._add, whose=whose, ref=ref)):
                return
            await asyncio.sleep(WAIT_S)  # another process is at it, and tells nobody when it is through

    def _add(self, link: sa.Connection, whose: Mapping[str, str | None], ref: ArtifactRef) -> bool:
        """Add a row; False while somebody deletes the same bytes."""
        self._alone(link)
        project, meta = str(whose["project"]), self._tables.meta
        note = link.execute(meta.select().where(meta.c.name == _note(project, ref.sha256))).mappings().first()
        if note is not None:
            if micros(utc_now()) - int(note["value"]) < STALE / timedelta(microseconds=1):
                return False
            self._done(link, _note(project, ref.sha256))
        table = self._tables.artifacts
        row = {"task_id": None, "job_id": None, "skill_name": "", "version_hash": "", **whose}
        row |= ref.model_dump(exclude={"artifact_id"}) | {"id": ref.artifact_id, "created_at": micros(utc_now())}
        new = upsert(link.dialect.name, table).values(row)
        change = {name: row[name] for name in ("sha256", "size", "created_at")}
        link.execute(new.on_conflict_do_update(index_elements=["id"], set_=change))
        return True

    def _remove(self, link: sa.Connection, task_ids: tuple[str, ...]) -> list[tuple[str, str]]:
        """Remove the rows of tasks, note the bytes nobody has any more, and return them."""
        self._alone(link)
        table, meta = self._tables.artifacts, self._tables.meta
        old = micros(utc_now() - INPUT_KEEP)
        mine = sa.or_(table.c.task_id.in_(task_ids), sa.and_(table.c.task_id.is_(None), table.c.created_at < old))
        had = sorted({(row[0], row[1]) for row in link.execute(sa.select(table.c.project, table.c.sha256).where(mine))})
        link.execute(table.delete().where(mine))
        loose = []
        for project, sha256 in had:
            remaining_rows = sa.select(table.c.id).where(table.c.project == project, table.c.sha256 == sha256).limit(1)
            if link.execute(remaining_rows).first() is None:
                loose.append((project, sha256))
                new = upsert(link.dialect.name, meta).values(name=_note(project, sha256), value=str(micros(utc_now())))
                link.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": new.excluded.value}))
        return loose

    def _done(self, link: sa.Connection, note: str) -> None:
        link.execute(self._tables.meta.delete().where(self._tables.meta.c.name == note))

    def _alone(self, link: sa.Connection) -> None:
        """Let nobody else add or remove artifacts until this transaction is over; SQLite does so by itself."""
        if link.dialect.name == "postgresql":
            link.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")


def _note(project: str, sha256: str) -> str:
    return "forget:" + hashlib.sha256(f"{sha256}{project}".encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _touched(path: Path) -> bool:
    """Say that a copy is in use; False when it is not there."""
    try:
        path.touch(exist_ok=True) if path.is_file() else path.stat()
    except FileNotFoundError:
        return False
    return True


def _tidy(folder: Path) -> None:
    """Make the folder of copies, and remove those nobody asked for in a day."""
    private_folder(folder.parent)
    private_folder(folder)
    oldest = time.time() - CACHE_S
    for path in folder.iterdir():
        try:
            if path.lstat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:  # another process was quicker
            continue
