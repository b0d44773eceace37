"""Write what comes from elsewhere to disk as it comes: it is never held, whatever its size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from pathlib import Path

from kdskills.app.projects.whole import whole
from kdskills.skills.archives import ArchiveRefused


async def spool(source: AsyncIterable[bytes], place: Path, limit: int) -> int:
    """Write *source* to the new file *place*, and return how many bytes it has.

    Args:
        source: The bytes as they come.
        place: Where to; nothing is there yet.
        limit: Most bytes to accept; the rest is not asked for.

    Raises:
        ArchiveRefused: `archive_too_large`; what was written stays for the caller to remove.
    """
    size = 0
    with await whole(asyncio.to_thread(place.open, "xb")) as out:
        async for piece in source:
            size += len(piece)
            if size > limit:
                raise ArchiveRefused("archive_too_large", f"it has more than {limit} bytes")
            await whole(asyncio.to_thread(out.write, piece))
    return size
