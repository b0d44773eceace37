"""Source distributions: looked for at the operator's indexes, and built into wheels behind the wall, without a network.

Nothing of one is unpacked or run on this host; what comes out is a wheel like any other, and must keep the rules of wheels.
What a build requires comes as wheels, and is locked with the source.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from kdskills.environments.codes import EnvironmentFailed, without_credentials
from kdskills.environments.model import EnvironmentSpec, LockedPackage
from kdskills.environments.resolve import (
    PackageIndex,
    Tell,
    allowed_hashes,
    best_wheel,
    check_python,
    fetch_wheel,
    file_pieces,
    requirement_line,
    resolve,
    supported_tags,
)
from kdskills.environments.wheels import unpack_wheel
from kdskills.execution import EnvironmentMount, ExecRequest, ExecResult, InputFile, Limits

MIB: Final = 1024 * 1024
MAX_PAGE: Final = 64 * MIB
MAX_BUILDS: Final = 20
"""Source distributions that are built for one resolution."""

MAX_REQUIRES: Final = 100
BUILD_LIMITS: Final = Limits(
    wall_s=600.0,
    memory=2048 * MIB,
    pids=256,
    nofile=1024,
    fsize=256 * MIB,
    work_size=2048 * MIB,
    tmp_size=512 * MIB,
    stdout=64 * 1024,
    stderr=64 * 1024,
    output_size=256 * MIB,
)
PROGRAM: Final = "source_build.py"
SCRATCH: Final = ".source-"
"""How names of folders begin in which this is done."""
_SAID: Final = 1500

Mounted = Callable[[str, tuple[LockedPackage, ...]], EnvironmentMount]
"""Builds an environment of wheels, under a name for people, and gives its mount."""


@dataclass(frozen=True, slots=True)
class SourceBuilds:
    """Builds in a sandbox; `run` gives a request to an engine that isolates, and blocks until it ended."""

    run: Callable[[ExecRequest], ExecResult]
    limits: Limits = BUILD_LIMITS

    def wheel(self, source: LockedPackage, file: Path, mount: EnvironmentMount | None, folder: Path) -> Path:
        """Build *source* with the packages of *mount*, and return its wheel, a new file in *folder*, that nobody has looked into.

        Raises EnvironmentFailed, `environment_build_failed`.
        """
        result = self._step(source, file, "wheel", mount)
        wheels = [item for item in result.artifacts if item.path.startswith("dist/")]
        name = wheels[0].path.removeprefix("dist/") if len(wheels) == 1 else ""
        try:
            project, version, _, _ = parse_wheel_filename(name)
            agrees = project == source.name and version == Version(source.version)
        except (InvalidWheelFilename, InvalidVersion):
            agrees = False
        if not agrees or best_wheel([name], supported_tags()) is None:
            reason = f"it made {name[:200]!r}" if name else f"it made {len(wheels)} wheels"
            raise _failed(source, f"{reason}, not one of {source.name} {source.version} for this Python")
        (folder / name).write_bytes(wheels[0].content)
        return folder / name

    def names(
        self,
        source: LockedPackage,
        file: Path,
        task: Literal["requires", "more"],
        mount: EnvironmentMount | None = None,
    ) -> tuple[str, ...]:
        """Return the requirements that the build's files (`requires`), or its backend (`more`), ask for. Raises EnvironmentFailed."""
        result = self._step(source, file, task, mount)
        try:
            texts = json.loads(result.artifacts[0].content)
        except (IndexError, ValueError, RecursionError):
            texts = None
        if not isinstance(texts, list) or len(texts) > MAX_REQUIRES or not all(isinstance(text, str) for text in texts):
            raise _failed(source, "what it requires is no list of texts")
        return tuple(requirement_line(text) for text in texts)

    def _step(self, source: LockedPackage, file: Path, task: str, mount: EnvironmentMount | None) -> ExecResult:
        program = Path(__file__).with_name(PROGRAM)
        request = ExecRequest(
            argv=("python3", PROGRAM, source.file, task),
            inputs=(InputFile(PROGRAM, program.read_bytes()), InputFile(source.file, file)),
            environment=mount,
            outputs=("dist/*.whl",) if task == "wheel" else ("answer.json",),
            env={"SOURCE_DATE_EPOCH": "315532800", "PYTHONDONTWRITEBYTECODE": "1"},
            limits=self.limits,
        )
        result = self.run(request)
        if result.status != "ok":
            message = "" if result.error is None else result.error.message
            last = (message or result.stderr.text or result.stdout.text)[-_SAID:]
            raise _failed(source, f"{result.status}: {' '.join(last.split())}".rstrip(": "))
        return result


