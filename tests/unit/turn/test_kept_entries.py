"""Catalog entries are made once for each skill, and never shown for another state of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdskills.turn import SkillsSubsystem


@pytest.fixture
def subsystem(write: Callable[..., Path], tmp_path: Path) -> SkillsSubsystem:
    """Three skills; writers may not see the first."""
    for name in ("acme.alpha", "acme.beta", "acme.gamma"):
        write(name)
    agents: dict[str, Any] = {"writer": {"disabled": ["acme.alpha"]}}
    return SkillsSubsystem(
        {"custom_skills_root": "skills", "agents_config": agents},
        bundle_root=tmp_path / "bundle",
        roots=(),
        index_dir=None,
        auto_refresh=None,
    )


def test_an_unchanged_skill_keeps_its_entry(subsystem: SkillsSubsystem, write: Callable[..., Path]) -> None:
    """After an edit only the edited skill gets a new entry."""
    before = subsystem.view()._entries
    write("acme.beta", description="Something else.")
    subsystem.refresh()
    after = subsystem.view()._entries
    assert [one is other for one, other in zip(before, after, strict=True)] == [True, False, True]
    assert after[1].description == "Something else."


def test_an_edit_of_the_same_size_within_one_tick_is_shown(
    subsystem: SkillsSubsystem, write: Callable[..., Path]
) -> None:
    """Neither size nor modification time tells of the edit; the catalog shows it all the same."""
    file = write("acme.beta", description="First words.") / "SKILL.md"
    subsystem.refresh()
    assert "First words." in subsystem.view().catalog("xml").text
    stamp = file.stat()
    file.write_text(file.read_text().replace("First words.", "Other words."))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.stat().st_size == stamp.st_size
    subsystem.refresh()
    text = subsystem.view().catalog("xml").text
    assert ("First words." in text, "Other words." in text) == (False, True)


def test_consumers_have_their_own_numbers_and_names(subsystem: SkillsSubsystem, write: Callable[..., Path]) -> None:
    """Entries are shared only where number and name are the same, in whatever order views are asked."""
    write("other.beta")
    subsystem.refresh()
    for _ in range(2):
        for consumer in ("reader", "writer", "reader"):
            view = subsystem.view(consumer, tools=[f"t{_}"])
            shown = {entry.short_id: (entry.full_id, entry.display_name) for entry in view._entries}
            names = {full_id: name for name, full_id in view.names.items()}
            assert shown == {number: (full_id, names[full_id]) for number, full_id in view.short_ids.items()}
    assert "acme.alpha" not in subsystem.view("writer").catalog("json").text


def test_a_removed_skill_leaves_no_entry_behind(subsystem: SkillsSubsystem, write: Callable[..., Path]) -> None:
    """What is gone is forgotten with the moment it was of, and is made anew when it returns."""
    subsystem.view().catalog("xml")
    file = write("acme.beta") / "SKILL.md"
    file.unlink()
    subsystem.refresh()
    assert "beta" not in subsystem.view().catalog("xml").text
    assert set(subsystem.view().state.entries) == {"acme.alpha", "acme.gamma"}
    write("acme.beta", description="Back again.")
    subsystem.refresh()
    assert "Back again." in subsystem.view().catalog("xml").text


def test_an_older_view_stays_as_it_was(subsystem: SkillsSubsystem, write: Callable[..., Path]) -> None:
    """A view taken before an edit, but asked for its catalog after it, shows the skill as it was then."""
    old = subsystem.view()
    write("acme.beta", description="Newer words.")
    subsystem.refresh()
    assert "Newer words." in subsystem.view().catalog("xml").text
    assert "Newer words." not in old.catalog("xml").text


class Growing(dict[str, Any]):
    """Skills at whose look-up another view of the same moment makes an entry, as one in another thread does."""

    def __init__(self, skills: Mapping[str, Any], entries: dict[str, Any]) -> None:
        super().__init__(skills)
        self._entries = entries

    def get(self, key: str, default: Any = None) -> Any:
        """Add an entry and return the skill."""
        self._entries[f"acme.more-{len(self._entries)}"] = (None, None)
        return super().get(key, default)


def test_views_go_on_making_entries_while_they_are_carried_over(subsystem: SkillsSubsystem) -> None:
    """What one moment hands to the next does not depend on who renders meanwhile."""
    assert subsystem.view()._entries
    state = subsystem.view().state
    kept = dict(state.entries)
    assert state.reusable_entries(replace(state.snapshot, skills=Growing(state.snapshot.skills, state.entries))) == kept


def test_threads_render_while_skills_change(subsystem: SkillsSubsystem, write: Callable[..., Path]) -> None:
    """Six threads read catalogs of several consumers while a seventh edits: none fails, and the last edit is seen."""
    over = threading.Event()

    def render(consumer: str) -> None:
        while not over.is_set():
            names = [entry.full_id for entry in subsystem.view(consumer)._entries]
            assert names == sorted(names)

    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(render, name) for name in ("writer", "reader", "editor") * 2]
        try:
            for number in range(40):
                write(f"acme.n{number}")
                write("acme.beta", description=f"Edit {number}.")
                subsystem.refresh()
        finally:
            over.set()
        for done in running:
            done.result()
    assert "Edit 39." in subsystem.view("writer").catalog("xml").text
    assert len(subsystem.view("reader")._entries) == 43
