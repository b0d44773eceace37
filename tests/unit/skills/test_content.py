"""Long texts come through one bounded cache and are never served unnoticed when they have changed."""

import os
import threading
import time

import pytest

from kdskills.errors import RootChanged, RootMissing
from kdskills.skills.folder import ContentRead, ContentReader
from kdskills.skills.safe_open import bytes_digest


class Decoder:
    """Counts how often bytes were decoded."""

    def __init__(self, cost: int = 10) -> None:
        self.calls = 0
        self.cost = cost

    def __call__(self, data: bytes) -> ContentRead[str]:
        self.calls += 1
        return ContentRead(data.decode(), cost=self.cost)


def _quiet(path) -> None:
    """Make a file look as if it had not been touched for a while."""
    old = time.time() - 60
    os.utime(path, (old, old))


def _read(reader, folder, decoder, name="file", expected=b"one"):
    return reader.read(str(folder), name, limit=100, expected=bytes_digest(expected), ref="x.y", decode=decoder)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "file").write_bytes(b"one")
    _quiet(tmp_path / "file")
    return tmp_path


@pytest.fixture
def reader():
    return ContentReader(verified=False, clock=time.time_ns)


def test_a_quiet_file_is_read_once(folder, reader):
    """The second read of an unchanged file comes from the cache."""
    decoder = Decoder()
    assert [_read(reader, folder, decoder).value for _ in range(3)] == ["one"] * 3
    assert decoder.calls == 1


def test_a_file_touched_just_now_is_read_again(folder, reader):
    """Within two seconds of its modification time, a stamp proves nothing."""
    os.utime(folder / "file")
    decoder = Decoder()
    _read(reader, folder, decoder)
    _read(reader, folder, decoder)
    assert decoder.calls == 2


def test_a_same_size_edit_with_the_same_times_is_seen_within_the_tick(folder, reader):
    """Even when size and modification time stay, a fresh edit is noticed."""
    os.utime(folder / "file")
    facts = (folder / "file").stat()
    assert not _read(reader, folder, Decoder()).stale
    (folder / "file").write_bytes(b"two")
    os.utime(folder / "file", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert _read(reader, folder, Decoder()).stale


def test_a_changed_file_is_served_as_stale(folder, reader):
    """The new text comes with a finding that names the skill."""
    _read(reader, folder, Decoder())
    (folder / "file").write_bytes(b"two")
    got = _read(reader, folder, Decoder())
    assert (got.value, got.stale, [n.code for n in got.diagnostics]) == ("two", True, ["stale"])
    assert (got.diagnostics[0].severity, got.diagnostics[0].ref, got.diagnostics[0].path) == ("warning", "x.y", "file")


def test_a_verified_reader_refuses_a_changed_file(folder):
    """A child whose files must be the exported ones gets no other text."""
    reader = ContentReader(verified=True, clock=time.time_ns)
    assert _read(reader, folder, Decoder()).value == "one"
    (folder / "file").write_bytes(b"two")
    with pytest.raises(RootChanged) as caught:
        _read(reader, folder, Decoder())
    assert caught.value.code == "skill_changed"
    assert caught.value.details["found"] == bytes_digest(b"two")


def test_a_file_that_is_gone_or_became_a_link_is_an_error(folder, reader):
    """Nothing is served from the cache for a file that is no longer one."""
    _read(reader, folder, Decoder())
    (folder / "file").rename(folder / "other")
    with pytest.raises(RootMissing) as gone:
        _read(reader, folder, Decoder())
    (folder / "file").symlink_to(folder / "other")
    with pytest.raises(RootMissing) as linked:
        _read(reader, folder, Decoder())
    assert (gone.value.details["reason"], linked.value.details["reason"]) == ("file_missing", "symlink")
    assert gone.value.code == "skill_missing"


def test_the_cache_is_bounded_and_drops_the_longest_unused(tmp_path):
    """Costs add up to the bound at most; what was used last stays."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"one")
        _quiet(tmp_path / name)
    reader = ContentReader(verified=False, clock=time.time_ns, cache_bytes=20)
    decoders = {name: Decoder() for name in "abc"}
    for name in "ababcabc":  # a is dropped for c, b for a, c for b, a for c
        _read(reader, tmp_path, decoders[name], name)
        assert reader.cached_bytes <= 20
    assert reader.cached_bytes == 20
    assert sum(decoder.calls for decoder in decoders.values()) == 6


def test_what_costs_more_than_the_cache_is_served_and_not_kept(folder):
    """A huge text does not empty the cache, and is not kept."""
    reader = ContentReader(verified=False, clock=time.time_ns, cache_bytes=5)
    assert (_read(reader, folder, Decoder(cost=6)).value, reader.cached_bytes) == ("one", 0)


def test_clear_forgets(folder, reader):
    """After `clear` files are read again."""
    decoder = Decoder()
    _read(reader, folder, decoder)
    reader.clear()
    _read(reader, folder, decoder)
    assert (decoder.calls, reader.cached_bytes) == (2, 10)


def test_many_threads_share_the_cache(tmp_path):
    """Threads reading many files at once get the right texts, and the bound holds."""
    names = [f"f{n}" for n in range(20)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
        _quiet(tmp_path / name)
    reader = ContentReader(verified=False, clock=time.time_ns, cache_bytes=55)
    wrong = []

    def work():
        for _ in range(20):
            for name in names:
                got = _read(reader, tmp_path, Decoder(), name, name.encode())
                if got.value != name or reader.cached_bytes > 55:
                    wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, reader.cached_bytes <= 55) == ([], True)
