"""Every page of the console in a real Chromium: read by anybody, on any screen, with and without scripts."""

import pytest

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]

PAGES = (
    "/ui/",
    "/ui/skills",
    "/ui/skills?q=report&state=listed",
    "/ui/skills/press.report",
    "/ui/skills/press.report?tab=source",
    "/ui/skills/press.report?tab=scripts",
    "/ui/skills/press.report?tab=sources",
    "/ui/skills/press.report?tab=imports",
    "/ui/skills/press.report?tab=facts",
    "/ui/skills/press.style/why?consumer=desk.editor",
    "/ui/work",
    "/ui/work/jobs",
    "/ui/work/new",
    "/ui/work/hosts",
    "/ui/projects",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_anybody_from_reading(press, window, judge, scheme):
    """axe-core finds nothing serious or critical on any page, in light and in dark."""
    page = window(press.url, scheme=scheme)
    found = {}
    for path in PAGES:
        page.goto(press.origin + path)
        page.wait_for_load_state("networkidle")
        found[path] = judge(page)
    assert {path: rows for path, rows in found.items() if rows} == {}
