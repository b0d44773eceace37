"""The kept index: what is read again, what is never believed, and who may use it at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kdskills.errors import OperatorMustAct
from kdskills.search import index as index_module
from kdskills.search import texts as texts_module
from kdskills.search import words as words_module
from kdskills.search.cache_file import IndexDamaged
from kdskills.search.index import SearchIndex
from kdskills.skills.model import Skill
from kdskills.turn import SkillView
from tests.unit.search.conftest import Build, Write


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the full ids of the skills whose texts are read."""
    read: list[str] = []
    original = texts_module.skill_texts

    def reading(skill: Skill) -> tuple[dict[str, str], bool]:
        read.append(skill.full_id)
        return original(skill)

    monkeypatch.setattr(index_module, "skill_texts", reading)
    return read


@pytest.fixture
def zoo(write: Write) -> None:
    """Write three skills."""
    write("zoo.feeder", "Feeds the walrus.", body="Fish at noon.")
    write("zoo.keeper", "Opens the gates.", body="Keys hang by the door.")
    write("zoo.guide", "Tells of the penguins.", body="They swim.")


def kept_file(tmp_path: Path) -> Path:
    """Return the one search index there is."""
    (path,) = (tmp_path / "index").glob("*.search")
    return path


def found(view: SkillView, query: str = "walrus fish") -> list[str]:
    """Return the full ids found."""
    return [hit.full_id for hit in view.search(query).hits]


def test_nothing_is_read_before_the_first_search(zoo: None, build: Build, reads: list[str], tmp_path: Path) -> None:
    """Listing, catalogs and loading build no index."""
    view = build().view()
    view.catalog()
    view.resolve("zoo.feeder")
    assert reads == []
    assert list((tmp_path / "index").glob("*.search")) == []
    assert found(view) == ["zoo.feeder"]
    assert sorted(reads) == ["zoo.feeder", "zoo.guide", "zoo.keeper"]


def test_a_kept_index_reads_nothing(zoo: None, build: Build, reads: list[str], tmp_path: Path) -> None:
    """Another subsystem over the same roots, as in another process, finds everything without reading a skill."""
    assert found(build().view()) == ["zoo.feeder"]
    reads.clear()
    assert found(build().view()) == ["zoo.feeder"]
    assert reads == []
    assert stat.S_IMODE(kept_file(tmp_path).stat().st_mode) == 0o600


def test_a_change_reads_what_changed(zoo: None, write: Write, build: Build, reads: list[str]) -> None:
    """One edited, one added and one removed skill cost two readings, and the answers follow."""
    subsystem = build()
    assert found(subsystem.view()) == ["zoo.feeder"]
    reads.clear()
    folder = write("zoo.keeper", "Opens the gates of the walrus.", body="Keys.")
    write("zoo.vet", "Heals the walrus.")
    shutil.rmtree(folder.parent / "guide")
    subsystem.refresh()
    assert set(found(subsystem.view(), "walrus")) == {"zoo.feeder", "zoo.keeper", "zoo.vet"}
    assert found(subsystem.view(), "penguins") == []
    assert sorted(reads) == ["zoo.keeper", "zoo.vet"]


def _aged(folder: Path) -> None:
    """Make every file and folder ten seconds old: younger ones are never taken for unchanged."""
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))


def test_an_edited_script_is_read_again(
    zoo: None, write: Write, build: Build, reads: list[str], tmp_path: Path
) -> None:
    """Scripts and references that were edited, added or removed in place are noticed by the next process, and no others read."""
    folder = write("zoo.vet", "Heals.", files={"scripts/a.py": "# Weighs lions\n", "references/b.md": "# Bones\n"})
    write("zoo.cook", "Cooks.", files={"scripts/c.py": "# Boils rice\n"})
    _aged(tmp_path / "skills")
    assert found(build().view(), "lions") == ["zoo.vet"]
    reads.clear()
    assert found(build().view(), "lions") == ["zoo.vet"]
    assert reads == []
    (folder / "scripts" / "a.py").write_text("# Weighs bears\n")
    _aged(folder / "scripts")
    assert (found(build().view(), "lions"), found(build().view(), "bears")) == ([], ["zoo.vet"])
    (folder / "references" / "d.md").write_text("# Muscles\n")
    assert found(build().view(), "muscles") == ["zoo.vet"]
    (folder / "references" / "b.md").unlink()
    assert found(build().view(), "bones") == []
    assert set(reads) == {"zoo.vet"}


