"""Hostile skills, transcripts and logs on the real pages: nothing of them is HTML, and every page is small."""

from __future__ import annotations

import re
import shutil
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from kdskills.doors.ui.rendering import UNSEEN
from kdskills.jobs.client import JobsClient
from tests.hostile_console import HIDDEN, MARK, SCRIPT, keep_task, keep_turn, write_hostile

LIMIT = 100 * 1024
LONG = 450 * 1024  # of the page of a prompt, which shows what is sent
TABS = ("text", "source", "files", "scripts", "sources", "imports", "findings", "facts", "nothing")
LOG = (
    SCRIPT + HIDDEN + "\x1b]8;;javascript:alert(1)\x1b\\x\x1b]8;;\x1b\\\x00\x1b[31m<b>\x1b[0m\r\n"
).encode() + b"\xff\xfe\n"


class Page(HTMLParser):
    """What a browser makes of a page: every element with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


def require_own(answer, most: int = LIMIT) -> str:
    """Check that a page is ours alone: no element, handler, link or picture of a stranger, nothing unseen, and small."""
    html = answer.text
    where = str(answer.url)[:200]
    assert answer.status_code in {200, 400, 403, 404, 422}, (where, html[-2000:])
    assert "internal_error" not in html, where
    assert len(answer.content) <= most, (where, len(answer.content))
    assert UNSEEN.search(html) is None, (where, UNSEEN.search(html))
    for tag, attributes in Page(html).elements:
        assert tag not in {"img", "iframe", "object", "embed", "base", "style", "math", "b", "video", "audio"}, (
            where,
            tag,
        )
        assert not [name for name in attributes if name.startswith("on") or MARK in name], (where, tag, attributes)
        assert MARK not in (attributes.get("class") or ""), (where, tag)
        assert tag != "script" or (attributes.get("src") or "").startswith("/ui/static/"), where
        for name in ("href", "src", "action", "hx-get"):
            value = attributes.get(name)
            assert value is None or re.match(r"/ui/|#|https?://|mailto:", value), (where, tag, value)
            assert value is None or name == "href" or value.startswith("/ui/"), (where, tag, value)
    return html


@pytest.fixture
def bundle(tmp_path):
    """The hostile bundle."""
    return write_hostile(tmp_path / f"{MARK}'<b>\u202e", files=300)


async def test_pages_of_hostile_skills(owner):
    """Every page about skills shows their attacks as words."""
    for path in (
        "/ui/",
        "/ui/skills",
        "/ui/skills?findings=error",
        "/ui/try",
        "/ui/evals",
        "/ui/projects",
        "/ui/work/hosts",
    ):
        require_own(await owner.get(path))
    skills = require_own(await owner.get("/ui/skills"))
    assert "bad.main" in skills
    for name in ("main", "long", "huge", "broken", SCRIPT, "a/b", "%2e%2e"):
        for tab in TABS:
            require_own(await owner.get(f"/ui/skills/bad.{name}", params={"tab": tab}))
        for consumer in ("", SCRIPT, HIDDEN, "nobody"):
            require_own(await owner.get(f"/ui/skills/bad.{name}/why", params={"consumer": consumer}))
    shown = require_own(await owner.get("/ui/skills/bad.long"))
    assert "&lt;&lt;&lt;" in shown
    assert "more characters]" in shown


async def test_hostile_files(owner):
    """Every file that the list leads to is a page, whatever its name and content; there is no way out of the folder."""
    listed = require_own(await owner.get("/ui/skills/bad.main?tab=files"))
    links = [
        attributes["href"]
        for tag, attributes in Page(listed).elements
        if tag == "a" and "/files/" in attributes["href"]
    ]
    assert len(links) == 100
    odd = [link for link in links if "file-0" not in link]
    for link in [*odd, links[-1]]:
        require_own(await owner.get(link))
        require_own(await owner.get(f"{link}{'&' if '?' in link else '?'}view=source"))
    for path in ("line.txt", "lines.md", "brackets.md", "page.md", "bytes.bin", "picture.svg"):
        began = time.process_time()
        page = require_own(await owner.get(f"/ui/skills/bad.main/files/{path}"))
        assert time.process_time() - began < 5, path
        assert "This did not work" not in page, path


async def test_queries_of_strangers(owner):
    """What a link of a stranger says behind its question mark is words on the page."""
    for path in ("/ui/skills?q={}", "/ui/skills?namespace={}", "/ui/prompt?request={}&loaded={}&consumer={}&tools={}", "/ui/prompt?beside=yes&request2={}", "/ui/try?request={}&model={}&skills={}", "/ui/work?skill={}", "/ui/work/new?skill={}", "/ui/turns/compare?first={}&second={}", "/ui/access/audit?who={}", "/ui/skills/{}", "/ui/turns/{}", "/ui/projects/{}", "/ui/evals/{}", "/ui/{}"):  # fmt: skip
        for text in (SCRIPT, HIDDEN, "javascript:alert(1)", "a" * 3000, "\x00", "{{ 7777 * 3 }}"):
            words = [text.replace("/", "")] * path.count("{}") if "?" not in path else [text] * path.count("{}")
            quoted = [
                re.sub(r"[^\w]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), word)
                for word in words
            ]
            page = require_own(await owner.get(path.format(*quoted)), LONG if "prompt" in path else LIMIT)
            assert "23331" not in page or "{{ 7777 * 3 }}" not in text


async def test_the_prompt_is_shown_whole_and_bounded(owner):
    """A prompt with a megabyte of a skill is shown as far as a page goes, beside another one, too."""
    for query in ("loaded=bad.main", "loaded=bad.long", "loaded=bad.long&beside=yes&loaded2=bad.main"):
        page = require_own(await owner.get(f"/ui/prompt?{query}"), LONG)
        assert "tokens" in page


async def test_a_skill_that_vanishes_and_a_file_that_becomes_a_link(owner, bundle):
    """What is gone since the page was made is said to be gone; a link to elsewhere shows nothing of elsewhere."""
    require_own(await owner.get("/ui/skills/bad.main"))
    secret = bundle.parent / "secret.txt"
    secret.write_text("the secret of elsewhere")
    page = bundle / "skills" / "bad" / "main" / "page.md"
    page.unlink()
    page.symlink_to(secret)
    assert "the secret" not in require_own(await owner.get("/ui/skills/bad.main/files/page.md"))
    (bundle / "skills" / "bad" / "main" / "gone").mkdir()
    shutil.rmtree(bundle / "skills" / "bad" / "main")
    for path in (
        "/ui/skills/bad.main",
        "/ui/skills/bad.main?tab=files",
        "/ui/skills/bad.main/files/page.html",
        "/ui/skills/bad.main/why",
    ):
        require_own(await owner.get(path))


async def test_hostile_turns(owner, tmp_path):
    """A transcript of ten thousand hostile events is read a page at a time, a step at a time, and beside another."""
    turns = [
        keep_turn(tmp_path / "state", 10_000),
        keep_turn(tmp_path / "state", 700, one_step=False),
        keep_turn(tmp_path / "state", 0),
    ]
    for turn in turns:
        page = require_own(await owner.get(f"/ui/turns/{turn}"))
        assert "&lt;script" in page
    page = require_own(await owner.get(f"/ui/turns/{turns[0]}"))
    assert "1 to 60 of" in page
    for query in ("offset=60", "offset=9999", "offset=99999999", "step=1", "step=7", "step=1&offset=60"):
        require_own(await owner.get(f"/ui/turns/{turns[0]}?{query}"))
    require_own(await owner.get(f"/ui/turns/compare?first={turns[1]}&second={turns[2]}"))
    for _ in range(50):
        keep_turn(tmp_path / "state", 0)
    require_own(await owner.get("/ui/turns"))
    require_own(await owner.get("/ui/"))


@pytest.fixture
async def jobs(host, tmp_path):
    """A client of background work whose workers are nobody."""
    client = JobsClient(host.settings.work_database, host.settings.state_dir, host.settings.jobs)
    host.work.__dict__["client"] = client
    return client


async def test_hostile_output(owner, jobs, host):
    """Output with sequences, links, nothing and half characters is text, at the end of 300 MB as at the beginning."""
    state = host.settings.state_dir
    tasks = [
        await keep_task(jobs, state, LOG * 400),
        await keep_task(jobs, state, LOG * 400, size=300 * 1024 * 1024),
        await keep_task(jobs, state, b"\x1b[31mX\x1b[32mY" * 50_000),
        await keep_task(jobs, state, b"<" * 1_000_000, argument="<" * 100_000),
        await keep_task(jobs, state, b"\x00" * 100_000),
        await keep_task(jobs, state, b"\n" * 100_000),
    ]
    for task in tasks:
        began = time.process_time()
        page = require_own(await owner.get(f"/ui/work/tasks/{task}"))
        assert "log-end" not in page, page[-1500:]
        for offset in ("0", "7", "1000", "99999999999"):
            require_own(await owner.get(f"/ui/work/tasks/{task}/log/stdout?offset={offset}"))
        assert time.process_time() - began < 10
    for path in ("/ui/work", "/ui/", "/ui/work?status=running"):
        require_own(await owner.get(path))


async def test_a_list_of_tasks_with_long_commands_is_a_page(owner, jobs, host):
    """Fifty commands of a hundred thousand characters are fifty short lines."""
    for _ in range(50):
        await keep_task(jobs, host.settings.state_dir, b"", argument='"' * 20_000)
    require_own(await owner.get("/ui/work"))


async def test_ten_thousand_files(tmp_path, own, owner, bundle):
    """A skill of ten thousand files lists a hundred of them at a time, and says that there are more."""
    folder = bundle / "skills" / "bad" / "long"
    for number in range(10_000):
        (folder / f"f{number:05}.txt").write_text("")
    page = require_own(await owner.get("/ui/skills/bad.long?tab=files"))
    assert "Later" in page
    for tab in TABS:
        require_own(await owner.get(f"/ui/skills/bad.long?tab={tab}"))


async def test_downloads_are_no_pages(owner, host, monkeypatch):
    """A file is given as bytes to keep, under its own name and in a box, whatever it claims to be."""
    names = ["page.html", 'a"b\r\nX-Evil: 1.svg', "\udcff\u202e.js", "../../etc/passwd"]
    for name in names:

        async def give(operation, arguments, context, name=name):
            return SimpleNamespace(path=name, size=8, next_offset=None, data_base64="PHNjcmlwdD4=")

        monkeypatch.setattr(host, "invoke", give)
        for path in ("/ui/work/artifacts/x", "/ui/turns/x/files/y"):
            answer = await owner.get(path)
            assert answer.content == b"<script>"
            assert answer.headers["content-type"] == "application/octet-stream"
            assert re.fullmatch(
                r"attachment; filename\*=UTF-8''[\w.%~-]+", answer.headers["content-disposition"], re.ASCII
            )
            assert answer.headers.get_list("content-security-policy") == ["default-src 'none'; sandbox"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "x-evil" not in answer.headers
