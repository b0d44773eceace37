"""Looking without waiting, and what an operator accepts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.builtin.roots.mcp.listing import AcceptedSets, FileSet
from kdskills.builtin.roots.mcp.wire import ServerFailed
from kdskills.errors import Conflict, MissingExtra
from kdskills.skills.roots import ApprovedListing

WAIT_S = 60


def refused(root):
    """Return the full ids that wait for approval, as the catalog has them."""
    records = root.listing.scan().skills.values()
    return sorted(record.full_id for record in records if record.skill is None)


def test_looking_never_waits_after_the_first_time(far, server):
    """While a server takes its time, a look answers with what was listed before; the one after it has what is new."""
    server.put("skill://a/tidy")
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def beside(look):
        def whole():
            look()
            done.set()

        threading.Thread(target=whole).start()

    root = far(server, in_background=beside)
    before = root.listing.scan()
    usual = server.entries

    def slow():
        begun.set()
        assert go.wait(WAIT_S)
        return usual()

    server.entries = slow
    server.put("skill://a/sweep")
    root.now[0] += 61
    for _ in range(100):  # none of them starts a second question, none waits
        assert root.listing.scan() is before
    assert begun.wait(WAIT_S)
    go.set()
    assert done.wait(WAIT_S)
    assert {record.full_id for record in root.listing.scan().skills.values()} == {"mcp-acme.sweep", "mcp-acme.tidy"}
    assert server.asked == ["list", "list"]


def test_a_thread_of_its_own(far, server):
    """Nobody who looks asks an old listing's server in the own thread."""
    server.put("skill://a/tidy")
    root = far(server, in_background=None)
    root.listing.scan()
    told = threading.Event()
    asking = []
    usual = server.entries

    def noted():
        asking.append(threading.get_ident())
        told.set()
        return usual()

    server.entries = noted
    root.now[0] += 61
    root.listing.scan()
    assert told.wait(WAIT_S)
    assert asking != [threading.get_ident()]


@pytest.mark.parametrize("error", [ServerFailed("it is down"), MissingExtra("MCP roots", "mcp")])
def test_a_look_never_raises(far, server, error):
    """Whatever keeps a server from being asked is a finding, with the reason."""

    def broken():
        raise error

    server.entries = broken
    root = far(server)
    (note,) = root.listing.scan().notes
    assert note.code == "mcp_unreachable"
    assert error.message.rstrip(".") in note.message
    assert root.listing.scan().notes == (note,)


def test_what_cannot_be_noted_is_not_taken(far, server, tmp_path):
    """Where accepted sets cannot be written, a skill that is listed for the first time stays out, with the reason."""
    server.put("skill://a/tidy")
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / ".lock").symlink_to("elsewhere")  # a lock is never a link
    root = far(server)
    assert dict(root.subsystem.registry) == {}
    (note,) = root.listing.scan().notes
    assert (note.code, "cannot be written" in note.message) == ("mcp_unreachable", True)
    (tmp_path / "acme" / ".lock").unlink()
    root.later()
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}


def test_a_folder_that_is_none_accepts_nothing(far, server, tmp_path):
    """Where nothing can be read, everything waits for approval."""
    server.put("skill://a/tidy")
    (tmp_path / "acme").write_text("a file where the folder would be")
    assert refused(far(server)) == ["mcp-acme.tidy"]


def test_changes_say_which_files(far, server):
    """What waits for approval is told by path: added, removed, changed; accepted, it is granted, and stays so."""
    server.put("skill://a/tidy", guide=b"one", old=b"x", same=b"y")
    server.put("skill://a/sweep")
    root = far(server)
    assert isinstance(root.listing, ApprovedListing)
    assert root.listing.label == "acme"
    assert root.listing.changes() == ()
    files = server.skills["skill://a/tidy"]
    files["guide"], files["new"] = b"two", b"z"
    del files["old"]
    root.later()
    assert refused(root) == ["mcp-acme.tidy"]
    (change,) = root.listing.changes()
    assert (change.uri, change.full_id, change.files_known) == ("skill://a/tidy/SKILL.md", "mcp-acme.tidy", True)
    assert (change.added, change.removed, change.changed) == (("new",), ("old",), ("guide",))
    assert refused(root) == ["mcp-acme.tidy"]  # looking accepts nothing
    root.listing.accept([change])
    assert root.listing.changes() == ()
    assert refused(root) == []
    assert refused(far(server)) == []


