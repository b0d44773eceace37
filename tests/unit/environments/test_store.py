"""Environments are built once, whole or not at all, from files that are the locked ones, and removed when nobody uses them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from kdskills.environments import resolve as room
from kdskills.environments import store
from kdskills.environments.codes import ENVIRONMENT_CODES, EnvironmentFailed
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment
from kdskills.environments.resolve import PackageIndex, configured_indexes, platform_name, resolve
from kdskills.environments.sources import SourceBuilds, find_sources, resolve_with_sources
from kdskills.environments.store import EnvironmentStore, digest_of, digests_in_use
from tests.unit.environments.conftest import wheel_bytes

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(tmp_path):
    """A folder for a store."""
    return tmp_path / "cache"


def printed(mount, program, *, env=None):
    """Return what a program prints that has an environment."""
    variables = {"PATH": f"{mount.root / 'bin'}:{os.defpath}", "PYTHONPATH": str(mount.root / "python"), **(env or {})}
    command = [sys.executable, "-S", "-c", program]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def failing(store_, locked, index, code):
    """Return the error of a build, after checking its code, and that nothing of it is used."""
    with pytest.raises(EnvironmentFailed) as caught:
        store_.build(locked, index.indexes)
    assert (caught.value.code, caught.value.code in ENVIRONMENT_CODES) == (code, True), caught.value
    assert store_.built(locked) is None
    return caught.value


def entries(cache):
    """Return the names in the store's folders."""
    top = cache / "environments"
    return sorted(path.name for folder in (top, top / "wheels") for path in folder.iterdir() if path.name != ".lock")


def test_a_locked_environment_is_built_and_imported(index, cache):
    """What was built is importable, has its programs, a note, plain modes and bytecode, and is the same the next time."""
    index.add("one", requires=("two",), entry_points="[console_scripts]\nrun-one = one:print\n")
    index.add("two", files={"two/__init__.py": b"X = 2\n", "two/broken.py": b"def :\n"})
    locked, environments = index.locked("one"), EnvironmentStore(cache)
    with pytest.raises(EnvironmentFailed) as missing:
        environments.mount_of(locked)
    assert (missing.value.code, missing.value.who) == ("environment_missing", "operator")
    mount = environments.build(locked, index.indexes)
    assert mount.root == cache / "environments" / digest_of(locked) == environments.mount_of(locked).root
    assert printed(mount, "import one, two; print(one.VERSION, two.X)") == "1.0 2\n"
    assert (mount.root / "bin/run-one").is_file()
    note = json.loads((mount.root / "environment.json").read_text())
    assert note["packages"] == ["one==1.0", "two==1.0"]
    modes = {path.stat().st_mode & 0o777 for path in mount.root.rglob("*")} | {mount.root.stat().st_mode & 0o777}
    assert modes <= {0o644, 0o755}
    compiled = mount.root / "python/two/__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    assert compiled.read_bytes()[4] == 1  # by hash, and never checked
    asked = index.asked.copy()
    assert environments.build(locked, index.indexes) == mount
    assert index.asked == asked


def test_the_digest_tells_files_apart_and_skills_together(index):
    """Two skills with the same files have one environment; other bytes make another."""
    index.add("one")
    locked = index.locked("one")
    other = replace(locked.packages[0], sha256="0" * 64)
    assert digest_of(replace(locked, key="other/skill", requirements=("one>=1",))) == digest_of(locked)
    assert digest_of(replace(locked, packages=(other,))) != digest_of(locked)


def test_wheels_are_unpacked_once_and_shared(index, cache):
    """A wheel of two environments is downloaded once, and its files are on the disk once."""
    for name in ("one", "two", "three"):
        index.add(name)
    environments = EnvironmentStore(cache)
    first = environments.build(index.locked("one", "two"), index.indexes)
    index.asked.clear()
    second = environments.build(index.locked("one", "three"), index.indexes)
    assert index.asked["files/one-1.0-py3-none-any.whl"] == 0 or index.asked["files/three-1.0-py3-none-any.whl"] > 0
    assert (first.root / "python/one.py").samefile(second.root / "python/one.py")


def test_fifty_processes_make_one_build(index, cache):
    """Fifty processes that ask for one environment at the same time all get it, and it is downloaded once."""
    index.add("one")
    locked = index.locked("one")
    index.asked.clear()
    context = get_context("fork")
    answers = context.SimpleQueue()

    def ask():
        told = []
        mount = EnvironmentStore(cache).build(locked, index.indexes, tell=lambda *event: told.append(event[0]))
        answers.put(((mount.root / "python/one.py").is_file(), "built" in told))

    processes = [context.Process(target=ask) for _ in range(50)]
    for process in processes:
        process.start()
    results = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    assert [whole for whole, _ in results] == [True] * 50
    assert sum(built for _, built in results) == 1


