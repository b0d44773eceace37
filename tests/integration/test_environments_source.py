"""Source distributions are built behind the wall, without a network, of wheels alone; what their code tries stays there."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from kdskills.app import Host, Settings
from kdskills.app.operations.table import Context
from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import read_lock
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage
from kdskills.environments.resolve import platform_name
from kdskills.environments.sources import BUILD_LIMITS, SourceBuilds, resolve_with_sources
from kdskills.environments.store import EnvironmentStore
from kdskills.execution import Limits
from tests.unit.environments.conftest import LoopIndex, index, open_cache, wheel_bytes

__all__ = ["index", "open_cache"]
pytestmark = pytest.mark.needs("bubblewrap")

SYSTEM = '[build-system]\nrequires = [%s]\nbuild-backend = "maker"\nbackend-path = ["."]\n'
MAKER = """import pathlib, shutil
def build_wheel(folder, *_):
    for wheel in pathlib.Path("ready").iterdir():
        shutil.copy(wheel, folder)
"""
"""A backend that gives out the wheels that lie in its source tree."""


def source(code: str = "", *, requires: str = "", wheels: Mapping[str, bytes] | None = None) -> dict[str, str | bytes]:
    """Return the files of a source distribution whose backend runs *code* first."""
    ready = {"raw-1.0-py3-none-any.whl": wheel_bytes("raw")} if wheels is None else wheels
    files: dict[str, str | bytes] = {f"ready/{name}": data for name, data in ready.items()}
    return {"pyproject.toml": SYSTEM % requires, "maker.py": f"{code}\n{MAKER}", **files}


@pytest.fixture
def host(tmp_path: Path, open_cache: Path, index: LoopIndex) -> Host:
    """A host whose packages come from the loopback index alone."""
    settings = Settings(
        executor="bubblewrap",
        environments="locked",
        environment_index={"loop": index.indexes[0].url},
        environment_cache_dir=open_cache,
        state_dir=tmp_path / "state",
    )
    return Host(settings, entry_points=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a skill whose script declares a package."""
    folder = tmp_path / "bundle/skills/forms"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: forms\ndescription: Does things for a test.\n---\nDo it.\n")
    (folder / "requirements.txt").write_text("two\n")
    (tmp_path / "bundle/skills_descriptor.yaml").write_text("custom_skills_root: skills\nagents_config: {}\n")
    return tmp_path / "bundle"


Resolve = Callable[..., Any]


@pytest.fixture
def resolved(host: Host, open_cache: Path, index: LoopIndex) -> Resolve:
    """Return what resolves a requirement by building sources."""

    async def resolve(requirement: str = "raw", limits: Limits = BUILD_LIMITS) -> tuple[LockedPackage, ...]:
        engine, loop = await host.wiring.executor(), asyncio.get_running_loop()
        builds = SourceBuilds(
            lambda request: asyncio.run_coroutine_threadsafe(engine.run(request), loop).result(), limits
        )

        def mounted(name: str, packages: tuple[LockedPackage, ...]) -> Any:
            parts = LockedEnvironment(name, (), "", platform_name(), packages)
            return EnvironmentStore(open_cache).build(parts, index.indexes)

        spec = EnvironmentSpec((requirement,))
        facts: dict[str, Any] = {"builds": builds, "mounted": mounted, "folder": open_cache}
        return await asyncio.to_thread(resolve_with_sources, spec, index.indexes, **facts)

    return resolve


async def failing(resolved: Resolve, code: str, **limits: Any) -> EnvironmentFailed:
    """Return the error of a resolution, after checking its code."""
    with pytest.raises(EnvironmentFailed) as caught:
        await resolved(limits=replace(BUILD_LIMITS, **limits))
    assert caught.value.code == code, caught.value
    return caught.value


async def answered(host: Host, name: str, bundle: Path, **arguments: object) -> Any:
    """Return the one environment of an operation's answer."""
    answer: Any = await host.invoke(f"environments.{name}", {"bundle": str(bundle), **arguments}, Context())
    (row,) = answer.rows
    return row


