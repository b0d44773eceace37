"""The file of a backup: a tar archive that says of every byte in it what it must be, and is whole only when its last member is there.

Members are regular files and folders with headers of one form, so that a header that differs anywhere is damage. After each run of
members stands an `index/…` member with their names, sizes and digests; `manifest.json` counts them all and has the digest of the
indexes, `manifest.sha256` that of the manifest. Writing and reading hold one piece of a member in memory, however large it is. The
page `docs/reference/backup.md` is the description for other programs.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import secrets
import tarfile
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kdskills.errors import Conflict, OperatorMustAct
from kdskills.execution.dirs import locked
from kdskills.skills.private_files import open_private
from kdskills.storage.folder import telling_full_disk

T = TypeVar("T")
FORMAT: Final = 1
CHUNK: Final = 1024 * 1024
BLOCK: Final = tarfile.BLOCKSIZE
END: Final = bytes(2 * BLOCK)
INDEXED: Final = 2000
"""Members between two indexes."""
LOOK_S: Final = 0.05
MAX_NAME: Final = 8192
MAX_INDEX: Final = INDEXED * (MAX_NAME + 256)
MAX_MANIFEST: Final = 4 * CHUNK
MAX_ROWS: Final = 64 * CHUNK
"""Bytes that the rows of one `tables/…` member may have, and the member itself."""
MAX_TOLD: Final = 1000
"""How many of what a backup goes without are named; all are counted."""
MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest.sha256"
MAX_TABLES: Final = 100
TABLE: Final = re.compile(r"tables/(service|sessions)/(kd_[a-z_]{1,60})/([0-9]{6,})\.jsonl\.gz")
EXECUTABLE: Final = b"0000700\0"
NAME: Final = re.compile(r"(?:index|tables|objects|versions|state)(?:/[A-Za-z0-9%._~+-]+)+/?")


class BackupRefused(OperatorMustAct, code="backup_damaged"):
    """A file is no whole backup, or not one that this version restores; nothing of it was written."""


class PartCount(BaseModel):
    """Members of a kind, folders not counted, and their bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    count: int = Field(0, ge=0)
    size: int = Field(0, ge=0)


class TableRows(BaseModel):
    """The rows of a table: its columns in the order of each row's values, how many rows, their bytes and digest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    columns: list[str]
    rows: int = Field(ge=0)
    size: int = Field(ge=0)
    sha256: str


class DatabaseRows(BaseModel):
    """What is kept of one database."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dialect: Literal["sqlite", "postgresql"]
    revisions: list[str]
    tables: dict[str, TableRows]


