"""A turn's pool of sources, grown by several calls at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

from kdskills.session.scope import TurnSources
from kdskills.sources import SourcesPool

AT_ONCE = 4


class Meeting:
    """A skill whose sources are looked at by several threads before any of them goes on."""

    full_id = "acme.brief"
    digest = "sha256:1"
    hidden = False
    location = "skill://acme.brief"

    def __init__(self):
        self._together = threading.Barrier(AT_ONCE)

    @property
    def sources(self):
        """Return the rows once everybody is here."""
        self._together.wait(60)
        return ({"sid": 7, "title": "One", "url": "https://one.example"},)


def test_what_several_calls_bring_at_once_is_told_once():
    """The same skill loaded by calls side by side is merged into one row, which whoever listens hears of once."""
    told = []
    sources = TurnSources(SourcesPool(), lambda name, result: told.append((name, dict(result.sid_map))))
    skill = Meeting()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        futures = [threads.submit(sources.adopt, skill, "Read [[S:7]].") for _ in range(AT_ONCE)]
        texts = {future.result() for future in futures}
    assert texts == {"Read [[S:7]]."}
    assert told == [("acme.brief", {7: 7})]
    assert len(sources.pool.rows) == 1