async def test_a_source_distribution_is_locked_with_its_build_and_built_when_that_is_allowed(
    host: Host, bundle: Path, open_cache: Path, index: LoopIndex
) -> None:
    """What a wheel needs and has no wheel is built of what its project and its backend require; all of that is locked, and no
    step is taken without the word for it.
    """
    index.add("two", requires=("raw>=1",))
    index.add("helper")
    index.add("extra")
    code = "import helper\ndef get_requires_for_build_wheel(*_):\n    return ['extra']\n"
    index.add_source("raw", files=source(code + "pathlib = __import__('pathlib')\n", requires='"helper"'))
    refused = await answered(host, "lock", bundle)
    assert (refused.state, refused.code) == ("failed", "environment_source_only")
    locked = await answered(host, "lock", bundle, allow_source=True)
    assert (locked.state, locked.packages) == ("locked", ("raw 1.0", "two 1.0"))
    raw, two = read_lock(bundle / "kdskills.lock")["public.forms"].packages
    assert (raw.file, [part.name for part in raw.build], two.build) == ("raw-1.0.tar.gz", ["extra", "helper"], ())
    refused = await answered(host, "build", bundle)
    assert (refused.state, refused.code) == ("failed", "environment_source_only")
    built = await answered(host, "build", bundle, allow_source=True)
    root = open_cache / "environments" / built.digest
    assert (built.state, (root / "python/raw.py").is_file()) == ("built", True)
    assert not (root / "python/helper.py").exists()
    await answered(host, "clean", bundle)
    assert (await answered(host, "show", bundle)).state == "locked"


async def test_a_legacy_project_is_built_by_setuptools(resolved: Resolve, index: LoopIndex) -> None:
    """Without a pyproject.toml the backend is that of setuptools, from the operator's index."""
    legacy = (
        "import runpy, shutil\nclass __legacy__:\n    @staticmethod\n    def build_wheel(folder, *_):\n"
        "        runpy.run_path('setup.py')\n        shutil.copy('raw-1.0-py3-none-any.whl', folder)\n"
    )
    index.add("setuptools", "70.0", files={"setuptools/__init__.py": b"", "setuptools/build_meta.py": legacy.encode()})
    setup = "import shutil\nshutil.copy('kept.whl', 'raw-1.0-py3-none-any.whl')\n"
    index.add_source("raw", files={"setup.py": setup, "kept.whl": wheel_bytes("raw")})
    (raw,) = await resolved()
    assert [part.file for part in raw.build] == ["setuptools-70.0-py3-none-any.whl"]


async def test_the_newest_source_that_fits_is_taken_and_wheels_go_first(resolved: Resolve, index: LoopIndex) -> None:
    """A release goes before a preview, what the requirement excludes is passed over, and an older wheel before all sources."""
    for version in ("1.0", "2.0", "3.0rc1", "4.0"):
        ready = {f"raw-{version}-py3-none-any.whl": wheel_bytes("raw", version)}
        index.add_source("raw", version, source(wheels=ready))
    index.yanked.add("raw-4.0.tar.gz")
    assert [package.file for package in await resolved()] == ["raw-2.0.tar.gz"]
    assert [package.file for package in await resolved("raw<2")] == ["raw-1.0.tar.gz"]
    wheel = index.add("raw", "1.0")
    assert [package.file for package in await resolved()] == [wheel]


async def test_a_build_neither_writes_outside_nor_reaches_anybody(
    resolved: Resolve, index: LoopIndex, tmp_path: Path
) -> None:
    """Code of a build sees no variable of this process and no file of this machine, changes none, and has no network."""
    proof = tmp_path / "proof"
    proof.mkdir(mode=0o777)
    code = f"""import glob, os, socket, urllib.request
tried = {{"home": os.path.exists({str(tmp_path)!r}), "env": "PLANTED_HERE" in os.environ}}
for path in ({str(proof / "written")!r}, "/etc/written", "/usr/lib/written", "/skills/written"):
    try:
        open(path, "w").close()
        tried[path] = True
    except OSError:
        tried[path] = False
try:
    urllib.request.urlopen({index.url + "/files/stolen"!r}, timeout=3)
    tried["network"] = True
except OSError:
    tried["network"] = False
if any(tried.values()):
    raise SystemExit(repr(tried))
"""
    os.environ["PLANTED_HERE"] = "yes"
    try:
        index.add_source("raw", files=source(code))
        assert [package.name for package in await resolved()] == ["raw"]
    finally:
        del os.environ["PLANTED_HERE"]
    assert (list(proof.iterdir()), index.asked["files/stolen"]) == ([], 0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "timeout|limit: the program"),  # seconds on the clock, or those of the processor
        ("import os\nwhile True: os.fork()", "fork|unavailable|BlockingIOError|timeout|nonzero"),
        ("x = bytearray(1 << 40)", "MemoryError|oom"),
        ("raise SystemExit('no compiler here')", "no compiler here"),
        ("import os\nos._exit(0)", "made 0 wheels|no list"),
    ],
)
async def test_a_build_that_goes_wrong_is_told(resolved: Resolve, index: LoopIndex, code: str, words: str) -> None:
    """Endless, forking, greedy and failing builds end, and their last words are in the error."""
    index.add_source("raw", files=source(code))
    error = await failing(resolved, "environment_build_failed", wall_s=10.0, pids=32)
    assert re.search(words, error.message), error.message
    assert len(error.message) < 3000


