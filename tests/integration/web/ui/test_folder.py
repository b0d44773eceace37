"""The console over a bundle's folder, as its author uses it: found, asked why, rendered, changed, tried."""

import time

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]

TABS = {
    "Source": "Body as it is written",
    "Files": "scripts/press.py",
    "Scripts and tools": "scripts/to_pdf.py",
    "Sources": "It brings no sources.",
    "Imports": "press.style",
    "Findings": "Nothing is wrong with its files.",
    "Facts": "Digest of the folder",
    "Text": "press.py",
}
"""Tabs of the skill `press.report`, and what stands on each."""


def test_only_the_link_that_was_printed_opens_it(press, window):
    """A guessed key and a visit without the link show nothing of the folder; the link leads in, and its browser stays in."""
    for path in ("/ui/enter/guessed", "/ui/", "/ui/skills/press.report"):
        page = window(press.origin + path)
        assert press.folder.name not in page.inner_text("body"), path
        assert "kdskills ui" in page.inner_text("[role=alert]")
    page = window(press.url)
    assert page.url == f"{press.origin}/ui/", "the key is not left in the address"
    page.goto(f"{press.origin}/ui/skills/press.report")
    assert page.inner_text("h1") == "press.report"
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
    assert cookie["value"] not in press.url


def test_skills_are_found_while_typing_and_a_cell_tells_why(press, window):
    """Rows shrink at each key without a load of the page, and a cell leads to the rules that decided, in their order."""
    page = window(press.url)
    page.get_by_role("link", name="Skills", exact=True).click()
    rows = page.locator("#rows tbody tr")
    everything = rows.count()
    page.evaluate("window.stayed = true")
    page.keyboard.press("/")
    page.keyboard.type("embargo")
    expect(rows).to_have_count(1)
    page.wait_for_url("**/ui/skills?q=embargo*")
    assert everything > 1
    assert page.evaluate("window.stayed"), "the page was not loaded anew"
    page.get_by_label("Search", exact=True).fill("no such words")
    page.get_by_text("No skill fits.").wait_for()
    page.get_by_label("Search", exact=True).fill("embargo")
    cell = page.locator("#rows td a[title*='for solver.react.decision']")
    assert "refused" in cell.inner_text()
    cell.click()
    page.wait_for_url("**/press.embargo/why?consumer=solver.react.decision")
    assert page.inner_text("h1") == "May not be used"
    assert page.locator(".timeline > li.good").count() > 3, "rules that let it pass are told as well"
    assert "agents_config.solver.react.decision.disabled" in page.locator(".timeline > li.bad").inner_text()
    page.get_by_label("Consumer").fill("desk.editor")
    page.get_by_role("button", name="Ask").click()
    page.wait_for_url("**consumer=desk.editor*")
    assert page.inner_text("h1") == "May be used"


def test_a_skill_is_read_tab_by_tab(press, window):
    """Each tab is a link with an address of its own, is marked when it is open, and shows its part of the skill."""
    page = window(press.url)
    page.goto(f"{press.origin}/ui/skills/press.report")
    tabs = page.get_by_role("navigation", name="Parts of the skill")
    for tab, words in TABS.items():
        tabs.get_by_role("link", name=tab, exact=True).click()
        page.locator(f".tabs a[aria-current]:text-is('{tab}')").wait_for()
        assert words in page.inner_text("main") or page.get_by_label(words).count(), tab
    page.goto(f"{press.origin}/ui/skills/press.report?tab=files")
    page.get_by_role("link", name="scripts/press.py").click()
    assert page.inner_text("h1") == "scripts/press.py"
    assert (press.folder / "skills/press/report/scripts/press.py").read_text("utf-8")[:200] in page.inner_text("pre")


