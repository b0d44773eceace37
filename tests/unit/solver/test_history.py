"""A second turn of a session goes on where the first one ended: what was said, the numbers of sources, the files."""

import asyncio
import sqlite3
import subprocess
import sys

import pytest
from pydantic import SecretStr

from kdskills.builtin.stores.sql import SqlStore
from kdskills.errors import BadRequest, KdskillsError, ModelFailed
from kdskills.models import Message, ToolCall
from kdskills.session import StoreUnavailable
from kdskills.session.conversations import ConversationBusy, MemoryConversations
from kdskills.solver import ReactSolver, ToolAnswer, ToolContext
from kdskills.solver import history as history_module
from kdskills.testing.models import ScriptedModel, call, say


def texts(request):
    """Return role and text of the messages of a request."""
    return [(message.role, message.text) for message in request.messages]


async def test_a_second_turn_reads_the_first(build):
    """What was asked, called and answered stands before the new request, byte for byte as it was sent and added to."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("42 [[S:1]]"), say("again 42"), say("and again")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        for request in ("how much?", "sure?", "really?"):
            await solver.run(request, session_id="c1")
    sent = [request.messages for request in model.requests]
    assert [m.role for m in sent[2]] == ["user", "assistant", "tool", "assistant", "user"]
    assert [m.text for m in sent[2] if m.role == "user"] == ["how much?", "sure?"]
    assert (sent[2][:3], sent[3][:5]) == (sent[1], sent[2])
    assert texts(model.requests[3])[-2:] == [("assistant", "again 42"), ("user", "really?")]
    assert model.requests[2].instructions == model.requests[3].instructions


async def test_numbers_keep_their_sources(build):
    """A number of an earlier answer means the same source in every later turn; a new source gets a new number."""
    replies = [
        call("skills_load", names=["sales"]),
        say("a [[S:1]]"),
        call("skills_load", names=["brief"]),
        say("b [[S:1,2]]"),
    ]
    async with build(replies) as system:
        solver = ReactSolver(system)
        first = await solver.run("x", session_id="c1")
        second = await solver.run("y", session_id="c1")
    assert [row["title"] for row in first.sources] == ["Sales guide"]
    assert [(row["sid"], row["title"]) for row in second.sources] == [(1, "Sales guide"), (2, "Brief guide")]
    assert second.cited == (1, 2)


async def test_files_of_an_earlier_turn_can_be_read(build):
    """The next turn is told the files of the one before, and `turn:<turn id>/<path>` reads them; no other turn's."""
    seen = []

    def read(request):
        seen.append(request.messages[-2].text)
        return call(
            "react_read",
            refs=[f"turn:{first.turn_id}/out.md", f"turn:{other.turn_id}/out.md", f"turn:{first.turn_id}/../x"],
        )

    model = ScriptedModel(
        [
            call("react_write", path="out.md", text="mine"),
            say("ok"),
            call("react_write", path="out.md", text="theirs"),
            say("ok"),
            read,
            say("ok"),
        ]
    )
    async with build(model=model) as system:
        solver = ReactSolver(system)
        first = await solver.run("write", session_id="c1")
        other = await solver.run("write", session_id="c2")
        second = await solver.run("read", session_id="c1")
    assert f"turn:{first.turn_id}/out.md" in seen[0]
    result = second.steps[0].calls[0].result
    assert ("mine" in result, "theirs" in result, "path_denied" in result) == (True, False, True)


async def test_more_files_than_are_named_are_counted(build, monkeypatch):
    """Beyond those that are named, the next turn is told how many there are."""
    monkeypatch.setattr(history_module, "MAX_NAMED", 2)
    model = ScriptedModel([*(call("react_write", path=f"{name}.md", text="x") for name in "abc"), say("ok"), say("ok")])
    async with build(model=model) as system:
        first = await ReactSolver(system).run("write", session_id="c1")
        await ReactSolver(system).run("read", session_id="c1")
    note = model.requests[-1].messages[-2].text
    assert note.endswith(f"turn:{first.turn_id}/a.md, turn:{first.turn_id}/b.md and 1 more")


