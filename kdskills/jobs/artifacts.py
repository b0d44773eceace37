"""Files that work left behind, kept by content: in a local folder, S3, Azure or Google's storage.

The bytes of an artifact are kept once per project under `artifacts/{project}/sha256/…`; who made them, and under which name,
stands in the table `kd_artifacts`. What is read back is checked against its digest. obstore serves all kinds of storage but
Google's; a library is imported when the first storage that needs it is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import string
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kdskills.errors import Conflict, MissingExtra, NotFound, OperatorMustAct
from kdskills.jobs.model import OCTETS, ArtifactRef, Scope, TaskHead, artifact_id, mime_of
from kdskills.jobs.quotas import inputs_of_open
from kdskills.jobs.records import ContentRecords, WorkRecords
from kdskills.skills.private_files import FILE_MODE, make_folder, open_private, private_folder, write_private
from kdskills.storage.database import Database, LazyModule, micros, upsert, utc_now

if TYPE_CHECKING:
    import obstore
    import sqlalchemy as sa
    from obstore import Attributes
    from obstore.store import ObjectStore

    from kdskills.jobs.attempts import OutFile
    from kdskills.jobs.records import WorkTables
else:
    obstore, sa = LazyModule("obstore"), LazyModule("sqlalchemy")

CHUNK: Final = 1024 * 1024
NO_BUCKET: Final = "the bucket of artifacts is not there: make it, or let the setting artifacts name another"


class ArtifactStoreUnavailable(OperatorMustAct, code="artifact_store_unavailable"):
    """The place artifacts are kept in does not answer, or its URL is not understood."""


class ArtifactCorrupt(OperatorMustAct, code="artifact_corrupt"):
    """What is kept of an artifact is not what was stored."""


_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "_.-")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


def blob_key(project: str, sha256: str) -> str:
    """Return where the bytes of a digest, in lower-case hex, are kept for a project with a name. Raises ValueError."""
    if not _HEX.fullmatch(sha256):
        raise ValueError(f"{sha256[:80]!r} is no sha256 in lower-case hex")
    if not project:
        raise ValueError("the project has no name")
    return f"artifacts/{key_part(project)}/sha256/{sha256[:2]}/{sha256[2:]}"


def key_part(project: str) -> str:
    """Return *project* as one component of a key; no two projects share one, and none means something else in a path.

    Marked by `~` and not by `%`, which some servers of object storage decode once more than they should.
    """
    plain = _PLAIN if set(project) != {"."} else _PLAIN - {"."}
    return "".join(
        letter if letter in plain else "".join(f"~{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))
        for letter in project
    )


ATTRIBUTES: Final = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
"""A browser that follows a link saves what a program wrote; it never shows it."""

NO_BUCKET_CODES: Final = ("NoSuchBucket", "ContainerNotFound")
"""What S3 and Azure call it."""
CHECKED: Final = "kdskills-ready"
"""A prefix without keys, so that asking for it costs the same however much is kept."""

PARTS: Final = 2
"""Parts of a large file on their way at once: each of them is held in memory."""

FORMS: Final = "a folder, s3://bucket/prefix, az://container/prefix or gs://bucket/prefix"


def open_blobs(url: str) -> Blobs:
    """Open the storage at *url*; nothing is asked of it yet, credentials come from where each cloud's tools take them.

    It is an absolute folder, `file:///folder`, `s3://bucket/prefix`, `az://container/prefix` or `gs://bucket/prefix`.
    Raises ArtifactStoreUnavailable when it is not understood or cannot be set up, and MissingExtra.
    """
    parts = urlsplit(url)
    if url.startswith("/") or parts.scheme == "file":
        folder = Path(url if url.startswith("/") else parts.path)
        try:
            make_folder(folder)
        except OSError as error:
            raise ArtifactStoreUnavailable(f"the folder of artifacts cannot be made: {error.strerror}") from error
        with _obstore_errors():
            from obstore.store import LocalStore

            return ObjectBlobs(LocalStore(str(folder)), links=False, folder=folder)
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not bucket or parts.query or parts.fragment or parts.username is not None:
        raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}; the setting names none of these")
    if parts.scheme == "gs":  # an emulator is found by `STORAGE_EMULATOR_HOST`
        try:
            from google.auth.exceptions import GoogleAuthError
            from google.cloud import storage  # type: ignore[import-untyped]
        except ImportError:
            raise MissingExtra("keeping artifacts in Google's storage", "gcs") from None
        try:
            return GoogleBlobs(storage.Client(), bucket, prefix)
        except (GoogleAuthError, OSError) as error:
            raise ArtifactStoreUnavailable(f"Google's storage cannot be used here: {type(error).__name__}") from error
    if parts.scheme not in {"s3", "az"}:
        raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}, not {parts.scheme}://")
    with _obstore_errors():
        from obstore.store import AzureStore, S3Store

        inner = prefix or None
        s3 = parts.scheme == "s3"
        store: ObjectStore = S3Store(bucket, prefix=inner) if s3 else AzureStore(container_name=bucket, prefix=inner)
        return ObjectBlobs(store, links=True)


class ObjectBlobs:
    """Blobs in one of obstore's stores: it can sign *links* and keep attributes, or is a *folder* closed to others."""

    def __init__(self, store: Any, *, links: bool, folder: Path | None = None) -> None:
        self._store = store
        self._links = links
        self._folder = folder

    async def check(self) -> None:
        """Ask for the first page of keys, which a bucket that is not there does not have. Raises ArtifactStoreUnavailable."""
        with _obstore_errors(), _in_bucket():
            await obstore.list(self._store, prefix=CHECKED, chunk_size=1).collect_async()

    async def save(self, key: str, source: Path) -> None:
        """Keep a file, streamed; it appears whole or not at all."""
        attributes: Attributes | None = ATTRIBUTES if self._links else None
        with _obstore_errors(), _in_bucket():
            if self._folder is not None:
                private_folder(self._folder / key.partition("/")[0], contents=True)
                make_folder((self._folder / key).parent)
            await obstore.put_async(self._store, key, source, attributes=attributes, max_concurrency=PARTS)
            if self._folder is not None:
                # the library follows the umask; the folders are closed all the while
                (self._folder / key).chmod(FILE_MODE)

    async def size(self, key: str) -> int | None:
        """Return the size of a key, or None."""
        with _obstore_errors():
            try:
                return (await obstore.head_async(self._store, key))["size"]
            except FileNotFoundError:
                return None

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        """Stream a key."""
        with _obstore_errors(), _in_bucket():
            response = await obstore.get_async(self._store, key)
            async for chunk in response.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return a piece of a key."""
        with _obstore_errors(), _in_bucket():
            return bytes(await obstore.get_range_async(self._store, key, start=begin, end=end))

    async def delete(self, key: str) -> None:
        """Forget a key."""
        with _obstore_errors(), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, key)

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix that ends with a whole component."""
        with _obstore_errors(), _in_bucket():
            try:
                return [meta["path"] for meta in await obstore.list(self._store, prefix=prefix).collect_async()]
            except FileNotFoundError:
                return []

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link, where the store has them."""
        if not self._links:
            return None
        with _obstore_errors():
            return await obstore.sign_async(self._store, "GET", key, expires)

    async def aclose(self) -> None:
        """Nothing is held open."""


@contextmanager
def _in_bucket() -> Iterator[None]:
    """Tell a bucket that is not there from a key that is not: only the operator can bring a bucket back."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        if any(word in str(error) for word in NO_BUCKET_CODES):
            raise ArtifactStoreUnavailable(NO_BUCKET) from error
        raise


