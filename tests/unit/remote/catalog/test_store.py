"""Records of catalogs, in memory and in the journal's database."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kdskills.errors import Conflict
from kdskills.remote.catalog.backend import CatalogRecord, MemoryCatalogStore, SqlCatalogStore
from kdskills.remote.journal import JournalUnavailable, SqlJournal


@pytest.fixture(params=["memory", "sql"])
def store(request, tmp_path):
    """Return a store of either kind."""
    if request.param == "memory":
        yield MemoryCatalogStore()
        return
    journal = SqlJournal(f"sqlite:///{tmp_path / 'calls.sqlite3'}")
    yield SqlCatalogStore(journal.engine)
    journal.close()


def test_what_is_written_is_read(store):
    """A record comes back whole, with its version counted."""
    assert store.get("t") == CatalogRecord("t")
    change = {"strategy": "reload", "digest": "d", "tools": {"a": "1"}, "context_digest": "c"}
    written = store.update("t", lambda old: replace(old, **change))
    assert written == CatalogRecord("t", "reload", "d", {"a": "1"}, "c", version=1) == store.get("t")
    assert store.update("t", lambda old: replace(old, digest="e")).version == 2
    store.forget("t")
    assert store.get("t") == CatalogRecord("t")


def test_releases_are_those_asked_for(store):
    """Only threads one watches, and only those somebody releases or released."""
    store.update("a", lambda old: replace(old, release="releasing", release_by="w"))
    store.update("b", lambda old: replace(old, release="applied", release_by="w"))
    store.update("c", lambda old: old)
    store.update("d", lambda old: replace(old, release="releasing", release_by="w"))
    assert sorted((one.session_id, one.release) for one in store.releases(["a", "b", "c"])) == [
        ("a", "releasing"),
        ("b", "applied"),
    ]
    assert store.releases([]) == []


def test_no_change_is_lost(store):
    """Changes of many threads at once all count."""

    def count(_):
        for _ in range(5):
            store.update("t", lambda old: replace(old, tools={**old.tools, "n": str(int(old.tools.get("n", "0")) + 1)}))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert store.get("t").tools == {"n": "20"}


def test_two_workers_share_one_database(tmp_path):
    """What one worker notes another one reads; a record of a rival's version is not overwritten."""
    url = f"sqlite:///{tmp_path / 'calls.sqlite3'}"
    first, second = SqlJournal(url), SqlJournal(url)
    mine, theirs = SqlCatalogStore(first.engine), SqlCatalogStore(second.engine)
    mine.update("t", lambda old: replace(old, digest="1"))

    def rival(old):
        theirs.update("t", lambda seen: replace(seen, digest=seen.digest + "x"))
        return replace(old, digest="never")

    with pytest.raises(Conflict):
        mine.update("t", rival)
    assert theirs.get("t").digest.startswith("1xx")
    first.close()
    second.close()


def test_a_database_that_does_not_answer_is_told(tmp_path):
    """A broken database is `JournalUnavailable`, for reading and for writing; no SQL reaches the caller."""
    journal = SqlJournal(f"sqlite:///{tmp_path / 'calls.sqlite3'}")
    with journal.engine.begin() as link:
        link.exec_driver_sql("DROP TABLE remote_catalogs")
    store = SqlCatalogStore(journal.engine)
    for work in (lambda: store.get("t"), lambda: store.update("t", lambda old: old), lambda: store.forget("t")):
        with pytest.raises(JournalUnavailable, match="do not answer"):
            work()
    journal.close()