def test_a_killed_build_leaves_nothing_that_is_used(index, cache):
    """A build ended by SIGKILL wherever it is leaves no environment, and the next build makes it and removes the rest."""
    for number in range(6):
        index.add(f"one{number}")
    locked = index.locked(*(f"one{number}" for number in range(6)))
    for pause in (0.0, 0.05, 0.3, 0.6):
        shutil.rmtree(cache, ignore_errors=True)
        pid = os.fork()
        if pid == 0:
            try:
                EnvironmentStore(cache).build(locked, index.indexes)
            finally:
                os._exit(0)
        started = time.monotonic()
        while not list(cache.glob("environments/.new-*")) and time.monotonic() - started < 20:
            time.sleep(0.001)
        time.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        environments = EnvironmentStore(cache)
        mount = environments.built(locked) or environments.build(locked, index.indexes)
        assert len(list((mount.root / "python").glob("one*.py"))) == 6
        environments.remove([])  # nothing but what killed builds left
        assert [name for name in entries(cache) if name.startswith(".")] == []


@pytest.mark.needs("bubblewrap")
def test_a_full_disk_is_told(index, tmp_path):
    """Where the cache's disk is full, the error says so, nothing half-built is used, and the disk is as it was."""
    index.add("one", files={"one.py": os.urandom(3 << 20)})
    index.add("small")
    folder = tmp_path / "disk"
    folder.mkdir()
    program = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from kdskills.environments.codes import EnvironmentFailed
        from kdskills.environments.model import *
        from kdskills.environments.store import EnvironmentStore
        from kdskills.environments.resolve import PackageIndex
        indexes = (PackageIndex("loop", {index.indexes[0].url!r}),)
        store = EnvironmentStore(Path({str(folder / "cache")!r}))
        try:
            store.build({index.locked("one")!r}, indexes)
        except EnvironmentFailed as error:
            print(error.code, "1" if os.statvfs({str(folder)!r}).f_bavail * 4096 > 1500_000 else "full")
        print(store.build({index.locked("small")!r}, indexes).root.is_dir())
    """)
    mount = f'mount -t tmpfs -o size=2m tmpfs "{folder}" && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (run.stdout, run.stderr) == ("environment_no_space 1\nTrue\n", "")


def test_wrong_bytes_are_refused(index, cache):
    """A file whose digest is not the locked one is `environment_hash_mismatch`, whoever lies about it."""
    file = index.add("one")
    locked = index.locked("one")
    index.lies[file] = index.files[file][:-1] + b"x"
    environments = EnvironmentStore(cache)
    failing(environments, locked, index, "environment_hash_mismatch")
    index.lies.clear()
    index.add("one", files={"one.py": b"import os; os.system('id')"})  # the index has another file under the name now
    failing(environments, locked, index, "environment_hash_mismatch")
    assert entries(cache) == ["wheels"]


def test_a_file_that_is_larger_than_locked_is_given_up(index, cache):
    """A download that goes on beyond the locked size ends there."""
    file = index.add("one")
    locked = index.locked("one")
    locked = replace(locked, packages=(replace(locked.packages[0], size=len(index.files[file])),))
    index.lies[file] = b"x" * (64 << 20)
    error = failing(EnvironmentStore(cache), locked, index, "environment_hash_mismatch")
    assert "more bytes" in error.message


def test_what_the_index_lost_is_told(index, cache):
    """A locked file that no index offers any more is `environment_unavailable`; a yanked one is built, and told."""
    file = index.add("one")
    index.add("one", "2.0")
    locked = index.locked("one==1.0")
    data = index.files.pop(file)
    failing(EnvironmentStore(cache), locked, index, "environment_unavailable")
    index.files[file] = data
    index.yanked.add(file)
    told = []
    EnvironmentStore(cache).build(locked, index.indexes, tell=lambda *event: told.append(event))
    assert any(kind == "warning" and "yanked" in words for kind, words, _ in told)


def test_an_index_that_goes_away_is_told(index, cache, monkeypatch):
    """Nobody listening, an error for the file, and a server that falls silent are `environment_index_unreachable`."""
    monkeypatch.setattr(room, "PAUSE_S", 0.01)
    monkeypatch.setattr(room, "SILENCE_S", 0.2)
    index.add("one")
    locked, environments = index.locked("one"), EnvironmentStore(cache)
    good, index.url = index.url, "http://127.0.0.1:9"
    failing(environments, locked, index, "environment_index_unreachable")
    index.url = good
    offers = store.list_wheels(["one==1.0"], index.indexes, dependencies=False)
    monkeypatch.setattr(store, "list_wheels", lambda *_, **__: offers)
    index.status = 503
    failing(environments, locked, index, "environment_index_unreachable")
    index.status, index.delay_s = 200, 1.0
    failing(environments, locked, index, "environment_index_unreachable")
    assert entries(cache) == ["wheels"]


def test_addresses_in_a_lock_are_not_followed(index, cache):
    """Files come from the operator's index; the address that a lock tells is only told."""
    index.add("one")
    locked = index.locked("one")
    evil = replace(locked.packages[0], url="file:///etc/passwd")
    mount = EnvironmentStore(cache).build(replace(locked, packages=(evil,)), index.indexes)
    assert (mount.root / "python/one.py").is_file()


