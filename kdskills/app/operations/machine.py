"""Operations about the machine: `doctor` with the self-checks of every part, `db.upgrade` and `image.build`."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from inspect import iscoroutinefunction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import yaml
from pydantic import Field

from kdskills.app.logs import without_secrets
from kdskills.app.operations.models import Input, Output
from kdskills.app.settings import ProfileName
from kdskills.bundle.lock_file import lock_of
from kdskills.errors import BadRequest, ExecRefused, KdskillsError, MissingExtra
from kdskills.execution.rootfs import build_rootfs, chosen_profiles, rootfs_for_image
from kdskills.storage.database import HEADS, Database, current_revisions, sqlite_file, upgrade
from kdskills.storage.folder import database_folder

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.settings import Settings


class UpgradeInput(Input):
    """Which database is a setting."""


class UpgradedPart(Output):
    """One part's tables: the revision they are at, and whether they were changed just now."""

    part: str
    revision: str
    changed: bool


class UpgradeOut(Output):
    """What was done; parts sorted by name."""

    parts: tuple[UpgradedPart, ...]


def upgrade_database(settings: Settings, arguments: UpgradeInput) -> UpgradeOut:
    """Upgrade every part, one after the other; what is up to date stays as it is."""
    database_folder(settings.work_database, settings.state_dir)
    with closing(Database(settings.work_database, label="the service's database")) as database:
        done = {part: upgrade(database, part) for part in sorted(HEADS)}
        revisions = database.ask(current_revisions)
    heads = {part: HEADS[part] if HEADS[part] in revisions else "" for part in done}
    return UpgradeOut(parts=tuple(UpgradedPart(part=part, revision=heads[part], changed=done[part]) for part in done))


class ImageInput(Input):
    """How to build."""

    offline: bool = Field(default=True, description="From this host's own files, or by a registry's image.")
    tar: bool = Field(default=False, description="Also write the archive that `docker import` takes.")
    profile: tuple[ProfileName, ...] = Field((), description="Kept lists beside those of the settings.")


class ImageOutput(Output):
    """Where the tree lies, the digest of what went into it, and its size; `tar` is the archive, if asked for.

    `absent` tells for each profile what this machine does not have and the tree goes without, with the cure; `complete` that
    there is none of that.
    """

    YES: ClassVar[str] = "complete"
    complete: bool
    absent: tuple[str, ...] = ()
    path: str
    key: str
    python: str
    size: int
    files: int
    tar: str | None = None
    tar_digest: str | None = None


def build_image(settings: Settings, arguments: ImageInput) -> ImageOutput:
    """Build the tree, or find it built."""
    if not arguments.offline:
        raise BadRequest("with a registry at hand, build runtime/images/Dockerfile with docker", code="not_offline")
    options = settings.execution_options()
    options = replace(options, image_profiles=tuple(dict.fromkeys((*options.image_profiles, *arguments.profile))))
    absent = absent_parts(options.image_profiles)
    tree = build_rootfs(options.cache_dir, **options.image)
    archive = rootfs_for_image(options.cache_dir, **options.image) if arguments.tar else None
    sizes = [path.stat().st_size for path in tree.path.rglob("*") if path.is_file() and not path.is_symlink()]
    tar, digest = (None, None) if archive is None else (str(archive[0]), archive[1])
    facts = {"complete": not absent, "absent": tuple(absent), "path": str(tree.path), "size": sum(sizes)}
    return ImageOutput.of(tree, **facts, files=len(sizes), tar=tar, tar_digest=digest)


def absent_parts(profiles: Collection[str]) -> list[str]:
    """Return in words what this machine lacks of each of *profiles*, and the commands that bring it. Raises ExecFailed."""
    sentences = []
    for name, profile in zip(profiles, chosen_profiles(profiles), strict=True):
        programs, packages = profile.absent()
        parts = [f"programs {', '.join(programs)} (apt install {' '.join(profile.debian)})"] if programs else []
        parts += [f"packages {', '.join(packages)} (pip install {' '.join(packages)})"] if packages else []
        sentences += [f"{name}: {'; '.join(parts)}"] if parts else []
    return sentences


EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {"models": "pydantic-ai-slim", "documents": "fpdf2", "otel": "opentelemetry-api"}
)


