"""Files that work left, over HTTP: whole, in ranges, unchanged, gone, and never shown as a page of this service."""

from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.doors.web.resources import byte_range
from kdskills.jobs.model import Scope

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("web")]

DATA = os.urandom(3 * 1024 * 1024 + 17)
TAG = f'"{hashlib.sha256(DATA).hexdigest()}"'


class Kept:
    """An artifact of the service's project, and a client that may read it."""

    def __init__(self, service):
        self.service = service
        self.client = service.client(service.token(scopes=frozenset({"work:read"})))
        self.id = self.keep(DATA, 'out/report é\u202e".html')

    def keep(self, data, path="x.bin"):
        """Keep bytes under a name, and return the artifact's id."""

        async def keep():
            work, keeper = await self.service.host.work.client.work(), await self.service.host.work.keeper()
            item = await keeper.keep_input(Scope(), data)
            table = work.tables.artifacts
            change = table.update().where(table.c.id == item).values(path=path, mime="text/html")
            await work.database.write(lambda link: link.execute(change))
            return item

        return self.service.run(keep())

    def get(self, item=None, method="GET", **headers):
        """Ask for it, with headers whose names have lines for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, f"/projects/local/artifacts/{item or self.id}/content", headers=named)


@pytest.fixture
def kept(service):
    """The artifact."""
    made = Kept(service)
    yield made
    made.client.close()


def test_the_whole_file(kept):
    """All bytes with their number, digest and type, as a file to keep that no browser shows or runs."""
    found = kept.get()
    assert (found.status_code, found.content == DATA) == (200, True)
    headers = found.headers
    assert (headers["content-length"], headers["etag"], headers["accept-ranges"]) == (str(len(DATA)), TAG, "bytes")
    assert (headers["x-content-type-options"], headers["content-security-policy"]) == (
        "nosniff",
        "default-src 'none'; sandbox",
    )
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''report%20%C3%A9%E2%80%AE%22.html"
    assert "private" in headers["cache-control"]
    head = kept.get(method="HEAD")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(DATA)))


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=1048570-1048590", 1048570, 1048591),
        ("bytes=100-", 100, len(DATA)),
        ("bytes=-7", len(DATA) - 7, len(DATA)),
        ("bytes=-999999999", 0, len(DATA)),
        (f"bytes={len(DATA) - 1}-999999999999", len(DATA) - 1, len(DATA)),
    ],
)
def test_a_range(kept, asked, begin, end):
    """206 with exactly these bytes and where they are."""
    found = kept.get(Range=asked)
    assert (found.status_code, found.content == DATA[begin:end]) == (206, True)
    assert found.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(DATA)}"
    assert found.headers["content-length"] == str(end - begin)
    assert found.headers["etag"] == TAG


@pytest.mark.parametrize("asked", [f"bytes={len(DATA)}-", f"bytes={len(DATA)}-{len(DATA) + 9}", "bytes=-0"])
def test_a_range_behind_the_end(kept, asked):
    """416 as a problem, with the size."""
    found = kept.get(Range=asked)
    assert (found.status_code, found.json()["code"]) == (416, "range_not_satisfiable")
    assert found.headers["content-range"] == f"bytes */{len(DATA)}"
    assert found.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "asked", ["bytes=9-5", "bytes=", "bytes=-", "bytes=0-1,5-6", "lines=0-1", "bytes=a-b", "bytes=1-2-3", "bytes=" + "9" * 400 + "-", "0-5"]
)  # fmt: skip
def test_what_is_no_range_is_not_one(kept, asked):
    """Several ranges, other units and nonsense get the whole file, as if nothing had been said."""
    found = kept.get(Range=asked)
    assert (found.status_code, found.content == DATA) == (200, True)
    assert "content-range" not in found.headers


def test_a_range_of_another_file(kept):
    """`If-Range` gives the range only of the file it names by its strong tag; what was seen already is 304."""
    for other in ('"0"', f"W/{TAG}", "Sat, 28 Nov 2026 11:48:15 GMT", ""):
        assert kept.get(Range="bytes=0-4", If_Range=other).status_code == 200
    assert kept.get(Range="bytes=0-4", If_Range=TAG).content == DATA[:5]
    for same in (TAG, f'"x", W/{TAG}', "*"):
        found = kept.get(If_None_Match=same)
        assert (found.status_code, found.content, found.headers["etag"]) == (304, b"", TAG)
    assert kept.get(If_None_Match='"x"').status_code == 200


def test_a_file_without_bytes(kept):
    """It is given whole, and has no range."""
    item = kept.keep(b"")
    found = kept.get(item)
    assert (found.status_code, found.content, found.headers["content-length"]) == (200, b"", "0")
    assert kept.get(item, Range="bytes=0-").status_code == 416


def test_whose_it_is(kept):
    """It is read with the scope `work:read` of its project and where the token allows `artifacts.get`; else it is not there."""
    service, path = kept.service, f"artifacts/{kept.id}/content"
    service.run(service.host.projects.create("other", who="test"))
    cases = [
        (service.token("other"), "other", 404, "not_found"),
        (service.token("other"), "local", 404, "not_found"),
        (service.token(scopes=frozenset({"work:run"})), "local", 403, "scope_missing"),
        (service.token(allowed_tools=frozenset({"tasks.list"})), "local", 403, "tool_not_allowed"),
        (None, "local", 401, "unauthenticated"),
    ]
    for token, project, status, code in cases:
        with service.client(token) as client:
            found = client.get(f"/projects/{project}/{path}")
            assert (found.status_code, found.json()["code"]) == (status, code)
    assert kept.get("art_nothing").json()["code"] == "not_found"
    assert kept.get("..%2f..%2fetc%2fpasswd").status_code in {400, 404}


def test_bytes_that_are_gone_or_other_ones(kept):
    """A file that is missing is told before the answer begins; one that was changed never arrives whole."""
    import httpx

    (path,) = [path for path in kept.service.host.settings.state_dir.rglob("*") if path.name.startswith(TAG[1:20]) and path.is_file()] or [
        path for path in kept.service.host.settings.state_dir.rglob("*") if path.is_file() and path.stat().st_size == len(DATA)
    ]  # fmt: skip
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    with pytest.raises(httpx.RemoteProtocolError):
        kept.get()
    path.write_bytes(DATA[:-9])
    with pytest.raises(httpx.RemoteProtocolError):
        kept.get(Range="bytes=0-")
    path.unlink()
    for asked in ({}, {"Range": "bytes=0-4"}):
        found = kept.get(**asked)
        assert (found.status_code, found.json()["code"]) == (404, "artifact_missing")


def test_whoever_is_told_to_wait_is_told_how_long(serve, settings, tmp_path):
    """A 503 carries `Retry-After`."""
    from kdskills.app import Host

    (tmp_path / "file").write_text("in the way")
    with serve(Host(settings.model_copy(update={"artifacts": str(tmp_path / "file")}), entry_points=False)) as service:
        token = service.token()
        with service.client(token) as client:
            found = client.get("/readyz")
            assert (found.status_code, int(found.headers["retry-after"]) > 0) == (503, True)
            refused = client.get("/projects/local/artifacts/art_x/content")
            assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)


@given(st.text(max_size=40), st.integers(0, 1000))
def test_no_header_asks_beyond_the_file(text, size):
    """Whatever is said, what is given lies within the file."""
    for header in (text, f"bytes={text}", f"bytes={text}-", f"bytes=-{text}"):
        span = byte_range(header, size)
        assert span is None or 0 <= span[0] <= span[1] <= size
