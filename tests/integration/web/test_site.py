"""What anybody may fetch of a service: the skills marked as public, byte for byte, and nothing that tells of others."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.hooks import hookimpl
from kdskills.session import Denial
from kdskills.skills.archives import unpack_skill
from kdskills.skills.safe_open import bytes_digest, read_tree, version_of
from kdskills.supply.index import fetch_archive, index_urls, read_index

INDEX = "/.well-known/agent-skills/index.json"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with two skills that are public, one that is not, and one that is and may not be read."""
    top = tmp_path / "bundle"
    skills = {"brief": {}, "form": {"scripts/fill.py": b"print(1)\n", "bin é.dat": b"\x00\xff"}, "own": {}, "keys": {}}
    for name, files in skills.items():
        head = f"---\nname: {name}\ndescription: Makes a {name}.\n---\n\nWork, then rest.\n".encode()
        for path, data in {"SKILL.md": head, **files}.items():
            file = top / "skills" / "acme" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    (top / "skills/acme/form/scripts/fill.py").chmod(0o755)
    (top / "skills_descriptor.yaml").write_text("public: [acme.brief, acme.form, acme.keys]\n")
    return top


class Locked:
    """Lets nobody load one of the skills."""

    @hookimpl
    def kdskills_deny(self, request: Any) -> Denial | None:
        return Denial("no") if request.skill == "acme.keys" else None


@pytest.fixture
def site(settings: Settings, bundle: Path, serve: Any) -> Iterator[Any]:
    """A service with that bundle, which asks for tokens."""
    own = settings.model_copy(update={"bundle": bundle, "requests_per_minute": 0})
    with serve(Host(own, entry_points=False, plugins=[Locked()])) as service:
        yield service


@pytest.fixture
def client(site: Any) -> Iterator[httpx.Client]:
    """A client without a token."""
    with site.client() as anybody:
        yield anybody


def test_anybody_gets_the_public_skills_alone(site: Any, client: httpx.Client) -> None:
    """Without a token the index and its artifacts are there, as promised; of all else nobody learns a name."""
    listing = read_index(client.get(INDEX).content, f"{site.url}{INDEX}")
    assert [entry.name for entry in listing.entries] == ["brief", "form"]
    assert "own" not in client.get(INDEX).text
    assert "keys" not in client.get(INDEX).text
    for entry in listing.entries:
        answer = client.get(entry.url)
        assert (answer.status_code, bytes_digest(answer.content)) == (200, entry.digest)
        assert answer.headers["etag"] == f'"{entry.digest}"'
        assert "sandbox" in answer.headers["content-security-policy"]
    for path in ("/projects/local/skills", "/projects/local/tools/skills.list", "/openapi.json"):
        assert client.get(path).status_code == 401


def test_what_is_not_there_is_one_answer(site: Any, client: httpx.Client) -> None:
    """A project that was never made, one that publishes nothing, a broken one and a wrong name read alike."""
    site.run(site.host.projects.create("quiet", who="test"))
    broken = site.host.settings.state_dir / "broken"
    broken.mkdir()
    (broken / "skills_descriptor.yaml").write_text("public: 3\n")
    site.run(site.host.projects.create("broken", bundle=broken, who="test"))
    paths = [
        f"/p/{project}{INDEX}" for project in ("quiet", "never", "broken", "%2e%2e", "a%00b", "X" * 300, "local%0a")
    ]
    names = ["brief.zip", f"own-{'0' * 64}.zip", f"keys-{'0' * 64}.md", "..%2f..%2findex.json", "index.json%00"]
    paths += [INDEX.replace("index.json", name) for name in (*names, "", ".lock")]
    for path in paths:
        answer = client.get(path)
        shape = (answer.status_code, answer.json()["code"], answer.json()["details"])
        assert shape == (404, "not_found", {}), path
        assert answer.json()["detail"].startswith("there is nothing at "), path
        assert client.head(path).status_code == 404
    assert client.get(f"/p/local{INDEX}").content == client.get(INDEX).content


def test_a_project_publishes_what_its_own_bundle_marks(
    site: Any, client: httpx.Client, bundle: Path, archive: Callable[..., Path]
) -> None:
    """Below `/p/<project>/` lies that project's site; an upload is in it once its bundle's descriptor marks it."""
    site.run(site.host.projects.create("other", bundle=bundle, who="test"))
    site.run(site.host.projects.upload("other", archive("report"), who="test"))
    url = f"/p/other{INDEX}"
    assert "report" not in client.get(url).text
    (bundle / "skills_descriptor.yaml").write_text("public: [report, acme.own]\n")
    assert [entry.name for entry in read_index(client.get(url).content, site.url + url).entries] == ["own", "report"]
    site.run(site.host.projects.patch("other", "report", enabled=False, who="test"))
    assert [entry.name for entry in read_index(client.get(url).content, site.url + url).entries] == ["own"]


def test_caches_and_heads(site: Any, client: httpx.Client) -> None:
    """HEAD says what GET would, a known ETag is answered by 304 without a body, and a change is another ETag."""
    (artifact,) = [
        each.url for each in read_index(client.get(INDEX).content, site.url + INDEX).entries if each.name == "form"
    ]
    for path in (INDEX, artifact):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        names = ("etag", "content-length", "content-type", "cache-control", "access-control-allow-origin")
        assert [head.headers[name] for name in names] == [got.headers[name] for name in names]
        assert int(head.headers["content-length"]) == len(got.content)
        assert got.headers["cache-control"].startswith("public, max-age=")
        for known in (got.headers["etag"], f'"x", W/{got.headers["etag"]}', "*"):
            for method in ("GET", "HEAD"):
                again = client.request(method, path, headers={"If-None-Match": known})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", got.headers["etag"])
        assert client.get(path, headers={"If-None-Match": '"sha256:0"'}).status_code == 200
        assert client.post(path).status_code == 405
        assert client.put(path).status_code == 405


