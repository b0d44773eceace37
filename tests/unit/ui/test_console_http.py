"""The console over HTTP: who gets in, what every answer says to browsers, and what nobody is told."""

from __future__ import annotations

import logging

import pytest

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.doors.ui import console as module
from kdskills.doors.ui.calls import NAVIGATION
from kdskills.doors.ui.console import GROUPS, HEADERS
from kdskills.doors.ui.rendering import static_files
from kdskills.doors.ui.sessions import COOKIE, MAX_SESSIONS
from kdskills.doors.web import build_app
from kdskills.errors import CallRefused

from .conftest import Browser

PAGES = ("/ui/", "/ui/skills", "/ui/prompt", "/ui/try", "/ui/turns", "/ui/work", "/ui/work/jobs", "/ui/work/hosts", "/ui/evals", "/ui/projects", "/ui/access", "/ui/access/audit")  # fmt: skip


def require_headers(answer) -> None:
    """Check what every answer says to browsers."""
    for name, value in HEADERS.items():
        if name == "Cache-Control" and "/static/" in str(answer.url) and answer.status_code == 200:
            value = "public, max-age=31536000, immutable"
        assert answer.headers.get_list(name) == [value], (str(answer.url), name)


async def test_every_answer_has_its_headers(owner, own):
    """Pages, errors, files, redirects and refusals alike allow nothing from elsewhere, and are kept by nobody."""
    asked = [await owner.get(path) for path in PAGES]
    asked += [
        await owner.get(path) for path in ("/ui", "/", "/ui/nothing", "/ui/skills/no.such", "/ui/turns/x", "/other")
    ]
    asked += [await owner.get(file.url) for file in static_files().values()]
    asked += [await owner.get("/ui/static/0000/console.css"), await owner.get("/ui/static/x/../../etc/passwd")]
    asked += [
        await owner.request(method, "/ui/skills") for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "X")
    ]
    asked += [await owner.post("/ui/try"), await owner.get("/ui/sign-in"), await owner.get("/ui/enter/wrong")]
    asked += [await owner.get("/ui/", headers=headers) for headers in ({"Host": "evil.example"}, {"Origin": "null"})]
    async with Browser(own) as stranger:
        asked += [await stranger.get("/ui/"), await stranger.post("/ui/try", data={"csrf": "x"})]
    for answer in asked:
        require_headers(answer)
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert {answer.status_code for answer in asked} <= {200, 303, 307, 401, 403, 404, 421}


async def test_files_have_a_digest_in_their_address(owner):
    """A file is served under its own digest only, and is kept for ever there."""
    for name, file in static_files().items():
        answer = await owner.get(file.url)
        assert answer.content == file.path.read_bytes()
        assert answer.headers["content-type"] == file.media_type
        assert (await owner.get(file.url.replace(file.digest, "0" * 16))).status_code == 404
        assert (await owner.get(f"/ui/static/{file.digest}/..%2f{name}")).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "evil.example"}, 421, "host_refused"),
        ({"Host": "evil.example:8080"}, 421, "host_refused"),
        ({"Host": "127.0.0.1.evil.example"}, 421, "host_refused"),
        ({"Origin": "null"}, 403, "origin_refused"),
        ({"Origin": "http://evil.example"}, 403, "origin_refused"),
        ({"Origin": "http://127.0.0.1:9999"}, 403, "origin_refused"),
        ({"Origin": "https://127.0.0.1"}, 403, "origin_refused"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "origin_refused"),
    ],
)
async def test_other_names_and_other_pages_are_refused(owner, service, headers, status, code):
    """A request for another host, or of another origin's page, gets nothing, whoever's cookie it brings."""
    for browser in (owner, service(open_on_loopback=True)):
        answer = await browser.get("/ui/skills", headers=headers)
        assert answer.status_code == status
        assert code in answer.text
        assert "press.report" not in answer.text
        assert "set-cookie" not in answer.headers


async def test_own_pages_may_call(owner):
    """A form of the console's own origin is taken."""
    origin = {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}
    assert (await owner.get("/ui/skills", headers=origin)).status_code == 200


