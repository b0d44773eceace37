"""Skills of an MCP server come into a bundle by `kdskills add`, from our own server and from hostile ones."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.builtin.roots.mcp import wire
from kdskills.doors.cli.main import build_cli

TEXT = b"---\nname: tidy\ndescription: About tidy.\n---\n\nTidy up.\n"


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a command on the bundle `mine` and returns its answer as JSON, with the exit code."""
    (tmp_path / "mine/skills").mkdir(parents=True)

    def run(*words: object, **more: Any) -> dict[str, Any]:
        settings = Settings(
            state_dir=tmp_path / "own", index_dir=tmp_path / "i", environment_cache_dir=tmp_path / "cache", **more
        )
        program = get_command(build_cli(Host(settings, entry_points=False)))
        told = CliRunner().invoke(program, [*map(str, words), "--bundle", str(tmp_path / "mine"), "--json"])
        return {"exit": told.exit_code, **json.loads(told.stdout)}

    return run


def states(answer: dict[str, Any]) -> dict[str, str]:
    """Return what became of each skill, or the code of why nothing did."""
    return {row["key"]: row["code"] or row["state"] for row in answer["skills"]}


def test_skills_of_our_own_server(bundle, tmp_path, serve, cli):
    """`add`, `update` and `sync` read our own server: files come as listed, the lock has their digest, a change is shown."""
    bundle.skill("public/tidy", data=b"\x00\xff", references__guide="grüße\n".encode())
    bundle.skill("public/brief")
    mine = tmp_path / "mine"
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        source = f"mcp+{url}#acme"
        assert states(cli("add", source, "--into", "far", "--skill", "tidy", "--yes")) == {"far/tidy": "new"}
        theirs, here = bundle.root / "skills/public/tidy", mine / "skills/far/tidy"
        for name in ("SKILL.md", "data", "references/guide"):
            assert (here / name).read_bytes() == (theirs / name).read_bytes()
        lock = (mine / "kdskills.lock").read_text()
        assert f'source = "{source}"' in lock
        assert states(cli("outdated")) == {}
        (here / "data").write_bytes(b"mine")
        assert states(cli("sync", "--frozen")) == {"far/tidy": "restored"}
    bundle.skill("public/tidy", body="Tidy up twice.", data=b"\x00\xff", references__guide="grüße\n".encode())
    with serve(Host(bundle.settings(tmp_path), entry_points=False)) as url:
        (mine / "kdskills.lock").write_text(lock.replace(source, f"mcp+{url}#acme"))
        shown = cli("update", "--check")
        assert states(shown) == {"far/tidy": "changed"}
        assert "+Tidy up twice." in shown["skills"][0]["diff"]
        assert states(cli("update", "--yes")) == {"far/tidy": "changed"}
    assert "twice" in (here / "SKILL.md").read_text()
    assert cli("add", source)["error"]["code"] == "source_unreachable"


def test_a_lock_starts_no_program(tmp_path, cli):
    """A server that is a program is no source: whoever wrote the lock would say what `update` and `sync` run."""
    mark = tmp_path / "ran"
    assert cli("add", f"mcp+stdio:touch {mark}#x", "--yes")["error"]["code"] == "source_invalid"
    (tmp_path / "mine/kdskills.lock").write_text(f'[skill."public/tidy"]\nsource = "mcp+stdio:touch {mark}#x"\n')
    for command in ("outdated", "update", "sync"):
        assert states(cli(command)) == {"public/tidy": "source_invalid"}
    assert not mark.exists()