def test_two_prompts_are_told_apart(press, window, examine):
    """The messages a solver would send are shown part by part with their tokens, beside those of another setting."""
    page = window(press.url)
    page.get_by_role("link", name="Prompt", exact=True).click()
    assert page.locator("#prompt h2").inner_text().split()[1] == "tokens"
    page.get_by_label("Beside another setting").check()
    page.wait_for_url("**beside=yes*")
    page.get_by_role("group", name="The other").get_by_label("Skills loaded first").fill("press.report")
    page.get_by_role("group", name="The other").get_by_label("Skills loaded first").press("Enter")
    page.wait_for_url("**loaded2=press.report*")
    differences = page.get_by_label("Differences")
    assert "<active_skills>" in differences.inner_text()
    assert differences.locator(".ins").count()
    first, other = (int(text.split()[0].replace(",", "")) for text in page.locator("section > h2").all_inner_texts())
    assert other > first
    assert examine(page, "prompts-compared") == []
    page.get_by_role("group", name="One").get_by_label("Consumer").fill("nobody.at.all")
    page.get_by_role("group", name="One").get_by_label("Consumer").press("Enter")
    page.wait_for_url("**consumer=nobody.at.all*")
    assert "press.report" not in page.locator("#prompt section").first.inner_text()


def test_a_saved_file_is_seen(press, window):
    """Whoever looks a second after a SKILL.md was saved sees what was saved, and a broken one as a finding."""
    page = window(press.url)
    file = press.folder / "skills/press/style/SKILL.md"
    before = file.read_text("utf-8")
    for text, words in (
        (before.replace("House style of the desk", "Rules of the night desk"), "Rules of the night desk"),
        (before.replace("name: style", "name: [style"), "invalid"),
        (before, "House style of the desk"),
    ):
        file.write_text(text, "utf-8")
        saved = time.monotonic()
        while True:
            looked = time.monotonic()
            page.goto(f"{press.origin}/ui/skills?q=style")
            if words in page.inner_text("#rows tbody"):
                break
            assert looked - saved < 1, f"{words!r} is not seen {looked - saved:.1f} s after it was saved"


@pytest.mark.needs("bubblewrap")
def test_a_turn_is_tried_from_the_page(press, window, examine, tmp_path):
    """A replayed turn is seen step by step as it goes, can be stopped, and ends with an answer whose citations lead to rows.

    It stands under Turns afterwards, its files can be kept, and two turns are compared there.
    """
    page = window(press.url)
    script = press.folder / "skills/data/profile/scripts/profile.py"
    before = script.read_text("utf-8")
    script.write_text(
        f"import time\ntime.sleep(600)\n{before.replace('from __future__ import annotations', '')}", "utf-8"
    )
    page.get_by_role("link", name="Try", exact=True).click()
    expect(page.get_by_label("Model")).to_have_value("replay")
    page.get_by_role("button", name="Begin the turn").click()
    page.wait_for_url("**/ui/turns/*")
    expect(page.locator("#turn .timeline")).to_contain_text("skills.run_script")
    assert "running" in page.inner_text("#turn"), "the steps are seen while it goes on"
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("It is ended.")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    script.write_text(before, "utf-8")

    page.get_by_role("link", name="Ask again").click()
    page.get_by_role("button", name="Begin the turn").click()
    page.wait_for_url("**/ui/turns/*")
    expect(page.locator("#turn .badge").first).to_have_text("answered")
    place = page.url
    citations = page.locator(".answer a.cite")
    assert citations.count() > 1
    citations.first.click()
    assert page.url == f"{place}#source-1"
    assert "Airline On-Time Performance" in page.inner_text("li:target")
    steps = page.locator(".timeline")
    assert "data.profile/scripts/profile.py" in steps.inner_text()
    assert "press.report" in steps.inner_text()
    page.get_by_text("The prompt as it was sent").first.click()
    assert "<available_skills>" in page.get_by_label("Prompt of step 1").inner_text()
    with page.expect_download() as download:
        page.get_by_role("link", name="report.md").click()
    download.value.save_as(tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text("utf-8").startswith("# Newark kept its passengers waiting longest")
    page.goto(place)
    assert examine(page, "turn") == []

    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Turns").click()
    assert page.locator("tbody tr .badge").all_inner_texts() == ["answered", "stopped"]
    assert examine(page, "turns") == []
    page.get_by_label("one of two").last.check()
    page.get_by_label("the other of two").first.check()
    page.get_by_role("button", name="Compare the two chosen").click()
    page.wait_for_url("**/ui/turns/compare?*")
    assert "answered" in page.inner_text("main")
    assert examine(page, "turns-compared") == []
