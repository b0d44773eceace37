"""Artifacts in object stores: the same promises against S3's and Google's interfaces, served by real emulators."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from kdskills.app import Host, Settings
from kdskills.errors import NotFound
from kdskills.execution.request import Artifact
from kdskills.jobs.artifacts import (
    ArtifactCorrupt,
    ArtifactKeeper,
    ArtifactStore,
    ArtifactStoreUnavailable,
    blob_key,
    open_artifacts,
)
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import SessionFolder, WorkdirFiles
from kdskills.jobs.model import Command, Placement, Scope, TaskHead, TaskSpec
from kdskills.jobs.queue import Work
from kdskills.jobs.records import WorkTables
from kdskills.jobs.session_folders import SessionFolderCorrupt, SessionFolders
from kdskills.jobs.settings import JobsSettings
from kdskills.storage.database import Database, utc_now

BIN = Path(sys.executable).parent
BUCKET = "kept"


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve(command: list[str], url: str, log: Path) -> Iterator[str]:
    """Run an emulator until the tests are through."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except urllib.error.HTTPError as answered:
                answered.close()
                break
            except OSError:
                assert process.poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < deadline, "the emulator does not answer"
                time.sleep(0.2)
            else:
                break
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of moto with one bucket."""
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    for url in serve([str(BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}", log):
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30).close()
        yield url


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Google's storage emulated in memory, with one bucket."""
    port = free_port()
    command = [str(BIN / "gcp-storage-emulator"), "start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    log = tmp_path_factory.mktemp("gcs") / "log"
    yield from serve([*command, "--default-bucket", BUCKET], f"http://127.0.0.1:{port}", log)


@pytest.fixture
def open_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store in S3, with the variables its tools read."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3, "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/inner"


@pytest.fixture
def open_gcs(gcs: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store at Google's, with the variable its library reads."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "test")
    return f"gs://{BUCKET}/inner"


@pytest.fixture(params=["s3", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    """Each kind of storage in turn."""
    found: str = request.getfixturevalue(f"open_{request.param}")
    return found


async def everything(store: ArtifactStore, project: str, sha256: str) -> bytes:
    """Read all bytes of a digest."""
    return b"".join([chunk async for chunk in store.read(project, sha256)])


def key_of(url: str, project: str, sha256: str) -> str:
    """Return the key below the bucket."""
    return f"{url.rpartition('/')[2]}/{blob_key(project, sha256)}"


@pytest.mark.parametrize("size", [0, 1, 1024 * 1024, 7 * 1024 * 1024 + 3])
async def test_files_come_back_as_they_were(url: str, tmp_path: Path, size: int) -> None:
    """Empty, small and multi-part files come back byte by byte, streamed to a file and to the caller."""
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    store = open_artifacts(url)
    found = await store.save("a/b ä", source)
    assert (found.sha256, found.size) == (hashlib.sha256(data).hexdigest(), size)
    assert await everything(store, "a/b ä", found.sha256) == data
    assert await store.fetch("a/b ä", found.sha256, tmp_path / "back") == size
    assert (tmp_path / "back").read_bytes() == data
    await store.aclose()


async def test_life_of_an_artifact(url: str, tmp_path: Path) -> None:
    """Stored twice it is there once; another project has nothing; deleted twice it is missing."""
    source = tmp_path / "source"
    source.write_bytes(b"life " + url.encode())
    store = open_artifacts(url)
    found = await store.save("one", source)
    assert await store.save("one", source) == found
    assert (await store.has("one", found.sha256), await store.has("two", found.sha256)) == (True, False)
    with pytest.raises(NotFound) as refused:
        await everything(store, "two", found.sha256)
    assert refused.value.code == "artifact_missing"
    await store.delete("one", found.sha256)
    await store.delete("one", found.sha256)
    with pytest.raises(NotFound):
        await store.fetch("one", found.sha256, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    await store.aclose()


async def test_spoilt_bytes_are_told(open_s3: str, tmp_path: Path) -> None:
    """What somebody else put under the key is not handed over."""
    source = tmp_path / "source"
    source.write_bytes(b"as it was")
    store = open_artifacts(open_s3)
    found = await store.save("one", source)
    await obstore.put_async(S3Store(BUCKET), key_of(open_s3, "one", found.sha256), b"as it is!")
    with pytest.raises(ArtifactCorrupt):
        await everything(store, "one", found.sha256)
    await store.aclose()


async def test_links_of_s3_read_and_are_saved_not_shown(open_s3: str, tmp_path: Path) -> None:
    """A signed link reads the bytes, expires when it says, and makes a browser save what a program wrote."""
    source = tmp_path / "page.html"
    source.write_bytes(b"<script>alert(1)</script>")
    store = open_artifacts(open_s3)
    found = await store.save("one", source)
    link = await store.link("one", found.sha256, timedelta(seconds=90))
    assert link is not None
    assert ("X-Amz-Expires=90" in link, "X-Amz-Signature=" in link, "secret" in link) == (True, True, False)
    with await asyncio.to_thread(urllib.request.urlopen, link, None, 30) as answer:
        assert answer.read() == b"<script>alert(1)</script>"
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == "attachment"
    await store.aclose()


def service_account(folder: Path) -> Path:
    """Write the key file of an account that can sign."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    path = folder / "account.json"
    path.write_text(
        json.dumps(
            {
                "type": "service_account", "project_id": "test", "private_key_id": "one", "private_key": pem,
                "client_email": "signer@test.iam.gserviceaccount.com", "token_uri": "http://127.0.0.1:1/token",
            }
        )
    )  # fmt: skip
    return path


async def test_links_of_google_need_an_account_that_signs(
    open_gcs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account with a key signs links by itself; an emulator's anonymous caller has none."""
    digest = "ab" * 32
    anonymous = open_artifacts(open_gcs)
    assert await anonymous.link("one", digest) is None
    await anonymous.aclose()
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(service_account(tmp_path)))
    store = open_artifacts(open_gcs)
    link = await store.link("one", digest, timedelta(seconds=90))
    assert link is not None
    assert link.partition("?")[0] == f"https://storage.googleapis.com/{BUCKET}/{key_of(open_gcs, 'one', digest)}"
    assert "X-Goog-Expires=90" in link
    await store.aclose()


async def test_a_bucket_that_is_not_there_is_the_operators(open_s3: str, tmp_path: Path) -> None:
    """A wrong bucket fails at the first write, as something the operator must mend."""
    source = tmp_path / "source"
    source.write_bytes(b"x")
    with pytest.raises((ArtifactStoreUnavailable, NotFound)):
        await open_artifacts("s3://nobody-made-this").save("one", source)


async def test_large_files_do_not_fill_memory(open_s3: str, tmp_path: Path) -> None:
    """A file of 96 MiB is stored and read back with less than 64 MiB more memory."""
    source = tmp_path / "large"
    with source.open("wb") as sink:
        for number in range(96):
            sink.write(bytes([number]) * (1024 * 1024))
    store = open_artifacts(open_s3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = await store.save("one", source)
    assert await store.fetch("one", found.sha256, tmp_path / "back") == 96 * 1024 * 1024
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"{grown} KiB"
    await store.aclose()


@pytest.mark.parametrize("kind", ["s3", "gcs"])
async def test_every_use_of_a_missing_bucket_is_the_operators(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Storing, reading and asking all say that the bucket is missing; a key that is missing stays the caller's."""
    url = request.getfixturevalue(f"open_{kind}")
    source = tmp_path / "source"
    source.write_bytes(b"text")
    there, gone = open_artifacts(url), open_artifacts(url.replace(BUCKET, "no-such-bucket"))
    await there.check()
    with pytest.raises(NotFound) as missing:
        await there.piece("p", "0" * 64, 0, 1)
    assert missing.value.code == "artifact_missing"
    calls = [
        gone.check, lambda: gone.save("p", source), lambda: gone.piece("p", "0" * 64, 0, 1),
        lambda: gone.fetch("p", "0" * 64, tmp_path / "target"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ArtifactStoreUnavailable) as caught:
            await call()
        assert (caught.value.code, caught.value.who) == ("artifact_store_unavailable", "operator")
        assert "bucket" in caught.value.message
    await there.aclose()
    await gone.aclose()


async def test_folders_of_sessions_live_in_the_store(url: str, tmp_path: Path) -> None:
    """What one host saved another brings; objects nobody needs go, and one that is gone is told of."""
    spec = TaskSpec(
        scope=Scope(project="a/b ä"), session_id="s", command=Command(argv=("true",)),
        placement=Placement(engine="bubblewrap", skill_name="x", version_hash="0"),
    )  # fmt: skip
    key = spec.scope.session_key("s")
    head = TaskHead(id="task_1", spec=spec, status="running", mode="batch", session_key=key, created_at=utc_now())
    store, database = open_artifacts(url), f"sqlite:///{tmp_path / 'work.db'}"
    keeper = ArtifactKeeper(store, Database(database), WorkTables(), tmp_path / "cache")
    works = [Work(database, tmp_path / name, JobsSettings(session_folders="store")) for name in ("one", "two")]
    one, two = (SessionFolders(work, keeper) for work in works)
    here, there = (SessionFolder(work.attempts.session_dir(key)) for work in works)

    async def leave_and_save(data: bytes) -> list[str]:
        left = Artifact("f", len(data), hashlib.sha256(data).hexdigest(), 0o600, data)
        with here.reading() as base:
            pass
        here.commit(base, WorkdirFiles(files=[left], complete=True), OutputBounds())
        async with one.saving(head) as save:
            works[0].database.change(save.settle)
            await save.tidy()
        assert save.errors == []
        return await store.blobs.keys(f"session-folders/a~2Fb~20~C3~A4/{key}")

    for data in (b"first", os.urandom(9 * 1024 * 1024)):
        stored = await leave_and_save(data)
        assert len(stored) == 2
        await two.bring(head)
        with there.reading() as version:
            assert {path: file.read_bytes() for path, (file, _) in version.files.items()} == {"f": data}
    stored = await leave_and_save(b"third")
    await store.blobs.delete(next(name for name in stored if not name.endswith(".json")))
    with pytest.raises(SessionFolderCorrupt):
        await two.bring(head)
    for work in works:
        work.close()
    await store.aclose()


async def test_readiness_names_the_store(open_s3: str, tmp_path: Path) -> None:
    """`/readyz` tells of a missing bucket by the name of the part."""
    missing = open_s3.replace(BUCKET, "no-such-bucket")
    host = Host(Settings(state_dir=tmp_path / "state", artifacts=missing), entry_points=False)
    assert (await host.ready()).checks["artifacts"] == "artifact_store_unavailable"
    await host.work.aclose()
    await host.storage.aclose()
