"""Where the bytes of artifacts are: keys, ids and media types, and the kinds of storage: a folder, S3, Azure and Google's.

obstore serves all but the last. A library is imported when the first storage that needs it is opened.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import string
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kdskills.errors import MissingExtra, NotFound, OperatorMustAct
from kdskills.skills.private_files import FILE_MODE, make_folder, private_folder
from kdskills.storage.database import LazyModule

if TYPE_CHECKING:
    import obstore
    from obstore import Attributes
    from obstore.store import ObjectStore
else:
    obstore = LazyModule("obstore")

CHUNK: Final = 1024 * 1024
NO_BUCKET: Final = "the bucket of artifacts is not there: make it, or let the setting artifacts name another"


class ArtifactStoreUnavailable(OperatorMustAct, code="artifact_store_unavailable"):
    """The place artifacts are kept in does not answer, or its URL is not understood."""


class ArtifactCorrupt(OperatorMustAct, code="artifact_corrupt"):
    """What is kept of an artifact is not what was stored."""


OCTETS: Final = "application/octet-stream"

MIMES: Final = {
    "bmp": "image/bmp", "bz2": "application/x-bzip2", "css": "text/css", "csv": "text/csv", "doc": "application/msword",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document", "gif": "image/gif",
    "gz": "application/gzip", "htm": "text/html", "html": "text/html", "ipynb": "application/x-ipynb+json",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "js": "text/javascript", "json": "application/json",
    "jsonl": "application/jsonl", "log": "text/plain", "md": "text/markdown", "mp3": "audio/mpeg", "mp4": "video/mp4",
    "parquet": "application/vnd.apache.parquet", "pdf": "application/pdf", "png": "image/png",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation", "py": "text/x-python",
    "rtf": "application/rtf", "sh": "application/x-sh", "sqlite": "application/vnd.sqlite3", "svg": "image/svg+xml",
    "tar": "application/x-tar", "toml": "application/toml", "tsv": "text/tab-separated-values", "txt": "text/plain",
    "wav": "audio/wav", "webp": "image/webp", "xls": "application/vnd.ms-excel",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", "xml": "application/xml",
    "yaml": "application/yaml", "yml": "application/yaml", "zip": "application/zip",
}  # fmt: skip
"""Media types by suffix: a table of our own, because the one of the machine differs from host to host."""

_PLAIN: Final = frozenset(string.ascii_letters + string.digits + "_.-")
_HEX: Final = re.compile(r"[0-9a-f]{64}")


def mime_of(path: str) -> str:
    """Return the media type a file's suffix stands for; nothing looks into the file."""
    name = path.rpartition("/")[2]
    _, dot, suffix = name.rpartition(".")
    return MIMES.get(suffix.lower(), OCTETS) if dot else OCTETS


def artifact_id(task_id: str, path: str) -> str:
    """Return the id of what a task left at *path*: the same however often a worker stores it."""
    parts = b"".join(
        f"{len(part)}:".encode() + part for part in (task_id.encode(), path.encode("utf-8", "surrogatepass"))
    )
    digest = hashlib.sha256(parts).digest()[:16]
    return "art_" + base64.b32encode(digest).decode().rstrip("=").lower()


def blob_key(project: str, sha256: str) -> str:
    """Return where the bytes of a digest, in lower-case hex, are kept for a project with a name. Raises ValueError."""
    if not _HEX.fullmatch(sha256):
        raise ValueError(f"{sha256[:80]!r} is no sha256 in lower-case hex")
    if not project:
        raise ValueError("the project has no name")
    return f"artifacts/{_folder(project)}/sha256/{sha256[:2]}/{sha256[2:]}"


def _folder(project: str) -> str:
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
    """Open the storage at *url*; nothing is asked of it yet.

    Args:
        url: An absolute folder, `file:///folder`, `s3://bucket/prefix`, `az://container/prefix` or `gs://bucket/prefix`.
            Credentials come from where each cloud's own tools take them.

    Raises:
        ArtifactStoreUnavailable: The URL is not understood, or the storage cannot be set up.
        MissingExtra: What speaks to the storage is not installed.
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
    if parts.scheme == "gs":
        return _google_blobs(bucket, prefix)
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

    async def read(self, key: str) -> AsyncIterator[bytes]:
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


def _google_blobs(bucket: str, prefix: str) -> GoogleBlobs:
    """Return blobs in a bucket; credentials come from the machine, an emulator from `STORAGE_EMULATOR_HOST`."""
    try:
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("keeping artifacts in Google's storage", "gcs") from None
    try:
        client = storage.Client()
    except (GoogleAuthError, OSError) as error:
        raise ArtifactStoreUnavailable(f"Google's storage cannot be used here: {type(error).__name__}") from error
    return GoogleBlobs(client, bucket, prefix)


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

    async def read(self, key: str) -> AsyncIterator[bytes]:
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
            await asyncio.to_thread(self._blob(key).delete)

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
