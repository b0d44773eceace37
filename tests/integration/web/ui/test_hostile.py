"""Hostile skills, transcripts and logs in a real browser: it opens no dialog, asks nobody else, and runs nothing of theirs."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kdskills.app import Host, Settings
from tests.hostile_console import HIDDEN, MARK, SCRIPT, keep_task, keep_turn, write_hostile

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser"), pytest.mark.timeout(600)]

LOG = (
    SCRIPT + HIDDEN + "\x1b]8;;javascript:alert(1)\x1b\\x\x1b]8;;\x1b\\\x00\x1b[31m<b>\x1b[0m\r\n"
).encode() + b"\xff\xfe\n"
TABS = ("text", "source", "files", "scripts", "sources", "imports", "findings", "facts")


async def prepared(folder, state):
    """Keep a turn and a task of the hostile bundle, and return their pages."""
    host = Host(Settings(state_dir=state, index_dir=state / "index", bundle=folder), entry_points=False)
    try:
        task = await keep_task(host.work.client, state, LOG * 100)
    finally:
        await host.work.aclose()
        await host.storage.aclose()
    return f"/ui/turns/{keep_turn(state, 300)}", f"/ui/work/tasks/{task}"


@pytest.mark.parametrize("scripts", [True, False])
def test_hostile_pages_do_nothing(tmp_path, window, show, scripts):
    """With and without scripts every page about what a stranger wrote is words: no dialog, no request, no broken policy."""
    folder, state = write_hostile(tmp_path / "bundle", files=20), tmp_path / "state"
    with ThreadPoolExecutor(1) as thread:  # a browser has a loop of its own in this one
        made = thread.submit(lambda: asyncio.run(prepared(folder, state))).result()
    files = ("page.md", "page.html", "picture.svg", "line.txt", "lines.md", "bytes.bin", "javascript%3Ax")
    with show(folder, state) as console:
        page = window(console.url, scripts=scripts)
        for path in (
            "/ui/skills",
            *(f"/ui/skills/bad.main?tab={tab}" for tab in TABS),
            *(f"/ui/skills/bad.main/files/{name}" for name in files),
            "/ui/skills/bad.main/why?consumer=%22%3E%3Cscript%3Ealert(1)%3C/script%3E",
            "/ui/prompt?request=%22%3E%3Cscript%3Ealert(1)%3C/script%3E",
            "/ui/turns",
            "/ui/work",
            *made,
        ):
            answer = page.goto(console.origin + path)
            page.wait_for_load_state("load")
            assert answer.status in {200, 400, 403, 404}, path
            assert page.locator(f".{MARK}, iframe, img, [onload], [onerror], [onmouseover]").count() == 0, path
            assert page.locator("a[href^='javascript:' i], a[href^='data:' i]").count() == 0, path
            assert page.url.startswith(console.origin), path
        page.close()  # before its server, which it asks for news
