"""What a script needs, what was locked for it, and the folder it was built into."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """Node packages: the bytes of `package.json`, and of its `package-lock.json` when it has one."""

    manifest: bytes
    lock: bytes | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What a script, or several together, need of the world outside their skill.

    Attributes:
        requirements: Python packages as PEP 508 requirements, canonical, sorted, each once.
        requires_python: Versions of Python, such as `>=3.11`; empty for any.
        hashes: The `sha256:…` that a requirement's files must have, by requirement; others may have any.
        node: Node packages, or None.
        programs: Names of programs that must be on the path, sorted.
        origins: Files that said so, relative to the skill's folder.
    """

    requirements: tuple[str, ...] = ()
    requires_python: str = ""
    hashes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    node: NodeSpec | None = None
    programs: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether packages are needed."""
        return bool(self.requirements or self.node)


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One wheel of a locked environment, or a source distribution.

    Attributes:
        name: Canonical name of the distribution.
        file: File name of the wheel, or of the source distribution.
        url: Where it was found, without credentials.
        sha256: Hex digest of the file.
        size: Bytes, or 0 when the index does not say.
        index: Name of the index it comes from, as the operator's settings name it.
        build: Wheels that a source distribution is built with, sorted by name.
    """

    name: str
    version: str
    file: str
    url: str
    sha256: str
    size: int = 0
    index: str = "pypi"
    build: tuple[LockedPackage, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether it is a source distribution, of which a wheel is built."""
        return self.file.endswith(".tar.gz")


@dataclass(frozen=True, slots=True)
class LockedEnvironment:
    """What was locked for one skill or script.

    Attributes:
        key: Full id of the skill, or `<full id>/scripts/<file>` where a script says for itself.
        requirements: What was asked for; another request makes the lock stale.
        platform: Python and platform tags the files were chosen for, such as `cp311-manylinux_2_36_x86_64`.
        packages: Sorted by name.
        node: Hex digest of the manifest and lock of Node packages; empty for none.
    """

    key: str
    requirements: tuple[str, ...]
    requires_python: str
    platform: str
    packages: tuple[LockedPackage, ...]
    node: str = ""
