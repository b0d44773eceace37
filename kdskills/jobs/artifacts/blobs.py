"""The one thing every kind of storage does: keep bytes under a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from kdskills.errors import OperatorMustAct

CHUNK: Final = 1024 * 1024
NO_BUCKET: Final = "the bucket of artifacts is not there: make it, or let the setting artifacts name another"


class ArtifactStoreUnavailable(OperatorMustAct):
    """The place artifacts are kept in does not answer, or its URL is not understood."""

    code = "artifact_store_unavailable"


class ArtifactCorrupt(OperatorMustAct):
    """What is kept of an artifact is not what was stored."""

    code = "artifact_corrupt"


class Blobs(Protocol):
    """Keeps files under keys; a key's bytes never change."""

    async def check(self) -> None:
        """Ask whether the storage is there. Raises ArtifactStoreUnavailable."""
        ...

    async def save(self, key: str, source: Path) -> None:
        """Keep the file *source* under *key*; all of it or nothing."""
        ...

    async def size(self, key: str) -> int | None:
        """Return how many bytes *key* has, or None when there is no such key."""
        ...

    def read(self, key: str) -> AsyncIterator[bytes]:
        """Stream the bytes of *key*.

        Raises:
            NotFound: `artifact_missing`.
        """
        ...

    async def piece(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end* of *key*. Raises as `read`."""
        ...

    async def delete(self, key: str) -> None:
        """Forget *key*; one that is not there is forgotten already."""
        ...

    async def sign(self, key: str, expires: timedelta) -> str | None:
        """Return a link anybody may read *key* with until it expires, or None where there is no such thing."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