@contextmanager
def _obstore_errors() -> Iterator[None]:
    """Turn the library's failures into ours; its messages may hold addresses and names of credentials, and stay inside."""
    try:
        from obstore.exceptions import BaseError
    except ImportError:
        raise MissingExtra("keeping artifacts", "jobs") from None
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound("the bytes of this artifact are not there any more", code="artifact_missing") from error
    except (BaseError, OSError) as error:
        raise ArtifactStoreUnavailable(
            f"the storage of artifacts does not answer: {type(error).__name__}", driver=type(error).__name__
        ) from error


class GoogleBlobs:
    """Blobs in a bucket. The client blocks, so its calls are made in threads."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = client.bucket(bucket)
        self._prefix = f"{prefix}/" if prefix else ""

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(self._prefix + key, chunk_size=CHUNK)

    async def check(self) -> None:
        """Ask for a key, which only a bucket that is there answers. Raises ArtifactStoreUnavailable."""
        with _google_errors():
            bucket_exists = await asyncio.to_thread(self._bucket.exists)
        if not bucket_exists:
            raise ArtifactStoreUnavailable(NO_BUCKET)

    async def save(self, key: str, source: Path) -> None:
        """Keep a file, streamed; it appears whole or not at all."""
        blob = self._blob(key)
        blob.content_disposition = "attachment"

        def upload() -> None:
            with source.open("rb") as stream:
                size = source.stat().st_size
                blob.upload_from_file(stream, size=size, content_type=OCTETS, checksum="md5")

        try:
            with _google_errors():
                await asyncio.to_thread(upload)
        except NotFound:  # a key that is not there is made: it is the bucket
            raise ArtifactStoreUnavailable(NO_BUCKET) from None

    async def size(self, key: str) -> int | None:
        """Return the size of a key, or None."""
        with _google_errors():
            blob = await asyncio.to_thread(self._bucket.get_blob, self._prefix + key)
        return None if blob is None else int(blob.size)

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        """Stream a key in ranges of a chunk."""
        with _google_errors():
            blob = await asyncio.to_thread(self._bucket.get_blob, self._prefix + key)
        if blob is None:
            await self.check()
            raise NotFound("the bytes of this artifact are not there any more", code="artifact_missing")
        size = int(blob.size)
        for start in range(0, size, CHUNK):
            with _google_errors():
                yield await asyncio.to_thread(
                    blob.download_as_bytes, start=start, end=min(start + CHUNK, size) - 1, checksum=None
                )

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return a piece of a key."""
        try:
            with _google_errors():
                data: bytes = await asyncio.to_thread(
                    self._blob(key).download_as_bytes, start=begin, end=end - 1, checksum=None
                )
        except NotFound:
            await self.check()
            raise
        return data

    async def delete(self, key: str) -> None:
        """Forget a key."""
        with suppress(NotFound), _google_errors():
            await asyncio.to_thread(self._blob(key).delete, timeout=DELETE_S / 2)  # to connect, and to be answered

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix that ends with a whole component."""

        def names() -> list[str]:
            blobs = self._client.list_blobs(self._bucket, prefix=f"{self._prefix}{prefix}/")
            return [str(blob.name).removeprefix(self._prefix) for blob in blobs]

        with _google_errors():
            return await asyncio.to_thread(names)

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link; None for credentials that cannot sign, as those of an emulator."""
        from google.auth.credentials import Signing

        if not isinstance(self._client._credentials, Signing):  # noqa: SLF001 - the client offers no other way to ask
            return None
        with _google_errors():
            link: str = await asyncio.to_thread(
                self._blob(key).generate_signed_url, version="v4", expiration=expires, method="GET"
            )
            return link

    async def aclose(self) -> None:
        """Close the client's connections."""
        await asyncio.to_thread(self._client.close)


