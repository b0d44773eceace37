"""Transitions of a session as pure functions."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import BadRequest
from kdskills.session.store import (
    ImportedSkill,
    LoadedSkill,
    SessionRecord,
    from_iso,
    iso,
    load_mode,
    merge_entries,
    next_ids,
    prompt_order,
    without,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IDS = st.lists(st.sampled_from("abcdef"), max_size=8)


def entry(name: str, *imports: str, digest: str = "") -> LoadedSkill:
    return LoadedSkill(
        name, digest or f"d-{name}", "t", NOW, "model", tuple(ImportedSkill(i, f"d-{i}", "t") for i in imports)
    )


@pytest.mark.parametrize(
    ("mode", "meant"),
    [("replace", "replace"), ("add", "add"), ("", "replace"), (None, "replace"), ("append", None), ("ADD", None)],
)
def test_modes(mode: str | None, meant: str | None) -> None:
    """Empty and null mean replace; any other word is no mode."""
    assert load_mode(mode) == meant


def test_loading_again_moves_to_the_end() -> None:
    """The example of the spec: [sales, charts] and add sales give [charts, sales]."""
    assert next_ids(["sales", "charts"], ["sales"], "add") == ("charts", "sales")


def test_replace_keeps_only_what_is_asked() -> None:
    """Replace forgets the rest and drops repeats in first-seen order."""
    assert next_ids(["x"], ["b", "a", "b"], "replace") == ("b", "a")


@given(IDS, IDS)
def test_add_is_a_union_with_the_request_last(current: list[str], asked: list[str]) -> None:
    """After add, all are there once, and the request stands last in its own order."""
    have = list(dict.fromkeys(current))
    following = next_ids(have, asked, "add")
    wanted = tuple(dict.fromkeys(asked))
    assert set(following) == set(have) | set(asked)
    assert len(set(following)) == len(following)
    assert following[len(following) - len(wanted) :] == wanted


@given(IDS)
def test_adding_everything_again_changes_only_the_order(current: list[str]) -> None:
    """Adding what is loaded, in the same order, changes nothing."""
    have = tuple(dict.fromkeys(current))
    assert next_ids(have, have, "add") == have


def test_merge_takes_fresh_entries_first() -> None:
    """An entry loaded again replaces the one kept."""
    merged = merge_entries([entry("a"), entry("b")], [entry("a", digest="new")], ["b", "a"])
    assert [(item.id, item.digest) for item in merged] == [("b", "d-b"), ("a", "new")]


def test_without() -> None:
    """Dropping keeps the order of the rest."""
    assert [item.id for item in without([entry("a"), entry("b"), entry("c")], {"b"})] == ["a", "c"]


def test_imports_stand_once_before_their_first_importer() -> None:
    """A shared import is shown once; its importer is named."""
    order = prompt_order([entry("a", "base"), entry("b", "base", "more")])
    assert order == (
        ("base", "d-base", "a"),
        ("a", "d-a", None),
        ("more", "d-more", "b"),
        ("b", "d-b", None),
    )


def test_a_loaded_import_is_no_import() -> None:
    """A skill loaded itself is shown before its first importer, with its own digest, not as imported."""
    order = prompt_order([entry("a", "base"), entry("base", digest="own")])
    assert order == (("base", "own", None), ("a", "d-a", None))


def test_record_facts() -> None:
    """Ids, digests and head follow from the entries."""
    record = SessionRecord("s", "c", 3, NOW, NOW, 8, (entry("a", "x"), entry("b")))
    assert (record.ids, record.digests) == (("a", "b"), frozenset({"d-a", "d-b", "d-x"}))
    assert record.head().active == ("a", "b")
    assert (record.ids[-1], record.with_active((), NOW).ids) == ("b", ())
    assert record.with_active((), NOW).version == 4


@given(st.datetimes(timezones=st.just(UTC)).filter(lambda moment: moment.year >= 1970))
def test_times_survive(moment: datetime) -> None:
    """Times are UTC with Z and come back equal."""
    assert iso(moment).endswith("Z")
    assert from_iso(iso(moment)) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00", "12:00Z"])
def test_other_times_are_refused(text: str) -> None:
    """A time without zone, or no time at all, is no snapshot of ours."""
    with pytest.raises(BadRequest):
        from_iso(text)
