"""A rollout file under a change: nothing but line 1 differs, and what is cut off is put back."""

import json
import os
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.remote.catalog import rollout

TOOL = {"type": "function", "name": "a", "description": "d", "inputSchema": {"type": "object"}}


def head_line(thread="t", **payload):
    """Return a first line as the server writes it."""
    record = {"timestamp": "x", "ordinal": 0, "type": "session_meta", "payload": {"id": thread, "cwd": "/ü", **payload}}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def file(tmp_path):
    """Return a thread's file of two lines, in a folder as the server has it."""
    path = tmp_path / "sessions" / "2026" / "rollout-x-t.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(head_line(dynamic_tools=[]) + b'{"type":"event_msg"}\n{"half')
    path.chmod(0o640)
    return path


def change(path, tools, thread="t"):
    """Change a file as the reload does."""
    head = rollout.read_head(path, thread)
    rollout.back_up(head)
    rollout.swap(head, rollout.stage(head, head.with_tools(tools)))
    rollout.drop_backup(path)


def test_only_the_tools_of_line_one_change(file):
    """Every other byte, the mode and the rest of line 1 stay; no helper file is left."""
    before = rollout.read_head(file, "t")
    rest = file.read_bytes()[len(before.line) :]
    change(file, [TOOL])
    after = rollout.read_head(file, "t")
    assert after.tools == [TOOL]
    assert {**after.record["payload"], "dynamic_tools": []} == before.record["payload"]
    assert file.read_bytes()[len(after.line) :] == rest
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [one.name for one in file.parent.iterdir()] == [file.name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=6))
def test_what_follows_moves_only_when_it_must(file, sizes):
    """After the first growth, catalogs that fit the room leave the length of line 1 alone."""
    change(file, [])
    longest = len(rollout.read_head(file, "t").line)
    for size in sizes:
        change(file, [{**TOOL, "description": "x" * size}])
        now = len(rollout.read_head(file, "t").line)
        assert now == longest or now > longest + rollout.ROOM_BYTES - 1
        longest = now


def test_a_line_that_fits_exactly_keeps_its_length():
    """A text one byte shorter than the line fits; one of its length needs a longer line, with room."""
    assert rollout.padded(b"abc", 4) == b"abc\n"
    assert rollout.padded(b"ab", 4) == b"ab \n"
    assert len(rollout.padded(b"abcd", 4)) == 5 + rollout.ROOM_BYTES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage\n",
        b"{}\n",
        b"[1]\n",
        head_line()[:-1],
        b'{"type":"session_meta","payload":[]}\n',
        b'{"type":"response_item","payload":{"id":"t"}}\n',
        head_line(thread="another"),
        b"[" * 100_000 + b"\n",
        b"\x00\xff\n",
    ],
    ids=range(10),
)
def test_an_unknown_first_line_is_refused(file, content):
    """Whatever is not this thread's `session_meta`, ended by a line end, is `UnknownFormat`."""
    file.write_bytes(content)
    with pytest.raises(rollout.UnknownFormat):
        rollout.read_head(file, "t")


def test_what_is_no_plain_file_is_refused(file, tmp_path):
    """Links, folders, pipes and missing files are `UnknownFormat`, and nothing waits."""
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "missing"):
        with pytest.raises(rollout.UnknownFormat):
            rollout.read_head(path, "t")


def appended(path):
    """The server writes on."""
    with path.open("ab") as file:
        file.write(b"more\n")


def truncated(path):
    """Somebody cuts the file."""
    os.truncate(path, 10)


def replaced(path):
    """Somebody puts another file of the same size in its place."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def touched(path):
    """Somebody rewrites it in place."""
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def removed(path):
    """Somebody deletes it."""
    path.unlink()


@pytest.mark.parametrize("event", [appended, truncated, replaced, touched, removed], ids=lambda event: event.__name__)
@pytest.mark.parametrize("when", ["before staging", "before the swap"])
def test_a_file_that_changed_underneath_is_left_alone(file, event, when):
    """Whatever happens to the file meanwhile, it is not overwritten, and no helper file stays."""
    head = rollout.read_head(file, "t")
    staged = rollout.stage(head, head.with_tools([TOOL])) if when == "before the swap" else None
    event(file)
    left = file.read_bytes() if file.exists() else None
    with pytest.raises((rollout.ChangedUnderneath, OSError)):
        rollout.swap(head, staged if staged is not None else rollout.stage(head, head.with_tools([TOOL])))
    assert (file.read_bytes() if file.exists() else None) == left
    assert [one.name for one in file.parent.iterdir() if "kdskills" in one.name] == []


def test_a_backup_is_private_and_puts_line_one_back(file):
    """The backup is for its owner only; restoring keeps what was written after the change."""
    head = rollout.read_head(file, "t")
    rollout.back_up(head)
    assert stat.S_IMODE(rollout.backup_of(file).stat().st_mode) == 0o600
    rollout.swap(head, rollout.stage(head, head.with_tools([TOOL])))
    appended(file)
    assert rollout.restore(file) is True
    assert file.read_bytes() == head.line + b'{"type":"event_msg"}\n{"halfmore\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert rollout.backup_owner(file) == "t"
    rollout.drop_backup(file)
    assert rollout.backup_owner(file) is None
    assert rollout.restore(file) is False


def test_a_cut_off_change_is_mended_at_start(file, tmp_path):
    """Wherever a change died, the old first line is back, the pointers are gone, and no backup is left."""
    database = make_index(tmp_path)
    head = rollout.read_head(file, "t")
    rest = file.read_bytes()[len(head.line) :]
    for left in (head.line, b"gar" + head.line[3:], head.with_tools([TOOL]), b""):
        rollout.back_up(head)
        file.write_bytes(left + (b"\n" if not left else b"") + rest)
        assert rollout.mend_home(tmp_path) == [file]
        assert file.read_bytes() == head.line + rest
        assert rows_of(database) == ["s"]
        assert rollout.mend_home(tmp_path) == []
    assert rollout.mend_home(tmp_path / "no-home") == []


def test_mending_keeps_the_mark_while_the_index_is_locked(file, tmp_path, monkeypatch):
    """An index that stays locked leaves the backup where it is; the next start settles both."""
    import contextlib
    import sqlite3

    monkeypatch.setattr(rollout, "_BUSY_SECONDS", 0.05)
    database = make_index(tmp_path)
    head = rollout.read_head(file, "t")
    rollout.back_up(head)
    file.write_bytes(b"gar" + file.read_bytes()[3:])
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as busy:
        busy.execute("BEGIN EXCLUSIVE")
        assert rollout.mend_home(tmp_path) == [file]
        assert rollout.backup_of(file).exists()
        busy.execute("ROLLBACK")
    assert rollout.read_head(file, "t").line == head.line
    assert rows_of(database) == ["s", "t"]
    rollout.mend_home(tmp_path)
    assert rows_of(database) == ["s"]
    assert not rollout.backup_of(file).exists()


def test_a_change_that_is_under_way_is_not_mended(file, tmp_path):
    """The lock of the process that changes the file keeps mending away; a backup of nobody's is left alone."""
    rollout.back_up(rollout.read_head(file, "t"))
    with rollout.locked(file, 1.0):
        assert rollout.mend_home(tmp_path) == []
    rollout.backup_of(file).write_bytes(b"half a li")
    assert rollout.mend_home(tmp_path) == []