def installed(distribution: str) -> bool:
    """Whether a package is installed here."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


PATIENCE_S: Final = 15.0
"""Seconds a part may take to answer."""


class DoctorInput(Input):
    """Nothing to say."""


class Check(Output):
    """One self-check."""

    name: str
    ok: bool
    found: str
    cure: str | None = None


class Engine(Output):
    """One engine's probe: every question its canary answered."""

    name: str
    level: str
    ok: bool
    cure: str | None
    limits: tuple[str, ...]
    checks: tuple[Check, ...]


class DoctorOutput(Output):
    """`ok` means that everything the settings name works, and that an engine accepts programs."""

    YES: ClassVar[str] = "ok"
    ok: bool
    chosen: str | None
    refusal: str | None
    checks: tuple[Check, ...]
    engines: tuple[Engine, ...]
    interpreters: dict[str, tuple[str, ...]]
    plugins: tuple[str, ...]


def _basics() -> list[Check]:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    loader = "C loader" if yaml.__with_libyaml__ else "pure Python loader: correct, but slow"
    checks = [
        Check(name="python", ok=sys.version_info >= (3, 11), found=python, cure="install Python 3.11 or newer"),
        Check(name="libyaml", ok=yaml.__with_libyaml__, found=loader, cure="reinstall PyYAML from a wheel"),
    ]
    for extra, distribution in EXTRAS.items():
        here = installed(distribution)
        answer = f"{distribution} {version(distribution)}" if here else "not installed; only needed if used"
        cure = None if here else f"pip install 'kdskills[{extra}]'"
        checks.append(Check(name=f"extra {extra}", ok=here, found=answer, cure=cure))
    return checks


async def _parts(host: Host) -> list[Check]:
    """Look at everything the settings name, each part for itself and no longer than `PATIENCE_S`."""

    async def store(url: str) -> str:
        await (await asyncio.to_thread(host.session_store, url)).get("doctor")
        return "answers"

    def roots(uris: Collection[str]) -> str:
        diagnostics = host.subsystem(None).diagnostics
        findings = [row for row in diagnostics if row.severity == "error" or row.code.startswith("root_")]
        if findings:
            raise OSError("; ".join(f"{row.code}: {row.message}" for row in findings[:3]))
        return f"{len(uris)} opened"

    def packages(path: Path) -> str:
        try:
            bundle = host.bundle(path)
        except KdskillsError:
            return "nothing to look at"  # that the bundle does not open is told of it
        skills = host.subsystem(bundle).registry.values()
        if words := host.environments.unready(skills, lock_of(bundle.root)):
            raise OSError("; ".join(words[:5]) + (f"; {len(words) - 5} more" if len(words) > 5 else ""))
        return "what is locked is built"

    def image(profiles: tuple[str, ...]) -> str:
        if sentences := absent_parts(profiles):
            raise OSError("; ".join(sentences))
        return f"{', '.join(profiles)} complete"

    settings = host.settings
    usual_codex = type(settings).model_fields["codex_binary"].default
    codex = None if settings.codex_binary == usual_codex else settings.codex_binary
    rows: tuple[tuple[str, Any, Callable[[Any], Any], str], ...] = (
        ("state folder", settings.state_dir, _writable, "make the folder of `state_dir` writable"),
        ("database", settings, _database, "start the database, or mend `database_url`"),
        ("artifacts", settings.artifacts, _artifacts, "make the bucket or folder of `artifacts`, and let us write"),
        ("index", settings.index_dir, _writable, "make the folder of `index_dir` writable, or unset it"),
        ("session store", settings.session_store, store, "mend `session_store`"),
        (
            "bundle",
            settings.bundle,
            lambda path: f"{host.bundle(path).name}, {path}",
            "mend `bundle`, or what it names",
        ),
        (
            "packages",
            None if settings.environments == "off" else settings.bundle,
            packages,
            "run kdskills env lock, then kdskills env build",
        ),
        ("image profiles", settings.image_profiles or None, image, "install what they lack, or unset `image_profiles`"),
        ("skill roots", settings.skill_roots or None, roots, "mend `skill_roots`, or start what they name"),
        ("bus", settings.bus.url, _bus, "start the NATS server with JetStream, or mend `bus.url`"),
        ("codex", codex, _program, "install it, or mend `codex_binary`"),
    )
    return [*await asyncio.gather(*(_check(*row) for row in rows if row[1] is not None))]