def test_pages_of_any_site_may_read_these_alone(site: Any, client: httpx.Client) -> None:
    """The star of CORS stands on published skills and nowhere else; a foreign name of the host is still refused."""
    foreign = {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
    answer = client.get(INDEX, headers=foreign)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
    for path in (
        "/healthz",
        "/projects/local/skills",
        "/mcp",
        "/.well-known/agent-skills",
        "/.well-known/agent-skills/a/b",
    ):
        refused = client.get(path, headers=foreign)
        assert (refused.status_code, refused.json()["code"]) == (403, "origin_refused")
        assert "access-control-allow-origin" not in refused.headers
    assert client.post(INDEX, headers=foreign).json()["code"] == "origin_refused"
    assert client.get(INDEX, headers={"Host": "evil.example"}).json()["code"] == "host_refused"


def test_who_asks_too_often_waits(settings: Settings, bundle: Path, serve: Any) -> None:
    """Requests without a token are counted by their address, and tokens of others are not."""
    own = settings.model_copy(update={"bundle": bundle, "requests_per_minute": 3})
    with (
        serve(Host(own, entry_points=False)) as service,
        service.client() as anybody,
        service.client(service.token()) as holder,
    ):
        statuses = [anybody.get(INDEX).status_code for _ in range(5)]
        assert (statuses[:3], statuses[-1]) == ([200] * 3, 429)
        assert holder.get("/projects/local/skills").status_code == 200


def test_many_ask_at_once(site: Any) -> None:
    """Crowds get the same bytes, and one that goes away in the middle is nobody's harm."""
    parts = urlsplit(site.url)

    def leave(_: int) -> None:
        link = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        link.request("GET", INDEX)
        link.close()

    def ask(_: int) -> bytes:
        with site.client() as client:
            return client.get(INDEX).content

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(16)))
        assert len(set(pool.map(ask, range(32)))) == 1


def test_what_is_fetched_is_the_published_tree(site: Any, client: httpx.Client, bundle: Path, tmp_path: Path) -> None:
    """The reader of other sites' indexes reads ours, and what it unpacks has every byte and execute bit."""
    (found, _) = index_urls(site.url)
    for entry in read_index(client.get(found).content, found).entries:
        into = tmp_path / entry.name
        into.mkdir()
        skill = unpack_skill(fetch_archive(entry, lambda url, limit: client.get(url).content, into), into / "out")
        assert skill.version == version_of(read_tree(bundle / "skills" / "acme" / entry.name))


@pytest.mark.parametrize("path", ["", "/p/other"])
def test_our_own_client_installs_what_is_served(site: Any, bundle: Path, tmp_path: Path, path: str) -> None:
    """`kdskills add URL` puts the published trees into another bundle, execute bits too, locks them, and finds them the same."""
    site.run(site.host.projects.create("other", bundle=bundle, who="test"))
    mine = tmp_path / "mine"
    (mine / "skills").mkdir(parents=True)
    (mine / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    host = Host(Settings(state_dir=tmp_path / "own", index_dir=tmp_path / "own-index"), entry_points=False)
    words = {"bundle": mine, "source": site.url + path, "into": "acme", "yes": True}
    answer = asyncio.run(host.invoke("skills.add", words, Context()))
    assert sorted(row.key for row in answer.skills) == ["acme/brief", "acme/form"]
    for name in ("brief", "form"):
        installed, ours = (read_tree(top / "skills" / "acme" / name) for top in (mine, bundle))
        assert version_of(installed) == version_of(ours)
    assert not asyncio.run(host.invoke("skills.outdated", {"bundle": mine}, Context())).negative
    (bundle / "skills/acme/brief/SKILL.md").write_text("---\nname: brief\ndescription: Another.\n---\n\nRest.\n")
    assert asyncio.run(host.invoke("skills.outdated", {"bundle": mine}, Context())).negative


@pytest.mark.needs("skills-client")
@pytest.mark.parametrize("path", ["", "/p/other"])
def test_the_client_that_most_people_have_installs_what_is_served(
    site: Any, bundle: Path, tmp_path: Path, path: str
) -> None:
    """Npm's `skills add URL` finds the index, takes its artifacts, and writes the files that were published."""
    site.run(site.host.projects.create("other", bundle=bundle, who="test"))
    tools = (
        Path(os.environ.get("KDSKILLS_SKILLS_CLIENT_DIR") or "/tmp/kdskills-skills-client") / "node_modules" / ".bin"
    )
    home = tmp_path / "home"
    home.mkdir()
    env = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    words = [tools / "skills", "add", site.url + path, "--yes", "--copy", "--agent", "universal"]
    done = subprocess.run(
        words, env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110
    )
    assert re.search(r"Installed 2 skills", done.stdout), done.stdout + done.stderr
    installed = home / ".agents" / "skills"
    assert sorted(each.name for each in installed.iterdir()) == ["brief", "form"]
    for name in ("brief", "form"):
        theirs, ours = read_tree(installed / name), read_tree(bundle / "skills" / "acme" / name)
        assert [file[:3] for file in theirs] == [file[:3] for file in ours]