class Speaker(BaseHTTPRequestHandler):
    """Speaks MCP as its server's table `answers` says; what is not in it, it does not know."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer one request."""
        self.server.tokens.append(self.headers.get("Authorization"))
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in asked:
            return self.give(202, b"")
        answer = self.server.answers.get(asked["method"], {"error": {"code": -32601, "message": "Method not found"}})
        if isinstance(answer, Callable):
            answer = answer(asked.get("params", {}))
        if isinstance(answer, int):
            return self.endless(answer)
        return self.give(200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}).encode())

    def do_GET(self) -> None:
        """Have no stream."""
        self.give(405, b"")

    def do_DELETE(self) -> None:
        """Have no session."""
        self.give(405, b"")

    def give(self, status: int, body: bytes) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def endless(self, size: int) -> None:
        """Send spaces for as long as somebody reads, at most *size*."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        try:
            for _ in range(size // 65536):
                self.wfile.write(b" " * 65536)
                self.server.sent += 65536
        except OSError:  # nobody reads any more
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hostile() -> Iterator[ThreadingHTTPServer]:
    """A server that has one good skill, `tidy`, until a test changes its answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Speaker) as server:
        server.tokens, server.sent = [], 0
        server.answers = {
            "initialize": lambda params: {
                "result": {
                    "protocolVersion": params.get("protocolVersion", "2025-06-18"),
                    "capabilities": {"resources": {}},
                    "serverInfo": {"name": "x", "version": "1"},
                }
            },
            "skills/list": {"result": {"skills": [entry("tidy")]}},
            "resources/read": lambda params: contents(params["uri"], TEXT),
        }
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def entry(name: str, *more: str, data: bytes = TEXT, size: int | None = None) -> dict[str, Any]:
    """Return how a skill is listed, all its files having the same bytes."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    resources = [
        {"uri": f"skill://{name}/{path}", "digest": digest, "size": len(data) if size is None else size}
        for path in ("SKILL.md", *more)
    ]
    frontmatter = {"name": name.rpartition("/")[2], "description": "About tidy."}
    return {"uri": f"skill://{name}/SKILL.md", "frontmatter": frontmatter, "resources": resources}


def contents(uri: str, data: bytes) -> dict[str, Any]:
    """Return the answer that gives a file."""
    return {"result": {"contents": [{"uri": uri, "blob": base64.b64encode(data).decode()}]}}


def source_of(server: ThreadingHTTPServer) -> str:
    """Return what to add."""
    return f"mcp+http://127.0.0.1:{server.server_port}/mcp#acme"


BAD = {
    "digest": (entry("evil", data=b"others"), {"evil": "mcp_mismatch"}),
    "parent": (entry("evil", "../../out"), {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
    "encoded parent": (entry("evil", "%2e%2e/%2e%2e/out"), {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
    "absolute": (entry("evil", "/etc/passwd"), {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
    "name": (entry("evil/..", "x"), {"skill://evil/../SKILL.md": "mcp_entry_invalid"}),
    "size": (entry("evil", size=1 << 40), {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
    "files": (entry("evil", *map(str, range(600))), {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
    "other name": (entry("evil"), {"evil": "mcp_mismatch"}),
    "dynamic": ({**entry("evil"), "resources": "dynamic"}, {"skill://evil/SKILL.md": "mcp_entry_invalid"}),
}


@pytest.mark.parametrize(("row", "expected"), BAD.values(), ids=BAD)
def test_a_hostile_skill_costs_only_itself(hostile, tmp_path, cli, row, expected):
    """What is not as listed, leads out of its folder or is too large is refused by a code; the others come."""
    hostile.answers["skills/list"] = {"result": {"skills": [row, entry("tidy")]}}
    answer = cli("add", source_of(hostile), "--yes")
    assert states(answer) == {**expected, "public/tidy": "new"}
    files = sorted(
        str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()
    )
    assert files == ["kdskills.lock", "skills/public/tidy/SKILL.md"]
    assert not list(tmp_path.glob("**/out"))


def test_endless_listings_end(hostile, cli, monkeypatch):
    """A listing whose pages never end is given up."""
    monkeypatch.setattr(wire, "MAX_PAGES", 5)
    hostile.answers["skills/list"] = {"result": {"skills": [entry("tidy")], "nextCursor": "more"}}
    error = cli("add", source_of(hostile), "--yes")["error"]
    assert (error["code"], "pages" in error["message"]) == ("source_unreachable", True)


def test_huge_answers_are_cut(hostile, cli, monkeypatch):
    """No answer is read beyond its bound, and none that is packed."""
    monkeypatch.setattr(wire, "MAX_ANSWER", 1 << 20)
    hostile.answers["skills/list"] = 1 << 30
    error = cli("add", source_of(hostile), "--yes")["error"]
    assert error["code"] == "source_unreachable"
    assert hostile.sent < 64 << 20


def test_a_lock_gets_no_token(hostile, cli, monkeypatch):
    """The token of a label goes to the server of the settings, never to one that a source or a lock calls the same."""
    monkeypatch.setenv("KDSKILLS_MCP_TOKEN_ACME", "secret")
    assert states(cli("add", source_of(hostile), "--yes")) == {"public/tidy": "new"}
    assert set(hostile.tokens) == {None}
    cli("outdated", skill_roots=(source_of(hostile),))
    assert "Bearer secret" in hostile.tokens
