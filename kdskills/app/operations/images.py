"""`image.build`: the tree sandboxes run in, made from this host's own files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest
from kdskills.execution.rootfs import Rootfs, build_rootfs, rootfs_for_image

if TYPE_CHECKING:
    from kdskills.app.host import Host


class ImageInput(Input):
    """How to build."""

    offline: bool = Field(default=True, description="From this host's own Python, libraries and tools.")
    tar: bool = Field(default=False, description="Also write the archive that `docker import` takes.")


class ImageOutput(Output):
    """Where the tree lies, the digest of what went into it, and its size; `tar` is the archive, if asked for."""

    path: str
    key: str
    python: str
    size: int
    files: int
    tar: str | None = None
    tar_digest: str | None = None


def _measure(tree: Path) -> tuple[int, int]:
    files = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files), len(files)


def _build(host: Host, tar: bool) -> tuple[Rootfs, tuple[Path, str] | None]:
    options = host.settings.execution_options()
    tree = build_rootfs(options.cache_dir, packages=options.image_packages)
    return tree, rootfs_for_image(options.cache_dir, packages=options.image_packages) if tar else None


async def build(host: Host, arguments: ImageInput, context: Context) -> ImageOutput:
    """Build the tree, or find it built."""
    if not arguments.offline:
        raise BadRequest("with a registry at hand, build runtime/images/Dockerfile with docker", code="not_offline")
    tree, archive = await asyncio.to_thread(_build, host, arguments.tar)
    size, files = await asyncio.to_thread(_measure, tree.path)
    return ImageOutput(
        path=str(tree.path),
        key=tree.key,
        python=tree.python,
        size=size,
        files=files,
        tar=None if archive is None else str(archive[0]),
        tar_digest=None if archive is None else archive[1],
    )


IMAGE = Implementation(ImageInput, ImageOutput, ("engine_unavailable",), build)
