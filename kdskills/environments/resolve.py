"""Exact wheels for requirements, chosen by `uv`, or by pip where it is missing, from the operator's indexes; and their bytes.

Neither reads a configuration file by itself, nor the folder it is started in, and nothing of a package runs: only wheels
are looked at. Texts of requirements reach them in files, one requirement a line, after they were read as requirements.

Downloads are bounded in bytes and time, and compared with their digest before anybody reads them.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kdskills.environments.codes import EnvironmentFailed, without_credentials
from kdskills.environments.model import EnvironmentSpec, LockedPackage
from kdskills.environments.requirements import RequirementRefused, canonical_requirement
from kdskills.environments.wheels import WHEEL_LIMITS
from kdskills.errors import MissingExtra

PYPI: Final = "https://pypi.org/simple"
RESOLVE_S: Final = 600.0
"""Seconds one resolution may take."""

MAX_MESSAGE: Final = 2000
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackageIndex:
    """An index of the operator's; the address may hold credentials, which are printed nowhere."""

    name: str
    url: str = field(repr=False)


def indexes_of(settings: Mapping[str, str]) -> tuple[PackageIndex, ...]:
    """Return the indexes of the setting, in its order; without any, those this machine's uv and pip are set up with."""
    return tuple(PackageIndex(name, url) for name, url in settings.items()) or configured_indexes()


def configured_indexes() -> tuple[PackageIndex, ...]:
    """Return the indexes that variables and files of this account and machine name, the first to be asked first.

    Variables go before files and uv's before pip's; the main index and further ones are looked for separately. PyPI
    stands for the main one where nobody names another. Files of the folder we were started in are not read.
    """
    main, further = "", ""
    for default, extras in (*_variables(), *_uv_files(), *_pip_files()):
        main, further = main or default, further or extras
    pairs = [part.rpartition("=") if "=" in part.partition("://")[0] else ("", "", part) for part in further.split()]
    rows = [("", main or PYPI), *((name, url) for name, _, url in pairs)]
    return tuple(PackageIndex(name or urlsplit(url).hostname or "files", url) for name, url in rows)


def _variables() -> Iterator[tuple[str, str]]:
    value = os.environ.get
    yield value("UV_DEFAULT_INDEX") or value("UV_INDEX_URL", ""), value("UV_INDEX") or value("UV_EXTRA_INDEX_URL", "")
    yield value("PIP_INDEX_URL", ""), value("PIP_EXTRA_INDEX_URL", "")


def _uv_files() -> Iterator[tuple[str, str]]:
    for path in (_config_home() / "uv/uv.toml", Path("/etc/uv/uv.toml")):
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # not ours to judge: uv would say it
            table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
            table = table.get("pip", {}) | table
            rows = table.get("index", [])
            main = next((row["url"] for row in rows if row.get("default")), table.get("index-url", ""))
            entries = [f"{row.get('name', '')}={row['url']}".lstrip("=") for row in rows if not row.get("default")]
            yield main, " ".join((*entries, *table.get("extra-index-url", ())))


