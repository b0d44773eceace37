"""The reference page names every event and setting there is."""

import re

from kdskills.solver import SolverSettings
from kdskills.solver.events import EVENT_TYPES


def test_every_event_and_setting_is_documented(repo):
    """A new event or setting stands on the page, and the page names no other event."""
    page = (repo / "docs/reference/solver.md").read_text()
    names = {kind.model_fields["type"].default for kind in EVENT_TYPES}
    listed = re.search(r"Types: (.*?)\. Only", page, re.DOTALL)[1]
    assert set(re.findall(r"`([a-z._]+)`", listed)) == names
    assert [name for name in SolverSettings.model_fields if f"`{name}" not in page] == []
