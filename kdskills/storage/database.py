"""The one way to a database: SQLite or PostgreSQL through SQLAlchemy Core, with tables made by Alembic's revisions.

Every room that keeps rows opens its engine here, so that several writers, also of several processes, get along. The tables of
the service are one Alembic tree with a branch for each part (see `migrations/README.md`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

from kdskills.errors import KdskillsError, MissingExtra, OperatorMustAct
from kdskills.skills.private_files import private_database

if TYPE_CHECKING:
    import sqlalchemy as sa


class LazyModule(ModuleType):
    """A module that is imported when something of it is first asked for: rooms are read without what keeps their rows."""

    def __getattr__(self, name: str) -> Any:
        """Import it; not for what only looks at modules. Raises ImportError."""
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    sa = LazyModule("sqlalchemy")

T = TypeVar("T")

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
BUSY_MS: Final = 30_000
JOURNAL_LIMIT: Final = 16 * 1024 * 1024
PRAGMAS = (f"busy_timeout={BUSY_MS}", "journal_mode=WAL", "synchronous=NORMAL", f"journal_size_limit={JOURNAL_LIMIT}")
SQLITE_CONNECTIONS: Final = 24
"""Connections to a file that are kept: as many as a worker has threads; each is opened when it is first needed."""
SNAPSHOT_ROWS: Final = 500
"""Rows that are held at a time of a long answer."""
SCHEMA_LOCK: Final = 2_037_581
"""Number of the advisory lock under which tables are made."""
FROZEN_MS: Final = 10_000
"""Milliseconds a transaction may stand still before PostgreSQL ends it: the locks of a frozen machine must not outlive the
leases of those that wait for them."""
SCHEMA_FROZEN_MS: Final = 60_000
"""As `FROZEN_MS`, for one that makes tables."""
_LINKS: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""How soon a connection to a PostgreSQL that vanished without a word is known to be dead: within half a minute."""
_SQLITE: Final = "sqlite:///"
_ALEMBIC: Final = threading.Lock()
"""Alembic keeps the connection it works on in its module: two upgrades in one process would write to each other's database."""


class DatabaseUnavailable(OperatorMustAct, code="database_unavailable"):
    """The database does not answer, or cannot be used as it is: `database_newer` where a later version made its tables."""


def micros(moment: datetime) -> int:
    """Return microseconds since 1970, which every database keeps and compares alike."""
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment_of(value: int) -> datetime:
    """Return the time of `micros`."""
    return EPOCH + timedelta(microseconds=value)


def utc_now() -> datetime:
    """Return the time now, with its zone."""
    return datetime.now(UTC)


def word_type(length: int) -> sa.String:
    """Return the type of a text column that is compared by bytes, not in a language's order: sorted alike everywhere."""
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def columns(kind: Any, *names: str, **options: Any) -> list[sa.Column[Any]]:
    """Return columns of one type."""
    return [sa.Column(name, kind, **options) for name in names]


def upsert(dialect: str, table: sa.Table) -> Any:
    """Return an INSERT that can say what happens on conflict."""
    if dialect == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgres_insert

        return postgres_insert(table)
    from sqlalchemy.dialects.sqlite import insert as sqlite_insert

    return sqlite_insert(table)


def _file_of(name: str) -> Path | None:
    """Return the file SQLite opens by *name*; None for a database in memory."""
    if name.startswith("file:"):
        name, _, options = name.removeprefix("file:").partition("?")
        if "mode=memory" in options.split("&"):
            return None
        name = unquote(name)
    return None if name in {"", ":memory:"} else Path(name)


def sqlite_file(url: str) -> Path | None:
    """Return the file of a database's URL; None when it is not SQLite, or in memory. The file is never to be opened."""
    return _file_of(url.removeprefix(_SQLITE).partition("?")[0]) if url.startswith(_SQLITE) else None


