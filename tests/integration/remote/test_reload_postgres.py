"""Records of catalogs in PostgreSQL, shared by workers of several machines."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kdskills.remote.catalog.backend import CatalogRecord, SqlCatalogStore
from kdskills.remote.journal import SqlJournal

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("postgres")]


@pytest.fixture
def url(postgres):
    """Return an empty database of a real server."""
    return postgres.create(f"catalogs_{secrets.token_hex(6)}")


def test_workers_share_records(url):
    """What one worker writes the others read; changes of many at once all count."""
    journals = [SqlJournal(url) for _ in range(3)]
    try:
        stores = [SqlCatalogStore(journal.engine) for journal in journals]
        stores[0].update("t", lambda old: replace(old, strategy="reload", digest="d", tools={"a": "1"}))
        assert stores[1].get("t") == CatalogRecord("t", "reload", "d", {"a": "1"}, version=1)

        def count(store):
            for _ in range(5):
                store.update("n", lambda old: replace(old, tools={"n": str(int(old.tools.get("n", "0")) + 1)}))

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(count, stores))
        assert stores[2].get("n").tools == {"n": "15"}
        stores[1].update("t", lambda old: replace(old, release="releasing", release_by="w"))
        assert [one.session_id for one in stores[0].releases(["t", "n"])] == ["t"]
        stores[2].forget("t")
        assert stores[0].get("t") == CatalogRecord("t")
    finally:
        for journal in journals:
            journal.close()
