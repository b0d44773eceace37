"""Servers that answer too much, too little, elsewhere or never: told, bounded, and nothing of it is used."""

from __future__ import annotations

import gzip
import io
import json
import socket
import tarfile
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kdskills.errors import KdskillsError
from kdskills.skills.safe_open import bytes_digest
from kdskills.supply import fetching, sources
from kdskills.supply.index import SCHEMA
from kdskills.supply.lock import read_skills
from kdskills.supply.sources import fetch_source, parse_source
from tests.unit.supply.conftest import skill_text


def zip_of(name="brief", body="Read, then write."):
    """Return a zip with one skill."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("SKILL.md", skill_text(name, body))
    return out.getvalue()


class Pages(dict):
    """What a server answers by path: bytes, or (status, headers, pieces)."""

    url: str
    asked: list[str]


@pytest.fixture
def site():
    """A server of this machine; `site[path]` is what it answers."""
    pages = Pages()
    pages.asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            pages.asked.append(self.path)
            page = pages.get(self.path, (404, {}, ()))
            status, headers, pieces = (
                (200, {"Content-Length": str(len(page))}, [page]) if isinstance(page, bytes) else page
            )
            self.send_response(status)
            for header, value in headers.items():
                self.send_header(header, value)
            self.end_headers()
            try:
                for piece in pieces:
                    self.wfile.write(piece)
            except OSError:
                pass

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        pages.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield pages
        server.shutdown()
        thread.join()


@pytest.fixture
def fetch(tmp_path):
    """Fetch a source, and return what came of it."""

    def fetch_text(text, *names):
        scratch = tmp_path / f"scratch-{len(list(tmp_path.glob('scratch-*')))}"
        scratch.mkdir()
        return fetch_source(parse_source(text, base=tmp_path), scratch, names=names)

    return fetch_text


def refusal(call, *words, **named):
    """Return the code and words of the error that a call ends in."""
    with pytest.raises(KdskillsError) as caught:
        call(*words, **named)
    return caught.value.code, caught.value.message


def endless():
    """Yield bytes for ever."""
    while True:
        yield bytes(1 << 20)


def test_an_archive_is_downloaded(site, fetch):
    """A zip behind a redirect of its own host comes, and what is locked is the digest of its bytes."""
    site["/a.zip"] = (302, {"Location": "/b"}, ())
    site["/b"] = zip_of()
    [skill] = fetch(f"{site.url}/a.zip").skills
    assert (skill.unpacked.name, skill.resolved) == ("brief", bytes_digest(site["/b"]))


def test_a_download_tells_how_far_it_is(site, tmp_path):
    """While bytes come it is told how many there are already, and of how many; without passwords of the address."""
    data = site["/a.zip"] = zip_of(body="A line of many.\n" * 40_000)
    events = []
    (tmp_path / "scratch").mkdir()
    source = parse_source(f"{site.url}/a.zip".replace("//", "//me:secret@"), base=tmp_path)
    fetch_source(source, tmp_path / "scratch", tell=lambda *words: events.append(words))
    steps = [done for kind, _, done, total in events if (kind, total) == ("fetch", len(data))]
    assert len(steps) > 1
    assert steps == sorted(steps)
    assert steps[-1] == len(data)
    assert "secret" not in str(events)


def test_an_answer_without_end_is_cut_off(site, fetch, monkeypatch):
    """However much a server sends or promises, no more than the bound is taken."""
    monkeypatch.setattr(sources, "CONTAINER", replace(sources.CONTAINER, archive_bytes=3 << 20))
    site["/a.zip"] = (200, {}, endless())
    assert refusal(fetch, f"{site.url}/a.zip")[0] == "source_too_large"
    site["/a.zip"] = (200, {"Content-Length": str(10 << 30)}, [b"PK"])
    assert refusal(fetch, f"{site.url}/a.zip")[0] == "source_too_large"


def test_redirects_end(site, fetch):
    """A circle of redirects is left after five, and one that leads to no address is an error like any other."""
    site["/a.zip"] = (302, {"Location": "/a.zip"}, ())
    code, words = refusal(fetch, f"{site.url}/a.zip")
    assert (code, site.asked.count("/a.zip")) == ("source_unreachable", 6)
    assert "redirects" in words
    for target in ("http://[::1", "file:///etc/passwd", "https://", "ftp://example.net/x", "https://a..b/x"):
        site["/a.zip"] = (302, {"Location": target}, ())
        assert refusal(fetch, f"{site.url}/a.zip")[0] == "source_unreachable"


@pytest.mark.parametrize(
    "target",
    [
        "https://127.0.0.1:1/x",
        "https://localhost/x",
        "https://[::1]/x",
        "https://169.254.169.254/x",
        "https://[::ffff:127.0.0.1]/x",
        "https://[64:ff9b::a9fe:a9fe]/x",
        "https://[2002:7f00:1::]/x",
        "https://[::127.0.0.1]/x",
        "https://[ff02::1]/x",
        "https://224.0.0.1/x",
    ],
)
def test_no_other_host_leads_into_the_private_network(site, fetch, target):
    """A redirect, and an address in an index, lead to no private address; nobody is even connected to."""
    site["/a.zip"] = (302, {"Location": target}, ())
    code, words = refusal(fetch, f"{site.url}/a.zip")
    assert code == "source_unreachable"
    assert "private network" in words
    entry = {"name": "brief", "type": "archive", "description": "x", "url": target, "digest": bytes_digest(b"")}
    site["/.well-known/agent-skills/index.json"] = json.dumps({"$schema": SCHEMA, "skills": [entry]}).encode()
    (refused,) = fetch(site.url).refused
    assert refused.code == "source_unreachable"
    assert "private network" in refused.message


def test_a_host_that_no_name_service_knows_is_an_error_like_any_other(fetch):
    """A host with empty or overlong labels, of a source or of an index, is told in a sentence."""
    for host in ("a..b", f"{'a' * 300}.example"):
        assert refusal(fetch, f"https://{host}/a.zip")[0] == "source_unreachable"


def test_another_port_of_this_machine_is_another_host(site, fetch):
    """What a server of this machine names on another port is not asked."""
    other = socket.create_server(("127.0.0.1", 0))
    site["/a.zip"] = (302, {"Location": f"http://127.0.0.1:{other.getsockname()[1]}/x"}, ())
    assert refusal(fetch, f"{site.url}/a.zip")[0] == "source_unreachable"
    other.settimeout(0)
    with pytest.raises(BlockingIOError):
        other.accept()
    other.close()


@contextmanager
def silent():
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_says_nothing_is_left(fetch, monkeypatch):
    """Silence ends in an error, as does a host that does not answer at all."""
    monkeypatch.setattr(fetching, "SILENCE_S", 0.2)
    with silent() as url:
        assert refusal(fetch, f"{url}/a.zip")[0] == "source_unreachable"
    assert refusal(fetch, f"{url}/a.zip")[0] == "source_unreachable"


def test_a_trickle_is_left(site, fetch, monkeypatch):
    """A server that sends a little for ever has its time, and no more."""
    monkeypatch.setattr(fetching, "FETCH_S", 0.0)
    site["/a.zip"] = zip_of()
    assert "more than 0 s" in refusal(fetch, f"{site.url}/a.zip")[1]


@pytest.mark.parametrize("status", [401, 404, 410, 500, 503])
def test_answers_that_are_errors_are_told(site, fetch, status):
    """The status stands in the error; the body of such an answer is not used."""
    site["/a.zip"] = (status, {}, [zip_of()])
    assert f"it answers {status}" in refusal(fetch, f"{site.url}/a.zip")[1]


def test_packed_twice_is_not_unpacked(site, fetch):
    """An encoding that was not asked for is not undone, so that it hides no bomb."""
    site["/a.zip"] = (200, {"Content-Encoding": "gzip"}, [gzip.compress(zip_of())])
    assert refusal(fetch, f"{site.url}/a.zip")[0].startswith("archive_")


def index_of(pages, *skills):
    """Let a site have an index of these (name, kind, path)."""
    rows = [
        {"name": name, "type": kind, "description": "x", "url": path, "digest": bytes_digest(pages[path])}
        for name, kind, path in skills
    ]
    pages["/.well-known/agent-skills/index.json"] = json.dumps({"$schema": SCHEMA, "skills": rows}).encode()


def test_a_site_gives_its_skills(site, fetch):
    """A site's skills come each from its own artifact, zip, tar.gz or skill file, and only those that are asked for."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("SKILL.md")
        info.size = len(skill_text("packed"))
        tar.addfile(info, io.BytesIO(skill_text("packed").encode()))
    site["/a.zip"], site["/b.tar.gz"], site["/c.md"] = zip_of(), out.getvalue(), skill_text("plain").encode()
    index_of(site, ("brief", "archive", "/a.zip"), ("packed", "archive", "/b.tar.gz"), ("plain", "skill-md", "/c.md"))
    assert [skill.unpacked.name for skill in fetch(site.url).skills] == ["brief", "packed", "plain"]
    site.asked.clear()
    assert [skill.unpacked.name for skill in fetch(site.url, "plain").skills] == ["plain"]
    assert site.asked == ["/.well-known/agent-skills/index.json", "/c.md"]


