"""Ids, keys and media types of artifacts: one for one, and never a path that leads elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.jobs.artifacts import blob_key
from kdskills.jobs.model import artifact_id, mime_of

DIGEST = "ab" * 32
PROJECTS = st.text(min_size=1, max_size=40)


@given(first=PROJECTS, second=PROJECTS)
def test_projects_never_share_a_folder(first: str, second: str) -> None:
    """Two projects have one key exactly when they are one project."""
    assert (blob_key(first, DIGEST) == blob_key(second, DIGEST)) == (first == second)


@given(project=PROJECTS)
def test_a_project_is_one_component_of_a_key(project: str) -> None:
    """No project's name adds a folder, climbs out, or needs to be quoted in a URL."""
    parts = blob_key(project, DIGEST).split("/")
    assert (len(parts), parts[0], parts[2], parts[1] in {".", "..", ""}) == (5, "artifacts", "sha256", False)
    assert parts[1].isascii()
    assert set(parts[1]) & set("%?#\\ \0") == set()


@pytest.mark.parametrize(
    ("project", "folder"),
    [("local", "local"), ("a/b", "a~2Fb"), ("..", "~2E~2E"), ("a..b", "a..b"), ("a~b", "a~7Eb"), ("ä", "~C3~A4")],
)
def test_folders_are_readable(project: str, folder: str) -> None:
    """Usual names stay as they are; what could mean something else is marked."""
    assert blob_key(project, DIGEST) == f"artifacts/{folder}/sha256/ab/{'ab' * 31}"


@pytest.mark.parametrize("digest", ["", "ab", "AB" * 32, "../" + "a" * 61, "ab" * 32 + "\n"])
def test_only_digests_become_keys(digest: str) -> None:
    """What is no digest is refused before it is part of a key."""
    with pytest.raises(ValueError, match="no sha256"):
        blob_key("local", digest)


def test_a_project_without_a_name_has_no_key() -> None:
    """The empty name would put its files above every project."""
    with pytest.raises(ValueError, match="no name"):
        blob_key("", DIGEST)


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_ids_tell_outputs_apart(first: tuple[str, str], second: tuple[str, str]) -> None:
    """An id stands for one task and one path, however these are spelt; storing it again gives the same id."""
    assert (artifact_id(*first) == artifact_id(*second)) == (first == second)


def test_ids_do_not_run_into_one_another() -> None:
    """Task `a` with path `bc` is not task `ab` with path `c`."""
    assert artifact_id("a", "bc") != artifact_id("ab", "c")
    assert artifact_id("task_1", "out.txt").startswith("art_")
    assert len(artifact_id("task_1", "out.txt")) == 30


@pytest.mark.parametrize(
    ("path", "mime"),
    [
        ("report.pdf", "application/pdf"),
        ("a/b/DATA.CSV", "text/csv"),
        ("page.html", "text/html"),
        ("a.tar.gz", "application/gzip"),
        ("noext", "application/octet-stream"),
        ("folder.csv/noext", "application/octet-stream"),
        ("odd.", "application/octet-stream"),
        (".csv", "text/csv"),
        ("x.unknown", "application/octet-stream"),
    ],
)
def test_media_types_follow_the_suffix(path: str, mime: str) -> None:
    """The type is told by the name alone, the same on every machine."""
    assert mime_of(path) == mime