@contextmanager
def _google_errors() -> Iterator[None]:
    """Turn the library's failures into ours."""
    from google.api_core.exceptions import GoogleAPIError
    from google.api_core.exceptions import NotFound as GoogleNotFound
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except GoogleNotFound as error:
        raise NotFound("the bytes of this artifact are not there any more", code="artifact_missing") from error
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        raise ArtifactStoreUnavailable(
            f"the storage of artifacts does not answer: {type(error).__name__}", driver=type(error).__name__
        ) from error


Blobs = ObjectBlobs | GoogleBlobs
"""Keeps files under keys, each whole or not at all; a key's bytes never change."""

LINK: Final = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Stored:
    """What was kept: digest in hex, and bytes."""

    sha256: str
    size: int


class ArtifactStore:
    """Keeps files of projects by content, so that storing one twice costs nothing and never changes anything."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs

    async def check(self) -> None:
        """Ask whether the storage is there. Raises ArtifactStoreUnavailable."""
        await self.blobs.check()

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
        if await self.blobs.size(key) != content.size:
            await self.blobs.save(key, source)
        return content

    async def read(self, project: str, sha256: str) -> AsyncIterator[bytes]:
        """Stream the bytes of a digest. Raises NotFound, `artifact_missing`.

        Raises ArtifactCorrupt after the last chunk, when what came is not what was stored.
        """
        hasher = hashlib.sha256()
        async for chunk in self.blobs.read(blob_key(project, sha256)):
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
        return await self.blobs.piece(blob_key(project, sha256), begin, end) if end > begin else b""

    async def pieces(self, project: str, sha256: str, begin: int, end: int) -> AsyncIterator[bytes]:
        """Stream the bytes *begin* to *end*. Raises NotFound, `artifact_missing`."""
        while begin < end:
            data = await self.piece(project, sha256, begin, min(begin + CHUNK, end))
            if not data:
                raise ArtifactCorrupt(f"the artifact {sha256[:12]}… is shorter than what was stored", sha256=sha256)
            begin += len(data)
            yield data

    async def has(self, project: str, sha256: str) -> bool:
        """Whether the bytes of a digest are kept for this project."""
        return await self.size(project, sha256) is not None

    async def size(self, project: str, sha256: str) -> int | None:
        """Return how many bytes are kept of a digest, or None. Raises ArtifactStoreUnavailable."""
        return await self.blobs.size(blob_key(project, sha256))

    async def link(self, project: str, sha256: str, expires: timedelta = LINK) -> str | None:
        """Return a link that reads these bytes until it expires, or None where the storage has no such links."""
        return await self.blobs.sign(blob_key(project, sha256), expires)

    async def delete(self, project: str, sha256: str) -> None:
        """Forget the bytes of a digest; the caller knows that no artifact of the project has them any more."""
        await self.blobs.delete(blob_key(project, sha256))

    async def aclose(self) -> None:
        """Close connections."""
        await self.blobs.aclose()


def open_artifacts(url: str) -> ArtifactStore:
    """Open the store at *url*; as `open_blobs`."""
    return ArtifactStore(open_blobs(url))


DELETE_S: Final = 60.0
"""Seconds one deletion may take: it is through, or given up, before its note is stale."""

INPUT_KEEP: Final = timedelta(days=8)
"""How long an input is kept that no task owns, and for as long as one that is not over takes it."""

WAIT_S: Final = 0.2
CACHE_S: Final = 86_400.0


class ArtifactKeeper:
    """Keeps outputs of tasks and finds them again; *cache* is a folder of copies on this host, for inputs of programs.

    *host* is this host's id where the hosts of a pool have a store each: what another one has is not kept here for it.
    """

    def __init__(
        self, store: ArtifactStore, database: Database, tables: WorkTables, cache: Path, *, host: str | None = None
    ) -> None:
        self.store = store
        self._contents = ContentRecords(tables, host)
        self._database = database
        self._tables = tables
        self._cache = cache

    async def keep(
        self, head: TaskHead, files: Sequence[OutFile], folder: Path, *, executor: str | None = None
    ) -> tuple[ArtifactRef, ...]:
        """Store a task's outputs from its attempt's *folder*; doing it again for the same task gives the same ids.

        A file that is not, any more, what *files* say of it is left out. Raises Conflict when the worker *executor*, unless that is None, does not hold the task any more, or it is over.
        """
        refs: list[ArtifactRef] = []
        for item in files:
            try:
                content = await self.store.measure(folder / item.file)
            except FileNotFoundError:
                continue
            if content != Stored(item.sha256, item.size):
                continue
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
            await self._note_down(provenance, ref, executor)
            await self.store.save(head.scope.project, folder / item.file)
            refs.append(ref)
        return tuple(refs)

    async def find(self, scope: Scope, item: str) -> sa.Row[Any]:
        """Return the row of an artifact of the caller's project. Raises NotFound, also for another project's."""
        table = self._tables.artifacts
        query = table.select().where(
            table.c.id == item, table.c.tenant == scope.tenant, table.c.project == scope.project
        )
        row = await self._database.read(lambda link: link.execute(query).first())
        if row is None:
            raise NotFound(f"there is no artifact {item!r}", artifact_id=item)
        return row

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
        target: Path = folder / artifact.sha256
        await asyncio.to_thread(_tidy, folder)
        if not await asyncio.to_thread(_touched, target):
            await self.store.fetch(artifact.project, artifact.sha256, target)
        return target

    async def forget(self, task_ids: Sequence[str]) -> None:
        """Forget the artifacts of these tasks, and the bytes no other artifact of their project has."""
        if task_ids:
            await self._delete(await self._database.write(partial(self._remove, task_ids=tuple(task_ids))))

    async def tend(self) -> None:
        """Forget old inputs that no open work takes, and delete bytes that who died, or a store that was away, left behind.

        Raises ArtifactStoreUnavailable; the next call tries again.
        """
        await self._database.write(self._remove_inputs)
        await self._delete(await self._database.read(self._contents.leftovers))

    async def _delete(self, loose: Sequence[tuple[str, str]]) -> None:
        for project, sha256 in loose:
            mark = await self._database.write(partial(self._contents.begin, project=project, sha256=sha256))
            if mark is None:
                continue
            try:
                async with asyncio.timeout(DELETE_S):
                    await self.store.delete(project, sha256)
            except TimeoutError:
                words = f"the storage of artifacts deleted nothing within {DELETE_S:g} s"
                raise ArtifactStoreUnavailable(words) from None
            await self._database.write(partial(self._contents.done, project=project, sha256=sha256, mark=mark))

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

    async def _note_down(self, whose: Mapping[str, str | None], ref: ArtifactRef, executor: str | None = None) -> None:
        """Add the row of an artifact, when nobody is deleting its bytes: those stored from now on stay."""
        while True:
            if await self._database.write(partial(self._add, whose=whose, ref=ref, executor=executor)):
                return
            await asyncio.sleep(WAIT_S)  # another process is at it, and tells nobody when it is through

    def _add(
        self, link: sa.Connection, whose: Mapping[str, str | None], ref: ArtifactRef, executor: str | None
    ) -> bool:
        """Add a row; False while somebody deletes the same bytes. Raises Conflict when *executor* lost the task."""
        project, table, contents, task = (
            str(whose["project"]),
            self._tables.artifacts,
            self._contents,
            whose.get("task_id"),
        )
        contents.alone(link)
        if executor is not None:
            records = WorkRecords(self._tables, link.dialect.name)
            if not records.goes_on(link, "task", str(task), executor, even_canceled=True):
                raise Conflict(f"{task} is not of {executor} any more, or over: nothing of it is kept")
        if not contents.take(link, project, ref.sha256):
            return False
        row = {"task_id": None, "job_id": None, "skill_name": "", "version_hash": "", **whose}
        row |= ref.model_dump(exclude={"artifact_id"}) | {"id": ref.artifact_id, "created_at": micros(utc_now())}
        old = link.execute(sa.select(table.c.project, table.c.sha256).where(table.c.id == ref.artifact_id)).all()
        new = upsert(link.dialect.name, table).values(row)
        change = {name: row[name] for name in ("sha256", "size", "created_at")}
        link.execute(new.on_conflict_do_update(index_elements=["id"], set_=change))
        contents.let_go(link, [(row[0], row[1]) for row in old])
        return True

    def _remove(self, link: sa.Connection, *, task_ids: tuple[str, ...]) -> list[tuple[str, str]]:
        """Remove the rows of tasks, write down the bytes nobody has any more, and return them."""
        self._contents.alone(link)
        table = self._tables.artifacts
        mine = table.c.task_id.in_(task_ids)
        had = sorted({(row[0], row[1]) for row in link.execute(sa.select(table.c.project, table.c.sha256).where(mine))})
        link.execute(table.delete().where(mine))
        return self._contents.let_go(link, had)

    def _remove_inputs(self, link: sa.Connection) -> None:
        """Remove the rows of inputs that came long ago, and that nothing takes that is not over."""
        self._contents.alone(link)
        columns, before = self._tables.artifacts.c, micros(utc_now() - INPUT_KEEP)
        old = sa.select(columns.id, columns.project, columns.sha256).where(
            columns.task_id.is_(None), columns.created_at < before
        )
        rows = link.execute(old).all()
        inputs = inputs_of_open(link, self._tables) if rows else set[str]()
        if going := [row for row in rows if row.id not in inputs]:
            delete = self._tables.artifacts.delete().where(columns.id == sa.bindparam("item"))
            link.execute(delete, [{"item": row.id} for row in going])
            self._contents.let_go(link, sorted({(row.project, row.sha256) for row in going}))


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