def test_files_are_read_from_disk_for_an_index_of_files_alone(index, tmp_path):
    """An address of a file is opened only where the operator's own index is one of files."""
    file = index.add("one")
    package = index.locked("one").packages[0]
    (tmp_path / file).write_bytes(index.files[file])
    here = replace(package, url=(tmp_path / file).as_uri())
    with pytest.raises(EnvironmentFailed) as caught:
        room.fetch_wheel(here, index.indexes, tmp_path / "a")
    assert caught.value.code == "environment_index_unreachable"
    own = (PackageIndex("files", tmp_path.as_uri()),)
    assert room.fetch_wheel(here, own, tmp_path / "b") == len(index.files[file])


class ReadyBuilds(SourceBuilds):
    """Gives a wheel that says what it was built with, and tells where that was."""

    def names(self, *_):
        """Return that nothing is required."""
        return ()

    def wheel(self, source, file, mount, folder):
        """Return the wheel."""
        self.run(folder)
        words = repr([part.version for part in source.build]).encode()
        (folder / "raw-1.0-py3-none-any.whl").write_bytes(wheel_bytes("raw", files={"raw.py": words}))
        return folder / "raw-1.0-py3-none-any.whl"


def test_a_wheel_that_was_built_here_is_that_of_its_build(index, cache, monkeypatch):
    """Other requirements of a build, and another Python, make another wheel of the same source; each is found again."""
    index.add_source("raw")
    index.add("helper")
    index.add("helper", "2.0")
    environments, (source,) = EnvironmentStore(cache), find_sources("raw", index.indexes)
    locks, folders = [], []
    for version in ("1.0", "2.0"):
        build = resolve(EnvironmentSpec((f"helper=={version}",)), index.indexes)
        locks.append(LockedEnvironment("lab/skill", ("raw",), "", platform_name(), (replace(source, build=build),)))
    for locked, words in zip(locks, ("['1.0']", "['2.0']"), strict=True):
        mount = environments.build(locked, index.indexes, builds=ReadyBuilds(folders.append))
        assert (mount.root / "python/raw.py").read_text() == words
        assert environments.assembled(locked) == mount
    name = store.tree_name(locks[0].packages[0])
    with monkeypatch.context() as patch:
        patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        assert store.tree_name(locks[0].packages[0]) != name
    environments.remove(locks)
    assert name not in entries(cache)


def test_builds_of_sources_lie_in_the_store_and_are_swept(index, cache):
    """What a killed build of a source left goes a day later; folders of builds that may be at work stay."""
    index.add_source("raw")
    environments, folders = EnvironmentStore(cache), []
    facts = {"builds": ReadyBuilds(folders.append), "mounted": None, "folder": environments.top}
    (raw,) = resolve_with_sources(EnvironmentSpec(("raw",)), index.indexes, **facts)
    locked = LockedEnvironment("lab/skill", ("raw",), "", platform_name(), (raw,))
    environments.build(locked, index.indexes, builds=ReadyBuilds(folders.append))
    assert {folder.parent for folder in folders} == {environments.top}
    for name, seconds in ((".source-old", 2 * store.SCRATCH_S), (".source-new", 60)):
        (environments.top / name / "x").mkdir(parents=True)
        os.utime(environments.top / name, (time.time() - seconds,) * 2)
    environments.remove([])
    assert [path.name for path in environments.top.glob(".source-*")] == [".source-new"]