def test_another_process_sees_what_was_accepted(far, server):
    """A running service takes an accepted set at its next look at the server."""
    server.put("skill://a/tidy", guide=b"one")
    service = far(server)
    service.listing.scan()
    server.skills["skill://a/tidy"]["guide"] = b"two"
    service.later()
    assert refused(service) == ["mcp-acme.tidy"]
    command = far(server)
    command.listing.accept(command.listing.changes())
    service.later()
    assert refused(service) == []


def test_only_what_was_shown_is_accepted(far, server):
    """A set that changed again between the look and the yes is refused, and nothing at all is accepted."""
    server.put("skill://a/tidy", guide=b"one")
    server.put("skill://a/sweep", guide=b"one")
    root = far(server)
    root.listing.scan()
    for base in server.skills:
        server.skills[base]["guide"] = b"two"
    changes = root.listing.changes()
    assert len(changes) == 2
    server.skills["skill://a/tidy"]["guide"] = b"evil"
    root.later()
    with pytest.raises(Conflict) as caught:
        root.listing.accept(changes)
    assert caught.value.code == "mcp_set_changed"
    with pytest.raises(Conflict):
        root.listing.accept([replace(changes[0], uri="skill://b/none/SKILL.md")])
    assert refused(root) == ["mcp-acme.sweep", "mcp-acme.tidy"]


def test_accepting_one_where_nothing_can_be_read(far, server):
    """One yes never says yes to the rest: with a broken file, what was not named still waits."""
    server.put("skill://a/tidy")
    server.put("skill://a/sweep")
    root = far(server)
    root.folder.mkdir(parents=True)
    (root.folder / "accepted.json").write_text("[]")
    changes = root.listing.changes()
    assert [(change.full_id, change.files_known) for change in changes] == [
        ("mcp-acme.sweep", False), ("mcp-acme.tidy", False),
    ]  # fmt: skip
    root.listing.accept(changes[:1])
    assert refused(root) == ["mcp-acme.tidy"]
    assert refused(far(server)) == ["mcp-acme.tidy"]


def test_sets_of_the_earlier_form(far, server):
    """A file with digests alone goes on to count; what changed is then not known path by path."""
    server.put("skill://a/tidy", guide=b"one")
    root = far(server)
    root.listing.scan()
    place = root.folder / "accepted.json"
    rows = json.loads(place.read_text())
    place.write_text(json.dumps({uri: row["set"] for uri, row in rows.items()}))
    assert refused(far(server)) == []
    server.skills["skill://a/tidy"]["guide"] = b"two"
    (change,) = far(server).listing.changes()
    assert (change.files_known, change.added, change.changed) == (False, (), ())


@pytest.mark.parametrize(
    "row", [7, None, [], {}, {"set": 7}, {"set": None, "files": {}}, {"set": "", "files": 3}, "", "sha256:x"]
)
def test_rows_out_of_shape_accept_nothing(far, server, row):
    """A kept set that is no set is equal to none."""
    uri = server.put("skill://a/tidy")
    root = far(server)
    root.folder.mkdir(parents=True)
    (root.folder / "accepted.json").write_text(json.dumps({uri: row}))
    assert refused(root) == ["mcp-acme.tidy"]


PATHS = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["1", "2"]))


@settings(max_examples=200, deadline=None)
@given(PATHS, PATHS)
def test_a_change_leads_from_one_set_to_the_other(old, new):
    """Added, removed and changed paths are apart from each other, and together make the new set of the old one."""
    change = FileSet("d", new).change("u", "i", FileSet("e", old))
    added, removed, changed = map(set, (change.added, change.removed, change.changed))
    assert not added & removed | added & changed | removed & changed
    assert (set(old) - removed) | added == set(new)
    assert {path for path in set(old) & set(new) if old[path] != new[path]} == changed


def test_threads_lose_nothing(tmp_path):
    """Sets noted at one time from many threads are all there, and the first note of a uri stays."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: AcceptedSets(tmp_path).note({f"u{n % 40}": FileSet(f"d{n % 40}")}), range(200)))
    assert AcceptedSets(tmp_path).read() == {f"u{n}": FileSet(f"d{n}") for n in range(40)}
    assert AcceptedSets(tmp_path).note({"u1": FileSet("other")})["u1"] == FileSet("d1")


def test_processes_lose_nothing(tmp_path):
    """Nor do processes."""
    program = (
        "import sys; from pathlib import Path\n"
        "from kdskills.builtin.roots.mcp.listing import AcceptedSets, FileSet\n"
        "for n in range(25): AcceptedSets(Path(sys.argv[1])).note({f'{sys.argv[2]}-{n}': FileSet('d')})\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(number)]) for number in range(4)]
    try:
        codes = [process.wait(120) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait(60)
    assert codes == [0] * 4
    assert len(AcceptedSets(tmp_path).read()) == 100