async def _check(name: str, value: Any, look: Callable[[Any], Any], cure: str) -> Check:
    """Look at a part, and tell in words what was found, else what cures it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await (look(value) if iscoroutinefunction(look) else asyncio.to_thread(look, value))
            return Check(name=name, ok=True, found=answer)
    except KdskillsError as error:
        answer = f"{error.code}: {error.message}"
    except TimeoutError:  # one of OSError's, without words of its own
        answer = f"no answer in {PATIENCE_S:.0f} s"
    except OSError as error:
        answer = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return Check(name=name, ok=False, found=answer, cure=cure)


def _writable(folder: Path) -> str:
    """Write a file where *folder* is, or see that it can be made. Raises OSError."""
    if folder.is_dir():
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
        return str(folder)
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if folder.exists() or not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is no folder", str(folder if folder.exists() else above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the folder cannot be made", str(folder))
    return f"{folder}, made when it is needed"


async def _database(settings: Settings) -> str:
    """Ask the database something, without making it or its tables. Raises KdskillsError, OSError."""
    try:
        file = sqlite_file(settings.work_database)
        if file is not None and not file.exists():
            await asyncio.to_thread(_writable, file.parent)
            return "SQLite, made when it is needed"
        database = Database(settings.work_database, label="the service's database")
    except MissingExtra as error:
        if settings.database_url is None:
            return f"not used: {error.message}"
        raise
    try:
        question = "SELECT 1" if file is None else "SELECT count(*) FROM sqlite_master"
        await database.read(lambda link: link.exec_driver_sql(question).scalar())
    finally:
        await database.aclose()
    return "PostgreSQL answers" if file is None else f"SQLite, {file}"


async def _artifacts(url: str) -> str:
    """Write, read and delete a small object where artifacts are kept. Raises KdskillsError, OSError."""
    from kdskills.jobs.artifacts import open_blobs

    blobs, key = open_blobs(url), f"doctor/{secrets.token_hex(8)}"
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"doctor")
            file.flush()
            await blobs.save(key, Path(file.name))
        size = await blobs.size(key)
        await blobs.delete(key)
    finally:
        await blobs.aclose()
    if size != len(b"doctor"):
        raise OSError(errno.EIO, "what was written does not come back")
    return "written, read and deleted"


async def _bus(url: str) -> str:
    """Connect to the command bus, and ask its JetStream something. Raises MissingExtra, OSError."""
    try:
        from nats.aio.client import Client
        from nats.errors import Error as NatsError
    except ModuleNotFoundError as error:
        raise MissingExtra("the command bus", "service") from error

    troubles: list[Exception] = []

    async def note_trouble(error: Exception) -> None:
        """Note what keeps the bus away: the error that is raised does not say it."""
        troubles.append(error)

    connection = Client()
    try:
        await connection.connect(
            url, error_cb=note_trouble, allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0
        )
        try:
            await connection.jetstream().account_info()
        finally:
            await connection.close()
    except (NatsError, ValueError) as error:
        reason = troubles[-1] if troubles else error
        raise OSError(errno.EIO, without_secrets(f"{type(reason).__name__}: {reason}")) from error
    return "answers, with JetStream"


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such program", name)
    return path


async def doctor(host: Host, arguments: DoctorInput) -> DoctorOutput:
    """Run every self-check."""
    reports = [await engine.probe() for engine in host.engines()]
    chosen = refusal = None
    try:
        chosen = (await host.wiring.executor(host.settings.executor)).name
    except ExecRefused as error:
        refusal = error.message
    basics, parts = _basics(), await _parts(host)
    return DoctorOutput.of(
        ok=chosen is not None and basics[0].ok and all(check.ok for check in parts),
        chosen=chosen,
        refusal=refusal,
        checks=(*basics, *parts),
        engines=[
            Engine.of(report, name=report.engine, level=report.level.name, limits=sorted(report.limits))
            for report in reports
        ],
        interpreters=host.interpreters(),
        plugins=sorted(name for name, _ in host.plugins.list_name_plugin()),
    )