async def test_changes_need_the_proof_of_the_session(owner, own, host):
    """Every POST without the proof of its session, or with another's, is refused, and nothing is begun."""
    posts = [route.path.replace("{kind}", "tasks") for group in GROUPS for route in group if route.method == "POST"]
    assert len(posts) >= 9
    async with Browser(own) as other:
        await other.get(f"/ui/enter/{own.key}")
        foreign = await other.proof()
    for path in [*posts, "/sign-out"]:
        for fields in ({}, {"csrf": ""}, {"csrf": "x"}, {"csrf": foreign}, {"csrf": "ü\x00"}):
            answer = await owner.post(f"/ui{path}", data={**fields, "action": "delete"})
            assert (answer.status_code, "form_outdated" in answer.text) == (403, True), (path, fields)
        answer = await owner.post(f"/ui{path}", headers={"X-CSRF-Token": foreign}, data={"csrf": await owner.proof()})
        assert answer.status_code == 403, path
    assert (await host.call("turns.list")).turns == ()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"--x\r\nbroken"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n\r\n--x--"),
        ("multipart/form-data; boundary=x; charset=unicode_escape", b'--x\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n\\ud800\r\n--x--\r\n'),
        ("multipart/form-data; boundary=x; charset=punycode", b'--x\r\nContent-Disposition: form-data; name="csrf"\r\n\r\nx\r\n--x--\r\n'),
        ("application/x-www-form-urlencoded", b"csrf=%ED%A0%80&=&&&=%"),
        ("application/x-www-form-urlencoded; charset=utf-7", b"csrf=+2AA-"),
        ("application/json", b'{"csrf": 1}'),
        ("", b"\xff" * 100),
        ("multipart/form-data; boundary=x", b"".join(b'--x\r\nContent-Disposition: form-data; name="a%d"\r\n\r\nx\r\n' % i for i in range(300))),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n' + b"x" * 2_000_000 + b"\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b"".join(b'--x\r\nContent-Disposition: form-data; name="f%d"; filename="f"\r\n\r\nx\r\n' % i for i in range(3)) + b"--x--\r\n"),
    ],
)  # fmt: skip
async def test_broken_forms_are_the_callers(owner, service, kind, body):
    """A form that cannot be read is answered with a page that says so, at the sign-in, too, and never with an error of ours."""
    for browser, path in ((owner, "/ui/try"), (service(), "/ui/sign-in")):
        answer = await browser.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code in {400, 401, 403}, answer.text
        assert answer.headers["content-type"].startswith("text/html")


async def test_the_cookie_is_not_the_token(service, token):
    """A sign-in leaves a cookie that no script reads and no other site sends, of twelve hours, which is not the token."""
    text, browser = await token(), service()
    answer = await browser.sign_in(text, back="/ui/skills?q=report")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/skills?q=report")
    (cookie,) = answer.headers.get_list("set-cookie")
    assert text not in cookie
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {
        "httponly",
        "max-age=43200",
        "path=/ui",
        "samesite=strict",
    }
    page = await browser.get("/ui/skills")
    assert page.status_code == 200
    assert text not in page.text
    assert browser.session not in page.text


async def test_the_token_itself_is_no_session(service, token):
    """Neither the token as a cookie nor as a header opens a page, and no header says who looks."""
    text = await token()
    for headers in ({"Cookie": f"{COOKIE}={text}"}, {"Authorization": f"Bearer {text}"}):
        answer = await service().get("/ui/skills", headers=headers)
        assert answer.status_code == 401
        assert 'action="/ui/sign-in"' in answer.text


@pytest.mark.parametrize(
    "back",
    ["//evil.example", "http://evil.example/ui/", "/ui/\\evil.example", "//[", "javascript:alert(1)", "/ui/../x"],
)
async def test_signing_in_leads_to_the_console_only(service, token, back):
    """Whatever the form says to go back to, nobody is led elsewhere with a fresh session."""
    answer = await service().sign_in(await token(), back=back)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")


@pytest.mark.parametrize(
    "wrong", ["", " ", "x", "kdskills_" + "x" * 40, "\x00", "é", "x" * 5000, "a\r\nSet-Cookie: x=y"]
)
async def test_a_wrong_token_opens_nothing(service, wrong):
    """A wrong token is answered with the form again, says nothing of why, and leaves no cookie."""
    answer = await service().sign_in(wrong)
    assert answer.status_code in {400, 401}
    assert "set-cookie" not in answer.headers
    assert 'action="/ui/sign-in"' in answer.text or "cannot be read" in answer.text


async def test_a_revoked_token_ends_its_sessions(service, token, host):
    """The moment a token is revoked its sessions see nothing any more, and another token's go on."""
    browsers = [service(), service()]
    app = browsers[0]._transport
    browsers[1]._transport = app
    for browser, label in zip(browsers, ("one", "two"), strict=True):
        await browser.sign_in(await token(label=label))
        assert (await browser.get("/ui/skills")).status_code == 200
    row = next(row for row in await host.tokens.list() if row.label == "one")
    await host.tokens.revoke(row.id, who="test")
    answer = await browsers[0].get("/ui/skills")
    assert answer.status_code == 401
    assert "press.report" not in answer.text
    assert (await browsers[1].get("/ui/skills")).status_code == 200


