"""From a URL to a store of artifacts; what a kind of storage needs is imported when one is opened."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from kdskills.jobs.artifacts.blobs import ArtifactStoreUnavailable, Blobs
from kdskills.jobs.artifacts.store import ArtifactStore

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
        from kdskills.jobs.artifacts.objects import local_blobs

        return local_blobs(Path(url if url.startswith("/") else parts.path))
    prefix = parts.path.strip("/")
    if not parts.netloc or parts.query or parts.fragment or parts.username is not None:
        raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}; the setting names none of these")
    if parts.scheme == "gs":
        from kdskills.jobs.artifacts.google import google_blobs

        return google_blobs(parts.netloc, prefix)
    if parts.scheme in {"s3", "az"}:
        from kdskills.jobs.artifacts.objects import cloud_blobs

        return cloud_blobs(parts.scheme, parts.netloc, prefix)
    raise ArtifactStoreUnavailable(f"artifacts are kept in {FORMS}, not {parts.scheme}://")
