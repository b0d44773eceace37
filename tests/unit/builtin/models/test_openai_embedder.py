"""The shipped embedder speaks `/v1/embeddings` to a server on this machine, and says in words what went wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.builtin.models.embeddings import open_embedder
from kdskills.errors import BadRequest, ModelFailed

KEY = "sk-test-0123456789abcdef"


class Server(ThreadingHTTPServer):
    """Answers every request with the length of each text, or with `status` and `body`; notes requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.status, self.body = 200, ""
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        """Answer it, rows in reverse order."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, asked, self.headers["authorization"]))
        rows = [
            {"object": "embedding", "index": index, "embedding": [len(text), "car" in text or "automobile" in text]}
            for index, text in enumerate(asked["input"])
        ]
        body = self.server.body or json.dumps({"object": "list", "model": asked["model"], "data": rows[::-1]})
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve on a free port, as the server that the variables name."""
    with Server() as serving:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", serving.url)
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_texts_become_vectors_in_their_order(server: Server) -> None:
    """One request for all texts, as plain numbers, with the key; rows are put in the order of their index."""
    embedder = open_embedder("openai", "small")
    assert [list(row) for row in embedder.embed(["a", "bcd"])] == [[1, 0], [3, 0]]
    ((path, asked, authorization),) = server.requests
    assert (path, authorization) == ("/v1/embeddings", f"Bearer {KEY}")
    assert asked == {"input": ["a", "bcd"], "model": "small", "encoding_format": "float"}


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, "bad"), (413, "bad"), (422, "bad"), (500, "input is too large to process. increase the batch size")],
)
def test_a_text_that_is_too_much_is_a_value_error(server: Server, status: int, words: str) -> None:
    """Refusals of a text are told from failures, however a server says them; nothing is tried twice."""
    server.status, server.body = status, json.dumps({"error": {"message": words, "code": status}})
    with pytest.raises(ValueError, match=words.split(".", maxsplit=1)[0]) as caught:
        open_embedder("openai", "small").embed(["a"])
    assert type(caught.value) is ValueError
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "no JSON"),
        (200, "[]"),
        (200, "{}"),
        (200, '{"data": null}'),
        (200, '{"data": [{"index": null}, {}]}'),
        (200, '{"data": [5]}'),
        (401, json.dumps({"error": {"message": f"wrong key {KEY}"}})),
        (404, "no such model"),
        (429, json.dumps({"error": {"message": "slowly " * 10_000}})),
        (503, ""),
    ],
)
def test_a_server_that_fails_is_told_in_words(server: Server, status: int, body: str) -> None:
    """Whatever it answers is one short failure, without the key."""
    server.status, server.body = status, body or "busy"
    with pytest.raises(ModelFailed) as caught:
        open_embedder("openai", "small").embed(["a", "b"])
    assert "openai:small" in caught.value.message
    assert KEY not in caught.value.message
    assert len(caught.value.message) < 300


def test_without_a_server_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, no key and no name are told in words."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelFailed, match="could not be asked"):
        open_embedder("openai", "small@http://127.0.0.1:9/v1").embed(["a"])
    with pytest.raises(BadRequest, match="OPENAI_API_KEY"):
        open_embedder("openai", "small")
    with pytest.raises(BadRequest, match="no model"):
        open_embedder("ollama", "")


SKILL = "---\nname: {name}\ndescription: {about}\n---\nDo it.\n"


def test_the_setting_makes_searches_go_by_meaning(server: Server, tmp_path: Path) -> None:
    """`embedder` is asked by `skills.search`, and of a server that fails the answer says why it went by words."""
    for name, about in (("driver", "Starts the automobile."), ("painter", "Paints the walls.")):
        folder = tmp_path / "skills" / "home" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(SKILL.format(name=name, about=about))
    facts = {"bundle": tmp_path, "query": "my car"}
    words = Host(Settings(index_dir=tmp_path / "index"), entry_points=False)
    assert (words.run("skills.search", **facts).hits, server.requests) == ((), [])
    settings = Settings(index_dir=tmp_path / "index", embedder="openai:small")
    answer = Host(settings, entry_points=False).run("skills.search", **facts)
    assert (answer.hits[0].full_id, answer.hits[0].why, answer.diagnostics) == ("home.driver", {}, ())
    server.status = 503
    failing = Host(settings, entry_points=False).run("skills.search", **facts)
    assert (failing.hits, [finding.code for finding in failing.diagnostics]) == ((), ["embedder_failed"])


def test_an_embedder_nobody_registered_is_told(tmp_path: Path) -> None:
    """A name with an unknown prefix searches by words, and the diagnostic lists the known ones."""
    folder = tmp_path / "skills" / "home" / "driver"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(SKILL.format(name="driver", about="Starts the car."))
    host = Host(Settings(index_dir=tmp_path / "index", embedder="nobody:x"), entry_points=False)
    answer = host.run("skills.search", bundle=tmp_path, query="car")
    (finding,) = answer.diagnostics
    assert (answer.hits[0].full_id, finding.code) == ("home.driver", "embedder_failed")
    assert "known: ollama, openai" in finding.message