def test_one_worker_at_a_time(file):
    """The lock keeps a second one out, and ends with its holder."""
    with rollout.locked(file, 1.0), pytest.raises(rollout.LockBusy), rollout.locked(file, 0.05):
        pass
    with rollout.locked(file, 0.0):
        pass


def test_a_lock_that_is_a_link_is_not_followed(file, tmp_path):
    """A link in the lock's place opens nothing elsewhere."""
    file.with_name(file.name + rollout.LOCK_SUFFIX).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), rollout.locked(file, 0.0):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_successor_gets_the_items_without_developer_messages(file):
    """`response_item`s in order, minus the server's own instructions; broken lines are skipped."""
    lines = [
        {"type": "response_item", "payload": {"type": "message", "role": "developer"}},
        {"type": "response_item", "payload": {"type": "message", "role": "user", "n": 1}},
        {"type": "event_msg", "payload": {}},
        {"type": "response_item", "payload": {"type": "function_call", "n": 2}},
    ]
    file.write_bytes(head_line() + b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b"{broken\n[1]\n")
    assert [item["n"] for item in rollout.response_items(file)] == [1, 2]
    assert rollout.response_items(file.with_name("missing")) == []


def make_index(home, tables=("thread_turns", "thread_items", "thread_history_projection_state")):
    """Make an index as newer servers have it, with rows of two segments."""
    import contextlib
    import sqlite3

    path = home / "thread_history_1.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for table in tables:
            db.execute(f"CREATE TABLE {table} (thread_id TEXT, x INTEGER)")
            db.executemany(f"INSERT INTO {table} VALUES (?, 1)", [("t",), ("s",)])
    return path


def rows_of(path):
    """Return the segments an index has rows of."""
    import contextlib
    import sqlite3

    with contextlib.closing(sqlite3.connect(path)) as db:
        return sorted(row[0] for row in db.execute("SELECT thread_id FROM thread_turns"))


def test_the_servers_pointers_of_one_segment_are_dropped(tmp_path):
    """Rows of the file's own segment go, others stay; an index of another shape or garbage is refused."""
    path = make_index(tmp_path)
    assert rollout.find(tmp_path) == [path]
    assert rollout.forget(path, "s") == 3
    assert rows_of(path) == ["t"]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(rollout.UnknownFormat, match="other tables"):
        rollout.forget(make_index(other, tables=("thread_turns",)), "t")
    path.write_bytes(b"no database" * 100)
    with pytest.raises(rollout.UnknownFormat, match="cannot be changed"):
        rollout.forget(path, "t")
    assert rollout.find(None) == rollout.find(tmp_path / "nowhere") == []


def test_the_segment_is_in_the_files_name(tmp_path):
    """A file that continues another after a revert has a segment of its own."""
    assert rollout.segment_of(tmp_path / "rollout-2026-01-01T00-00-00-t-1.jsonl", "t-1") == "t-1"
    assert rollout.segment_of(tmp_path / "rollout-2026-01-01T00-00-00-t-1_seg-2.jsonl", "t-1") == "seg-2"


def test_a_fork_is_found(file, tmp_path):
    """A file whose history begins in the segment is found; others, and broken ones, are not."""
    assert rollout.continued_elsewhere(tmp_path, "t") is None
    fork = file.with_name("rollout-x-f.jsonl")
    fork.write_bytes(head_line("f", history_base={"thread_id": "t", "end_byte_offset": 3}))
    file.with_name("rollout-x-broken.jsonl").write_bytes(b'{"history_base"')
    assert rollout.continued_elsewhere(tmp_path, "t") == fork
    assert rollout.continued_elsewhere(tmp_path, "s") is None
