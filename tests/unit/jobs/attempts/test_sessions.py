"""Session folders: versions that are whole, changes that survive overlap, and nothing but plain files."""

import hashlib
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.execution.request import Artifact, ArtifactError, ExecResult, IsolationLevel, Stream
from kdskills.execution.stage import MAX_ERRORS
from kdskills.jobs.attempts import OutputBounds
from kdskills.jobs.exchange import MARKER, SessionFolder, WorkdirFiles, workdir_files

ROOMY = OutputBounds(files=100, total=10_000)


def art(path, text="x", mode=0o644):
    """Return a file a program left."""
    return Artifact(path, len(text), hashlib.sha256(text.encode()).hexdigest(), mode, text.encode())


def left(*files, complete=True, errors=()):
    """Return what a program left."""
    return WorkdirFiles(files=files, complete=complete, errors=errors)


def shown(folder):
    """Return what a session holds, as text by path."""
    with folder.reading() as snapshot:
        return {path: file.read_text() for path, (file, _) in snapshot.files.items()}


def now(folder):
    """Return the version a command would be given."""
    with folder.reading() as snapshot:
        return snapshot


def result(artifacts=(), errors=()):
    """Return an engine's result with these outputs."""
    return ExecResult(
        status="ok",
        exit_code=0,
        signal=None,
        stdout=Stream(),
        stderr=Stream(),
        duration_s=0.0,
        engine="e",
        level=IsolationLevel.NONE,
        limits_enforced=frozenset(),
        artifacts=tuple(artifacts),
        artifact_errors=tuple(errors),
    )


@pytest.fixture
def folder(tmp_path):
    """A session with two files."""
    folder = SessionFolder(tmp_path / "s")
    folder.commit(now(folder), left(art("a", "1"), art("d/b", "2")), ROOMY)
    return folder


def test_new_session_is_empty(tmp_path):
    """A session nobody used has no files."""
    assert shown(SessionFolder(tmp_path / "s")) == {}


def test_changed_new_and_removed_files_are_carried_over(folder):
    """The next command sees exactly what this one left."""
    assert folder.commit(now(folder), left(art("a", "one"), art("c", "3")), ROOMY) == []
    assert shown(folder) == {"a": "one", "c": "3"}


def test_overlapping_commands_keep_each_others_changes(folder):
    """Of commands that were given the same files, each carries over only what it changed itself."""
    given = now(folder)
    folder.commit(given, left(art("a", "1"), art("d/b", "other"), art("first", "f")), ROOMY)
    folder.commit(given, left(art("a", "changed"), art("d/b", "2")), ROOMY)
    assert shown(folder) == {"a": "changed", "d/b": "other", "first": "f"}


def test_removing_what_another_changed_leaves_the_change(folder):
    """A file that one command removed and another rewrote meanwhile is the rewritten one."""
    given = now(folder)
    folder.commit(given, left(art("a", "rewritten"), art("d/b", "2")), ROOMY)
    folder.commit(given, left(art("d/b", "2")), ROOMY)
    assert shown(folder) == {"a": "rewritten", "d/b": "2"}


def test_executable_files_stay_executable(folder):
    """Of a mode, whether the file may be executed is kept, and nothing that opens it to others."""
    folder.commit(now(folder), left(art("a", "1"), art("d/b", "2"), art("run.sh", "#!", mode=0o4777)), ROOMY)
    with folder.reading() as snapshot:
        assert {path: mode for path, (_, mode) in snapshot.files.items()} == {
            "a": 0o600,
            "d/b": 0o600,
            "run.sh": 0o700,
        }


def test_file_takes_the_place_of_a_folder_and_back(folder):
    """A file may stand where a folder was, and a folder where a file was."""
    folder.commit(now(folder), left(art("a/deep/x", "1"), art("d", "2")), ROOMY)
    assert shown(folder) == {"a/deep/x": "1", "d": "2"}


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a\nb", "back\\slash", "x//y", ".", "d/../../e"])
def test_odd_names_are_named_and_not_kept(folder, tmp_path, name):
    """A path that could not be given to the next command is refused, and nothing is written outside."""
    before = shown(folder)
    errors = folder.commit(now(folder), left(art("a", "1"), art("d/b", "2"), art(name, "evil")), ROOMY)
    assert [(error.path, error.code) for error in errors] == [(name, "bad_name")]
    assert shown(folder) == before
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def test_what_does_not_fit_keeps_its_old_version(folder):
    """Beyond its bounds a session takes no more; a file whose new version is too large stays as it was."""
    files = [art("a", "x" * 90), art("d/b", "2"), art("e", "5"), art("f", "6")]
    errors = folder.commit(now(folder), left(*files), OutputBounds(files=3, total=50))
    assert sorted((error.path, error.code) for error in errors) == [("a", "session_full"), ("f", "session_full")]
    assert shown(folder) == {"a": "1", "d/b": "2", "e": "5"}


