"""Turns over HTTP: started, followed as a stream, taken up again, and ended with the service."""

import json
from pathlib import Path

import pytest

from kdskills.app import Host, Settings

HELLO = Path(__file__).parents[3] / "bundles" / "hello"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def served(tmp_path, serve):
    """A service on the bundle `hello`."""
    host = Host(Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=HELLO), entry_points=False)
    with serve(host) as service:
        yield service


def frames(text):
    """Return the events of a stream as `(name, number, data)`."""
    rows = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    return [(row["event"], row.get("id"), json.loads(row["data"])) for row in rows if "event" in row]


@pytest.mark.needs("bubblewrap")
def test_a_turn_is_followed_as_a_stream(served):
    """Events come under their numbers until the end, a reader goes on after the last it has, and others find nothing."""
    with served.client(served.token(agent="bot")) as client:
        started = client.post("/projects/local/tools/turns.start", json={})
        assert started.status_code == 200, started.text
        path = f"/projects/local/turns/{started.json()['turn_id']}/events"
        told = frames(client.get(path).text)
        numbers = [number for name, number, _ in told if name == "event"]
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
        assert (told[-1][0], told[-1][2]["status"], told[-1][2]["agent"]) == ("end", "final", "bot")
        assert told[-2][2]["type"] == "turn.finished"
        rest = frames(client.get(path, headers={"Last-Event-ID": numbers[-3]}).text)
        assert [number for _, number, _ in rest] == [*numbers[-2:], None]
        assert client.get("/projects/local/turns/nothing/events").status_code == 404
        refused = client.post("/projects/local/tools/turns.start", json={"model": "openai:gpt-5"})
        assert (refused.status_code, refused.json()["code"]) == (403, "model_not_allowed")
    with served.client(served.token(agent="other", scopes={"work:read", "work:run"})) as client:
        assert client.get(path).status_code == 404
    with served.client(served.token(agent="bot", scopes={"skills:read"})) as client:
        assert client.get(path).status_code == 403