async def test_signing_out_ends_the_session(service, token):
    """After the sign-out the cookie is taken away, and whoever kept it gets nowhere."""
    browser = service()
    await browser.sign_in(await token())
    kept = browser.session
    answer = await browser.send_form("/ui/sign-out")
    assert answer.status_code == 200
    (cookie,) = answer.headers.get_list("set-cookie")
    assert "Max-Age=0" in cookie
    assert kept not in cookie
    assert (await browser.get("/ui/", headers={"Cookie": f"{COOKIE}={kept}"})).status_code == 401


@pytest.mark.parametrize(
    ("console", "listen", "there"),
    [("auto", "127.0.0.1", True), ("auto", "::1", True), ("auto", "localhost", True), ("auto", "0.0.0.0", False), ("auto", "192.0.2.7", False), ("auto", "example.org", False), ("on", "192.0.2.7", True), ("on", "127.0.0.1", True), ("off", "127.0.0.1", False)],
)  # fmt: skip
async def test_where_there_is_a_console(tmp_path, console, listen, there):
    """It is served where the setting says so: by itself only where nobody else's machine reaches it."""
    host = Host(Settings(state_dir=tmp_path, bundle=None, console=console), entry_points=False)
    answer = await Browser(build_app(host, listen=listen)).get("/ui/sign-in")
    assert answer.status_code == (200 if there else 404)
    await host.storage.aclose()


async def test_odd_methods_and_pages(owner):
    """HEAD is GET without its body; other methods and unknown pages are pages that say what is wrong."""
    head = await owner.head("/ui/skills")
    assert (head.status_code, head.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for method, path in [("PUT", "/ui/skills"), ("OPTIONS", "/ui/"), ("GET", "/ui/nothing"), ("GET", "/ui/skills/a/b/c/d"), ("POST", "/ui/skills"), ("GET", "/ui/sign-out"), ("GET", "/ui//skills"), ("GET", "/ui/%00"), ("GET", "/ui/<script>alert(1)</script>")]:  # fmt: skip
        answer = await owner.request(method, path)
        assert answer.status_code == 404, (method, path)
        assert "not_found" in answer.text
        assert "<script>alert" not in answer.text


@pytest.mark.parametrize("path", ["/ui/skills?offset=-1", "/ui/skills?offset=x", "/ui/skills?offset=" + "9" * 40, "/ui/skills?state=nothing", "/ui/skills?sort=<b>", "/ui/turns?cursor=x", "/ui/turns?status=x", "/ui/work?cursor=%00", "/ui/work/tasks/x", "/ui/work/tasks/x/log/none", "/ui/turns/compare", "/ui/turns/compare?first=a&second=b", "/ui/evals/0x1", "/ui/evals/99999999", "/ui/projects/none", "/ui/projects/UPPER%00", "/ui/access/tokens/x", "/ui/prompt?budget=x", "/ui/skills/press.report/files/../../../etc/passwd", "/ui/skills/press.report/files/..%2f..%2fetc%2fpasswd", "/ui/skills/press.report/files/%00", "/ui/skills/%FF", "/ui/work/artifacts/x"])  # fmt: skip
async def test_what_is_out_of_shape_is_a_page_that_says_so(owner, path):
    """Numbers, states, cursors and names that are none are the caller's to mend; nothing breaks."""
    answer = await owner.get(path)
    assert answer.status_code in {200, 400, 403, 404, 422}, answer.text
    assert "internal_error" not in answer.text
    assert "root:" not in answer.text
    assert len(answer.content) < 100 * 1024


async def test_what_breaks_tells_its_operator_and_nobody_else(mounted, host, own, monkeypatch, caplog):
    """An error that nobody foresaw is a page without a word of what broke; who serves it gets the error itself."""

    async def broken(call):
        raise RuntimeError("the secret of line 7")

    monkeypatch.setattr(module, "GROUPS", ((module.ConsoleRoute("/broken", broken),),))
    console = module.Console(host, own._authenticate, frozenset(), owner=own._owner)
    browser = Browser(console)
    await browser.get(f"/ui/enter/{console.key}")
    answer = await browser.get("/ui/broken")
    assert answer.status_code == 500
    assert "internal_error" in answer.text
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    require_headers(answer)
    browser._transport.raise_app_exceptions = True  # what a server would write to its log
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="secret of line 7"):
        await browser.get("/ui/broken")


