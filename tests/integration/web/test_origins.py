"""Other hosts' names and other sites' pages are refused before any route, and nobody without a token is an administrator."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import pytest

from kdskills.app import Host, Settings
from kdskills.app.authentication import answered_names, require_own_origin
from kdskills.app.operations import OPERATIONS
from kdskills.errors import CallRefused

PATHS = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/openapi.json"),
    ("POST", "/mcp"),
    ("GET", "/mcp"),
    ("POST", "/projects/local/tools/tokens.create"),
    ("POST", "/projects/local/tools/skills.list"),
    ("POST", "/projects/local/skills:upload"),
    ("GET", "/projects/local/skills"),
    ("OPTIONS", "/projects/local/skills"),
    ("GET", "/nothing"),
]
FOREIGN = [
    ({"Host": "evil.example"}, 421, "host_refused"),
    ({"Host": "evil.example:80"}, 421, "host_refused"),
    ({"Host": "127.0.0.1.evil.example"}, 421, "host_refused"),
    ({"Host": "localhost@evil.example"}, 421, "host_refused"),
    ({"Host": "[::1]evil.example"}, 421, "host_refused"),
    ({"Host": "[::1].evil.example:80"}, 421, "host_refused"),
    ({"Host": ""}, 421, "host_refused"),
    ({"Origin": "https://evil.example"}, 403, "origin_refused"),
    ({"Origin": "null"}, 403, "origin_refused"),
    ({"Origin": "http://localhost:1"}, 403, "origin_refused"),
    ({"Origin": "http://127.0.0.1:1"}, 403, "origin_refused"),
    ({"Origin": "https://127.0.0.1"}, 403, "origin_refused"),
    ({"Origin": "file://"}, 403, "origin_refused"),
    ({"Sec-Fetch-Site": "cross-site"}, 403, "origin_refused"),
]


def ask(url: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Send a request with exactly these headers; return status and body."""
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": parts.netloc, "Content-Length": "0"} | headers).items():
            link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        return answer.status, answer.read().decode()
    finally:
        link.close()


@pytest.fixture
def opened(settings, serve):
    """A service that asks for no token."""
    with serve(Host(settings, entry_points=False), open_on_loopback=True) as service:
        yield service


def test_foreign_names_and_pages_reach_no_route(opened):
    """Whatever path is asked for, health and other doors among them, a foreign Host, Origin or site is refused."""
    for method, path in PATHS:
        assert "_refused" not in ask(opened.url, method, path, {})[1], path
        for headers, status, code in FOREIGN:
            found, body = ask(opened.url, method, path, headers)
            assert (found, code in body) == (status, True), (method, path, headers, body)


def test_own_names_and_pages_come_in(opened):
    """The service's own pages, and clients by any name of loopback, are served."""
    port = urlsplit(opened.url).port
    own = [
        {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}", "Sec-Fetch-Site": "same-origin"},
        {"Host": f"127.0.0.1:{port}", "Origin": f"http://127.0.0.1:{port}"},
        {"Host": "localhost", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "none"},
    ]
    for headers in own:
        assert ask(opened.url, "GET", "/projects/local/skills", headers)[0] == 200, headers


def test_a_name_of_the_settings_is_answered(settings, serve):
    """A proxy's name is allowed once the operator says it, as host and as the origin of its pages."""
    named = replace_settings(settings, host_names=("skills.example",))
    with serve(Host(named, entry_points=False), open_on_loopback=True) as service:
        own = {"Host": "skills.example", "Origin": "https://skills.example"}
        assert ask(service.url, "GET", "/projects/local/skills", own)[0] == 200
        assert ask(service.url, "GET", "/projects/local/skills", {"Origin": "https://skills.example"})[0] == 200
        assert ask(service.url, "GET", "/projects/local/skills", {"Host": "other.example"})[0] == 421


def replace_settings(settings: Settings, **changes) -> Settings:
    """Return settings with changes."""
    return settings.model_copy(update=changes)


def test_without_a_token_nobody_is_an_administrator(opened):
    """Where no token is asked for, nothing of the operator's is open, and no token comes of it."""
    with opened.client() as client:
        for name, row in OPERATIONS.items():
            if row.scope == "admin" and not row.local:
                found = client.post(f"/projects/local/tools/{name}", json={"agent": "a", "scopes": ["admin"]})
                assert (found.status_code, found.json()["code"]) == (403, "scope_missing"), name
    assert opened.run(opened.host.tokens.list()) == []


def request(*headers: tuple[str, str], server: str = "10.0.0.7") -> dict[str, object]:
    """Return a request as ASGI has it."""
    return {"headers": [(name.encode(), value.encode()) for name, value in headers], "server": (server, 8765)}


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ((("host", "10.0.0.7:8765"),), True),
        ((("host", "SKILLS.lan."),), True),
        ((("host", "[::1]:8765"),), True),
        ((("host", "127.9.9.9"),), True),
        ((("host", "10.0.0.8"),), False),
        ((("host", "127.0.0.1"), ("host", "evil")), False),
        ((), False),
        ((("host", "skills.lan"), ("origin", "https://skills.lan")), True),
        ((("host", "10.0.0.7:8765"), ("origin", "http://10.0.0.7:8765")), True),
        ((("host", "10.0.0.7:8765"), ("origin", "http://10.0.0.7")), False),
        ((("host", "10.0.0.7:8765"), ("origin", "http://10.0.0.7:8765"), ("origin", "http://evil")), False),
    ],
)
def test_names_on_a_network(headers, allowed):
    """Beside loopback a service answers to what it listens on, its own address, and the names of the settings."""
    names = answered_names("skills.lan", ())
    try:
        require_own_origin(request(*headers), names)
    except CallRefused:
        assert not allowed
    else:
        assert allowed


@pytest.mark.parametrize("listen", ["127.0.0.1", "localhost", "::1", "10.0.0.7", "127.9.9.9"])
def test_other_ports_are_other_origins(listen):
    """A page that another program serves on the same address may not call, whichever address is listened on."""
    names, authority = answered_names(listen, ()), f"[{listen}]" if ":" in listen else listen
    require_own_origin(
        request(("host", f"{authority}:8765"), ("origin", f"http://{authority}:8765"), server=listen), names
    )
    for host in (f"{authority}:8765", "127.0.0.1:8765"):
        with pytest.raises(CallRefused) as caught:
            require_own_origin(request(("host", host), ("origin", f"http://{authority}:3000"), server=listen), names)
        assert caught.value.code == "origin_refused"


def test_listening_everywhere_is_no_name():
    """The address that means every interface is no name a page could use."""
    assert answered_names("0.0.0.0", ("A.example",)) == {"a.example"}
    with pytest.raises(CallRefused):
        require_own_origin(request(("host", "0.0.0.0:8765")), answered_names("0.0.0.0", ()))