def test_files_that_could_not_be_read_are_not_taken_for_removed(folder):
    """When not everything could be read back, nothing counts as removed."""
    folder.commit(now(folder), left(art("c", "3"), complete=False), ROOMY)
    assert shown(folder) == {"a": "1", "c": "3", "d/b": "2"}


def test_crash_before_the_exchange_leaves_the_old_version(folder, monkeypatch):
    """A writer that dies while it builds the new version changes nothing; the next one cleans up."""

    class Crash(Exception):
        pass

    def crash(*_):
        raise Crash

    monkeypatch.setattr("pathlib.Path.rename", crash)
    with pytest.raises(Crash):
        folder.commit(now(folder), left(art("a", "new")), ROOMY)
    monkeypatch.undo()
    assert shown(folder) == {"a": "1", "d/b": "2"}
    folder.commit(now(folder), left(art("a", "newer"), art("d/b", "2")), ROOMY)
    assert shown(folder) == {"a": "newer", "d/b": "2"}
    assert len([path for path in folder._top.iterdir() if path.name.startswith(("v-", ".new-"))]) == 1


def test_unchanged_files_make_no_new_version(folder):
    """A command that changes nothing leaves the very folder it was given."""
    before = now(folder).folder
    folder.commit(now(folder), left(art("a", "1"), art("d/b", "2")), ROOMY)
    assert now(folder).folder == before


def test_old_version_does_not_change_with_the_new(folder):
    """Files are shared between versions, never written in place."""
    with folder.reading() as snapshot:
        kept = snapshot.files["a"][0].open()
    folder.commit(now(folder), left(art("a", "other"), art("d/b", "2")), ROOMY)
    with kept:
        assert kept.read() == "1"


def test_nobody_looked_means_nothing_is_known():
    """A result whose workdir was never read says nothing about the session; the marker tells."""
    assert workdir_files(result()) is None
    looked = workdir_files(result([art("a")], [ArtifactError(MARKER, "missing", "")]))
    assert (looked.files, looked.complete, looked.errors) == ([art("a")], True, [])
    assert workdir_files(result([art(MARKER), art("a")])).files == [art("a")]


@pytest.mark.parametrize("code", ["too_large", "too_many", "too_deep", "unreadable"])
def test_unread_files_make_it_less_than_whole(code):
    """What could not be read is told, and nothing is taken for removed."""
    looked = workdir_files(result([], [ArtifactError("big", code, "why"), ArtifactError(MARKER, "missing", "")]))
    assert (looked.complete, [(error.path, error.code) for error in looked.errors]) == (False, [("big", code)])


def test_flood_of_errors_hides_no_removal():
    """When errors were cut, even the marker's, the rest is taken for unread."""
    errors = [ArtifactError(f"l{number}", "link", "is a link") for number in range(MAX_ERRORS)]
    looked = workdir_files(result([art("a")], errors))
    assert (looked.files, looked.complete, len(looked.errors)) == ([art("a")], False, MAX_ERRORS)


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


def plain(files):
    """Drop files that stand where another path needs a folder."""
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    return {path: text for path, text in files.items() if path not in folders}


@settings(max_examples=25)
@given(rounds=st.lists(st.dictionaries(PATHS, st.text("xyz", max_size=3), max_size=6).map(plain), max_size=6))
def test_session_is_what_the_last_command_left(tmp_path_factory, rounds):
    """Whatever commands leave, one after the other, the session is what the last one left."""
    folder = SessionFolder(tmp_path_factory.mktemp("session") / "s")
    seen = {}
    for files in rounds:
        errors = folder.commit(now(folder), left(*(art(path, text) for path, text in files.items())), ROOMY)
        seen = shown(folder)
        assert (errors, seen) == ([], files)