async def test_pages_ask_only_what_pages_may(host, own):
    """Whoever looks, an operation that is not for pages is refused at this door."""
    refused = [name for name, operation in host.operations.items() if not operation.ui_allowed]
    assert refused
    for name in refused:
        with pytest.raises(CallRefused) as caught:
            await host.invoke(name, {}, Context(identity=own._owner))
        assert caught.value.code == "ui_not_allowed"


async def test_only_what_somebody_may_is_offered(service, token):
    """A caller of one scope sees no way to what needs another, and is refused where it goes there all the same."""
    browser = service()
    await browser.sign_in(await token("skills:read", agent="reader"))
    page = (await browser.get("/ui/skills")).text
    for item in NAVIGATION:
        offered = f'href="{item.path}"' in page
        answer = await browser.get(item.path)
        if item.operation and not offered:
            assert answer.status_code == 403, item
            assert "scope_missing" in answer.text or "ui_not_allowed" in answer.text
        else:
            assert answer.status_code == 200, item
    assert 'href="/ui/access"' not in page
    assert 'href="/ui/work"' not in page
    for path in ("/ui/access", "/ui/work/new", "/ui/try"):
        assert (await browser.send_form(path, action="delete", agent="x", scopes="admin")).status_code == 403, path


async def test_other_projects_are_not_found(service, token, host, archive):
    """What is another project's is not there: its uploads, its turns, its tokens."""
    await host.projects.create("acme", bundle=None, who="test")
    await host.projects.create("other", bundle=None, who="test")
    browser, other = service(), service()
    await browser.sign_in(await token(project="acme"))
    await other.sign_in(await token(project="other"))
    upload = await browser.post(
        "/ui/projects", data={"csrf": await browser.proof()}, files={"file": ("a.zip", archive())}
    )
    assert upload.status_code == 303, upload.text
    assert (await browser.get(upload.headers["location"])).status_code == 200
    for path in (upload.headers["location"], "/ui/projects/brief"):
        assert (await other.get(path)).status_code == 404
    assert "brief" not in (await other.get("/ui/projects")).text
    assert (await other.send_form("/ui/projects/brief", action="delete")).status_code == 404
    assert (await browser.get("/ui/projects/brief")).status_code == 200


async def test_sessions_of_callers_without_cookies_are_bounded(service, host):
    """Whoever never sends the cookie back, and whoever tries wrong tokens, takes no memory without end."""
    opened = service(open_on_loopback=True)
    (console,) = {
        route.endpoint for route in opened._transport.app.router.routes if getattr(route, "path", "") == "/ui"
    }
    for _ in range(20):
        opened.cookies.clear()
        assert (await opened.get("/ui/nothing-here")).status_code == 404
    assert not console._sessions._sessions  # nothing was shown: nobody was looking
    for _ in range(3):
        opened.cookies.clear()
        await opened.get("/ui/try")
    assert len(console._sessions._sessions) == 3
    for _ in range(MAX_SESSIONS + 5):
        console._sessions.open(None)
    assert len(console._sessions._sessions) == MAX_SESSIONS


async def test_wrong_sign_ins_leave_nothing(service):
    """Attempts with wrong tokens open no session, however many there are."""
    browser = service()
    (console,) = {
        route.endpoint for route in browser._transport.app.router.routes if getattr(route, "path", "") == "/ui"
    }
    for number in range(200):
        assert (await browser.sign_in(f"wrong-{number}")).status_code == 401
    assert not console._sessions._sessions
    assert not console._limits._buckets


async def test_bodies_are_bounded(tmp_path, bundle):
    """A body larger than the service takes is refused, at the sign-in as at an upload, before it is read."""
    host = Host(Settings(state_dir=tmp_path / "s", index_dir=tmp_path / "i", bundle=bundle, body_limit=100_000), entry_points=False)  # fmt: skip
    browser = Browser(build_app(host, listen="127.0.0.1", open_on_loopback=True))
    proof = await browser.proof("/ui/try")
    for path in ("/ui/sign-in", "/ui/projects", "/ui/try"):
        answer = await browser.post(path, data={"csrf": proof, "token": "x" * 200_000})
        assert answer.status_code == 413, path
    await host.storage.aclose()


async def test_the_key_of_a_start_opens_it_alone(own):
    """Only who was shown the key of this start gets in; any other key, and no cookie, get nothing."""
    browser = Browser(own)
    for path in ("/ui/", "/ui/skills", "/ui/enter/", "/ui/enter/x", f"/ui/enter/{own.key[:-1]}", "/ui/enter/%FF"):
        answer = await browser.get(path)
        assert answer.status_code in {401, 404}
        assert "press" not in answer.text.replace("kdskills", "")
    assert (await browser.post("/ui/sign-in", data={"token": own.key})).headers.get("set-cookie") is None