async def test_none_and_own_messages_leave_the_conversation(build):
    """`none` sends the request alone, a list what it holds without foreign citations; neither is added to the conversation."""
    model = ScriptedModel([say("one"), say("two"), say("three"), say("four")])
    own = [Message("user", "before"), Message("assistant", "it was [[S:1]]")]
    async with build(model=model) as system:
        solver = ReactSolver(system)
        await solver.run("a", session_id="c1")
        await solver.run("b", session_id="c1", history="none")
        await solver.run("c", session_id="c1", history=own)
        await solver.run("d", session_id="c1")
    sent = [[text for _, text in texts(request)] for request in model.requests]
    assert sent == [["a"], ["b"], ["before", "it was", "c"], ["a", "one", "d"]]


@pytest.mark.parametrize(
    "history",
    [
        "all",
        ["text"],
        [Message("tool", "x", call_id="c1")],
        [Message("user", "x"), Message("assistant", calls=(ToolCall("c1", "t", "{}"),))],
        [Message("assistant", calls=(ToolCall("c1", "t", "{}"),)), Message("user", "x")],
        [Message("system", "x")],
        [Message("user", "x", calls=(ToolCall("c1", "t", "{}"),)), Message("tool", "y", call_id="c1")],
        [Message("user", 5)],
        [Message("assistant", calls=({"id": "c1"},))],
    ],
)
async def test_a_history_that_no_provider_takes_is_refused(build, tmp_path, history):
    """A word of no meaning, what is no message, an answer without its call and a call without answer: before a turn begins."""
    async with build([]) as system:
        with pytest.raises(BadRequest) as caught:
            await ReactSolver(system).run("x", history=history)
    assert caught.value.code == "history_invalid"
    assert not (tmp_path / "turns").exists() or list((tmp_path / "turns").iterdir()) == []


class Slow(ScriptedModel):
    """A model that answers once somebody says so."""

    def __init__(self, replies):
        super().__init__(replies)
        self.go, self.asked = asyncio.Event(), asyncio.Event()

    async def reply(self, request):
        self.asked.set()
        await self.go.wait()
        return await super().reply(request)


async def test_a_turn_beside_another_is_refused_at_once(build):
    """While a turn goes on, a second of its conversation asks nothing and leaves nothing; others, and the next, go on."""
    model = Slow([say("one"), say("other"), say("aside"), say("two")])
    async with build(model=model) as system:
        solver, beside = ReactSolver(system), ReactSolver(system)
        first = asyncio.create_task(solver.run("a", session_id="c1"))
        await model.asked.wait()
        with pytest.raises(ConversationBusy) as caught:
            await beside.run("b", session_id="c1")
        with pytest.raises(ConversationBusy):
            [event async for event in beside.stream("b", session_id="c1")]
        assert (caught.value.code, getattr(caught.value, "result", None), model.requests) == (
            "conversation_busy",
            None,
            [],
        )
        model.go.set()
        await asyncio.gather(first, solver.run("c", session_id="c2"), solver.run("d", session_id="c1", history="none"))
        await solver.run("e", session_id="c1")
        conversation = await system.conversations.get("c1")
    assert [turn.request for turn in conversation.turns] == ["a", "e"]


