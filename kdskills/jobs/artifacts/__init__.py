"""Files that work left behind, kept by content: in a local folder, S3, Azure or Google's storage.

The bytes of an artifact are kept once per project under `artifacts/{project}/sha256/…`; who made them, and under which name,
stands in the table `kd_artifacts`. What is read back is checked against its digest.
"""

from kdskills.jobs.artifacts.blobs import ArtifactCorrupt, ArtifactStoreUnavailable, Blobs, artifact_id, mime_of
from kdskills.jobs.artifacts.store import (
    ArtifactKeeper,
    ArtifactRow,
    ArtifactStore,
    Stored,
    artifacts_url,
    open_artifacts,
)

__all__ = [
    "ArtifactCorrupt",
    "ArtifactKeeper",
    "ArtifactRow",
    "ArtifactStore",
    "ArtifactStoreUnavailable",
    "Blobs",
    "Stored",
    "artifact_id",
    "artifacts_url",
    "mime_of",
    "open_artifacts",
]