def _pip_files() -> Iterator[tuple[str, str]]:
    chosen = os.environ.get("PIP_CONFIG_FILE")
    account = (Path(chosen),) if chosen else (_config_home() / "pip/pip.conf", Path("~/.pip/pip.conf").expanduser())
    for path in (Path(sys.prefix) / "pip.conf", *account, Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf")):
        parser = configparser.RawConfigParser()
        with suppress(OSError, ValueError, configparser.Error):
            parser.read_string(path.read_text(encoding="utf-8"))
            for section in ("install", "global"):
                if parser.has_section(section):
                    table = parser[section]
                    yield table.get("index-url", ""), table.get("extra-index-url", "")


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def supported_tags() -> list[Tag]:
    """Return the tags of wheels that the sandbox's Python takes, which is this one, the best first."""
    return list(sys_tags())


def platform_name() -> str:
    """Return what wheels are chosen for, such as `cp311-manylinux_2_36_x86_64`."""
    tags = supported_tags()
    tag = next((tag for tag in tags if tag.platform.startswith(("many", "musl"))), tags[0])
    return f"{tag.interpreter}-{tag.platform}"


def check_python(requires_python: str) -> None:
    """Refuse versions of Python that this one is none of. Raises EnvironmentFailed: `environment_platform`, `_invalid`."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        fits = SpecifierSet(requires_python).contains(version, prereleases=True)
    except InvalidSpecifier:
        message = f"requires-python is no set of versions: {requires_python[:200]!r}"
        raise EnvironmentFailed(message, code="environment_invalid", who="author") from None
    if not fits:
        message = f"it needs Python {requires_python}, and the sandbox has {version}"
        raise EnvironmentFailed(message, code="environment_platform", requires_python=requires_python)


def best_wheel(files: Iterable[str], tags: list[Tag]) -> str | None:
    """Return the wheel that fits *tags* best by its file name, None when none does."""
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    scores = []
    for file in files:
        with suppress(InvalidWheelFilename, InvalidVersion):
            _, _, build, wheel_tags = parse_wheel_filename(file)
            best = min((ranks[tag] for tag in wheel_tags if tag in ranks), default=None)
            if best is not None:
                scores.append((best, [-part if isinstance(part, int) else 0 for part in build or (0,)], file))
    return min(scores)[2] if scores else None


def resolve(
    spec: EnvironmentSpec,
    indexes: Collection[PackageIndex],
    *,
    constraints: Iterable[str] = (),
    tell: Tell = print,
    links: Path | None = None,
) -> tuple[LockedPackage, ...]:
    """Return the wheels for what *spec* requires and all they need, sorted by name.

    Args:
        spec: What is needed; only its Python packages are looked at.
        indexes: Where packages come from: the first that has one decides about all its versions.
        constraints: Requirements for packages that are needed anyway.
        tell: Told about warnings, such as a version that was yanked.
        links: A folder of further wheels.

    Raises:
        EnvironmentFailed: By its codes: invalid, conflict, unavailable, source only (whose details have the packages as
            `sources`), index unreachable, hash mismatch, platform.
        MissingExtra: Neither uv nor pip is installed.
    """
    check_python(spec.requires_python)
    lines = [requirement_line(text) for text in spec.requirements]
    wheels = list_wheels(lines, indexes, constraints=constraints, tell=tell, links=links) if lines else {}
    tags = supported_tags()
    packages = []
    for name, files in wheels.items():
        allowed = allowed_hashes(name, spec.hashes)
        candidates = {wheel.file: wheel for wheel in files if not allowed or wheel.sha256 in allowed}
        best = best_wheel(candidates, tags)
        if best is None and files and allowed:
            message = f"no file of {name} has a hash that its requirement allows"
            raise EnvironmentFailed(message, code="environment_hash_mismatch", package=name)
        if best is None:
            message = f"{name} has no wheel for {platform_name()}"
            raise EnvironmentFailed(message, package=name)
        if not candidates[best].sha256:
            message = f"the index gives no SHA-256 of {best}, so that it cannot be locked"
            raise EnvironmentFailed(message, package=name)
        packages.append(candidates[best])
    return tuple(sorted(packages, key=lambda package: package.name))


def requirement_line(text: str) -> str:
    """Return one requirement as a line that is nothing else. Raises EnvironmentFailed, `environment_invalid`."""
    try:
        return canonical_requirement(text)
    except RequirementRefused as error:
        message = f"{without_credentials(text[:200])!r} is refused: {error}"
        raise EnvironmentFailed(message, code="environment_invalid", who="author") from None


def allowed_hashes(name: str, hashes: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Return the hex digests that *hashes*, by requirement, allow files of a package to have; none for any."""
    return {
        digest.removeprefix("sha256:")
        for text, digests in hashes.items()
        if canonicalize_name(Requirement(text).name) == name
        for digest in digests
    }


def list_wheels(
    lines: Collection[str],
    indexes: Collection[PackageIndex],
    *,
    constraints: Iterable[str] = (),
    dependencies: bool = True,
    tell: Tell = print,
    links: Path | None = None,
) -> dict[str, list[LockedPackage]]:
    """Return by package the wheels of the version chosen for it, that fit here; without *dependencies* of *lines* alone.

    Raises as `resolve`.
    """
    uv = find_uv()
    with tempfile.TemporaryDirectory(prefix="kdskills-resolve-") as name:
        folder = Path(name)
        (folder / "requirements.in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in constraints) or "\n", encoding="utf-8")
        command = [*(_uv_command(uv) if uv else _pip_command()), *([] if dependencies else ["--no-deps"])]
        command += [] if links is None else [f"--find-links={links}"]
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=_environment(folder, indexes),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RESOLVE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"the index took more than {RESOLVE_S:.0f} s"
            raise EnvironmentFailed(message, code="environment_index_unreachable") from None
        if run.returncode != 0:
            reasons = run.stdout.partition("The conflict is caused by:")[2].partition("To fix this")[0]  # pip's
            raise _failure(run.stderr, reasons)
        for line in run.stderr.splitlines():
            if line.lower().startswith("warning:") and "yanked" in line:
                tell(without_credentials(line.partition(":")[2].strip())[:MAX_MESSAGE])
        rows = _pylock_rows(folder / "pylock.toml") if uv else _report_rows(folder / "report.json")
        return {package: [_wheel(package, row, indexes) for row in files] for package, files in rows.items()}


def find_uv() -> str | None:
    """Return the program `uv`: that of the installed package, else the one on the path, else None."""
    with suppress(ModuleNotFoundError, FileNotFoundError):
        from uv import find_uv_bin

        return find_uv_bin()
    return shutil.which("uv")


def _uv_command(uv: str) -> list[str]:
    return [
        *(uv, "pip", "compile", "--no-config", "--color=never", "--no-progress", "--no-header", "--no-annotate"),
        *("--python", sys.executable, "--no-python-downloads", "--only-binary=:all:", "--format=pylock.toml"),
        *("--cache-dir=cache", "--constraints=constraints.txt", "--output-file=pylock.toml", "requirements.in"),
    ]


def _pip_command() -> list[str]:
    import importlib.util

    if importlib.util.find_spec("pip") is None:
        raise MissingExtra("looking for packages", "environments")
    return [
        *(sys.executable, "-I", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"),
        *("--no-input", "--no-cache-dir", "--no-color", "--progress-bar=off", "--disable-pip-version-check"),
        *("--constraint=constraints.txt", "--report=report.json", "--requirement=requirements.in"),
    ]


_PASSED: Final = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)


def _environment(folder: Path, indexes: Collection[PackageIndex]) -> dict[str, str]:
    """Return the variables of a resolution; addresses stand in them, for command lines can be read by everybody."""
    urls = [index.url for index in indexes]
    certificates = os.environ.get("SSL_CERT_FILE", "")
    fixed = {
        "PATH": os.defpath,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LC_ALL": "C.UTF-8",
        "UV_INDEX": " ".join(urls[:-1]),
        "UV_DEFAULT_INDEX": urls[-1],
        "UV_HTTP_TIMEOUT": "30",
        "UV_KEYRING_PROVIDER": "disabled",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": urls[0],
        "PIP_EXTRA_INDEX_URL": " ".join(urls[1:]),
        "PIP_RETRIES": "1",
        "PIP_TIMEOUT": "30",
    }
    return (
        {name: os.environ[name] for name in _PASSED if name in os.environ}
        | fixed
        | ({"PIP_CERT": certificates} if certificates else {})
    )


#: What tells the codes of failures apart, in the words of uv and pip; the first that is found decides.
_SIGNS: Final = (
    (
        "environment_index_unreachable",
        r"Failed to fetch|error sending request|Request failed|connection broken|Could not fetch URL|[Tt]imed out|HTTP error",
    ),
    ("environment_source_only", r"no usable wheels|building from source is disabled"),
    (
        "environment_unavailable",
        r"not found in|no wheels|[Nn]o matching distribution|(is|are) available and|no version|yanked",
    ),
    ("environment_conflict", r"No solution found|ResolutionImpossible"),
)


def _failure(words: str, reasons: str) -> EnvironmentFailed:
    """Return the error for what uv or pip wrote, and the reasons that it gave elsewhere."""
    code = next((code for code, sign in _SIGNS if re.search(sign, words)), "environment_unavailable")
    lines = without_credentials(reasons + words).partition("\nhint:")[0].splitlines()
    lines = [line for line in lines if not line.lower().startswith("warning:")]
    text = " ".join(re.sub(r"^\s*(error|cause):\s*", "", "\n".join(lines), flags=re.MULTILINE | re.IGNORECASE).split())
    sources = re.findall(r"^hint: Wheels are required for `([a-z0-9-]+)`", words, re.MULTILINE)
    return EnvironmentFailed(text[:MAX_MESSAGE] or "the packages cannot be resolved", code=code, sources=sources)


Row = dict[str, Any]


def _pylock_rows(path: Path) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for package in tomllib.loads(path.read_text(encoding="utf-8")).get("packages", []):
        name = canonicalize_name(package["name"])
        rows[name] = [
            {"version": package["version"], "url": wheel.get("url", ""), "size": wheel.get("size", 0)}
            | {"file": wheel.get("name", ""), "sha256": wheel.get("hashes", {}).get("sha256", "")}
            for wheel in package.get("wheels", [])
        ]
        if not rows[name]:
            message = f"there is only a source distribution of {name} {package['version']}"
            raise EnvironmentFailed(message, code="environment_source_only", package=name, sources=[name])
    return rows


def _report_rows(path: Path) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for item in json.loads(path.read_text(encoding="utf-8"))["install"]:
        download, metadata = item["download_info"], item["metadata"]
        sha256 = download.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        row = {"version": metadata["version"], "url": download["url"], "size": 0, "file": "", "sha256": sha256}
        rows[canonicalize_name(metadata["name"])] = [row]
    return rows


def _wheel(name: str, row: Row, indexes: Collection[PackageIndex]) -> LockedPackage:
    url = without_credentials(str(row["url"])).partition("#")[0]
    file = str(row["file"]) or unquote(urlsplit(url).path).rpartition("/")[2]
    try:
        wheel_name, wheel_version, _, _ = parse_wheel_filename(file)
        agrees = wheel_name == name and wheel_version == Version(row["version"])
    except (InvalidWheelFilename, InvalidVersion):
        agrees = False
    if not agrees or not re.fullmatch(r"([0-9a-f]{64})?", str(row["sha256"])):
        message = f"the index offers {file[:200]!r} as a wheel of {name} {row['version']}"
        raise EnvironmentFailed(message, package=name)
    host = urlsplit(url).hostname
    index = next((index for index in indexes if urlsplit(index.url).hostname == host), next(iter(indexes)))
    return LockedPackage(name, str(row["version"]), file, url, str(row["sha256"]), int(row["size"]), index.name)


FETCH_S: Final = 900.0
"""Seconds one file may take."""

SILENCE_S: Final = 30.0
"""Seconds a server may say nothing."""

TRIES: Final = 3
PAUSE_S: Final = 0.5
_PIECE = 256 * 1024


def fetch_wheel(
    package: LockedPackage,
    indexes: Collection[PackageIndex],
    target: Path,
    integrity: tuple[str, str] | None = None,
) -> int:
    """Write a wheel to *target*, a new file, and return its bytes; *integrity* is another algorithm and hex digest than SHA-256.

    Its address is one that an index told; credentials of the operator go to hosts of indexes alone. Raises
    EnvironmentFailed: `environment_hash_mismatch`, `environment_index_unreachable`.
    """
    for remaining in reversed(range(TRIES)):
        try:
            return _fetch(package, indexes, target, *(integrity or ("sha256", package.sha256)))
        except EnvironmentFailed as error:
            target.unlink(missing_ok=True)
            if remaining == 0 or error.code != "environment_index_unreachable":
                raise
            time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _fetch(package: LockedPackage, indexes: Collection[PackageIndex], target: Path, algorithm: str, digest: str) -> int:
    hasher, size = hashlib.new(algorithm), 0
    bound = min(package.size or WHEEL_LIMITS.archive_bytes, WHEEL_LIMITS.archive_bytes)
    with file_pieces(package, indexes) as pieces, target.open("xb") as out:
        for piece in pieces:
            size += len(piece)
            if size > bound:
                message = f"{package.file} has more bytes than the {bound} it may have"
                raise EnvironmentFailed(message, code="environment_hash_mismatch", package=package.name)
            hasher.update(piece)
            out.write(piece)
    if hasher.hexdigest() != digest:
        message = f"{package.file} is not the file that was locked: its {algorithm} is {hasher.hexdigest()}"
        raise EnvironmentFailed(message, code="environment_hash_mismatch", package=package.name)
    return size


@contextmanager
def file_pieces(package: LockedPackage, indexes: Collection[PackageIndex]) -> Iterator[Iterator[bytes]]:
    """Open a file: one of this machine where an index of the operator is one of files, else by HTTP.

    Raises EnvironmentFailed, `environment_index_unreachable`, with the `status` of an answer, 404 for what is not there.
    """
    parts = urlsplit(package.url)
    if parts.scheme == "file" and any(urlsplit(index.url).scheme == "file" for index in indexes):
        with _file(Path(unquote(parts.path)), package) as pieces:
            yield pieces
    elif parts.scheme in {"http", "https"}:
        with _response(package, indexes) as pieces:
            yield pieces
    else:
        raise _unreachable(package, f"addresses of kind {parts.scheme[:20]!r} are not read")


@contextmanager
def _file(path: Path, package: LockedPackage) -> Iterator[Iterator[bytes]]:
    try:
        stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        status = 404 if isinstance(error, FileNotFoundError) else 0
        raise _unreachable(package, error.strerror or str(error), status) from None
    with stream:
        yield iter(lambda: stream.read(_PIECE), b"")


@contextmanager
def _response(package: LockedPackage, indexes: Collection[PackageIndex]) -> Iterator[Iterator[bytes]]:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise MissingExtra("downloading packages", "environments") from error
    host, deadline = urlsplit(package.url).hostname, time.monotonic() + FETCH_S
    logins = (urlsplit(index.url) for index in indexes)
    login = next((parts for parts in logins if parts.hostname == host and parts.username is not None), None)
    auth = None if login is None else (unquote(login.username or ""), unquote(login.password or ""))

    def in_time(response: httpx.Response) -> Iterator[bytes]:
        for piece in response.iter_raw(_PIECE):
            if time.monotonic() > deadline:
                raise _unreachable(package, f"it took more than {FETCH_S:.0f} s")
            yield piece

    try:
        with (
            httpx.Client(follow_redirects=True, timeout=SILENCE_S, auth=auth) as client,
            client.stream("GET", package.url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            response.raise_for_status()
            yield in_time(response)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise _unreachable(package, f"it answers {status}", status) from None
    except httpx.HTTPError as error:
        raise _unreachable(package, f"{type(error).__name__}: {error}") from None


def _unreachable(package: LockedPackage, reason: str, status: int = 0) -> EnvironmentFailed:
    words = f"{package.file} cannot be downloaded from {urlsplit(package.url).hostname}: {reason}"
    return EnvironmentFailed(words, code="environment_index_unreachable", package=package.name, status=status)