def test_a_folder_of_scripts_that_comes_later_is_read(zoo: None, build: Build, tmp_path: Path) -> None:
    """A skill that had no scripts is searched by those it gets, after a refresh and in the next process."""
    subsystem = build()
    assert found(subsystem.view(), "lions") == []
    scripts = tmp_path / "skills" / "zoo" / "keeper" / "scripts"
    scripts.mkdir()
    (scripts / "a.py").write_text("# Weighs lions\n")
    subsystem.refresh()
    assert found(subsystem.view(), "lions") == ["zoo.keeper"]
    assert found(build().view(), "lions") == ["zoo.keeper"]


def test_what_changed_a_moment_ago_is_not_taken_for_unchanged(zoo: None, write: Write, build: Build) -> None:
    """An edit of equal size in the same tick of the clock is seen once the tick is over."""
    script = write("zoo.vet", "Heals.", files={"scripts/a.py": "# lions\n"}) / "scripts" / "a.py"
    before = script.stat()
    assert found(build().view(), "lions") == ["zoo.vet"]
    script.write_text("# bears\n")
    os.utime(script, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found(build().view(), "bears") == ["zoo.vet"]


def test_a_view_answers_for_its_own_moment(zoo: None, write: Write, build: Build) -> None:
    """A view taken before a change finds what was there then; the new one finds the new text."""
    subsystem = build()
    before = subsystem.view()
    assert found(before) == ["zoo.feeder"]
    write("zoo.feeder", "Feeds the seals.", body="Squid.")
    subsystem.refresh()
    assert found(subsystem.view(), "squid seals") == ["zoo.feeder"]
    assert found(before) == ["zoo.feeder"]


def test_edits_without_end_do_not_grow_the_file(zoo: None, write: Write, build: Build, tmp_path: Path) -> None:
    """When most of an index is of texts that are gone it is begun anew."""
    subsystem = build()
    for number in range(300):
        write("zoo.keeper", f"Opens gate {number}.", body=f"Key k{number} hangs by the door.")
        subsystem.refresh()
        assert found(subsystem.view(), f"k{number}") == ["zoo.keeper"]
    with closing(sqlite3.connect(kept_file(tmp_path))) as database:
        (rows,) = database.execute("SELECT count(*) FROM skill").fetchone()
    assert rows <= 2 * 3 + 256 + 1


def test_a_building_of_many_words_goes_on_with_another_lexicon(
    zoo: None, write: Write, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few words are remembered at once, the same hits have the same scores."""
    for number in range(20):
        write(f"zoo.s{number}", "Sweeps the yard.", body=f"Brooms, bucket{number} and walrus{number} at noon.")
    query = "walrus fish brooms at noon"
    before = build(index_dir=None).view().search(query)
    assert before.total == 21
    monkeypatch.setattr(words_module, "_MOST_WORDS", 25)
    after = build(index_dir=None).view().search(query)
    assert (after.hits, after.total) == (before.hits, before.total)


# ---- what is not believed ----------------------------------------------------------------------------------------


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(9000))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loose(path: Path) -> None:
    path.chmod(0o666)


def _sql(*statements: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database:
            for statement in statements:
                database.execute(statement)
            database.commit()

    return damage


DAMAGES = {
    "garbage": _garbage,
    "empty": _empty,
    "cut": _cut,
    "a link": _link,
    "others may write": _loose,
    "another version": _sql("UPDATE meta SET identity = 'newer'"),
    "no identity": _sql("DELETE FROM meta"),
    "a further table": _sql("CREATE TABLE more (x)"),
    "a trigger": _sql("CREATE TRIGGER t AFTER INSERT ON skill BEGIN DELETE FROM term; END"),
    "another shape": _sql("ALTER TABLE term ADD COLUMN x"),
    "changed postings": _sql("UPDATE term SET postings = x'00112233445566778899'"),
    "postings of text": _sql("UPDATE term SET postings = 'text'"),
    "terms gone": _sql("DELETE FROM term"),
    "terms elsewhere": _sql("UPDATE term SET code = code + 1"),
    "skills under other numbers": _sql("UPDATE skill SET number = number + 10"),
    "list of terms gone": _sql("UPDATE meta SET codes = NULL"),
    "names gone": _sql("UPDATE meta SET names = NULL"),
    "names of text": _sql("UPDATE meta SET names = 'text'"),
    "no names": _sql("UPDATE meta SET names = x'00000000'"),
    "postings gone": _sql("UPDATE term SET postings = NULL"),
    "changed streams": _sql("UPDATE skill SET stream = x'0011'"),
    "streams gone": _sql("UPDATE skill SET stream = NULL"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_ours_is_written_anew(
    damage: Callable[[Path], None], zoo: None, build: Build, tmp_path: Path
) -> None:
    """Damaged, foreign, newer or loose, the file is rebuilt; the answer is right and says what happened."""
    query = "walrus fish at noon"
    before = build().view().search(query)
    damage(kept_file(tmp_path))
    after = build().view().search(query)
    assert (after.hits, after.total) == (before.hits, before.total)
    assert [note.code for note in after.diagnostics] == ["index_ignored"]
    again = build().view().search(query)
    assert (again.hits, again.diagnostics) == (before.hits, ())


def test_every_flipped_byte_is_harmless(zoo: None, build: Build, tmp_path: Path) -> None:
    """Whatever byte of the file is turned, the answer is the right one."""
    query = "walrus fish at noon"
    before = build().view().search(query).hits
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        assert build().view().search(query).hits == before, position


def test_a_folder_in_its_place_keeps_the_index_in_memory(zoo: None, build: Build, tmp_path: Path) -> None:
    """Where nothing can be written the search works for this process and says so."""
    assert found(build().view()) == ["zoo.feeder"]
    _folder(kept_file(tmp_path))
    result = build().view().search("walrus fish")
    assert [hit.full_id for hit in result.hits] == ["zoo.feeder"]
    assert "index_not_written" in {note.code for note in result.diagnostics}


def test_without_a_folder_nothing_is_written(zoo: None, build: Build, tmp_path: Path) -> None:
    """`index_dir=None` keeps the index for the process."""
    assert found(build(index_dir=None).view()) == ["zoo.feeder"]
    assert not (tmp_path / "index").exists()


LIMITED = """
import resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
from kdskills.turn import SkillsSubsystem
view = SkillsSubsystem({}, bundle_root=sys.argv[1], index_dir=sys.argv[1] + "/index", auto_refresh=None).view()
for query in ("walrus fish", "penguins swim"):
    result = view.search(query)
    print(*(hit.full_id for hit in result.hits), *sorted({note.code for note in result.diagnostics}))
"""


@pytest.mark.parametrize("size", [0, 1000, 10_000, 40_000, 100_000])
def test_a_full_disk_is_told_and_survived(zoo: None, write: Write, tmp_path: Path, size: int) -> None:
    """Where files may not grow, at whatever moment, the index lives in memory, and says so."""
    for number in range(100):
        words = " ".join(f"w{number}x{word}" for word in range(60))
        write(f"zoo.s{number}", "Sweeps the yard.", body=words)
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = "zoo.feeder index_not_written\nzoo.guide index_not_written\n"
    assert (done.stdout, done.stderr) == (answer, "")
    assert list((tmp_path / "index").glob(".*.search.*")) == []


def test_where_no_folder_can_be_the_index_lives_in_memory(zoo: None, build: Build, tmp_path: Path) -> None:
    """A folder that can be neither made nor written is told, and costs nobody an answer."""
    result = build(index_dir="/proc/nowhere").view().search("walrus fish")
    assert [hit.full_id for hit in result.hits] == ["zoo.feeder"]
    assert {note.code for note in result.diagnostics} == {"index_not_written"}


def test_a_file_that_breaks_under_many_threads_harms_none(
    zoo: None, write: Write, build: Build, tmp_path: Path
) -> None:
    """Threads that find the file damaged at once build it anew once, and every answer is the right one."""
    for number in range(40):
        write(f"zoo.s{number}", "Sweeps the yard.", body="Brooms. " * 50)
    subsystem = build()
    views = [subsystem.view(name) for name in ("a", "b", "c", "d")]
    assert {tuple(found(view)) for view in views} == {("zoo.feeder",)}
    path, answers = kept_file(tmp_path), []

    def ask(view: SkillView) -> None:
        answers.extend(tuple(found(view)) for _ in range(25))

    threads = [threading.Thread(target=ask, args=(view,)) for view in views * 2]
    for thread in threads:
        thread.start()
    with path.open("r+b") as file:
        file.truncate(3000)
    for thread in threads:
        thread.join()
    assert answers == [("zoo.feeder",)] * 200


def test_what_stays_damaged_ends_with_a_code(zoo: None, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even a new index gives back something else than was written, a search ends, and says who must act."""

    def broken(index: SearchIndex, terms: object) -> dict[str, object]:
        raise IndexDamaged("a row does not fit its checksum")

    monkeypatch.setattr(SearchIndex, "postings", broken)
    with pytest.raises(OperatorMustAct, match="does not fit its checksum") as caught:
        build().view().search("walrus")
    assert caught.value.code == "search_unavailable"


# ---- many at once ------------------------------------------------------------------------------------------------


def test_threads_share_one_building(zoo: None, build: Build, reads: list[str]) -> None:
    """Sixteen threads that search at once read each skill once and get one answer."""
    view = build().view()
    answers: list[list[str]] = []
    threads = [threading.Thread(target=lambda: answers.append(found(view))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [["zoo.feeder"]] * 16
    assert sorted(reads) == ["zoo.feeder", "zoo.guide", "zoo.keeper"]


def _search(folder: str, results: multiprocessing.SimpleQueue[list[str]]) -> None:
    from kdskills.turn import SkillsSubsystem

    subsystem = SkillsSubsystem({}, bundle_root=folder, index_dir=f"{folder}/index", auto_refresh=None)
    results.put(found(subsystem.view()))


def test_processes_share_one_file(zoo: None, write: Write, tmp_path: Path) -> None:
    """Eight processes that build the same index at once all answer, and leave one whole file."""
    for number in range(200):
        write(f"zoo.s{number}", "Sweeps the yard.", body="Brooms. " * 50)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_search, args=(str(tmp_path), results)) for _ in range(8)]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert answers == [["zoo.feeder"]] * 8
    with closing(sqlite3.connect(kept_file(tmp_path))) as database:
        (names,) = database.execute("SELECT names FROM meta").fetchone()
        assert database.execute("SELECT count(*) FROM skill").fetchone() == (203,)
    assert len(set(names.decode("latin-1").split("\n")[1:])) == 203


def test_a_fork_opens_the_file_for_itself(zoo: None, write: Write, build: Build) -> None:
    """A child of a process that searched searches as well, and so does its parent afterwards."""
    subsystem = build()
    view = subsystem.view()
    assert found(view) == ["zoo.feeder"]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if found(view) == ["zoo.feeder"] else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert found(view, "penguins") == ["zoo.guide"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_fork_of_an_index_in_memory_builds_its_own(kept: bool, zoo: None, build: Build) -> None:
    """A child does not read through a file it shares with its parent unnamed."""
    view = (build() if kept else build(index_dir=None)).view()
    assert found(view) == ["zoo.feeder"]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if found(view, "gates keys") == ["zoo.keeper"] else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_killed_builder_leaves_nothing_half_written(zoo: None, write: Write, build: Build, tmp_path: Path) -> None:
    """A process killed while it builds leaves a file the next one completes."""
    for number in range(400):
        write(f"zoo.s{number}", "Sweeps the yard.", body="Brooms and dustpans. " * 200)
    child = os.fork()
    if child == 0:
        try:
            original = texts_module.skill_texts
            count = 0

            def dying(skill: Skill) -> tuple[dict[str, str], bool]:
                nonlocal count
                count += 1
                if count == 300:
                    os.kill(os.getpid(), 9)
                return original(skill)

            index_module.skill_texts = dying
            found(build().view())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -9
    result = build().view().search("walrus fish")
    assert [hit.full_id for hit in result.hits] == ["zoo.feeder"]
    assert build().view().search("dustpans brooms").total == 400