async def test_a_turn_that_is_stopped_holds_nothing(build):
    """A turn that was cancelled or left, that failed, or whose request cannot be used, leaves the conversation to the next one."""
    model = Slow([ModelFailed("no"), say("two")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        first = asyncio.create_task(solver.run("a", session_id="c1"))
        await model.asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(BadRequest):
            await solver.run("b", session_id="c1", files=["/no/such/file"])
        with pytest.raises(BadRequest):
            await solver.run("b", session_id="c1", overlay="none")
        left = aiter(solver.stream("b", session_id="c1"))
        await anext(left)
        await left.aclose()
        model.go.set()
        with pytest.raises(ModelFailed):
            await solver.run("b", session_id="c1")
        assert (await solver.run("c", session_id="c1")).text == "two"


@pytest.mark.parametrize("said", [0, 1])
async def test_what_is_erased_while_a_turn_goes_on(build, said):
    """A turn of a conversation that is gone is not added; one that had none before it begins a new one, at its end."""
    model = Slow([say("one"), say("two")][1 - said :])
    async with build(model=model) as system:
        solver, store = ReactSolver(system), system.conversations
        if said:
            model.go.set()
            await solver.run("a", session_id="c1", user="ada")
            model.go.clear()
            model.asked.clear()
        second = asyncio.create_task(solver.run("b", session_id="c1", user="ada"))
        await model.asked.wait()
        assert await store.erase("ada") == said
        model.go.set()
        (outcome,) = await asyncio.gather(second, return_exceptions=True)
        conversation = await store.get("c1")
    assert isinstance(outcome, ConversationBusy) is bool(said)
    assert (conversation and [turn.request for turn in conversation.turns]) == (None if said else ["b"])


async def test_a_history_of_ten_thousand_messages(build):
    """All of them are sent, results as one line each where the window has no room, soon and in every step."""
    exchange = [
        Message("user", "What?"),
        Message("assistant", "", calls=(ToolCall("c", "react_read", "{}"),)),
        Message("tool", "result " * 99, call_id="c", tool="react_read"),
        Message("assistant", "That."),
    ]
    model = ScriptedModel([call("react_read", refs=["turn:x"]), say("ok")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", history=exchange * 2_500)
    assert [len(request.messages) for request in model.requests] == [10_001, 10_003]
    assert (result.status, {cut.kind for cut in result.context}) == ("final", {"results"})
    assert sum(len(message.text) for message in model.requests[0].messages) < 128_000 * 4


async def test_of_two_turns_at_once_one_is_added(build, tmp_path):
    """Over stores of two processes, who ends second is `conversation_busy`, with its result; the winner's turn alone is added."""

    class Together(ScriptedModel):
        """Answers once both turns have asked."""

        both = asyncio.Barrier(2)

        async def reply(self, request):
            await self.both.wait()
            return await super().reply(request)

    stores = [SqlStore(f"sqlite:///{tmp_path / 's.db'}") for _ in range(2)]
    async with (
        build(model=Together([say("one")]), store=stores[0]) as system,
        build(model=Together([say("two")]), store=stores[1]) as other,
    ):
        turns = (ReactSolver(each).run("x", session_id="c1") for each in (system, other))
        answers = await asyncio.gather(*turns, return_exceptions=True)
        conversation = await system.conversations.get("c1")
    lost = next(answer for answer in answers if isinstance(answer, ConversationBusy))
    won = next(answer for answer in answers if answer is not lost)
    assert (lost.code, lost.result.status, lost.result.stop_reason) == (
        "conversation_busy",
        "failed",
        "conversation_busy",
    )
    assert [turn.turn_id for turn in conversation.turns] == [won.turn_id]
    for store in stores:
        await store.aclose()


async def test_a_stream_that_comes_second_ends_failed(build, tmp_path):
    """The last event of a stream says that the turn was not added."""
    model, stores = Slow([say("one")]), [SqlStore(f"sqlite:///{tmp_path / 's.db'}") for _ in range(2)]
    async with build(model=model, store=stores[0]) as system, build([say("two")], store=stores[1]) as other:
        stream = ReactSolver(system).stream("a", session_id="c1")
        await anext(stream)
        await model.asked.wait()
        await ReactSolver(other).run("b", session_id="c1")
        model.go.set()
        last = [event async for event in stream][-1]
    assert (last.type, last.result.status, last.result.stop_reason) == ("turn.finished", "failed", "conversation_busy")
    for store in stores:
        await store.aclose()


class Breaking(ScriptedModel):
    """A model that fails, or never answers, once its replies are used up."""

    def __init__(self, replies, *, hangs):
        super().__init__(replies)
        self.broken = asyncio.Event()
        self._hangs = hangs

    async def reply(self, request):
        if self._left:
            return await super().reply(request)
        self.broken.set()
        if self._hangs:
            await asyncio.Event().wait()
        raise ModelFailed("no")


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_turn_that_breaks_off_leaves_the_conversation(build, how):
    """A provider that fails and a caller who leaves: what was said before stays, and nothing half-said is added."""
    model = Breaking([say("one"), call("skills_load", names=["sales"])], hangs=how == "cancelled")
    async with build(model=model) as system:
        solver = ReactSolver(system)
        await solver.run("a", session_id="c1")
        before = await system.conversations.get("c1")
        task = asyncio.create_task(solver.run("b", session_id="c1"))
        await model.broken.wait()
        if how == "cancelled":
            task.cancel()
        with pytest.raises((ModelFailed, asyncio.CancelledError)):
            await task
        assert await system.conversations.get("c1") == before


async def test_a_conversation_is_of_one_user_and_consumer(build):
    """Nobody else goes on with it, and who it belongs to is not said."""
    async with build([say("one"), say("two")]) as system:
        await ReactSolver(system).run("a", session_id="c1", user="anna")
        for user in (None, "otto", "Anna"):
            with pytest.raises(BadRequest) as caught:
                await ReactSolver(system).run("b", session_id="c1", user=user)
            assert (caught.value.code, "anna" in caught.value.message) == ("conversation_foreign", False)
        for user in ("", " ", "x" * 201, "a\0b"):
            with pytest.raises(BadRequest):
                await ReactSolver(system).run("b", user=user)
        assert (await system.conversations.get("c1")).head.user == "anna"
        await ReactSolver(system).run("b", session_id="c1", user="anna")


class Gone(MemoryConversations):
    """A store that breaks at the reading or at the writing."""

    def __init__(self, reading: bool) -> None:
        super().__init__()
        self._reading = reading

    async def get(self, conversation_id):
        if self._reading:
            raise ConnectionError
        return await super().get(conversation_id)

    async def add(self, conversation):
        raise StoreUnavailable("no")


@pytest.mark.parametrize("reading", [True, False])
async def test_a_store_that_is_gone_is_told(build, reading):
    """A conversation that cannot be read begins no turn; one that cannot be kept fails it, its result in the error."""
    model = ScriptedModel([] if reading else [say("one")])
    async with build(model=model) as system:
        system.conversations = Gone(reading)
        with pytest.raises(KdskillsError) as caught:
            await ReactSolver(system).run("a", session_id="c1")
    assert caught.value.code == "store_unavailable"
    assert len(model.requests) == (0 if reading else 1)
    assert reading or (caught.value.result.status, caught.value.result.text) == ("failed", "one")


async def test_a_conversation_outlives_its_process(build, tmp_path):
    """With a store in a database a new system goes on, secrets masked in what is kept."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    models = [ScriptedModel([say("one s3cret")]), ScriptedModel([say("two")])]
    for number, model in enumerate(models):
        store = SqlStore(url)
        async with build(model=model, store=store, secrets=(SecretStr("s3cret"),)) as system:
            await ReactSolver(system).run(f"{number} s3cret", session_id="c1")
        await store.aclose()
    assert texts(models[1].requests[0]) == [("user", "0 ***"), ("assistant", "one ***"), ("user", "1 s3cret")]
    with sqlite3.connect(tmp_path / "s.db") as link:
        assert "s3cret" not in "".join(str(row) for row in link.execute("SELECT turn FROM kd_conversation_turns"))


@pytest.mark.parametrize("secret", ["2", "0", "user", "assistant"])
async def test_a_secret_that_is_a_word_of_ours_spoils_no_conversation(build, secret):
    """Texts are masked, never roles, times, ids and pins, whatever is declared as secret; the next turn goes on."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("one"), say("two")])
    async with build(model=model, secrets=(SecretStr(secret),)) as system:
        solver = ReactSolver(system)
        assert (await solver.run("a", session_id="c1")).status == "final"
        assert (await solver.run("b", session_id="c1")).status == "final"
    assert [message.role for message in model.requests[2].messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


async def test_a_store_that_fails_in_its_own_way_loses_no_answer(build):
    """What a store of somebody else's raises is told as `store_unavailable`, with the result."""

    class Odd(MemoryConversations):
        async def add(self, conversation):
            raise ValueError("what?")

    async with build([say("one")]) as system:
        system.conversations = Odd()
        with pytest.raises(KdskillsError) as caught:
            await ReactSolver(system).run("a", session_id="c1")
    assert (caught.value.code, caught.value.result.text) == ("store_unavailable", "one")


async def test_the_generator_s_answer_is_what_is_remembered(build):
    """Where a generator writes the answer, the next turn reads what the user read, not the draft."""
    model = ScriptedModel([say("draft"), say("final words"), say("x"), say("y")])
    async with build(model=model, answer_role="answer.generator.strong") as system:
        solver = ReactSolver(system)
        await solver.run("a", session_id="c1")
        await solver.run("b", session_id="c1")
    assert texts(model.requests[2])[:2] == [("user", "a"), ("assistant", "final words")]


async def test_images_are_of_their_own_turn(build):
    """A later turn reads that an image was shown, and is not sent it again."""
    model = ScriptedModel([call("files_read", path="p.png"), say("one"), say("two")])
    async with build(model=model, images=True) as system:
        solver = ReactSolver(system)
        await solver.run("a", session_id="c1", files=[("p.png", b"\x89PNG\r\n\x1a\n")])
        await solver.run("b", session_id="c1")
    assert [len(message.images) for request in model.requests[1:] for message in request.messages] == [
        0,
        0,
        1,
        *[0] * 5,
    ]


def cuts(result):
    """Return kind and number of turns of what a result says was cut."""
    return [(cut.kind, len(cut.turns)) for cut in result.context]


async def test_old_results_become_receipts(build):
    """Beyond its share of the window, results of the oldest turns are one line, in this turn and in the next; the rest stays."""
    steps = [
        step for number in range(4) for step in (call("react_read", refs=["turn:big.txt"]), say(f"answer {number}"))
    ]
    model = ScriptedModel([*steps, say("fifth"), say("sixth")], context_window=8_000)
    async with build(model=model, history_share=0.25) as system:
        solver, results = ReactSolver(system), []
        for number in range(4):
            results.append(await solver.run(f"q{number}", session_id="c1", files=[("big.txt", b"word " * 600)]))
        results += [await solver.run(text, session_id="c1") for text in ("q4", "q5")]
        conversation = await system.conversations.get("c1")
    assert [kind for result in results for kind, _ in cuts(result)].count("receipts") >= 1
    sent = model.requests[-1].messages
    assert [m.text for m in sent if m.role == "user"] == [f"q{number}" for number in range(6)]
    tools = [m.text for m in sent if m.role == "tool"]
    assert tools[0].startswith("[result of react_read in an earlier turn left out")
    assert "word word" in tools[-1]
    assert sent[: len(model.requests[-2].messages)] == model.requests[-2].messages
    assert "word word" in conversation.turns[0].messages[2].text


async def test_middle_turns_are_summarised(build):
    """What is too long even so is summed up by its own role; the last two turns stay, and the next turn asks for no summary."""
    replies = [say(f"answer {number} " + "long " * 800) for number in range(3)]
    roles = {"solver.summary": [say("They like it long [[S:1]].")]}
    model = ScriptedModel([*replies, *[say("short")] * 3], roles=roles, context_window=8_000)
    async with build(model=model, history_share=0.3) as system:
        solver = ReactSolver(system)
        results = [await solver.run(f"q{number}", session_id="c1") for number in range(6)]
        conversation = await system.conversations.get("c1")
    asked = next(request for request in model.requests if request.role == "solver.summary")
    assert "[user] q0" in asked.messages[0].text
    number = next(number for number, result in enumerate(results) if cuts(result))
    assert cuts(results[number]) == [("summary", number - 2)]
    assert conversation.summary.turn_ids == tuple(result.turn_id for result in results[: number - 2])
    last = model.requests[-1].messages
    assert last[0].text == "What was said before, in short:\nThey like it long [[S:1]]."
    assert [m.text for m in last if m.role == "user"][1:] == [f"q{each}" for each in range(number - 2, 6)]
    assert len(conversation.turns) == 6


class PlentyModel(ScriptedModel):
    """A model that need not say everything it could."""

    async def aclose(self):
        pass


async def test_a_conversation_survives_a_window_smaller_than_it_seemed(build):
    """Where requests no longer fit, earlier turns are cut until they do, and the next turn begins with what was cut."""
    window = 3_000

    def within(answer):
        def reply(request):
            if sum(len(message.text) for message in request.messages) // 4 > window:
                raise ModelFailed("full", code="context_full")
            return say(answer)

        return reply

    decisions = [within(f"answer {number} " + "x" * 3_000) for number in range(24)]
    model = PlentyModel(decisions, roles={"solver.summary": [within(f"summary {number}") for number in range(24)]})
    async with build(model=model) as system:
        solver = ReactSolver(system)
        results = [await solver.run(f"request {number}", session_id="c1") for number in range(8)]
    assert [result.status for result in results] == ["final"] * 8
    assert any(cut.kind == "summary" for result in results for cut in result.context)


async def test_what_is_read_of_earlier_turns_leaves_room_for_steps(build):
    """The share is also one of the tokens that a turn may use in all: each of its steps reads what was said before."""
    model = PlentyModel(
        [*(say(f"{number} " + "x" * 4_000) for number in range(8))], roles={"solver.summary": [say("short")] * 8}
    )
    async with build(model=model, max_total_tokens=60_000) as system:
        solver = ReactSolver(system)
        results = [await solver.run("r", session_id="c1") for _ in range(6)]
    assert (results[0].context, any(result.context for result in results)) == ((), True)


async def test_a_summary_that_fails_is_told(build):
    """The turn goes on with what there is, and says so."""
    replies = [say("long " * 1_500), say("long " * 1_500), say("long " * 1_500), ModelFailed("no"), say("ok")]
    async with build(replies, history_share=0.01) as system:
        solver = ReactSolver(system)
        results = [await solver.run(f"q{number}", session_id="c1") for number in range(4)]
    assert [finding.code for finding in results[3].diagnostics] == ["summary_failed"]
    assert (results[3].text, results[3].context) == ("ok", ())


async def text_of_skill(context: ToolContext) -> ToolAnswer:
    """Give a text that belongs to the loaded skill, as those of other servers do."""
    return ToolAnswer("Third party's words.", pin=" ".join(await context.turn.pins()))


@pytest.mark.parametrize("unloads", [False, True])
async def test_texts_of_loaded_skills_survive_a_summary(build, unloads):
    """What a loaded skill brought stays beside the summary, with its call; once it is unloaded it is left out."""
    first = [call("skills_load", names=["sales"]), call("tools_text_of_skill"), say("long " * 1_500)]
    second = [call("skills_unload", names=["sales"])] if unloads else []
    replies = [*first, *second, say("long " * 1_500), say("long " * 1_500), say("end")]
    model = ScriptedModel(replies, roles={"solver.summary": [say("short")]}, context_window=16_000)
    async with build(model=model, history_share=0.3, tools=[text_of_skill]) as system:
        solver = ReactSolver(system)
        results = [await solver.run(f"q{number}", session_id="c1") for number in range(4)]
    assert cuts(results[3])[-1] == ("summary", 1)
    last = model.requests[-1].messages
    assert [m.tool for m in last if m.pin is not None] == ([] if unloads else ["tools_text_of_skill"])
    assert [m.text for m in last if m.pin is not None] == ([] if unloads else ["Third party's words."])
    answered = {m.call_id for m in last if m.role == "tool"}
    assert {each.id for m in last for each in m.calls} == answered


KILLED = """
import asyncio, sys
from kdskills.builtin.stores.sql import SqlStore
from kdskills.solver import PlainWiring, ReactSolver, SolverSystem
from kdskills.testing import ScriptedModel, call, say


class Hanging(ScriptedModel):
    async def reply(self, request):
        if self._left:
            return await super().reply(request)
        print("hangs", flush=True)
        await asyncio.Event().wait()


async def main():
    model = Hanging([say("one"), call("skills_load", names=["sales"])])
    store = SqlStore(sys.argv[2])
    async with SolverSystem(bundle=sys.argv[1], model=model, executor=None, store=store, wiring=PlainWiring()) as system:
        for request in "ab":
            await ReactSolver(system).run(request, session_id="c1")


asyncio.run(main())
"""


def test_a_killed_process_leaves_the_conversation(bundle_path, tmp_path):
    """A process that is killed in the middle of its second turn has added the first one, whole, and nothing else."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, bundle_path, url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "hangs\n"
        process.kill()

    async def conversation():
        store = SqlStore(url)
        answer = await store.conversations.get("c1")
        await store.aclose()
        return answer

    assert [(turn.request, turn.answer) for turn in asyncio.run(conversation()).turns] == [("a", "one")]
