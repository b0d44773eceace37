"""What turns cost: by a table of one's own, by the shipped list of prices, or unknown, which is never nothing."""

import pytest
from pydantic import ValidationError
from pydantic_ai.messages import ModelResponse
from pydantic_ai.usage import RequestUsage

from kdskills.builtin.models.pydantic_ai import open_live, shipped_cost
from kdskills.models import ModelPrice, ModelReply, Usage
from kdskills.session.conversations import ConversationTurn
from kdskills.solver import ReactSolver
from kdskills.solver.events import ModelReplied, TokenUsage, read_transcript
from kdskills.testing.models import ScriptedModel, call, say

PRICE = ModelPrice(input=1, output=10, cache_read=0.1)
USED = Usage(1000, 100, cache_read=500)  # 500 fresh, 500 read, 100 out: 1,550 millionths of a dollar


async def test_a_table_of_prices_gives_costs(build, tmp_path):
    """Step, event, result and the conversation's turn say what was spent; a price of one's own goes before the provider's."""
    replies = [call("skills_load", names=["sales"]), say("x", usage=USED)]
    async with build(
        [ModelReply(calls=replies[0].calls, usage=USED, cost=7.0), replies[1]], prices={"scripted": PRICE}
    ) as system:
        result = await ReactSolver(system).run("how much?", session_id="c1")
        conversation = await system.conversations.get("c1")
    assert [step.usage.cost for step in result.steps] == [0.00155, 0.00155]
    assert (result.usage.cost, result.usage.estimated) == (0.0031, False)
    assert conversation.turns[0].cost == 0.0031
    assert ConversationTurn.from_json(conversation.turns[0].to_json()) == conversation.turns[0]
    events = read_transcript(tmp_path / "transcripts" / f"{result.turn_id}.jsonl").events
    assert [event.usage.cost for event in events if isinstance(event, ModelReplied)] == [0.00155, 0.00155]


@pytest.mark.parametrize("first", [0.25, None])
async def test_one_unknown_price_leaves_the_whole_unknown(build, first):
    """A sum is told where every call's cost is known; else none, not what happens to be known."""
    replies = [
        ModelReply(calls=call("skills_load", names=["sales"]).calls, usage=USED, cost=first),
        say("x", usage=USED),
    ]
    async with build(replies, prices={"other:model": PRICE}) as system:
        result = await ReactSolver(system).run("how much?")
    assert ([step.usage.cost for step in result.steps], result.usage.cost) == ([first, None], None)


async def test_what_nobody_counted_is_estimated(build):
    """A provider that tells no tokens gives estimates that say so, and no cost; its own counts stay without mark."""
    async with build([say("word " * 40, usage=Usage())], prices={"scripted": PRICE}) as system:
        result = await ReactSolver(system).run("how much?", session_id="c1")
        conversation = await system.conversations.get("c1")
    usage = result.usage
    assert (usage.estimated, usage.cost, usage.input > 100, 20 < usage.output < 100) == (True, None, True, True)
    assert result.steps[0].usage == usage
    assert (conversation.turns[0].usage, conversation.turns[0].cost) == (Usage(), None)


async def test_estimates_count_for_the_bound(build):
    """A provider that tells no tokens ends a turn by `max_total_tokens`, too."""
    replies = [ModelReply(text="word " * 400, calls=call("react_read", refs=["turn:x"]).calls)]
    async with build(replies, max_total_tokens=400) as system:
        result = await ReactSolver(system).run("how much?")
    assert (result.status, result.stop_reason, result.usage.estimated) == ("budget", "max_total_tokens", True)


async def test_a_turn_that_asked_nobody_has_no_cost(build):
    """Nothing asked is no known price."""
    async with build([say("x")]) as system:
        solver = ReactSolver(system)
        async with solver.prepare_session("x") as turn:
            assert turn.log.tokens == TokenUsage()
            await solver.work(turn)


def test_prices_are_numbers_that_can_be_paid():
    """A price below nothing, endless or misspelt is refused."""
    for wrong in (
        {"input": -1, "output": 1},
        {"input": float("nan"), "output": 1},
        {"input": 1},
        {"in": 1, "output": 1},
    ):
        with pytest.raises(ValidationError):
            ModelPrice(**wrong)
    assert ModelPrice(input=2, output=4).cost(Usage(1000, 500, cache_read=400, cache_write=100)) == 0.004


@pytest.mark.parametrize(("name", "known"), [("anthropic:claude-sonnet-4-5", True), ("openai:no-such-model", False)])
def test_shipped_prices(name, known):
    """Prices come from the installed list; what is not in it has none."""
    response = ModelResponse(parts=[], usage=RequestUsage(input_tokens=1000, output_tokens=100))
    cost = shipped_cost(name, response)
    assert (cost is not None and cost > 0) is known


@pytest.mark.parametrize(
    ("provider", "target", "priced"),
    [("openai", "gpt-5", True), ("openai", "gpt-5@http://127.0.0.1:1/v1", False), ("ollama", "gpt-5", False)],
)
def test_a_server_of_ones_own_has_no_shipped_price(provider, target, priced, monkeypatch):
    """What stands behind an address of one's own costs nobody knows what, however it is named."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    model = open_live(provider, target)
    response = ModelResponse(parts=[], usage=RequestUsage(input_tokens=1000, output_tokens=100), model_name="gpt-5")
    assert (model._reply(response).cost is not None) is priced


async def test_a_prompt_says_where_active_skills_begin(build):
    """A request tells how much of its text stays while skills come and go."""
    model = ScriptedModel([call("skills_load", names=["sales"]), say("x")])
    async with build(model=model) as system:
        await ReactSolver(system).run("how much?")
    before, after = model.requests
    assert before.steady == len(before.instructions)
    assert 0 < after.steady <= len(after.instructions)
    assert after.instructions[: after.steady].rstrip() == before.instructions.rstrip()
