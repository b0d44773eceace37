"""The chat of the how-to page, served by uvicorn: streaming, stop, sources, users at once, readers that go away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kdskills.models import ModelReply
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/build-a-chat-with-fastapi.md"
LONG = "word " * 5_000
Events = list[tuple[str, Any]]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gate() -> threading.Event:
    """What a long answer waits for after its first words."""
    return threading.Event()


@pytest.fixture
def model(gate: threading.Event) -> Iterator[ModelServer]:
    """A model that cites a skill's source, or writes a long answer that waits in its middle."""
    thread = threading.local()  # each request has one

    def reply(asked: Asked) -> ModelReply:
        question = next(row["content"] for row in reversed(asked.body["messages"]) if row["role"] == "user")
        thread.long = "long" in question
        if thread.long:
            return say(LONG)
        if "remember" in question:
            return say("You said: " + ", ".join(re.findall(r"number \d+", asked.text)))
        if "The flights data set" not in asked.instructions:
            return call("skills_load", names=["flights"])
        return say("Carriers report them [[S:1]].")

    def between(piece: int) -> None:
        if piece == 3 and thread.long:
            gate.wait(60)

    with ModelServer(reply, between=between) as server:
        yield server
        gate.set()


@pytest.fixture
def chat(tmp_path: Path, model: ModelServer, gate: threading.Event, free_port: Callable[[], int]) -> Iterator[str]:
    """The page's program under uvicorn; what its clients speak to."""
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "chat.py").write_text(found[1])
    (tmp_path / "bundles").symlink_to(ROOT / "bundles")
    port = free_port()
    env = {**os.environ, "CHAT_MODEL": f"openai:tiny@{model.url}/v1", "OPENAI_API_KEY": "none"}
    words = [sys.executable, "-W", "error", "-m", "uvicorn", "chat:app", "--port", str(port), "--log-level", "warning"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, cwd=tmp_path, env=env, stderr=log) as server:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=60)) as knock:
            knock.get(f"{url}/openapi.json", timeout=60)
        yield url
        gate.set()
        server.terminate()
    assert "Traceback" not in (tmp_path / "log").read_text()


@asynccontextmanager
async def asking(url: str, user: str, conversation: str, text: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Ask, and give the events as they come."""
    async with (
        httpx.AsyncClient(timeout=60, headers={"X-User": user}) as client,
        client.stream("POST", f"{url}/chat/{conversation}", json={"text": text}) as response,
    ):
        assert response.status_code == 200

        async def events() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in response.aiter_lines():
                word, _, rest = line.partition(": ")
                if word == "event":
                    name = rest
                elif word == "data":
                    yield name, json.loads(rest)

        yield events()


async def ask(url: str, user: str, conversation: str, text: str) -> Events:
    """Ask, and return all that comes."""
    async with asking(url, user, conversation, text) as events:
        return [event async for event in events]


async def stop(url: str, user: str, conversation: str) -> bool:
    """Press the button."""
    async with httpx.AsyncClient(timeout=60, headers={"X-User": user}) as client:
        return bool((await client.post(f"{url}/chat/{conversation}/stop")).json()["stopped"])


async def test_an_answer_streams_and_ends_with_its_sources(chat: str) -> None:
    """Tools, pieces of text in order, then the answer with the citations that resolve."""
    events = await ask(chat, "ada", "c1", "Who reports the figures?")
    assert events[0] == ("tool", "skills.load")
    assert "".join(text for name, text in events if name == "delta") == "Carriers report them [[S:1]]."
    name, answer = events[-1]
    assert (name, answer["status"], answer["text"]) == ("answer", "final", "Carriers report them [[S:1]].")
    assert [row["sid"] for row in answer["citations"]] == [1]
    assert answer["citations"][0]["title"]


async def test_a_conversation_goes_on_and_is_its_users_own(chat: str) -> None:
    """What was said is known to the next turn of the same conversation, to no other, and to nobody else."""
    await ask(chat, "ada", "c1", "number 7: who reports them?")
    known = await ask(chat, "ada", "c1", "What do you remember?")
    assert known[-1][1]["text"] == "You said: number 7"
    assert (await ask(chat, "ada", "c2", "What do you remember?"))[-1][1]["text"] == "You said: "
    foreign = await ask(chat, "eve", "c1", "What do you remember?")
    assert foreign == [("failed", {"code": "conversation_foreign"})]


async def test_two_users_at_once_do_not_mix(chat: str, gate: threading.Event) -> None:
    """While one user's answer is still being written, others get theirs."""
    async with asking(chat, "ada", "c1", "a long one, number 1") as events:
        assert (await anext(events))[0] == "delta"
        others = await asyncio.gather(*(ask(chat, f"u{n}", f"c-u{n}", f"remember number {n}") for n in (2, 3, 4)))
        assert [answer[-1][1]["text"] for answer in others] == [f"You said: number {n}" for n in (2, 3, 4)]
        assert await stop(chat, "ada", "c1")
    gate.set()


async def test_stop_ends_the_turn_and_leaves_the_conversation_as_it_was(
    chat: str, gate: threading.Event, model: ModelServer
) -> None:
    """The stream ends with `stopped`, the model's request is cut, and the next turn does not know of it."""
    async with asking(chat, "ada", "c1", "a long one, number 5") as events:
        assert (await anext(events))[0] == "delta"
        async with httpx.AsyncClient(headers={"X-User": "ada"}) as client:
            assert (await client.post(f"{chat}/chat/c1", json={"text": "more"})).status_code == 409
        assert not await stop(chat, "eve", "c1")
        assert await stop(chat, "ada", "c1")
        assert [name async for name, _ in events if name != "delta"] == ["stopped"]
    gate.set()
    assert await asyncio.to_thread(model.hung_up.wait, 60)
    assert not await stop(chat, "ada", "c1")
    assert (await ask(chat, "ada", "c1", "What do you remember?"))[-1][1]["text"] == "You said: "


async def test_a_reader_that_goes_away_ends_its_turn(chat: str, gate: threading.Event, model: ModelServer) -> None:
    """Closing the connection cuts the model's request, and the conversation is free again."""
    async with asking(chat, "ada", "c1", "a long one, number 6") as events:
        assert (await anext(events))[0] == "delta"
    async with asyncio.timeout(60), httpx.AsyncClient(timeout=60, headers={"X-User": "ada"}) as client:
        while (await client.post(f"{chat}/chat/c1", json={"text": "What do you remember?"})).status_code == 409:
            pass  # until the server has seen it go
    gate.set()
    assert await asyncio.to_thread(model.hung_up.wait, 60)
    assert (await ask(chat, "ada", "c1", "What do you remember?"))[-1][1]["text"] == "You said: "