@pytest.mark.parametrize(
    ("name", "wheel", "code"),
    [
        ("other-1.0-py3-none-any.whl", wheel_bytes("other"), "environment_build_failed"),
        ("raw-2.0-py3-none-any.whl", wheel_bytes("raw", "2.0"), "environment_build_failed"),
        ("raw-1.0-cp39-cp39-win_amd64.whl", wheel_bytes("raw"), "environment_build_failed"),
        ("raw-1.0-py3-none-any.whl", b"no zip", "environment_wheel_refused"),
        ("raw-1.0-py3-none-any.whl", wheel_bytes("raw", files={"json.py": b""}), "environment_wheel_refused"),
        ("raw-1.0-py3-none-any.whl", wheel_bytes("raw", files={"../raw.py": b""}), "environment_wheel_refused"),
        ("raw-1.0-py3-none-any.whl", wheel_bytes("raw", record=b""), "environment_wheel_refused"),
    ],
)
async def test_the_wheel_that_comes_out_keeps_the_rules(
    resolved: Resolve, index: LoopIndex, name: str, wheel: bytes, code: str
) -> None:
    """One of another package, version or platform is no wheel of this one; a hostile one is refused as any other."""
    index.add_source("raw", files=source(wheels={name: wheel}))
    await failing(resolved, code)


@pytest.mark.parametrize(
    ("requires", "code"),
    [
        ('"-r /etc/passwd"', "environment_invalid"),
        ('"x @ file:///etc/passwd"', "environment_invalid"),
        ('"nobody-has-it"', "environment_unavailable"),
        ('"sourced"', "environment_source_only"),
        ("5", "environment_build_failed"),
    ],
)
async def test_what_a_build_requires_comes_as_wheels_from_the_index(
    resolved: Resolve, index: LoopIndex, requires: str, code: str
) -> None:
    """Options, files and addresses are refused, and what a build requires is not built itself."""
    index.add_source("sourced", files=source())
    index.add_source("raw", files=source(requires=requires))
    await failing(resolved, code)


async def test_an_archive_that_leads_outside_or_is_another_is_refused(resolved: Resolve, index: LoopIndex) -> None:
    """A path out of the archive's folder fails the build; bytes that are not those of the index's digest are not opened."""
    index.add_source("raw", files={**source(), "../../../../tmp/planted": "x"})
    await failing(resolved, "environment_build_failed")
    file = index.add_source("raw", files=source())
    index.lies[file] = index.files[file] + b"more"
    await failing(resolved, "environment_hash_mismatch")


async def test_a_lock_cannot_name_what_a_build_is_done_with_but_wheels(bundle: Path) -> None:
    """A wheel with a build, and a build with a source, are `environment_lock_invalid`."""
    package = {"name": "raw", "version": "1.0", "file": "raw-1.0.tar.gz", "url": "", "sha256": "0" * 64}
    wheel = {**package, "file": "raw-1.0-py3-none-any.whl"}
    for row, part in ((wheel, wheel), (package, package), (package, "raw"), (package, {**wheel, "build": [wheel]})):
        table = {"requirements": ["raw"], "platform": "any", "package": [{**row, "build": [part]}]}
        (bundle / "kdskills.lock").write_text(tomli_w.dumps({"environment": {"public.forms": table}}))
        with pytest.raises(EnvironmentFailed) as caught:
            read_lock(bundle / "kdskills.lock")
        assert caught.value.code == "environment_lock_invalid"


async def test_an_engine_without_a_wall_builds_nothing(bundle: Path, index: LoopIndex, tmp_path: Path) -> None:
    """`--allow-source` is refused where programs are not isolated, before an index is asked."""
    settings = Settings(
        executor="subprocess",
        min_isolation="none",
        allow_unisolated=True,
        environment_index={"loop": index.indexes[0].url},
        environment_cache_dir=tmp_path / "cache",
        state_dir=tmp_path / "state",
    )
    index.add_source("two", files=source())
    with pytest.raises(Exception, match="wall") as caught:
        await answered(Host(settings, entry_points=False), "lock", bundle, allow_source=True)
    assert getattr(caught.value, "code", "") == "isolation_too_weak"
    assert not index.asked