def run_revisions(link: sa.Connection, scripts: Path, target: str, *, missing: MissingExtra) -> None:
    """Run Alembic's revisions up to *target*, such as `work@head`, in the transaction of *link*; one at a time.

    `env.py` of the *scripts* finds the link in `config.attributes`. Raises *missing* when Alembic is not installed.
    """
    try:
        from alembic import command
        from alembic.config import Config
    except ImportError:
        raise missing from None
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))  # a ConfigParser reads it
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = link
    with _ALEMBIC:
        command.upgrade(config, target)


@contextmanager
def speaking(label: str, failure: type[KdskillsError] = DatabaseUnavailable) -> Iterator[None]:
    """Turn the driver's own failures into *failure*; its message may hold a password and stays inside."""
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    try:
        yield
    except DBAPIError as error:
        failure_name = type(error.orig or error).__name__
        name = getattr(error.orig, "sqlite_errorname", None)  # SQLITE_FULL, SQLITE_BUSY and the like: no secret in it
        failure_name = failure_name if name is None else f"{failure_name} ({name})"
        raise failure(f"{label} does not answer: {failure_name}", driver=failure_name) from error
    except SQLAlchemyError as error:
        raise failure(f"{label} cannot be used: {type(error).__name__}") from error


class Database:
    """An engine with the settings both databases need for several writers; its work is done in threads, so that no event
    loop waits for a disk. A SQLite file is for this user only.

    Args:
        url: `sqlite:///path` or `postgresql://…`.
        label: Whose database it is, in words, such as `the session store`.
        failure: Class of the error for a database that does not answer, or a URL that is none.
        prepare: Called once, before the first question or change: it makes or upgrades tables through `engine`.
        role: What this process is to the database: PostgreSQL lists its connections as `kdskills ROLE HOSTNAME/PID`, unless
            the URL names them.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "the database",
        failure: type[KdskillsError] = DatabaseUnavailable,
        prepare: Callable[[Database], None] | None = None,
        role: str = "client",
    ) -> None:
        self.label = label
        self._role = role
        self._failure = failure
        self._prepare = prepare
        self._preparing = threading.RLock()
        self._is_ready = False
        self._closed = False
        self.engine = self._open(url)
        # each of PostgreSQL's questions sees what was committed by then, in a transaction or without
        mode = {"isolation_level": "AUTOCOMMIT"} if self.dialect == "postgresql" else {}
        self._reading = self.engine.execution_options(kdskills_reads=True, **mode)  # the same connections

    def _open(self, url: str) -> sa.Engine:
        try:
            import sqlalchemy as sa
        except ImportError:
            raise MissingExtra(f"{self.label} in a database", "jobs") from None
        if url.startswith("postgresql://"):
            url = "postgresql+psycopg://" + url.removeprefix("postgresql://")
        # a file is never away, and opening it anew costs more than keeping it open
        pool = {"pool_size": SQLITE_CONNECTIONS} if url.startswith("sqlite") else {"pool_pre_ping": True}
        options = dict[str, Any](pool)
        try:
            if url.startswith("postgresql"):
                words = {
                    "application_name": f"kdskills {self._role} {socket.gethostname()[:30]}/{os.getpid()}"
                } | _LINKS
                chosen = sa.make_url(url).query
                options["connect_args"] = {name: word for name, word in words.items() if name not in chosen}
            engine = sa.create_engine(url, hide_parameters=True, **options)
        except ImportError:
            raise MissingExtra(f"{self.label} in PostgreSQL", "jobs") from None
        except sa.exc.ArgumentError:
            raise self._failure(f"the URL of {self.label} is no database URL") from None
        sa.event.listen(engine, "checkin", self._checked_in)
        if engine.dialect.name == "postgresql":
            sa.event.listen(engine, "connect", _prepare_postgres)
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "do_connect", self._keep_private)
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _checked_in(self, _connection: object, record: sa.pool.ConnectionPoolEntry) -> None:
        if self._closed:
            record.invalidate()  # nobody is left who would close what the pool keeps

    def _keep_private(self, _dialect: object, _record: object, arguments: list[Any], _keywords: object) -> None:
        """Have the file made for this user only before any connection is made to it: SQLite would follow the umask."""
        path = _file_of(str(arguments[0]))
        if path is not None:
            try:
                private_database(path)
            except OSError as error:
                raise self._failure(f"{self.label} does not answer: {error.strerror}") from None

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.engine.dialect.name

    def create(self, metadata: sa.MetaData) -> None:
        """Make the tables of *metadata* that are not there, though several processes may open a new database; blocks."""
        with speaking(self.label, self._failure), self.engine.begin() as link:
            lock_schema(link)
            metadata.create_all(link, checkfirst=True)

    def ask(self, question: Callable[[sa.Connection], T]) -> T:
        """Return what *question* reads, on SQLite in a transaction of its own; blocks."""
        self._prepared()
        with speaking(self.label, self._failure), self._reading.connect() as link:
            return question(link)

    def change(self, change: Callable[[sa.Connection], T]) -> T:
        """Do *change* in one transaction, which holds the writer's lock from its beginning on SQLite; blocks."""
        self._prepared()
        with speaking(self.label, self._failure), self.engine.begin() as link:
            return change(link)

    def _prepared(self) -> None:
        """Prepare the database if nobody has; a failure leaves it to the next caller."""
        with self._preparing:
            prepare, self._prepare = self._prepare, None  # what it asks itself finds nothing to prepare
            if prepare is None:
                return
            try:
                prepare(self)
            except BaseException:  # raised again: the next caller prepares
                self._prepare = prepare
                raise

    def snapshot(self, question: Callable[[sa.Connection], T]) -> T:
        """As `ask`, but everything *question* reads is as it was at one moment, and long answers come in pieces; blocks."""
        self._prepared()
        mode = (
            {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.dialect == "postgresql" else {}
        )
        how = self.engine.execution_options(kdskills_reads=True, **mode)
        with speaking(self.label, self._failure), how.connect() as link:
            if mode:  # it holds no lock, and what it reads may be written elsewhere for long
                link.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            return question(link.execution_options(yield_per=SNAPSHOT_ROWS))

    def copy_to(self, target: Path) -> None:
        """Write a copy of a SQLite database, as it is at one moment, into the new file *target*; blocks."""
        with speaking(self.label, self._failure):
            raw: Any = self.engine.raw_connection()
            try:
                private_database(target)
                with closing(sqlite3.connect(target)) as copy:
                    raw.driver_connection.backup(copy)
            finally:
                raw.close()

    def connections(self) -> tuple[int, int, int]:
        """Return how many connections are in use, are idle, and are kept open at most."""
        pool = self.engine.pool
        if not isinstance(pool, sa.pool.QueuePool):  # one in memory, which is a single connection
            return 0, 0, 0
        return pool.checkedout(), pool.checkedin(), pool.size()

    async def ready(self) -> None:
        """Prepare the database if nobody has, for who writes to its tables in a transaction of another `Database`."""
        if not self._is_ready:  # also while somebody prepares it: that is waited for
            await asyncio.to_thread(self._prepared)
            self._is_ready = True

    async def read(self, question: Callable[[sa.Connection], T]) -> T:
        """As `ask`, in a thread."""
        return await asyncio.to_thread(self.ask, question)

    async def write(self, change: Callable[[sa.Connection], T]) -> T:
        """As `change`, in a thread."""
        return await asyncio.to_thread(self.change, change)

    def close(self) -> None:
        """Close every connection; blocks. Who still works with the engine may go on: each is closed after its use."""
        self._closed = True
        self.engine.dispose()

    async def aclose(self) -> None:
        """As `close`, in a thread."""
        await asyncio.to_thread(self.close)


def _prepare_postgres(connection: Any, _record: object) -> None:
    """Let the server end what stands still in a transaction; said by a statement, as poolers refuse it when connecting."""
    connection.autocommit = True
    connection.execute(f"SET idle_in_transaction_session_timeout = {FROZEN_MS}")
    connection.autocommit = False


def lock_schema(link: sa.Connection, frozen_ms: int = SCHEMA_FROZEN_MS) -> None:
    """Let nobody else make tables until the transaction ends, which may stand still for *frozen_ms*; 0 is for ever."""
    if link.dialect.name == "postgresql":  # SQLite's writer is alone already
        link.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {frozen_ms}")
        link.exec_driver_sql(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})")


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    """Prepare a connection to a file that many write and open. Raises OperationalError: locked for `BUSY_MS`."""
    connection.isolation_level = None  # transactions are ours: the driver would begin them too late
    patience = time.monotonic() + BUSY_MS / 1000
    for pragma in PRAGMAS:
        while True:
            try:
                connection.execute(f"PRAGMA {pragma}").close()
                break
            except sqlite3.OperationalError as error:
                # the first connections to a new file bring each other out of its old mode, and SQLite does not wait there
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > patience:
                    raise
                time.sleep(0.002)