class Manifest(BaseModel):
    """What a backup says of itself.

    Attributes:
        members: Regular files and folders before the manifest, without indexes.
        index_sha256: Digest of all indexes, one after the other.
        missing: Names of what the database speaks of and is nowhere; the first thousand of `missing_count`.
        left_out: Links, sockets and other things in the state folder that are no regular files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["kdskills-backup"] = "kdskills-backup"
    format: int
    version: str
    made_at: str
    databases: dict[str, DatabaseRows]
    parts: dict[Literal["objects", "versions", "state"], PartCount]
    members: int = Field(ge=0)
    index_sha256: str
    missing: list[str] = Field(max_length=MAX_TOLD)
    missing_count: int = Field(ge=0)
    left_out: int = Field(ge=0)

    def unpacked(self, *, objects: bool, rows: bool) -> int:
        """Return bytes of the files of a host, with those of objects and of rows where these go to its disk, too."""
        tables = [table.size for rows_kept in self.databases.values() for table in rows_kept.tables.values()]
        parts = [part.size for name, part in self.parts.items() if objects or name != "objects"]
        return sum(parts) + (sum(tables) if rows else 0)


@dataclass(frozen=True, slots=True)
class BackupMember:
    """One member: its name as it stands in the archive, its bytes, and whether it is a folder, or may be executed."""

    name: str
    size: int = 0
    folder: bool = False
    executable: bool = False

    @property
    def part(self) -> str:
        """The kind of member: the first word of its name."""
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        """What follows the first word, as text that a file system takes."""
        return os.fsdecode(unquote_to_bytes(self.name.partition("/")[2].rstrip("/")))

    def header(self) -> bytes:
        """Return the one header that such a member has."""
        info = tarfile.TarInfo(self.name)
        info.size, info.mode = self.size, 0o700 if self.folder or self.executable else 0o600
        info.type = tarfile.DIRTYPE if self.folder else tarfile.REGTYPE
        return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def member_name(part: str, path: str) -> str:
    """Return the name of a member for a path below *part*: letters that could mean something else are quoted."""
    return f"{part}/{quote_from_bytes(os.fsencode(path), safe='/~')}"


class BackupWriter:
    """Writes members one after the other into *sink*, which can be wound back; `finish` makes it a backup."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._lines: list[str] = []
        self._indexes = 0
        self._members = 0
        self._index_digest = hashlib.sha256()
        self._parts: dict[str, PartCount] = {}
        self.missing: list[str] = []
        self.missing_count = 0
        self.left_out = 0

    def tell_missing(self, name: str) -> None:
        """Note that the database speaks of something that is nowhere."""
        self.missing_count += 1
        if self.missing_count <= MAX_TOLD:
            self.missing.append(name[:MAX_NAME])

    def add(self, member: BackupMember, source: IO[bytes], *, sha256: str | None = None) -> bool:
        """Write a member's bytes; False, and nothing, when *source* has fewer than it shall have, or not those of *sha256*.

        Raises StorageFull, and as reading *source*; nothing is written then either.
        """
        start, digest, left = self._sink.tell(), hashlib.sha256(), member.size
        try:
            with telling_full_disk():
                self._sink.write(member.header())
                while left and (piece := source.read(min(CHUNK, left))):
                    digest.update(piece)
                    self._sink.write(piece)
                    left -= len(piece)
                self._sink.write(bytes(-member.size % BLOCK))
        except BaseException:  # raised again
            self._wind_back(start)
            raise
        if left or sha256 not in {None, digest.hexdigest()}:  # a file became shorter while it was read, or is another
            self._wind_back(start)
            return False
        if member.part != "index":
            self._count(member, digest.hexdigest())
        return True

    def _wind_back(self, start: int) -> None:
        self._sink.seek(start)
        self._sink.truncate()

    def add_bytes(self, name: str, content: bytes) -> None:
        """Write a member whose bytes are at hand."""
        self.add(BackupMember(name, len(content)), io.BytesIO(content))

    def _count(self, member: BackupMember, sha256: str) -> None:
        if member.part not in {MANIFEST, DIGEST}:
            self._members += 1
            self._parts[member.part] = _counted(self._parts.get(member.part), member)
            self._lines.append(index_line(member, sha256))
            if len(self._lines) >= INDEXED:
                self._index()

    def _index(self) -> None:
        content = "".join(self._lines).encode()
        self._lines.clear()
        self._index_digest.update(content)
        self._indexes += 1
        self.add_bytes(f"index/{self._indexes:06}.jsonl", content)

    def finish(self, *, version: str, made_at: str, databases: dict[str, DatabaseRows]) -> Manifest:
        """Write the manifest and its digest, which make the file a backup, and return it."""
        if self._lines:
            self._index()
        manifest = Manifest(
            format=FORMAT,
            version=version,
            made_at=made_at,
            databases=databases,
            parts={name: self._parts.get(name, PartCount()) for name in ("objects", "versions", "state")},
            members=self._members,
            index_sha256=self._index_digest.hexdigest(),
            missing=self.missing,
            missing_count=self.missing_count,
            left_out=self.left_out,
        )
        content = manifest.model_dump_json(indent=1).encode() + b"\n"
        self.add_bytes(MANIFEST, content)
        self.add_bytes(DIGEST, f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode())
        with telling_full_disk():
            self._sink.write(END)
        return manifest


def _counted(count: PartCount | None, member: BackupMember) -> PartCount:
    before = count or PartCount()
    return PartCount(count=before.count + (not member.folder), size=before.size + member.size)


