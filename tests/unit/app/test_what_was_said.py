"""Conversations that solvers keep in the settings' store can be listed, read, exported and forgotten."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from kdskills.app import Host, Settings
from kdskills.doors.cli.main import build_cli
from kdskills.errors import BadRequest, KdskillsError, NotFound
from kdskills.solver import ReactSolver, SolverSystem
from kdskills.testing import ScriptedModel, call, say
from kdskills.testing.conversations import stored, talk

HELLO = Path(__file__).parents[3] / "bundles" / "hello"


async def talked(folder: Path, *users: str | None, keep: float = 0.0) -> Host:
    """Return a Host over a store that holds a conversation `c<n>` of two turns for each user."""
    url = f"sqlite:///{folder / 's.db'}"
    host = Host(Settings(state_dir=folder, session_store=url, conversations_keep_days=keep), entry_points=False)
    store = host.session_store(url)
    replies = [call("skills_load", names=["hello"]), say("one"), say("two")] * len(users)
    system = SolverSystem(bundle=HELLO, model=ScriptedModel(replies), executor=None, store=store, wiring=host.wiring)
    async with system:
        for number, user in enumerate(users):
            for request in ("first?", "second?"):
                await ReactSolver(system).run(request, session_id=f"c{number}", user=user)
    await store.aclose()
    return host


async def test_they_are_listed_shown_and_exported(tmp_path: Path) -> None:
    """A page by id, of all or of a user; what was asked and answered; and every message with its calls."""
    host = await talked(tmp_path, "anna", "otto", "anna")
    first = await host.call("conversations.list", limit=2)
    rest = await host.call("conversations.list", limit=2, cursor=first.next_cursor)
    assert [[row.conversation_id for row in page.conversations] for page in (first, rest)] == [["c0", "c1"], ["c2"]]
    assert rest.next_cursor is None
    annas = await host.call("conversations.list", user="anna")
    assert [(row.conversation_id, row.number) for row in annas.conversations] == [("c0", 2), ("c2", 2)]
    shown = await host.call("conversations.get", id="c1")
    assert [(turn.request, turn.answer, turn.calls) for turn in shown.turns] == [
        ("first?", "one", 1),
        ("second?", "two", 0),
    ]
    exported = (await host.call("conversations.export", id="c1")).conversation
    assert [message["role"] for message in exported["turns"][0]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(json.dumps(exported)) == exported


async def test_they_are_forgotten(tmp_path: Path) -> None:
    """One by its id, all of a user, those that are idle; nothing at all is refused, and is not everything."""
    host = await talked(tmp_path, "anna", "otto", "anna", None)
    for nothing in ({}, {"id": None, "user": None}, {"id": "c0", "user": "anna"}):
        with pytest.raises(BadRequest):
            await host.call("conversations.delete", **nothing)
    deleted = [
        (await host.call("conversations.delete", **which)).deleted
        for which in ({"id": "c1"}, {"id": "c1"}, {"user": "anna"}, {"idle_days": 1}, {"idle_days": 0})
    ]
    assert deleted == [1, 0, 2, 0, 1]
    assert (await host.call("conversations.list")).conversations == ()
    with pytest.raises(NotFound) as caught:
        await host.call("conversations.get", id="c1")
    assert caught.value.code == "conversation_not_found"


async def test_old_ones_go_by_themselves(tmp_path: Path) -> None:
    """With `conversations_keep_days` a service forgets those nobody went on with, and no others."""
    host = await talked(tmp_path, None, keep=30.0)
    store = await host.conversations.dialogues()
    await stored(store, talk("old"))
    await host.upkeep.collect()
    assert [head.conversation_id for head in await store.page(user=None, after=None, limit=9)] == ["c0"]
    await host.storage.aclose()


@pytest.mark.parametrize(
    ("url", "code"),
    [(None, "session_store_missing"), ("memory:", None), ("sqlite:////nowhere/s.db", "store_unavailable")],
)
async def test_a_store_that_is_not_there_is_told(tmp_path: Path, url: str | None, code: str | None) -> None:
    """Without a store there is nothing to list, which is said; one that is gone is the operator's."""
    host = Host(Settings(state_dir=tmp_path, session_store=url), entry_points=False)
    if code is None:
        assert (await host.call("conversations.list")).conversations == ()
        return
    with pytest.raises(KdskillsError) as caught:
        await host.call("conversations.list")
    assert caught.value.code == code


def test_commands(tmp_path: Path) -> None:
    """`kdskills conversation list, show, export, delete` say it at a terminal."""
    host = asyncio.run(talked(tmp_path, "anna"))

    def run(*words: str) -> str:
        done = CliRunner().invoke(get_command(build_cli(host)), ["conversation", *words], obj=host)
        assert done.exit_code == 0, done.output
        return done.output

    assert "anna" in run("list")
    assert "> second?\ntwo" in run("show", "c0")
    assert json.loads(run("export", "c0"))["conversation_id"] == "c0"
    assert "1 conversation forgotten" in run("delete", "--user", "anna")
    assert "c0" not in run("list")