def _begin_sqlite(link: sa.Connection) -> None:
    # a writer takes its lock at once: a read that becomes a write later cannot wait and would fail
    reads = link.get_execution_options().get("kdskills_reads", False)
    words = "BEGIN" if reads else "BEGIN IMMEDIATE"
    connection = link.connection.driver_connection
    assert isinstance(connection, sqlite3.Connection)
    try:  # by the driver: what SQLAlchemy does for a statement costs more than this one
        connection.execute(words).close()
    except sqlite3.Error as error:
        kind = sa.exc.OperationalError if isinstance(error, sqlite3.OperationalError) else sa.exc.DatabaseError
        raise kind(words, None, error) from error


HEADS: Final = {"service": "service_0003", "work": "work_0006"}
"""The newest revision of each part whose room opens its database here."""

VERSIONS: Final = "kd_alembic"
MIGRATIONS: Final = Path(__file__).with_name("migrations")


def upgrade(database: Database, part: str) -> bool:
    """Bring the tables of *part*, a branch such as `work`, up to its newest revision; whether there was anything to do.

    Blocks. Raises MissingExtra, DatabaseUnavailable, also as `database_newer` for tables that a later version made.
    """
    target = HEADS[part]
    before = database.ask(current_revisions)
    if target in before:
        return False
    later = max((revision for revision in before if revision.startswith(f"{part}_")), default="")
    if later > target:
        message = f"a newer version brought the database to {later}, and this one knows {target}: start the newer one"
        raise DatabaseUnavailable(message, code="database_newer", revision=later)

    def change(link: sa.Connection) -> bool:
        lock_schema(link)
        if target in current_revisions(link):
            return False
        run_revisions(link, MIGRATIONS, f"{part}@head", missing=MissingExtra("a database of kdskills' own", "jobs"))
        return True

    return database.change(change)


def current_revisions(link: sa.Connection) -> frozenset[str]:
    """Return the revisions the database is at, of all parts."""
    if not sa.inspect(link).has_table(VERSIONS):
        return frozenset()
    return frozenset(link.exec_driver_sql(f"SELECT version_num FROM {VERSIONS}").scalars())  # noqa: S608 - our own constant


def table_columns(link: sa.Connection, name: str) -> sa.Table:
    """Return a table as the database has it, without its indexes."""
    found_columns = sa.inspect(link).get_columns(name)
    return sa.Table(name, sa.MetaData(), *(sa.Column(column["name"], column["type"]) for column in found_columns))


def table_names(link: sa.Connection) -> list[str]:
    """Return the tables of kdskills' own in a database, but that of its revisions, sorted."""
    return sorted(name for name in sa.inspect(link).get_table_names() if name.startswith("kd_") and name != VERSIONS)
