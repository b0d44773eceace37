"""Artifacts in a folder, S3 or Azure, through obstore."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import MissingExtra, NotFound
from kdskills.jobs.artifacts.blobs import CHUNK, NO_BUCKET, ArtifactStoreUnavailable
from kdskills.skills.private_files import FILE_MODE, make_folder, private_folder

if TYPE_CHECKING:
    from obstore import Attributes
    from obstore.store import ObjectStore

ATTRIBUTES: Final = {"Content-Type": "application/octet-stream", "Content-Disposition": "attachment"}
"""A browser that follows a link saves what a program wrote; it never shows it."""

NO_BUCKET_CODES: Final = ("NoSuchBucket", "ContainerNotFound")
"""What S3 and Azure call it."""
CHECKED: Final = "kdskills-ready"
"""A prefix without keys, so that asking for it costs the same however much is kept."""

PARTS: Final = 2
"""Parts of a large file on their way at once: each of them is held in memory."""


def local_blobs(folder: Path) -> ObjectBlobs:
    """Return blobs in a folder, which is made private when it is not there.

    Raises:
        ArtifactStoreUnavailable: The folder cannot be made.
    """
    try:
        make_folder(folder)
    except OSError as error:
        raise ArtifactStoreUnavailable(f"the folder of artifacts cannot be made: {error.strerror}") from error
    with _speaking():
        from obstore.store import LocalStore

        return ObjectBlobs(LocalStore(str(folder)), links=False, folder=folder)


def cloud_blobs(scheme: str, bucket: str, prefix: str) -> ObjectBlobs:
    """Return blobs in S3 or Azure; credentials and addresses come from the cloud's usual variables."""
    with _speaking():
        from obstore.store import AzureStore, S3Store

        inner = prefix or None
        store: ObjectStore = (
            S3Store(bucket, prefix=inner) if scheme == "s3" else AzureStore(container_name=bucket, prefix=inner)
        )
        return ObjectBlobs(store, links=True)


class ObjectBlobs:
    """Blobs in one of obstore's stores.

    Args:
        store: The store.
        links: Whether it can sign links and keeps attributes.
        folder: Where the files are when the store is a folder: they are kept from other users.
    """

    def __init__(self, store: Any, *, links: bool, folder: Path | None = None) -> None:
        self._store = store
        self._links = links
        self._folder = folder

    async def check(self) -> None:
        """Ask for the first page of keys, which a bucket that is not there does not have. Raises ArtifactStoreUnavailable."""
        import obstore

        with _speaking(), _in_bucket():
            await obstore.list(self._store, prefix=CHECKED, chunk_size=1).collect_async()

    async def save(self, key: str, source: Path) -> None:
        """Keep a file, streamed; it appears whole or not at all."""
        import obstore

        attributes: Attributes | None = ATTRIBUTES if self._links else None
        with _speaking(), _in_bucket():
            if self._folder is not None:
                private_folder(self._folder / key.partition("/")[0], contents=True)
                make_folder((self._folder / key).parent)
            await obstore.put_async(self._store, key, source, attributes=attributes, max_concurrency=PARTS)
            if self._folder is not None:
                # the library follows the umask; the folders are closed all the while
                (self._folder / key).chmod(FILE_MODE)

    async def size(self, key: str) -> int | None:
        """Return the size of a key, or None."""
        import obstore

        with _speaking():
            try:
                return (await obstore.head_async(self._store, key))["size"]
            except FileNotFoundError:
                return None

    async def read(self, key: str) -> AsyncIterator[bytes]:
        """Stream a key."""
        import obstore

        with _speaking(), _in_bucket():
            response = await obstore.get_async(self._store, key)
            async for chunk in response.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return a piece of a key."""
        import obstore

        with _speaking(), _in_bucket():
            return bytes(await obstore.get_range_async(self._store, key, start=begin, end=end))

    async def delete(self, key: str) -> None:
        """Forget a key."""
        import obstore

        with _speaking():
            try:
                await obstore.delete_async(self._store, key)
            except FileNotFoundError:
                return

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link, where the store has them."""
        if not self._links:
            return None
        import obstore

        with _speaking():
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
def _speaking() -> Iterator[None]:
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
