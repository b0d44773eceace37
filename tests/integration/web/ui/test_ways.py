"""The console without scripts, and without a mouse: whatever can be read or sent can be so there."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from kdskills.app import Host, Settings

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]

PRESS = Path(__file__).parents[4] / "bundles" / "press"
FOCUSED = """() => {
  const {activeElement: here} = document, style = getComputedStyle(here);
  return [here.matches(":focus-visible") && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
    here.getAttribute("aria-label") || here.innerText || here.name || here.tagName];
}"""
"""Tells whether the element that has the focus is seen to have it, and its words."""


@pytest.fixture(scope="module")
def service(tmp_path_factory, serve):
    """One service with tokens for all tests of this module."""
    state = tmp_path_factory.mktemp("service")
    settings = Settings(
        state_dir=state / "state", index_dir=state / "index", bundle=PRESS, requests_per_minute=0, jobs={"idle_s": 1.0}
    )
    with serve(Host(settings, entry_points=False)) as made:
        yield made


def test_pages_are_read_without_scripts(service, sign_in):
    """Search, filters, the rules behind a cell, a skill's tabs and two prompts are links and forms like any other."""
    page = sign_in(service, "/ui/skills", scripts=False)
    page.get_by_label("Search", exact=True).fill("embargo")
    page.locator("select[name=state]").select_option("refused")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#rows tbody tr")).to_have_count(1)
    page.locator("#rows td a[title*='for solver.react.decision']").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("May not be used")
    page.get_by_label("Consumer").fill("desk.editor")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("May be used")
    page.goto(f"{service.url}/ui/skills/press.report")
    page.get_by_role("link", name="Files").click()
    page.get_by_role("link", name="references/markdown.md").click()
    expect(page.get_by_role("heading", level=1).first).to_have_text("references/markdown.md")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Prompt").click()
    page.get_by_label("Beside another setting").check()
    page.get_by_role("button", name="Render").click()
    page.get_by_label("Skills loaded first").last.fill("press.report")
    page.get_by_role("button", name="Render").click()
    expect(page.get_by_label("Differences")).to_contain_text("<active_skills>")
    page.goto(f"{service.url}/ui/")
    page.get_by_role("link", name="Try every part of this machine").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Health")


@pytest.mark.needs("bubblewrap")
def test_forms_are_sent_without_scripts(service, sign_in, archive):
    """A skill is uploaded and activated, a command of it is run and ended, and its log is read, each by a form or a link."""
    page = sign_in(service, "/ui/projects", scripts=False)
    page.get_by_label("A skill as a zip archive").set_input_files(archive("plain"))
    page.get_by_role("button", name="Upload").click()
    page.get_by_role("button", name="Activate this version").click()
    expect(page.get_by_role("status")).to_have_text("This version is in use now.")
    page.goto(f"{service.url}/ui/work/new?skill=public.plain")
    page.get_by_label("Command, run by /bin/sh").fill("echo a first line; sleep 600")
    page.get_by_role("button", name="Start it").click()
    place = page.url
    assert page.get_by_role("button", name="Pause").count() == 0, "what only a script can do is not offered"
    for _ in range(600):
        if "a first line" in page.get_by_label("Output", exact=True).inner_text():
            break
        page.goto(place)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_be_visible()
    for _ in range(600):
        if page.locator("#state .badge").first.inner_text() == "canceled":
            break
        page.goto(place)
    assert "a first line" in page.get_by_label("Output", exact=True).inner_text()
    assert page.get_by_role("button", name="Run it again").count() == 1
    page.goto(f"{service.url}/ui/projects/plain")
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text("plain is deleted.")


def test_everything_is_reached_by_keys(service, sign_in):
    """Tab goes through the page in its order and is seen wherever it is; links open and forms are sent with Enter."""
    page = sign_in(service, "/ui/skills")
    page.goto(f"{service.url}/ui/skills")
    words = []
    for _ in range(28):
        page.keyboard.press("Tab")
        seen, name = page.evaluate(FOCUSED)
        assert seen, f"{name!r} has the focus, and it is not seen"
        words.append(name)
    assert words[:4] == ["Skip to the page", "kdskills", "Home", "Skills"]
    order = [words.index(name) for name in ("Work", "Sign out", "q", "Show", "Skills and consumers", "data.chart")]
    assert order == sorted(order)
    page.keyboard.press("/")
    page.keyboard.type("style")
    page.keyboard.press("Enter")
    expect(page.locator("#rows tbody tr")).to_have_count(1)
    page.wait_for_load_state("networkidle")  # the rows are those of Enter, not of the last letter
    page.keyboard.press("Escape")
    link = page.get_by_role("link", name="press.style", exact=True)
    while not link.evaluate("link => link === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/press.style/why?consumer=*")
    page.get_by_label("Consumer").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("solver.codegen")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("May not be used")
    page.goto(f"{service.url}/ui/skills/press.report")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)"), "the navigation is skipped"
