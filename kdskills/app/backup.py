"""Backups of an installation: rows of its databases, the objects these name, uploaded skills, and files of the state folder.

A backup is made while the system runs: rows are those of one moment, and everything they name never changes once it is there. A
restore puts all of it in place or nothing, and only where nothing is. The file itself is `kdskills.storage.backup_file`.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from kdskills.errors import Conflict, MissingExtra, NotFound, OperatorMustAct
from kdskills.jobs.artifacts import blob_key, open_blobs
from kdskills.jobs.exchange import SESSION_LOCK
from kdskills.jobs.session_folders import (
    MANIFEST_BYTES,
    NOTE,
    TOP,
    FolderManifest,
    FolderPointer,
    manifest_key,
    object_name,
    read_note,
)
from kdskills.projects.records import VERSIONS, ProjectRows, SkillVersion, version_of_row
from kdskills.projects.service import VersionFolders, VersionMissing
from kdskills.remote.journal.sql import journal_url
from kdskills.skills.archives import ArchiveRefused
from kdskills.skills.private_files import make_folder, open_private, private_folder, remove_tree
from kdskills.storage.backup_file import (
    CHUNK,
    BackupMember,
    BackupReader,
    BackupRefused,
    BackupWriter,
    ChunkStream,
    DatabaseRows,
    LoopBridge,
    Manifest,
    TableRows,
    TableSums,
    member_name,
    new_backup,
    table_rows,
)
from kdskills.storage.database import (
    HEADS,
    MIGRATIONS,
    SNAPSHOT_ROWS,
    Database,
    LazyModule,
    current_revisions,
    lock_schema,
    run_revisions,
    sqlite_file,
    table_columns,
    table_names,
    utc_now,
)
from kdskills.storage.folder import RESTORING, StorageFull, database_folder, state_folder, telling_full_disk

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.settings import Settings
    from kdskills.jobs.artifacts import Blobs
else:
    sa = LazyModule("sqlalchemy")

FOLDERS: Final = ("remote", "runs", "sessions", "turns")
FILES: Final = ("host", "trust.json")
PLACED: Final = (*FOLDERS, *FILES, "projects")
"""What a restore puts into the state folder, by its name there; caches, locks, sockets and databases are not among it."""
SERVICE: Final = "service"
SESSIONS: Final = "sessions"
OBJECT: Final = re.compile(
    r"artifacts/[A-Za-z0-9_.~-]+/sha256/[0-9a-f]{2}/[0-9a-f]{62}"
    rf"|{TOP}/[A-Za-z0-9_.~-]+/[A-Za-z0-9_.~-]+/[0-9]{{10}}-[0-9a-f]{{64}}(\.json)?"
)
VERSION: Final = re.compile(r"([^/]+)/([^/]+)/([0-9a-f]{64})\.zip")


class NothingToKeep(OperatorMustAct, code="backup_nothing"):
    """There is no database here, and so nothing to make a backup of."""


class RestoreRefused(OperatorMustAct, code="restore_not_empty"):
    """A backup is restored only where nothing is; what is there stays as it is."""


def databases(settings: Settings) -> dict[str, str]:
    """Return URLs of the databases whose rows are kept, by what a backup calls them; one that is none of SQL is not among them."""
    urls = {SERVICE: settings.work_database}
    sessions = settings.session_store
    if sessions is not None and sessions.startswith(("sqlite:", "postgresql:")) and sessions != settings.work_database:
        urls[SESSIONS] = sessions
    return urls


class BackupMaker:
    """Writes one backup."""

    def __init__(self, settings: Settings, version: str, bridge: LoopBridge, sink: IO[bytes]) -> None:
        self._settings = settings
        self._version = version
        self._bridge = bridge
        self._out = BackupWriter(sink)
        self._store: Blobs = open_blobs(settings.artifacts or str(settings.state_dir))
        self._folders = VersionFolders(settings.state_dir, None if settings.artifacts is None else self._store)
        self._versions: list[tuple[str, str, str]] = []
        self._pointers: dict[str, str | None] = {}

    def write(self) -> Manifest:
        """Write everything; blocks. Raises NothingToKeep, DatabaseUnavailable, ArtifactStoreUnavailable, StorageFull."""
        rows = {}
        with tempfile.TemporaryFile("w+", encoding="ascii") as objects:
            for name, url in databases(self._settings).items():
                file = sqlite_file(url)
                if file is not None and not file.exists():
                    if name == SERVICE:
                        raise NothingToKeep(f"there is no database {file}: nothing was kept here yet", path=str(file))
                    continue
                with closing(Database(url, label=f"the {name} database", role="backup")) as database:
                    rows[name] = database.snapshot(partial(self._rows, name=name, objects=objects))
                    if name == SERVICE:
                        self._keep_state()  # what runs writes its files meanwhile: the sooner after its rows, the better
                        self._keep_versions(database)
            objects.seek(0)
            self._keep_objects(json.loads(line) for line in objects)
        return self._out.finish(version=self._version, made_at=utc_now().isoformat(), databases=rows)

    def _rows(self, link: sa.Connection, *, name: str, objects: IO[str]) -> DatabaseRows:
        tables = {}
        if name == SERVICE and "kd_meta" in table_names(link):
            self._keep_sessions(link)
        for table in table_names(link):
            tables[table] = self._keep_table(link, name, table_columns(link, table))
        if "kd_artifacts" in tables:
            artifact_columns = table_columns(link, "kd_artifacts").c
            for row in link.execute(
                sa.select(artifact_columns.project, artifact_columns.sha256, artifact_columns.size).distinct()
            ):
                objects.write(json.dumps([blob_key(row.project, row.sha256), row.sha256, row.size]) + "\n")
        if "kd_skill_versions" in tables:
            column = VERSIONS.c
            self._versions = [
                tuple(row) for row in link.execute(sa.select(column.project, column.name, column.version))
            ]
        return DatabaseRows(
            dialect="postgresql" if link.dialect.name == "postgresql" else "sqlite",
            revisions=sorted(current_revisions(link)),
            tables=tables,
        )

    def _keep_sessions(self, link: sa.Connection) -> None:
        """Write what the store has of sessions' folders, before anything else: their next save takes it from the store."""
        column = table_columns(link, "kd_meta").c
        for name, text in link.execute(sa.select(column.name, column.value).where(column.name.startswith("session:"))):
            session, pointer = name.partition(":")[2], FolderPointer.model_validate_json(text)
            self._pointers[session] = pointer.manifest
            key = manifest_key(session, pointer)
            if pointer.manifest and not self._keep_object(key, pointer.manifest, pointer.size):
                self._pointers[session] = None
                self._out.tell_missing(member_name("objects", key))

    def _keep_table(self, link: sa.Connection, database: str, table: sa.Table) -> TableRows:
        """Write the rows of a table in members of about a MiB before they are packed."""
        digest, total, count, members = hashlib.sha256(), 0, 0, 0
        lines: list[bytes] = []
        size = 0

        def flush() -> None:
            nonlocal members, size
            self._bridge.go_on()
            packing = zlib.compressobj(3, zlib.DEFLATED, 31)
            content = packing.compress(b"".join(lines)) + packing.flush()
            members += 1
            self._out.add_bytes(f"tables/{database}/{table.name}/{members:06}.jsonl.gz", content)
            lines.clear()
            size = 0

        for line in _row_lines(link, table, names := [column.name for column in table.columns]):
            digest.update(line)
            lines.append(line)
            size += len(line)
            total += len(line)
            count += 1
            if size >= CHUNK:
                flush()
        if lines:
            flush()
        return TableRows(columns=names, rows=count, size=total, sha256=digest.hexdigest())

    def _keep_versions(self, database: Database) -> None:
        """Write the archive of every uploaded version."""
        for project, name, version in self._versions:
            self._bridge.go_on()
            member = member_name("versions", f"{project}/{name}/{version.partition(':')[2]}.zip")
            scratch = self._folders.scratch(".zip")
            try:
                row = database.ask(lambda link: ProjectRows(link, project, utc_now()).version_row(name, version))  # noqa: B023
                folder = self._bridge.wait(self._folders.ensure(project, version_of_row(row, False, 0)))
                self._folders.write(folder, scratch)
                with scratch.open("rb") as source:
                    self._out.add(BackupMember(member, os.fstat(source.fileno()).st_size), source)
            except (NotFound, VersionMissing, FileNotFoundError):  # collected since, or lost before
                self._out.tell_missing(member)
            finally:
                self._folders.discard(scratch)

    def _keep_objects(self, rows: Iterable[tuple[str, str, int]]) -> None:
        """Write the bytes of keys; one that is not there yet, its row comes first, is looked for again at the end."""
        later = [row for row in rows if not self._keep_object(*row)]
        for row in later:
            if not self._keep_object(*row):
                self._out.tell_missing(member_name("objects", row[0]))

    def _keep_object(self, key: str, sha256: str, size: int) -> bool:
        """Write the bytes of a key, after what it names if it is a session's manifest; False when they are not there."""
        self._bridge.go_on()
        member = BackupMember(member_name("objects", key), size)
        try:
            with io.BufferedReader(ChunkStream(self._bridge, self._store.read(key)), CHUNK) as source:
                if not key.startswith(f"{TOP}/") or not key.endswith(".json"):
                    return self._out.add(member, source, sha256=sha256)
                content = source.read(min(size, MANIFEST_BYTES) + 1)
        except NotFound:
            return False
        if hashlib.sha256(content).hexdigest() != sha256:
            return False
        prefix, missing = key.rpartition("/")[0], self._out.missing_count
        parts = FolderManifest.model_validate_json(content).objects
        self._keep_objects((f"{prefix}/{object_name(part)}", part.sha256, part.size) for part in parts)
        # without a part the manifest is left out, too: the session's next save then sends everything anew
        return missing == self._out.missing_count and self._out.add(member, io.BytesIO(content))

    def _is_later(self, folder: Path) -> bool:
        """Whether a session's folder here is noted to be other than what the rows say, which is written already."""
        manifest = self._pointers.get(folder.name)
        try:
            note = read_note(folder)
        except (ValueError, TypeError):  # whatever it is, it goes with the folder
            return False
        return note is not None and manifest is not None and manifest != (note.manifest if manifest else note.before)

    def _keep_state(self) -> None:
        """Write the files of the state folder that are no cache, lock, socket or database."""
        state = self._settings.state_dir
        for name in FILES:
            with suppress(FileNotFoundError):
                self._keep_file(name, os.open(state / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        for top in FOLDERS:
            self._keep_folder(state, top)
        journal = journal_url(state)
        file = sqlite_file(journal)
        if file is None or not file.exists():
            return
        scratch = self._folders.scratch(".copy")
        try:
            with closing(Database(journal, label="the journal of calls", role="backup")) as database:
                database.copy_to(scratch)
            self._keep_file(str(file.relative_to(state)), os.open(scratch, os.O_RDONLY))
        finally:
            self._folders.discard(scratch)

    def _keep_folder(self, state: Path, top: str) -> None:
        """Write a folder with everything below it; a link that a program puts in a folder's place is never followed."""
        if not (state / top).is_dir():
            return
        for path, folders, files, descriptor in os.fwalk(state / top, follow_symlinks=False):
            self._bridge.go_on()
            folders.sort()
            below = os.path.relpath(path, state)
            if below == top and top.startswith("sessions/") and top.partition("/")[2] not in self._pointers:
                files = [name for name in files if name != NOTE]  # of a save after the rows, which say of none
            self._out.add(BackupMember(member_name("state", below) + "/", folder=True), io.BytesIO())
            links = [name for name in folders if stat.S_ISLNK(_mode(name, descriptor))]
            self._out.left_out += len(links)
            if below == "sessions":
                for name in (name for name in folders if name not in links):
                    lock = state / top / name / SESSION_LOCK  # without one no command ever began here
                    # a command that ends meanwhile would take the version that `current` names away
                    with suppress(FileNotFoundError), self._bridge.locked(lock) if lock.exists() else nullcontext():
                        if not self._is_later(state / top / name):
                            self._keep_folder(state, f"{top}/{name}")
                folders.clear()
            for name in sorted(files):
                if top == "remote" and name.startswith("calls.sqlite3"):
                    continue
                if not stat.S_ISREG(_mode(name, descriptor)):
                    self._out.left_out += 1
                    continue
                with suppress(FileNotFoundError):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                    self._keep_file(f"{below}/{name}", os.open(name, flags, dir_fd=descriptor))

    def _keep_file(self, path: str, descriptor: int) -> None:
        with open(descriptor, "rb") as source:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                self._out.left_out += 1
                return
            member = BackupMember(
                member_name("state", path), facts.st_size, executable=bool(facts.st_mode & stat.S_IXUSR)
            )
            if not self._out.add(member, source):
                self._out.tell_missing(member.name)


def _full_tables(link: sa.Connection) -> list[str]:
    """Return the tables that have rows."""
    names = table_names(link)
    return [name for name in names if link.execute(sa.select(1).select_from(sa.table(name)).limit(1)).first()]


def _mode(name: str, folder: int) -> int:
    """Return the mode of what lies in a folder; 0 when it went away."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _row_lines(link: sa.Connection, table: sa.Table, names: Sequence[str]) -> Iterator[bytes]:
    """Give the rows of a table as a backup has them, with these columns, in the order of the primary key."""
    key = sa.inspect(link).get_pk_constraint(table.name)["constrained_columns"]
    columns = [table.c[name] for name in names]
    binary = [isinstance(column.type, sa.LargeBinary) for column in columns]
    for row in link.execute(
        sa.select(*columns).order_by(*(table.c[name] for name in key)).execution_options(yield_per=SNAPSHOT_ROWS)
    ):
        values = [
            base64.b64encode(value).decode() if is_binary and value is not None else value
            for value, is_binary in zip(row, binary, strict=True)
        ]
        yield json.dumps(values, separators=(",", ":")).encode() + b"\n"


async def make_backup(settings: Settings, version: str, path: Path) -> Manifest:
    """Write a backup into the new file *path*, which is there whole or not at all.

    Raises Conflict, NothingToKeep, DatabaseUnavailable, ArtifactStoreUnavailable, StorageFull, OSError and MissingExtra.
    """
    bridge = LoopBridge()

    def write() -> Manifest:
        with new_backup(path) as sink:
            return BackupMaker(settings, version, bridge, sink).write()

    return await bridge.run(write)


def check_backup(path: Path) -> Manifest:
    """Read a whole backup and return its manifest; writes nothing. Raises BackupRefused, NotFound."""
    with open_backup(path) as source:
        return verified(source)[0]


@contextmanager
def open_backup(path: Path) -> Iterator[IO[bytes]]:
    """Open the file of a backup. Raises NotFound."""
    try:
        source = path.open("rb")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFound(f"there is no backup {path}", code="path_missing", path=str(path)) from error
    with source:
        yield source


def verified(source: IO[bytes]) -> tuple[Manifest, int]:
    """Return the manifest of a backup of which every byte is right, and which this version can restore, and the bytes
    of its largest object. Raises BackupRefused.
    """
    sums = TableSums()
    manifest = BackupReader(source).read(sums.visit)
    sums.check(manifest)
    revisions = {revision for rows in manifest.databases.values() for revision in rows.revisions}
    known_names = {"_".join(file.stem.split("_")[:2]) for file in (MIGRATIONS / "versions").glob("*_*.py")}
    if revisions - known_names:
        words = ", ".join(sorted(revisions - known_names))[:200]
        raise BackupRefused(f"the backup is of a newer kdskills, {manifest.version[:40]}: {words}", code="backup_newer")
    if set(manifest.databases) - {SERVICE, SESSIONS} or SERVICE not in manifest.databases:
        raise BackupRefused("the backup has other databases than any installation", code="backup_hostile")
    return manifest, sums.largest_object


@dataclass
class Restorer:
    """Puts a verified backup in place; each method blocks."""

    settings: Settings
    bridge: LoopBridge
    source: IO[bytes]
    manifest: Manifest
    largest_object: int
    state_only: bool = False

    def __post_init__(self) -> None:
        """Know where things go; nothing is made yet."""
        self._staging = self.settings.state_dir / RESTORING
        self._blobs: Blobs = open_blobs(self.settings.artifacts or str(self.settings.state_dir))
        self._folders = VersionFolders(self._staging, None if self.settings.artifacts is None else self._blobs)
        self._began = self._halfway = False
        self._moved: list[str] = []
        self._saved: list[str] = []
        self._tables: dict[tuple[str, str], sa.Table] = {}

    def restore(self) -> None:
        """Put everything in place, or nothing. Raises RestoreRefused, BackupRefused, StorageFull, DatabaseUnavailable."""
        urls = databases(self.settings)
        if self.state_only:
            self._require_rows(urls[SERVICE])
        elif self.manifest.databases.keys() - urls.keys():
            message = "the backup has conversations: let the setting session_store name where they go"
            raise RestoreRefused(message, code="restore_no_session_store")
        database_folder(self.settings.work_database, self.settings.state_dir)
        state_folder(self.settings.state_dir, restoring=True)
        here = {"objects": self.settings.artifacts is None, "rows": sqlite_file(urls[SERVICE]) is not None}
        needed = self.manifest.unpacked(**here) + self.largest_object  # which is put aside before it is stored
        if shutil.disk_usage(self.settings.state_dir).free < needed:
            raise StorageFull(f"the backup unpacks to {needed} bytes, and there is not that much room", needed=needed)
        with self._alone():
            self._again = self._staging.exists()  # an earlier restore was killed
            if not self._again:
                self._require_no_files()
            steps = [
                (name, Database(urls[name], label=f"the {name} database", role="restore"))
                for name in (() if self.state_only else self.manifest.databases)
            ]
            try:
                self._within(steps, {})
            except BaseException:  # raised again
                self._undo(steps)
                raise
            finally:
                for _, database in steps:
                    database.close()
            remove_tree(self._staging)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else restore into this state folder. Raises Conflict."""
        with open_private(self.settings.state_dir / "restore.lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict("another restore is at work in this state folder", code="restore_running") from None
            yield

    def _require_rows(self, url: str) -> None:
        file = sqlite_file(url)
        with closing(Database(url, label=f"the {SERVICE} database", role="restore")) as database:
            if (file is not None and not file.exists()) or not database.ask(_full_tables):
                message = "the database has no rows: restore one backup of the pool as a whole first"
                raise RestoreRefused(message, code="restore_no_rows")

    def _require_no_files(self) -> None:
        state = self.settings.state_dir
        names = (*PLACED, *(("artifacts", TOP) if self.settings.artifacts is None else ()))
        if taken_names := [name for name in names if os.path.lexists(state / name)]:
            message = f"the state folder {state} has {', '.join(taken_names)} already: restore into one without, by the setting state_dir"
            raise RestoreRefused(message, path=str(state), names=taken_names)

    def _within(self, steps: list[tuple[str, Database]], links: dict[str, sa.Connection]) -> None:
        """Open a transaction in each database, and fill all of them in the innermost; what fails takes all back."""
        if not steps:
            for name in (*PLACED, RESTORING) if self._again else ():  # placed before its rows were there: nobody's
                _remove(self.settings.state_dir / name)
            self._fill(links)
            return
        (name, database), *further = steps

        def change(link: sa.Connection) -> None:
            lock_schema(link, 0)  # it waits for objects, and for the other database
            self._prepare(name, link)
            self._within(further, {**links, name: link})

        database.change(change)
        self._halfway = bool(links)  # its rows are there now, and those of the database around it not yet

    def _prepare(self, name: str, link: sa.Connection) -> None:
        """See that a database is empty, and make its tables as those of the backup were. Raises RestoreRefused."""
        kept_rows = self.manifest.databases[name]
        if name == SESSIONS and self._again:
            self._take_back(link)
        full = _full_tables(link)
        present = current_revisions(link)
        if full or (present and kept_rows.revisions and present != frozenset(kept_rows.revisions)):
            why = f"has rows in {', '.join(full[:5])}" if full else "has tables of another version"
            raise RestoreRefused(f"the {name} database {why}: restore into an empty one, by its setting", tables=full)
        missing = MissingExtra("a database of kdskills' own", "jobs")
        for revision in kept_rows.revisions:
            if revision not in present:
                run_revisions(link, MIGRATIONS, revision, missing=missing)
        known_names = set(table_names(link))
        for table, rows in kept_rows.tables.items():
            self._tables[name, table] = target = (
                table_columns(link, table) if table in known_names else sa.Table(table, sa.MetaData())
            )
            if strange := set(rows.columns) - set(target.columns.keys()):
                words = f"{table} with {', '.join(sorted(strange))[:200]}" if table in known_names else table[:80]
                raise BackupRefused(
                    f"the backup has a table that this database has not: {words}", code="backup_unknown_table"
                )
            if len(set(rows.columns)) != len(rows.columns):
                raise BackupRefused(f"the backup names a column of {table[:80]} twice", code="backup_hostile")

    def _take_back(self, link: sa.Connection) -> None:
        """Empty a database of conversations that has the very rows of the backup; any other is left as it is.

        These rows are there before those of the other database, so they stay behind when it fails or is killed between.
        """
        lock_schema(link, 0)
        tables = self.manifest.databases[SESSIONS].tables
        for name in (present := table_names(link)):
            target, rows = table_columns(link, name), tables.get(name)
            digest, columns = hashlib.sha256(), [] if rows is None else rows.columns
            if rows is None or set(columns) - set(target.columns.keys()):
                return
            for line in _row_lines(link, target, columns):
                digest.update(line)
            if digest.hexdigest() != rows.sha256:
                return
        for name in present:
            link.execute(sa.delete(sa.table(name)))

    def _fill(self, links: Mapping[str, sa.Connection]) -> None:
        """Write rows, objects and files, and rename what was put aside into place last."""
        self._began = True
        private_folder(self._staging)
        manifest = BackupReader(self.source).read(partial(self._visit, links))
        if manifest != self.manifest:
            raise BackupRefused("the backup was changed while it was read")
        for name, link in links.items():
            if self.manifest.databases[name].revisions:
                for part in HEADS:
                    run_revisions(
                        link, MIGRATIONS, f"{part}@head", missing=MissingExtra("a database of kdskills' own", "jobs")
                    )
            self._set_counters(name, link)
        shutil.rmtree(self._staging / "projects" / ".scratch", ignore_errors=True)
        for name in PLACED:
            if os.path.lexists(self._staging / name):
                (self._staging / name).rename(self.settings.state_dir / name)
                self._moved.append(name)

    def _visit(self, links: Mapping[str, sa.Connection], member: BackupMember, stream: IO[bytes]) -> None:
        self.bridge.go_on()
        if self.state_only and member.part != "state":
            return
        try:
            if member.part == "tables":
                self._add_rows(links, member, stream)
            elif member.part == "objects":
                self._save_object(member, stream)
            elif member.part == "versions":
                self._take_version(links[SERVICE], member, stream)
            else:
                self._write_file(member, stream)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            words = f"the member {member.name[:200]} is in the way of another"
            raise BackupRefused(words, code="backup_hostile") from error

    def _add_rows(self, links: Mapping[str, sa.Connection], member: BackupMember, stream: IO[bytes]) -> None:
        database, name, _, content = table_rows(member, stream)
        table, columns = self._tables[database, name], self.manifest.databases[database].tables[name].columns
        binary = {column.name for column in table.columns if isinstance(column.type, sa.LargeBinary)}
        try:
            rows = [dict(zip(columns, json.loads(line), strict=True)) for line in content.splitlines()]
            for column in binary & set(columns):
                for row in rows:
                    row[column] = None if row[column] is None else base64.b64decode(row[column], validate=True)
        except (ValueError, TypeError, RecursionError) as error:
            raise BackupRefused(f"a row of {name} is none", code="backup_hostile") from error
        links[database].execute(table.insert(), rows)

    def _set_counters(self, name: str, link: sa.Connection) -> None:
        """Let numbers that PostgreSQL gives go on after those that were restored."""
        if link.dialect.name != "postgresql":
            return
        for _, table in (key for key in self._tables if key[0] == name):
            for column in sa.inspect(link).get_pk_constraint(table)["constrained_columns"]:
                sequence_query = sa.text("SELECT pg_get_serial_sequence(:name, :column)")
                sequence = link.execute(sequence_query, {"name": table, "column": column}).scalar()
                if sequence is not None:
                    most = sa.select(sa.func.max(sa.column(column))).select_from(sa.table(table)).scalar_subquery()
                    link.execute(sa.select(sa.func.setval(sequence, sa.func.coalesce(most, 1), most.is_not(None))))

    def _save_object(self, member: BackupMember, stream: IO[bytes]) -> None:
        if not OBJECT.fullmatch(member.path):
            raise BackupRefused(f"the member {member.name[:200]} is no object", code="backup_hostile")
        file = self._staging / "object"
        self._copy(file, stream)
        if self.bridge.wait(self._blobs.size(member.path)) != member.size:
            self.bridge.wait(self._blobs.save(member.path, file))
            self._saved.append(member.path)
        file.unlink()

    def _take_version(self, link: sa.Connection, member: BackupMember, stream: IO[bytes]) -> None:
        """Unpack an uploaded version as an upload is, within the same bounds, if a row names it."""
        names = VERSION.fullmatch(member.path)
        row = (
            names
            and link.execute(
                VERSIONS.select().where(
                    VERSIONS.c.project == names[1],
                    VERSIONS.c.name == names[2],
                    VERSIONS.c.version == f"sha256:{names[3]}",
                )
            ).first()
        )
        if not names or row is None:
            raise BackupRefused(f"the member {member.name[:200]} is a version that no row names", code="backup_hostile")
        version: SkillVersion = version_of_row(row, False, 0)
        archive = self._folders.scratch(".zip")
        self._copy(archive, stream)
        try:
            self._folders.take(names[1], version, archive)
        except (ArchiveRefused, VersionMissing) as error:
            words = f"the member {member.name[:200]} is not the version it is called"
            raise BackupRefused(words, code="backup_hostile") from error
        self.bridge.wait(self._folders.share(names[1], version, archive))
        archive.unlink()

    def _write_file(self, member: BackupMember, stream: IO[bytes]) -> None:
        path = self._staging / member.path
        if member.path.partition("/")[0] not in {*FOLDERS, *FILES}:
            raise BackupRefused(f"the member {member.name[:200]} is none of a state folder", code="backup_hostile")
        if member.folder:
            make_folder(path)
            return
        make_folder(path.parent)
        self._copy(path, stream)
        if member.executable:
            path.chmod(0o700)

    @staticmethod
    def _copy(path: Path, stream: IO[bytes]) -> None:
        with telling_full_disk(), open_private(path, "xb") as out:
            shutil.copyfileobj(stream, out, CHUNK)

    def _undo(self, steps: list[tuple[str, Database]]) -> None:
        """Take back what was placed and saved."""
        if self._halfway:
            for _, database in steps[1:]:
                try:
                    database.change(self._take_back)
                except OperatorMustAct:  # it is away: by the mark, which stays, the next restore does it
                    self._began = False
        for name in self._moved:
            _remove(self.settings.state_dir / name)
        for key in self._saved:
            with suppress(OperatorMustAct):
                self.bridge.wait(self._blobs.delete(key))
        if self.settings.artifacts is None and self._saved:
            for name in ("artifacts", TOP):
                _remove(self.settings.state_dir / name)
        if self._began:  # else it is the mark of an earlier restore that was killed
            _remove(self._staging)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


async def restore_backup(
    settings: Settings, path: Path, *, state_only: bool, make_sessions: Callable[[str], Coroutine[Any, Any, object]]
) -> Manifest:
    """Restore a backup where nothing is, after every byte of it was checked; all or nothing.

    *state_only* restores the files of a host beside rows that are there already. *make_sessions* makes the tables of conversations in the database at a URL. Raises as `check_backup` and `Restorer.restore`.
    """
    bridge = LoopBridge()
    with open_backup(path) as source:
        manifest, largest = await bridge.run(lambda: verified(source))
        kept_sessions = any("kd_sessions" in kept_rows.tables for kept_rows in manifest.databases.values())
        if kept_sessions and settings.session_store is not None and not state_only:
            await make_sessions(settings.session_store)
        await bridge.run(lambda: Restorer(settings, bridge, source, manifest, largest, state_only).restore())
    return manifest
