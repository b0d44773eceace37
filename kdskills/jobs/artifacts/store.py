"""The store of artifacts: opened by its URL, addressed by content, streamed both ways, checked when it is read."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kdskills.errors import BadRequest
from kdskills.jobs.artifacts.blobs import CHUNK, ArtifactCorrupt, ArtifactStoreUnavailable, Blobs, blob_key
from kdskills.skills.private_files import open_private

LINK: Final = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Stored:
    """What was kept: digest in hex, and bytes."""

    sha256: str
    size: int


class ArtifactStore:
    """Keeps files of projects by content, so that storing one twice costs nothing and never changes anything.

    Args:
        blobs: Where the bytes are kept.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def check(self) -> None:
        """Ask whether the storage is there. Raises ArtifactStoreUnavailable."""
        await self._blobs.check()

    async def measure(self, source: Path) -> Stored:
        """Return digest and size of a file, which is not kept. Raises OSError."""
        return await asyncio.to_thread(_hashed, source)

    async def save(self, project: str, source: Path) -> Stored:
        """Keep the file at *source*; it is streamed and must not change meanwhile.

        Raises:
            OSError: The file cannot be read.
            ArtifactStoreUnavailable: The storage does not answer.
        """
        content = await self.measure(source)
        key = blob_key(project, content.sha256)
        if await self._blobs.size(key) != content.size:
            await self._blobs.save(key, source)
        return content

    async def read(self, project: str, sha256: str) -> AsyncIterator[bytes]:
        """Stream the bytes of a digest.

        Raises:
            NotFound: `artifact_missing`.
            ArtifactCorrupt: After the last chunk, when what came is not what was stored.
        """
        hasher = hashlib.sha256()
        async for chunk in self._blobs.read(blob_key(project, sha256)):
            hasher.update(chunk)
            yield chunk
        if hasher.hexdigest() != sha256:
            raise ArtifactCorrupt(f"the artifact {sha256[:12]}… is not what was stored", sha256=sha256)

    async def fetch(self, project: str, sha256: str, target: Path, *, limit: int | None = None) -> int:
        """Write the bytes of a digest to *target*, whole and checked or not at all, and return their number.

        Raises:
            NotFound: `artifact_missing`.
            BadRequest: `artifact_large`; it has more than *limit* bytes.
            ArtifactCorrupt: What is kept is not what was stored.
        """
        part = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.part")
        size = 0
        try:
            with open_private(part, "xb") as sink:
                async for chunk in self.read(project, sha256):
                    size += len(chunk)
                    if limit is not None and size > limit:
                        raise BadRequest(
                            f"the artifact has more than {limit} bytes", code="artifact_large", limit=limit
                        )
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


def _hashed(source: Path) -> Stored:
    hasher = hashlib.sha256()
    size = 0
    with source.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return Stored(hasher.hexdigest(), size)


FORMS = "a folder, s3://bucket/prefix, az://container/prefix or gs://bucket/prefix"


def artifacts_url(configured_url: str | None, state_dir: Path) -> str:
    """Return where artifacts are kept: the setting, or a folder beside the other durable state."""
    return configured_url or str(state_dir)


def open_artifacts(url: str) -> ArtifactStore:
    """Open the store at *url*; nothing is asked of it yet.

    Args:
        url: An absolute folder, `file:///folder`, `s3://bucket/prefix`, `az://container/prefix` or `gs://bucket/prefix`.
            Credentials come from where each cloud's own tools take them.

    Raises:
        ArtifactStoreUnavailable: The URL is not understood, or the storage cannot be set up.
        MissingExtra: What speaks to the storage is not installed.
    """
    return ArtifactStore(open_blobs(url))


def open_blobs(url: str) -> Blobs:
    """Open the storage at *url* itself; as `open_artifacts`."""
    parts = urlsplit(url)
    if url.startswith("/") or parts.scheme == "file":
        from kdskills.jobs.artifacts.backends import local_blobs

        return local_blobs(Path(url if url.startswith("/") else parts.path))
    prefix = parts.path.strip("/")
    if not parts.netloc or parts.query or parts.fragment or parts.username is not None:
        raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}; the setting names none of these")
    if parts.scheme == "gs":
        from kdskills.jobs.artifacts.backends import google_blobs

        return google_blobs(parts.netloc, prefix)
    if parts.scheme in {"s3", "az"}:
        from kdskills.jobs.artifacts.backends import cloud_blobs

        return cloud_blobs(parts.scheme, parts.netloc, prefix)
    raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}, not {parts.scheme}://")
