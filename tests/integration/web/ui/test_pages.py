"""Every page of the console in a real Chromium: read by anybody, on any screen, with and without scripts."""

import pytest

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]

PAGES = {
    "/ui/": "home",
    "/ui/skills": "skills",
    "/ui/skills?q=report&state=listed": "",
    "/ui/skills/press.report": "skill",
    "/ui/skills/press.report?tab=source": "",
    "/ui/skills/press.report?tab=files": "",
    "/ui/skills/press.report/files/scripts/press.py": "file",
    "/ui/skills/press.report?tab=scripts": "",
    "/ui/skills/press.brief?tab=sources": "",
    "/ui/skills/press.report?tab=imports": "imports",
    "/ui/skills/press.report?tab=findings": "",
    "/ui/skills/press.report?tab=facts": "facts",
    "/ui/skills/press.embargo/why?consumer=solver.react.decision": "why",
    "/ui/prompt": "prompt",
    "/ui/try": "try",
    "/ui/turns": "",
    "/ui/work": "",
    "/ui/work/jobs": "",
    "/ui/work/new": "command",
    "/ui/work/hosts": "",
    "/ui/evals": "evals",
    "/ui/projects": "",
    "/ui/skills/no.such": "error",
}
"""Pages that need nothing done before, and what their pictures are called."""


def test_nothing_keeps_anybody_from_reading(press, window, examine):
    """axe-core finds nothing serious on any page, light or dark, and none scrolls sideways on small or enlarged screens."""
    page = window(press.url)
    page.locator("#health").wait_for()
    found, titles = {}, {}
    for path, name in PAGES.items():
        if path != "/ui/":
            page.goto(press.origin + path)
        found[path] = examine(page, name, dark=name in {"home", "skills"})
        titles.setdefault(page.title(), []).append(path.partition("?")[0])
    assert {path: rows for path, rows in found.items() if rows} == {}
    assert [paths for paths in titles.values() if len(set(paths)) > 1] == [], "titles tell pages apart"
