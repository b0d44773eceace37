"""The console of a service, as its operator uses it: signed in, uploaded, activated, run, watched, ended, accounted for."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from kdskills.app import Host, Settings

pytestmark = [pytest.mark.needs("browser"), pytest.mark.xdist_group("browser")]

PRESS = Path(__file__).parents[4] / "bundles" / "press"
ENDLESS = """n=0
while :; do n=$((n+1)); echo "line $n"; sleep 0.2; done"""
TOLD = ["skill.delete", "skill.patch", "skill.activate", "skill.upload"]
"""What the audit log tells of a skill that was taken in, used and taken away."""


@pytest.fixture(scope="module")
def service(tmp_path_factory, serve):
    """One service with tokens for all tests of this module."""
    state = tmp_path_factory.mktemp("service")
    settings = Settings(
        state_dir=state / "state", index_dir=state / "index", bundle=PRESS, requests_per_minute=0, jobs={"idle_s": 1.0}
    )
    with serve(Host(settings, entry_points=False)) as made:
        yield made


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_who_shows_a_token_is_let_in(service, window, examine, scripts):
    """A wrong token shows the form again and nothing else; a right one leads to the page that was asked for.

    What the browser keeps is a cookie of its own, which no script reads; signing out, or revoking the token, ends it.
    """
    token = service.token(agent="boss")
    page = window(f"{service.url}/ui/work?status=failed", scripts=scripts)
    assert page.get_by_role("navigation").count() == 0
    if scripts:
        assert examine(page, "sign-in") == []
    page.get_by_label("Token").fill(token[:-4] + "AAAA")
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{service.url}/ui/sign-in")
    assert page.get_by_role("navigation").count() == 0
    assert page.context.cookies() == []
    page.get_by_label("Token").fill(f" {token} ")
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{service.url}/ui/work?status=failed")
    assert "as boss" in page.get_by_role("banner").inner_text()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
    assert not set(token.split("_")[1:]) & set(cookie["value"].split("_"))
    assert token not in page.content()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("status")).to_have_text("you have signed out")
    page.context.add_cookies([cookie])
    page.goto(f"{service.url}/ui/skills")
    assert page.get_by_label("Token").count() == 1, "the cookie of a session that was ended opens nothing"

    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{service.url}/ui/skills")
    service.run(service.host.tokens.revoke(token.split("_")[1], who="test"))
    page.get_by_role("link", name="Work", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("revoked")
    assert page.get_by_role("navigation").count() == 0


def _start(page, service, skill, command):
    """Start a command from its form."""
    page.goto(f"{service.url}/ui/work/new?skill={skill}")
    page.get_by_label("Command, run by /bin/sh").fill(command)
    page.get_by_label("Files to keep").fill("result.json")
    page.get_by_text("Where it runs").click()
    page.get_by_label("Folder").fill("session")
    page.get_by_role("button", name="Start it").click()
    expect(page.get_by_role("status")).to_have_text("It is started.")


@pytest.mark.needs("bubblewrap")
def test_an_upload_is_looked_at_used_and_taken_away(service, sign_in, examine, archive, tmp_path):
    """A zip is checked first and in use for nobody; then it is activated, run, watched, ended, run again and deleted."""
    token = service.token(agent="boss")
    page = sign_in(service, "/ui/projects", token=token)
    page.agrees = True  # to the questions before what cannot be taken back
    page.get_by_label("A skill as a zip archive").set_input_files(archive("brief"))
    page.get_by_role("button", name="Upload").click()
    expect(page.get_by_role("status")).to_contain_text("in use for nobody")
    assert "Whom it changes" in page.inner_text("main")
    assert "not there" in page.get_by_role("region", name="Whom it changes").inner_text()
    assert examine(page, "upload-report") == []
    report = page.url
    page.goto(f"{service.url}/ui/")
    assert "no version is in use" in page.inner_text("main"), "it needs a decision"
    page.goto(report)
    page.get_by_role("button", name="Activate this version").click()
    expect(page.get_by_role("status")).to_have_text("This version is in use now.")
    assert examine(page, "upload") == []
    skill = page.locator("dl a").first
    full_id = skill.inner_text()
    skill.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(full_id)

    _start(page, service, full_id, ENDLESS)
    page.evaluate("window.stayed = true")
    output = page.get_by_label("Output", exact=True)
    expect(page.locator("#state .badge").first).to_have_text("running")
    expect(output).to_contain_text("line 2")
    seen = output.inner_text()
    expect(output).not_to_have_text(seen)
    assert output.inner_text().startswith(seen.rstrip()), "what comes is put behind what is there"
    assert page.evaluate("window.stayed"), "the page was not loaded anew"
    assert examine(page, "task") == []
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#state .badge").first).to_have_text("canceled")

    _start(page, service, full_id, """echo '{"pages": 1}' > result.json""")
    expect(page.locator("#state .badge").first).to_have_text("succeeded")
    page.reload()
    page.get_by_role("button", name="Run it again").click()
    expect(page.get_by_role("status")).to_contain_text("It runs again")
    expect(page.locator("#state .badge").first).to_have_text("succeeded")
    page.get_by_role("link", name="an earlier task").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="result.json").click()
    download.value.save_as(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text("utf-8")) == {"pages": 1}
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Work").click()
    assert page.locator("#rows .badge").all_inner_texts() == ["succeeded", "succeeded", "canceled"]
    assert examine(page, "work") == []
    page.get_by_role("link", name="Hosts").click()
    assert examine(page, "hosts") == []

    page.goto(f"{service.url}/ui/projects/brief")
    page.get_by_role("button", name="Disable").click()
    expect(page.get_by_role("status")).to_have_text("The skill is disabled.")
    page.get_by_role("link", name="Projects").last.click()
    assert "disabled" in page.inner_text("tbody")
    assert examine(page, "projects") == []
    page.get_by_role("link", name="brief").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text("brief is deleted.")
    assert "No skill was uploaded to this project." in page.inner_text("main")
    page.goto(f"{service.url}/ui/access/audit")
    page.get_by_label("Skill").fill("brief")
    page.get_by_label("Skill").press("Enter")
    page.wait_for_url("**/ui/access/audit?*skill=brief*")
    told = page.locator("#rows tbody td:nth-child(3)").all_inner_texts()
    assert told == TOLD, "who did what is told, the latest first"
    assert token.split("_")[1] in page.locator("#rows tbody td:nth-child(2)").first.inner_text()
    assert examine(page, "audit-log") == []


def test_a_token_is_shown_once_and_every_change_is_told(service, sign_in, examine):
    """A token made here opens what it may and nothing else, its text is never shown again, it becomes narrower, and is ended."""
    page = sign_in(service, "/ui/access")
    page.agrees = True
    page.get_by_text("Make a token", exact=True).click()
    page.get_by_label("Agent it is for").fill("desk.writer")
    page.get_by_label("Label").fill("night desk")
    page.get_by_label("Days until it ends").fill("7")
    page.get_by_role("button", name="Make it").click()
    token = page.get_by_label("The token").inner_text()
    with service.client(token) as client:
        assert client.get("/projects/local/skills").status_code == 200
        assert client.post("/projects/local/tools/tokens.list", json={}).status_code == 403
        page.goto(f"{service.url}/ui/access")
        row = page.get_by_role("row", name="night desk")
        assert ("desk.writer" in row.inner_text(), token in page.content()) == (True, False)
        assert examine(page, "access") == []
        page.get_by_role("link", name="night desk").click()
        assert token not in page.content()
        assert examine(page, "token") == []
        page.get_by_label("Requests a minute").fill("60")
        page.get_by_role("button", name="Narrow it").click()
        expect(page.get_by_role("status")).to_have_text("It is narrower now.")
        assert "60" in page.locator("dl.facts").inner_text()
        page.get_by_role("button", name="Revoke").click()
        expect(page.get_by_role("status")).to_contain_text("opens nothing any more")
        assert client.get("/projects/local/skills").status_code == 401
    page.get_by_role("link", name="Audit log").click()
    page.get_by_label("What").fill("token.revoke")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**action=token.revoke*")
    assert set(page.locator("#rows tbody td:nth-child(3)").all_inner_texts()) == {"token.revoke"}
    assert token.split("_")[1] in page.inner_text("#rows")
    assert examine(page, "audit-log") == []
