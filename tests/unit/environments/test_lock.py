"""The lock file says the same for the same facts, keeps what others wrote, and is read with suspicion."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import lock_text, node_digest, read_lock, stale_reason, write_lock
from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage, NodeSpec

SHA = "ab" * 32
PACKAGE = LockedPackage("one", "1.0", "one-1.0-py3-none-any.whl", "https://example.net/one.whl", SHA, 12, "loop")
LOCKED = LockedEnvironment("lab/skill", ("one>=1",), ">=3.11", "cp311-linux_x86_64", (PACKAGE,))

packages = st.lists(
    st.builds(
        lambda name, version, sha: replace(
            PACKAGE, name=name, version=version, file=f"{name}-{version}-py3-none-any.whl", sha256=sha
        ),
        st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True),
        st.from_regex(r"[1-9]\.[0-9]", fullmatch=True),
        st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    ),
    unique_by=lambda package: package.name,
    max_size=4,
).map(lambda rows: tuple(sorted(rows, key=lambda row: row.name)))
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
environments = st.dictionaries(texts, st.tuples(st.lists(texts, max_size=3), texts, packages), max_size=4).map(
    lambda rows: {
        key: LockedEnvironment(key, tuple(requirements), python, "cp311-linux_x86_64", found)
        for key, (requirements, python, found) in rows.items()
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(environments)
def test_what_is_written_is_read(tmp_path, written):
    """Every lock reads as it was written, and the order of its making changes no byte."""
    path = tmp_path / "kdskills.lock"
    write_lock(path, written)
    assert read_lock(path) == written
    backwards = dict(reversed(written.items()))
    assert write_lock(path, backwards) is False
    assert path.read_text() == lock_text(path, backwards)


def test_no_file_is_no_lock(tmp_path):
    """Where there is no file nothing is locked."""
    assert read_lock(tmp_path / "kdskills.lock") == {}


def test_tables_of_others_stay(tmp_path):
    """Tables that are not ours are kept when environments are written, and when the last one goes."""
    path = tmp_path / "kdskills.lock"
    path.write_text('version = 3\n\n[skill.one]\ndigest = "x"\n')
    write_lock(path, {"lab/skill": LOCKED})
    assert read_lock(path) == {"lab/skill": LOCKED}
    write_lock(path, {})
    assert path.read_text() == 'version = 3\n\n[skill.one]\ndigest = "x"\n'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[environment", "[[["),
        (SHA, "zz"),
        ("one-1.0-py3-none-any.whl", "../../etc/passwd"),
        ("one-1.0-py3-none-any.whl", "two-1.0-py3-none-any.whl"),
        ("one-1.0-py3-none-any.whl", "one-2.0-py3-none-any.whl"),
        ("size = 12", "size = -1"),
        ("size = 12", 'size = "12"'),
        ('name = "one"', 'name = "One"'),
        ('name = "one"', "name = 1"),
        ('"one>=1"', "7"),
        ("index =", "unknown ="),
        ('platform = "cp311-linux_x86_64"\n', ""),
        ('requires_python = ">=3.11"', "requires_python = 3"),
        ('[environment."lab/skill"]', "[environment]"),
    ],
)
def test_entries_that_are_none_are_refused(tmp_path, old, new):
    """What could not have been written by us ends in `environment_lock_invalid`, and nothing is overwritten by chance."""
    path = tmp_path / "kdskills.lock"
    write_lock(path, {"lab/skill": LOCKED})
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(EnvironmentFailed) as caught:
        read_lock(path)
    assert caught.value.code == "environment_lock_invalid"


@pytest.mark.parametrize("data", [b"\xff", b"a = [" * 5000, b"environment = 3", b"x" * (33 << 20)])
def test_files_that_are_no_locks_are_refused(tmp_path, data):
    """Bytes that are no text, no TOML, too deep or too many end in `environment_lock_invalid`."""
    path = tmp_path / "kdskills.lock"
    path.write_bytes(data)
    with pytest.raises(EnvironmentFailed) as caught:
        read_lock(path)
    assert (caught.value.code, caught.value.who) == ("environment_lock_invalid", "author")


def test_a_lock_grows_stale_with_its_skill():
    """Other requirements, another Python and other Node packages each make a lock stale, and the reason names them."""
    spec = EnvironmentSpec(("one>=1",), ">=3.11")
    assert stale_reason(LOCKED, spec) == ""
    assert stale_reason(LOCKED, replace(spec, origins=("x",), programs=("jq",))) == ""
    assert stale_reason(LOCKED, replace(spec, requirements=("two",))) == "asked for now: two; no longer: one>=1"
    assert "3.12" in stale_reason(LOCKED, replace(spec, requires_python=">=3.12"))
    node = NodeSpec(b"{}")
    assert "Node" in stale_reason(LOCKED, replace(spec, node=node))
    assert stale_reason(replace(LOCKED, node=node_digest(node)), replace(spec, node=node)) == ""
    assert node_digest(node) != node_digest(NodeSpec(b"{}", b"x")) != node_digest(NodeSpec(b"{}x"))


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    """A lock file that leads elsewhere is not read, so that nothing of another file comes into it; nor is a pipe."""
    secret = tmp_path / "config.toml"
    secret.write_text('[service]\ntoken = "hunter2"\n')
    path = tmp_path / "kdskills.lock"
    for make in (lambda: path.symlink_to(secret), lambda: os.mkfifo(path), path.mkdir):
        make()
        for call in (lambda: read_lock(path), lambda: write_lock(path, {"lab/skill": LOCKED})):
            with pytest.raises(EnvironmentFailed) as caught:
                call()
            assert caught.value.code == "environment_lock_invalid"
            assert "hunter2" not in caught.value.message
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.toml"]