def index_line(member: BackupMember, sha256: str) -> str:
    """Return what an index says of a member."""
    return json.dumps([member.name, member.size, sha256], separators=(",", ":")) + "\n"


class LoopBridge:
    """Lets a thread that blocks ask the loop it was started from, and the loop stop the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()

    def wait(self, step: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; called in the thread."""
        return asyncio.run_coroutine_threadsafe(step, self._loop).result()

    def go_on(self) -> None:
        """Raise CancelledError in the thread once its caller went away."""
        if self._stopped.is_set():
            raise asyncio.CancelledError

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold a lock file alone; waiting for whoever holds it ends as `go_on` does. Raises as `dirs.locked`."""
        with ExitStack() as locks:
            while True:
                self.go_on()
                with suppress(BlockingIOError):
                    locks.enter_context(locked(path, wait=False))
                    break
                self._stopped.wait(LOOK_S)
            yield

    async def run(self, work: Callable[[], T]) -> T:
        """Do *work* in a thread; a cancellation ends it at its next `go_on`, and is raised when it has cleaned up."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._stopped.set()
            await asyncio.wait([task])
            raise


class ChunkStream(io.RawIOBase):
    """What a store streams, as a file that a thread reads."""

    def __init__(self, bridge: LoopBridge, chunks: AsyncIterator[bytes]) -> None:
        self._bridge = bridge
        self._chunks = chunks
        self._left = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Let the store go."""

        async def let_go() -> None:
            await self._chunks.aclose()  # type: ignore[attr-defined]

        if not self.closed:
            super().close()
            self._bridge.wait(let_go())

    def readinto(self, buffer: Any) -> int:
        """Read what there is of a chunk; 0 at the end. Raises as the store."""

        async def following() -> bytes:
            return await anext(self._chunks, b"")

        while not self._left and (chunk := self._bridge.wait(following())):
            self._left = chunk
        piece, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


class _Piece(io.RawIOBase):
    """The bytes of one member as a stream that ends where they do, and digests what is read."""

    def __init__(self, source: IO[bytes], size: int) -> None:
        self._source = source
        self._left = size
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read a piece; 0 at the end. Raises BackupRefused when the archive ends before."""
        piece = self._source.read(min(len(buffer), self._left))
        if len(piece) < min(1, self._left):
            raise BackupRefused("the backup ends within a member: it is not whole")
        self._left -= len(piece)
        self.digest.update(piece)
        buffer[: len(piece)] = piece
        return len(piece)