def resolve_with_sources(
    spec: EnvironmentSpec,
    indexes: Collection[PackageIndex],
    *,
    builds: SourceBuilds,
    mounted: Mounted,
    folder: Path,
    constraints: Iterable[str] = (),
    tell: Tell = print,
) -> tuple[LockedPackage, ...]:
    """Return what `resolve` does, with a source distribution of what has no wheel in any version that fits.

    It is the newest that the requirement of its name allows, else the next older one. *folder* is where the builds have folders
    of their own meanwhile. Raises as `resolve`, and EnvironmentFailed,
    `environment_build_failed`.
    """
    constraints, sources = tuple(constraints), dict[str, LockedPackage]()  # by the file name of what was built of each
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as name:
        links = Path(name)
        while True:
            names = {source.name for source in sources.values()}
            hashes = {
                text: each
                for text, each in spec.hashes.items()
                if canonicalize_name(Requirement(text).name) not in names
            }
            try:
                packages = resolve(
                    replace(spec, hashes=hashes), indexes, constraints=constraints, tell=tell, links=links
                )
            except EnvironmentFailed as error:
                candidates = [
                    _next_source(package, spec, indexes, sources.values())
                    for package in error.details.get("sources", ())
                ]
                if not candidates or None in candidates or len(sources) + len(candidates) > MAX_BUILDS:
                    raise
            else:
                return tuple(sources.get(package.file, package) for package in packages)
            for candidate in filter(None, candidates):
                wheel, source = _locked_build(candidate, indexes, builds, mounted, links, tell)
                sources[wheel] = source


def _next_source(
    name: str, spec: EnvironmentSpec, indexes: Collection[PackageIndex], tried: Collection[LockedPackage]
) -> LockedPackage | None:
    """Return the newest source distribution that may be taken and was not tried; None without one."""
    allowed = allowed_hashes(name, spec.hashes)
    ranges = [Requirement(text) for text in spec.requirements]
    specifier = SpecifierSet(",".join(str(each.specifier) for each in ranges if canonicalize_name(each.name) == name))
    digests = {source.sha256 for source in tried}
    for source in find_sources(name, indexes):
        fits = specifier.contains(source.version) and (not allowed or source.sha256 in allowed)
        if fits and source.sha256 not in digests:
            return source
    return None


def _locked_build(
    source: LockedPackage,
    indexes: Collection[PackageIndex],
    builds: SourceBuilds,
    mounted: Mounted,
    links: Path,
    tell: Tell,
) -> tuple[str, LockedPackage]:
    """Build a source distribution for the first time; return its wheel's file name, which lies in *links*, and what to lock."""
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=links.parent) as name:
        file, tree = Path(name) / "file", Path(name) / "tree"
        fetch_wheel(source, indexes, file)
        packages: tuple[LockedPackage, ...] = ()
        mount: EnvironmentMount | None = None
        requires: set[str] = set()
        for task in ("requires", "more"):
            new = {*builds.names(source, file, task, mount)} - requires
            if new:
                requires |= new
                packages = resolve(EnvironmentSpec(tuple(sorted(requires))), indexes, tell=tell)
                mount = mounted(f"the build of {source.file}", packages)
        wheel = builds.wheel(source, file, mount, links)
        try:
            tree.mkdir()
            unpack_wheel(wheel, wheel.name, tree)
        except EnvironmentFailed:
            wheel.unlink()
            raise
        return wheel.name, replace(source, build=packages)


def find_sources(name: str, indexes: Collection[PackageIndex]) -> list[LockedPackage]:
    """Return the source distributions of a package for this Python, the newest first, releases before others, yanked ones left out.

    The first index that has the package decides. Raises EnvironmentFailed: `environment_unavailable`,
    `environment_index_unreachable`.
    """
    for index in indexes:
        page = "index.html" if urlsplit(index.url).scheme == "file" else ""
        url = without_credentials(f"{index.url.rstrip('/')}/{name}/{page}")
        links = _SourceLinks(name, url, index.name)
        try:
            links.feed(_page(LockedPackage(name, "", f"the page of {name}", url, ""), indexes))
        except EnvironmentFailed as error:
            if error.details.get("status") == 404:
                continue
            raise
        return sorted(links.files, key=_newest, reverse=True)
    raise EnvironmentFailed(f"no index has {name}", package=name)


def _page(page: LockedPackage, indexes: Collection[PackageIndex]) -> str:
    data = b""
    with file_pieces(page, indexes) as pieces:
        for piece in pieces:
            data += piece
            if len(data) > MAX_PAGE:
                raise EnvironmentFailed(f"{page.file} has more than {MAX_PAGE} bytes", package=page.name)
    return data.decode("utf-8", "replace")


def _newest(source: LockedPackage) -> tuple[bool, Version]:
    version = Version(source.version)
    return not version.is_prerelease, version


class _SourceLinks(HTMLParser):
    """Gathers the source distributions of an index's page."""

    def __init__(self, name: str, url: str, index: str) -> None:
        super().__init__()
        self._name, self._url, self._index = name, url, index
        self.files: list[LockedPackage] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take a link whose file is one, is not yanked and is for this Python."""
        words = dict(attrs)
        url, fragment = urldefrag(urljoin(self._url, words.get("href") or ""))
        file = unquote(urlsplit(url).path).rpartition("/")[2]
        digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        if tag != "a" or digest is None or "data-yanked" in words or not file.endswith(".tar.gz"):
            return
        try:
            project, version = parse_sdist_filename(file)
            check_python(words.get("data-requires-python") or "")
        except (InvalidSdistFilename, EnvironmentFailed):
            return
        if project == self._name:
            self.files.append(
                LockedPackage(project, str(version), file, without_credentials(url), digest[1], index=self._index)
            )


def _failed(source: LockedPackage, reason: str) -> EnvironmentFailed:
    message = f"{source.file} cannot be built: {reason}"
    return EnvironmentFailed(message, code="environment_build_failed", package=source.name)
