"""The store of artifacts over a local folder: by content, whole or not at all, checked when read."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path

import pytest

from kdskills.errors import NotFound
from kdskills.jobs.artifacts import (
    ArtifactCorrupt,
    ArtifactStore,
    ArtifactStoreUnavailable,
    Stored,
    blob_key,
    open_artifacts,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where artifacts are kept."""
    return tmp_path / "kept"


@pytest.fixture
def store(folder: Path) -> ArtifactStore:
    """A store in a folder."""
    return open_artifacts(str(folder))


def file(tmp_path: Path, data: bytes, name: str = "source.bin") -> Path:
    """Write a file to store."""
    path = tmp_path / name
    path.write_bytes(data)
    return path


def files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def names(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


async def everything(store: ArtifactStore, project: str, sha256: str) -> bytes:
    """Read all bytes of a digest."""
    return b"".join([chunk async for chunk in store.read(project, sha256)])


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 5000, os.urandom(64), b"y" * 3_000_001], ids=len)
async def test_what_goes_in_comes_out(tmp_path: Path, store: ArtifactStore, data: bytes) -> None:
    """Any file comes back byte by byte, with its digest and size."""
    found = await store.save("local", file(tmp_path, data))
    assert found == Stored(hashlib.sha256(data).hexdigest(), len(data))
    assert await everything(store, "local", found.sha256) == data
    assert await store.fetch("local", found.sha256, tmp_path / "back") == len(data)
    assert (tmp_path / "back").read_bytes() == data


async def test_one_content_is_kept_once(tmp_path: Path, store: ArtifactStore, folder: Path) -> None:
    """Storing the same bytes again, even at once, changes nothing."""
    source = file(tmp_path, b"again")
    stored = await asyncio.gather(*(store.save("local", source) for _ in range(8)))
    assert len(set(stored)) == 1
    assert [path.read_bytes() for path in files(folder)] == [b"again"]


async def test_projects_do_not_see_one_another(tmp_path: Path, store: ArtifactStore) -> None:
    """A digest of another project is not there, though the bytes are somewhere."""
    found = await store.save("a/b", file(tmp_path, b"secret"))
    assert (await store.has("a/b", found.sha256), await store.has("a", found.sha256)) == (True, False)
    with pytest.raises(NotFound) as refused:
        await everything(store, "a", found.sha256)
    assert refused.value.code == "artifact_missing"


async def test_a_project_cannot_climb_out(tmp_path: Path, store: ArtifactStore, folder: Path) -> None:
    """A project named like a path keeps its files below the store's folder."""
    await store.save("../../out", file(tmp_path, b"x"))
    await store.save("..", file(tmp_path, b"x"))
    kept = files(folder)
    assert len(kept) == 2
    assert {path.relative_to(folder).parts[0] for path in kept} == {"artifacts"}


async def test_spoilt_bytes_are_told(tmp_path: Path, store: ArtifactStore, folder: Path) -> None:
    """A file that was changed behind the store's back is never handed over as what was stored, and leaves nothing."""
    found = await store.save("local", file(tmp_path, b"the truth"))
    (folder / blob_key("local", found.sha256)).write_bytes(b"the trutH")
    with pytest.raises(ArtifactCorrupt):
        await everything(store, "local", found.sha256)
    with pytest.raises(ArtifactCorrupt):
        await store.fetch("local", found.sha256, tmp_path / "back")
    assert names(tmp_path) == ["kept", "source.bin"]


async def test_a_cut_file_is_stored_again(tmp_path: Path, store: ArtifactStore, folder: Path) -> None:
    """Bytes that are shorter than what is to be kept, as after a power cut, are replaced."""
    source = file(tmp_path, b"all of it")
    found = await store.save("local", source)
    (folder / blob_key("local", found.sha256)).write_bytes(b"all")
    await store.save("local", source)
    assert await everything(store, "local", found.sha256) == b"all of it"


async def test_forgetting_twice_is_forgetting(tmp_path: Path, store: ArtifactStore) -> None:
    """Deleting what is not there is no error; afterwards it is missing."""
    found = await store.save("local", file(tmp_path, b"gone"))
    await store.delete("local", found.sha256)
    await store.delete("local", found.sha256)
    assert await store.has("local", found.sha256) is False
    with pytest.raises(NotFound):
        await store.fetch("local", found.sha256, tmp_path / "back")


async def test_a_folder_has_no_links(tmp_path: Path, store: ArtifactStore) -> None:
    """A local folder cannot sign links, and says so with None."""
    found = await store.save("local", file(tmp_path, b"x"))
    assert await store.link("local", found.sha256) is None


def test_the_folder_is_private(store: ArtifactStore, folder: Path) -> None:
    """Other accounts of the machine cannot list what work left behind."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_source_that_is_not_there_is_an_os_error(tmp_path: Path, store: ArtifactStore) -> None:
    """A missing source is the caller's mistake, not a missing artifact."""
    with pytest.raises(FileNotFoundError):
        await store.save("local", tmp_path / "nothing")


@pytest.mark.parametrize(
    "url",
    ["", "relative/folder", "ftp://host/x", "s3://", "gs:///x", "s3://bucket?x=1", "s3://user:word@bucket", "az://c#f"],
)
def test_odd_urls_are_refused(url: str) -> None:
    """A URL that is none of the four is refused when the store is opened, without repeating a password."""
    with pytest.raises(ArtifactStoreUnavailable) as refused:
        open_artifacts(url)
    assert "word" not in str(refused.value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the way is told as the operator's matter."""
    file(tmp_path, b"", "taken")
    with pytest.raises(ArtifactStoreUnavailable):
        open_artifacts(str(tmp_path / "taken" / "below"))


async def test_a_store_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the address: the operator's error, with no credentials in its words."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id-of-mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    from obstore.store import S3Store

    from kdskills.jobs.artifacts import ObjectBlobs

    quick = S3Store("bucket", retry_config={"max_retries": 0})
    store = ArtifactStore(ObjectBlobs(quick, links=True))
    with pytest.raises(ArtifactStoreUnavailable) as refused:
        await store.save("local", file(tmp_path, b"x"))
    assert "mine" not in str(refused.value.to_json())


def test_file_urls_name_folders(tmp_path: Path) -> None:
    """`file:///…` is the folder it names."""
    open_artifacts(f"file://{tmp_path}/made")
    assert (tmp_path / "made").is_dir()