def test_an_older_site_gives_its_skills(site, fetch):
    """A site of the version before, which lists files and has no digests, is read where there is no newer index."""
    rows = [{"name": "brief", "description": "x", "files": ["SKILL.md", "notes.md"]}]
    site["/.well-known/skills/index.json"] = json.dumps({"skills": rows}).encode()
    site["/.well-known/skills/brief/SKILL.md"], site["/.well-known/skills/brief/notes.md"] = (
        skill_text("brief").encode(),
        b"x",
    )
    [skill] = fetch(site.url).skills
    assert [file.path for file in skill.unpacked.files] == ["SKILL.md", "notes.md"]


def test_another_artifact_than_the_index_promises_is_refused(site, fetch):
    """A skill whose bytes are not those of the index does not come; the others do, and the finding says which."""
    site["/a.zip"], site["/b.zip"] = zip_of(), zip_of("other")
    index_of(site, ("brief", "archive", "/a.zip"), ("other", "archive", "/b.zip"))
    site["/b.zip"] = zip_of("other", "Evil.")
    fetched = fetch(site.url)
    assert [skill.unpacked.name for skill in fetched.skills] == ["brief"]
    assert [(each.code, each.path) for each in fetched.refused] == [("site_digest_mismatch", "other")]


def test_other_bytes_of_a_locked_url_are_told(site, supply, bundle, tmp_path):
    """An address that gives other bytes than were locked is refused by `update` and by `sync` until somebody accepts it."""
    site["/a.zip"] = zip_of()
    supply().added(f"{site.url}/a.zip", base=tmp_path, yes=True)
    site["/a.zip"] = zip_of(body="Evil.")
    assert [row.code for row in supply().updated((), (), yes=True).skills] == ["source_changed"]
    for path in (*bundle.folder("public/brief").iterdir(), *(tmp_path / "cache/skills").glob("*.zip")):
        path.unlink()
    assert [row.code for row in supply().synced(frozen=False).skills] == ["source_changed"]
    assert [row.code for row in supply(accepts=True).synced(frozen=True).skills] == ["lock_frozen"]
    assert [row.state for row in supply(accepts=True).synced(frozen=False).skills] == ["changed"]
    assert read_skills(bundle.lock)["public/brief"].resolved == bytes_digest(site["/a.zip"])
