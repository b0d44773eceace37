"""Artifacts in Google's storage, through google-cloud-storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kdskills.errors import MissingExtra, NotFound
from kdskills.jobs.artifacts.blobs import CHUNK, NO_BUCKET, ArtifactStoreUnavailable


def google_blobs(bucket: str, prefix: str) -> GoogleBlobs:
    """Return blobs in a bucket; credentials come from the machine, an emulator from `STORAGE_EMULATOR_HOST`.

    Raises:
        MissingExtra: google-cloud-storage is not installed.
        ArtifactStoreUnavailable: There are no credentials.
    """
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
        with _speaking():
            bucket_exists = await asyncio.to_thread(self._bucket.exists)
        if not bucket_exists:
            raise ArtifactStoreUnavailable(NO_BUCKET)

    async def save(self, key: str, source: Path) -> None:
        """Keep a file, streamed; it appears whole or not at all."""
        blob = self._blob(key)
        blob.content_disposition = "attachment"

        def upload() -> None:
            with source.open("rb") as stream:
                blob.upload_from_file(
                    stream, size=source.stat().st_size, content_type="application/octet-stream", checksum="md5"
                )

        try:
            with _speaking():
                await asyncio.to_thread(upload)
        except NotFound:  # a key that is not there is made: it is the bucket
            raise ArtifactStoreUnavailable(NO_BUCKET) from None

    async def size(self, key: str) -> int | None:
        """Return the size of a key, or None."""
        with _speaking():
            blob = await asyncio.to_thread(self._bucket.get_blob, self._prefix + key)
        return None if blob is None else int(blob.size)

    async def read(self, key: str) -> AsyncIterator[bytes]:
        """Stream a key in ranges of a chunk."""
        with _speaking():
            blob = await asyncio.to_thread(self._bucket.get_blob, self._prefix + key)
        if blob is None:
            await self.check()
            raise NotFound("the bytes of this artifact are not there any more", code="artifact_missing")
        size = int(blob.size)
        for start in range(0, size, CHUNK):
            with _speaking():
                yield await asyncio.to_thread(
                    blob.download_as_bytes, start=start, end=min(start + CHUNK, size) - 1, checksum=None
                )

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return a piece of a key."""
        try:
            with _speaking():
                data: bytes = await asyncio.to_thread(
                    self._blob(key).download_as_bytes, start=begin, end=end - 1, checksum=None
                )
        except NotFound:
            await self.check()
            raise
        return data

    async def delete(self, key: str) -> None:
        """Forget a key."""
        try:
            with _speaking():
                await asyncio.to_thread(self._blob(key).delete)
        except NotFound:
            return

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link; None for credentials that cannot sign, as those of an emulator."""
        from google.auth.credentials import Signing

        if not isinstance(self._client._credentials, Signing):  # noqa: SLF001 - the client offers no other way to ask
            return None
        with _speaking():
            link: str = await asyncio.to_thread(
                self._blob(key).generate_signed_url, version="v4", expiration=expires, method="GET"
            )
            return link

    async def aclose(self) -> None:
        """Close the client's connections."""
        await asyncio.to_thread(self._client.close)


@contextmanager
def _speaking() -> Iterator[None]:
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