def test_packages_with_different_files_of_one_path_are_refused(index, cache):
    """Two packages may share a folder and equal files; different bytes under one path are refused with the path."""
    index.add("one", files={"space/one.py": b"", "space/same.py": b"same"})
    index.add("two", files={"space/two.py": b"", "space/same.py": b"same"})
    index.add("three", files={"space/one.py": b"other"})
    index.add("four", files={"space": b"a file"})
    environments = EnvironmentStore(cache)
    mount = environments.build(index.locked("one", "two"), index.indexes)
    assert sorted(path.name for path in (mount.root / "python/space").glob("*.py")) == ["one.py", "same.py", "two.py"]
    error = failing(environments, index.locked("one", "three"), index, "environment_wheel_refused")
    assert "python/space/one.py" in error.message
    failing(environments, index.locked("one", "four"), index, "environment_wheel_refused")


def test_a_hostile_wheel_leaves_nothing(index, cache):
    """A wheel that is refused ends the build; nothing of it is in the store."""
    index.add("one", files={"one.py": b"", "json.py": b"print('mine')"})
    failing(EnvironmentStore(cache), index.locked("one"), index, "environment_wheel_refused")
    assert entries(cache) == ["wheels"]


def test_nothing_of_a_package_runs_here(index, cache, tmp_path):
    """Modules, `.pth` files and `sitecustomize` of a package do not run while it is locked and built."""
    proof = tmp_path / "ran"
    evil = f"open({str(proof)!r}, 'w').close()\n".encode()
    files = {"one.py": evil, "sitecustomize.py": evil, "one.pth": b"import one\n", "setup.py": evil}
    index.add("one", files=files)
    EnvironmentStore(cache).build(index.locked("one"), index.indexes)
    assert not proof.exists()


def test_a_lock_for_another_platform_is_told(index, cache):
    """Files that do not run here are `environment_platform`; source distributions, and Node packages that nobody brings, have their codes."""
    index.add("one")
    locked, environments = index.locked("one"), EnvironmentStore(cache)
    package = locked.packages[0]
    for facts, code in (
        ({"packages": (replace(package, file="one-1.0-cp39-cp39-win_amd64.whl"),)}, "environment_platform"),
        ({"packages": (replace(package, file="one-1.0.tar.gz"),)}, "environment_source_only"),
        ({"node": "0" * 64}, "environment_missing"),
    ):
        failing(environments, replace(locked, **facts), index, code)


def test_the_least_recently_used_go_and_none_in_use(index, cache, monkeypatch):
    """Beyond the bound the oldest environments go, but for those that programs have mounted or on their path."""
    monkeypatch.setattr(store, "RECENT_S", 0.0)
    for name in ("one", "two", "three"):
        index.add(name, files={f"{name}.py": b"#" + os.urandom(300_000).hex().encode()})
    environments = EnvironmentStore(cache, limit=1_500_000)
    locks = [index.locked(name, key=name) for name in ("one", "two", "three")]
    first = environments.build(locks[0], index.indexes)
    command = ["sleep", "60"]
    with subprocess.Popen(command, env={"PATH": os.defpath, "PYTHONPATH": str(first.root / "python")}) as user:
        while first.digest not in digests_in_use():
            time.sleep(0.01)
        environments.build(locks[1], index.indexes)
        environments.build(locks[2], index.indexes)
        assert [environments.built(lock) is not None for lock in locks] == [True, False, True]
        assert environments.remove(locks) == (pytest.approx(600_000, rel=0.2), ["one"])
        user.kill()
    freed, staying = environments.remove(locks)
    assert freed > 500_000
    assert staying == []
    assert entries(cache) == ["wheels"]


@pytest.mark.needs("index")
def test_real_packages_are_locked_and_built(cache):
    """The packages pypdf and pandas of the real index are locked, built, and do their work with nothing else on the path."""
    indexes = configured_indexes()
    packages = resolve(EnvironmentSpec(("pandas", "pypdf")), indexes)
    locked = LockedEnvironment("lab/real", ("pandas", "pypdf"), "", platform_name(), packages)
    mount = EnvironmentStore(cache).build(locked, indexes)
    program = (
        "import io, pandas, pypdf\n"
        "writer = pypdf.PdfWriter(); writer.add_blank_page(72, 72); out = io.BytesIO(); writer.write(out)\n"
        "print(len(pypdf.PdfReader(out).pages), pandas.DataFrame({'a': [1, 2]})['a'].sum())\n"
    )
    assert printed(mount, program) == "1 3\n"


def test_other_errors_of_the_system_stay_what_they_are(index, cache, monkeypatch):
    """Only a full disk reads as one: another error of the system is not renamed."""
    index.add("one")
    locked = index.locked("one")

    def refuse(_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(store, "bring_to_disk", refuse)
    with pytest.raises(OSError, match="broken"):
        EnvironmentStore(cache).build(locked, index.indexes)
    assert EnvironmentStore(cache).built(locked) is None