def _text(field: bytes) -> str:
    try:
        return field.partition(b"\0")[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise BackupRefused("a member has a name that no backup has") from error


def _number(field: bytes) -> int:
    """Return a number of a header: eight-based digits, or bytes where these are too few."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 "), 8)
    except ValueError as error:
        raise BackupRefused("the backup is not whole, or is no backup: a member has no header") from error


class BackupReader:
    """Reads a backup from its beginning to its end, and checks every byte on the way. Raises BackupRefused for what differs."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source

    def read(self, visit: Callable[[BackupMember, IO[bytes]], None] | None = None) -> Manifest:
        """Call *visit* with each member but indexes and the manifest, and return the manifest once all of it is right.

        What was visited is proven only when this returns: indexes and manifest stand after what they tell of.
        """
        self._source.seek(0)
        lines: list[str] = []
        parts: dict[str, PartCount] = {}
        index_digest, members, indexes = hashlib.sha256(), 0, 0
        while True:
            member = self._header()
            if member.name == MANIFEST:
                break
            if member.part == "index":
                indexes += 1
                content = self._small(member, MAX_INDEX)
                if member.name != f"index/{indexes:06}.jsonl" or content != "".join(lines).encode():
                    raise BackupRefused(_differing(content, lines), member=member.name)
                index_digest.update(content)
                lines.clear()
                continue
            if len(lines) >= INDEXED:
                raise BackupRefused(f"the backup has no index before {member.name}")
            members += 1
            parts[member.part] = _counted(parts.get(member.part), member)
            lines.append(index_line(member, self._visited(member, visit)))
        manifest = self._manifest(member)
        if lines or (manifest.members, manifest.index_sha256) != (members, index_digest.hexdigest()):
            raise BackupRefused("the backup's manifest tells of other members than it has")
        if any(count != parts.get(name, PartCount()) for name, count in manifest.parts.items()):
            raise BackupRefused("the backup's manifest counts other members than it has")
        return manifest

    def _header(self) -> BackupMember:
        block = self._exactly(BLOCK)
        head, name, size = block, _text(block[:100]), _number(block[124:136])
        if block[156:157] == tarfile.GNUTYPE_LONGNAME:
            if not 0 < size <= MAX_NAME + 1:
                raise BackupRefused("a member's name is too long")
            padded = self._exactly(size + -size % BLOCK)
            block = self._exactly(BLOCK)
            head += padded + block
            name, size = _text(padded[:size]), _number(block[124:136])
        folder = block[156:157] == tarfile.DIRTYPE
        member = BackupMember(name, size, folder, block[100:108] == EXECUTABLE and not folder)
        if size < 0 or (folder and size) or member.header() != head:  # whatever else a header says, it is no backup's
            raise BackupRefused(f"the member {name[:200]!r} has a header that no backup has", member=name[:200])
        if name not in {MANIFEST, DIGEST}:
            check_name(member)
        return member

    def _visited(self, member: BackupMember, visit: Callable[[BackupMember, IO[bytes]], None] | None) -> str:
        """Let a member be read, and return its digest."""
        piece = _Piece(self._source, member.size)
        with io.BufferedReader(piece, max(1, min(member.size, CHUNK))) as stream:
            if visit is not None:
                visit(member, stream)
            while stream.read(CHUNK):
                pass
            self._padding(member)
        digest = piece.digest.hexdigest()
        if member.part == "objects" and member.name.removesuffix(".json").replace("/", "")[-64:] != digest:
            raise BackupRefused(f"the member {member.name[:200]} is not what its name says", member=member.name[:200])
        return digest

    def _small(self, member: BackupMember, most: int) -> bytes:
        if member.size > most or member.folder:
            raise BackupRefused(f"the member {member.name[:200]} is larger than any backup's", member=member.name[:200])
        content = self._exactly(member.size)
        self._padding(member)
        return content

    def _padding(self, member: BackupMember) -> None:
        if any(self._exactly(-member.size % BLOCK)):
            raise BackupRefused(f"after {member.name[:200]} stand bytes that belong to nothing")

    def _exactly(self, size: int) -> bytes:
        content = self._source.read(size)
        if len(content) != size:
            raise BackupRefused("the backup ends too early: it is not whole")
        return content

    def _manifest(self, member: BackupMember) -> Manifest:
        content = self._small(member, MAX_MANIFEST)
        last = self._header()
        digest = self._small(last, 200)
        if last.name != DIGEST or digest != f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode():
            raise BackupRefused("the backup's manifest is not what was written")
        if self._source.read(len(END) + 1) != END:
            raise BackupRefused("the backup does not end where its manifest does")
        try:
            told_text = json.loads(content)
            if (
                isinstance(told_text, dict)
                and isinstance(told_text.get("format"), int)
                and told_text["format"] > FORMAT
            ):
                message = f"the backup has format {told_text['format']}, and this version of kdskills reads {FORMAT}: use a newer one"
                raise BackupRefused(message, code="backup_newer")
            return Manifest.model_validate(told_text)
        except (ValueError, RecursionError, ValidationError) as error:
            raise BackupRefused("the backup's manifest is not understood") from error


def check_name(member: BackupMember) -> None:
    """Refuse a name that is none of a backup's, or could lead out of where it is put. Raises BackupRefused."""
    parts = [os.fsdecode(unquote_to_bytes(part)) for part in member.name.rstrip("/").split("/")]
    unsafe = any(part in {"", ".", ".."} or "/" in part or "\0" in part for part in parts)
    if unsafe or len(member.name) > MAX_NAME or not NAME.fullmatch(member.name) or len(parts) < 2:
        raise BackupRefused(f"the member {member.name[:200]!r} is none that a backup has", code="backup_hostile")
    if member.folder and member.part != "state":
        raise BackupRefused(f"the member {member.name[:200]!r} must not be a folder", code="backup_hostile")


def _differing(content: bytes, lines: list[str]) -> str:
    """Return which member is not what the index says."""
    told_text = content.decode("ascii", "replace").splitlines(keepends=True)
    for number, line in enumerate(lines):
        if number >= len(told_text) or told_text[number] != line:
            return f"the member {json.loads(line)[0][:200]} is not what was written"
    return "the backup's index tells of other members than it has"


def rows_of(content: bytes) -> bytes:
    """Return the rows of a `tables/…` member, unpacked within bounds. Raises BackupRefused."""
    unpacking = zlib.decompressobj(31)
    try:
        rows = unpacking.decompress(content, MAX_ROWS + 1)
    except zlib.error as error:
        raise BackupRefused("rows of a table cannot be unpacked") from error
    if len(rows) > MAX_ROWS or not unpacking.eof or unpacking.unused_data:
        raise BackupRefused("rows of a table unpack to more than any backup has", code="backup_hostile")
    return rows


class TableSums:
    """What the rows of each table come to, compared with what the manifest says of them."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, int, Any, int]] = {}
        self.largest_object = 0

    def visit(self, member: BackupMember, stream: IO[bytes]) -> None:
        """Add a member's rows, if it has any. Raises BackupRefused."""
        if member.part == "objects":
            self.largest_object = max(self.largest_object, member.size)
        if member.part != "tables":
            return
        database, table, number, content = table_rows(member, stream)
        rows, size, digest, members = self._sums.get((database, table), (0, 0, hashlib.sha256(), 0))
        if number != members + 1 or len(self._sums) > MAX_TABLES:
            raise BackupRefused(f"the member {member.name[:200]} does not follow those before it")
        digest.update(content)
        self._sums[database, table] = (rows + content.count(b"\n"), size + len(content), digest, number)

    def check(self, manifest: Manifest) -> None:
        """Raise BackupRefused when the manifest tells of other rows."""
        empty = (0, 0, hashlib.sha256(), 0)
        told_rows = {
            (name, table): rows
            for name, kept_rows in manifest.databases.items()
            for table, rows in kept_rows.tables.items()
        }
        for key in {*told_rows, *self._sums}:
            rows, size, digest, _ = self._sums.get(key, empty)
            table = told_rows.get(key)
            if table is None or (table.rows, table.size, table.sha256) != (rows, size, digest.hexdigest()):
                raise BackupRefused(f"the rows of {key[1]} are not those that the manifest tells of")


def table_rows(member: BackupMember, stream: IO[bytes]) -> tuple[str, str, int, bytes]:
    """Return database, table and number of a member of rows, and the rows as lines. Raises BackupRefused."""
    names = TABLE.fullmatch(member.name)
    if names is None or member.size > MAX_ROWS:
        raise BackupRefused(f"the member {member.name[:200]!r} is none that a backup has", code="backup_hostile")
    return names[1], names[2], int(names[3]), rows_of(stream.read(member.size))


@contextmanager
def new_backup(path: Path) -> Iterator[IO[bytes]]:
    """Give a file beside *path*, for this user only, which gets that name when the block ends and not otherwise.

    Raises Conflict when something has the name, OSError and StorageFull.
    """
    if os.path.lexists(path):
        raise Conflict(f"{path} is there already; a backup never replaces another", code="path_exists", path=str(path))
    aside = path.with_name(f".{path.name[:180]}.{secrets.token_hex(6)}.part")
    try:
        with open_private(aside, "x+b") as sink:
            yield sink
            with telling_full_disk():
                sink.flush()
                os.fsync(sink.fileno())
        try:
            os.link(aside, path)  # never replaces what somebody else put there meanwhile
        except FileExistsError:
            raise Conflict(f"{path} was made by another meanwhile", code="path_exists", path=str(path)) from None
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
