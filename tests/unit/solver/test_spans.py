"""OpenTelemetry spans of a turn, read back through the SDK's in-memory exporter."""

import asyncio

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pydantic import SecretStr

from kdskills.errors import ModelFailed
from kdskills.models import ModelPrice, Usage
from kdskills.solver import AgentSpec, ReactSolver, TokenUsage
from kdskills.solver.spans import company_and_model
from kdskills.testing.models import ScriptedModel, call, call_raw, say, together

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
AGENT = "invoke_agent solver.react.decision"


@pytest.fixture
def spans(monkeypatch):
    """Spans that have ended, of a provider of this test's own."""
    monkeypatch.delenv(CAPTURE, raising=False)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


def by_name(spans):
    return {span.name: dict(span.attributes) for span in spans()}


async def run(build, replies, **options):
    async with build(replies, **options) as system:
        return await ReactSolver(system).run("Which region grew?")


async def test_spans_tell_what_a_cache_gave(build, spans):
    """Tokens of the provider's cache and of reasoning stand in the spans of call and turn, and in the result."""
    result = await run(build, [say("x", usage=Usage(100, 10, 60, 20, 5))])
    assert result.usage == TokenUsage(input=100, output=10, cache_read=60, cache_write=20, reasoning=5)
    for name in (AGENT, "chat scripted"):
        row = by_name(spans)[name]
        counts = [row[f"gen_ai.usage.{what}"] for what in ("cache_read.input_tokens", "cache_creation.input_tokens")]
        assert [*counts, row["gen_ai.usage.reasoning.output_tokens"]] == [60, 20, 5]


async def test_spans_tell_what_was_paid(build, spans):
    """Each call has its cost, each turn that of its calls and of its agents'; where a price is unknown no span has one."""
    for prices, costs in (({"scripted": ModelPrice(input=1, output=10)}, [0.0002, 0.0006]), ({}, [None, None])):
        model = ScriptedModel([call("tools_research", task="Look."), say("x")], roles={"research": [say("y")]})
        await run(build, [], model=model, prices=prices, agents={"tools.research": AgentSpec("research", "Looks.")})
        told = [span.attributes.get("kdskills.usage.cost") for span in spans() if span.name.startswith("invoke_agent")]
        assert told[-2:] == [costs[0], costs[1]]
        assert [span.attributes.get("kdskills.usage.cost") for span in spans() if "chat" in span.name][-3:] == [
            costs[0]
        ] * 3


async def test_spans_name_agent_model_and_tools(build, executor, spans):
    """Every attribute the specification names, and none beside it; nothing of what was said."""
    executor.outcome = {"status": "nonzero", "exit_code": 3}
    replies = [
        call("skills_load", names=["sales"]),
        call("skills_run_script", path="scripts/sum.py"),
        call("skills_read", path="references/notes.md"),
        say("a confidential text"),
    ]
    result = await run(build, replies)
    found = by_name(spans)
    session, digest = result.session_id, result.skills_used[0].digest
    model = {"gen_ai.provider.name": "scripted", "gen_ai.request.model": "scripted"}
    assert found[AGENT] == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "solver.react.decision",
        "gen_ai.conversation.id": session,
        **model,
        "gen_ai.usage.input_tokens": 400,
        "gen_ai.usage.output_tokens": 40,
    }
    assert found["chat scripted"] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": "solver.react.decision",
        "gen_ai.conversation.id": session,
        **model,
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 10,
    }
    skill = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.type": "function",
        "gen_ai.skill.name": "sales",
        "gen_ai.skill.source.uri": "skill://acme/sales/SKILL.md",
        "kdskills.skill.digest": digest,
    }
    for tool, number, more in [
        ("skills.load", 1, {}),
        ("skills.run_script", 2, {"gen_ai.skill.resource.name": "scripts/sum.py", "kdskills.script.exit_code": 3}),
        ("skills.read", 3, {"gen_ai.skill.resource.name": "references/notes.md"}),
    ]:
        named = {"gen_ai.tool.name": tool, "gen_ai.tool.call.id": f"call_{number}"}
        assert found[f"execute_tool {tool}"] == {**skill, **named, **more}
    assert "confidential" not in "".join(span.to_json() for span in spans())


async def test_model_and_tool_spans_stand_below_the_agents(build, spans):
    """One tree a turn: the agent's span is the parent of all others."""
    await run(build, [call("skills_load", names=["sales"]), say("ok")])
    agent = next(span for span in spans() if span.name == AGENT)
    others = [span for span in spans() if span is not agent]
    assert agent.parent is None
    assert {span.parent.span_id for span in others} == {agent.context.span_id}
    assert [span.name for span in others] == ["chat scripted", "execute_tool skills.load", "chat scripted"]


@pytest.mark.parametrize(
    ("reply", "name", "code"),
    [
        (call("skills_read", path="none.md", skill="sales"), "execute_tool skills.read", "no_active_skills"),
        (call("skills_load", names=["nowhere"]), "execute_tool skills.load", "skill_not_found"),
        (call_raw("skills_load", "{broken"), "execute_tool skills.load", "invalid_argument"),
        (call("say_CONFIDENTIAL_things"), "execute_tool unknown", "tool_not_found"),
        (call("tools_fail"), "execute_tool tools.fail", "tool_failed"),
    ],
)
async def test_failed_calls_have_our_code(build, spans, reply, name, code):
    """`error.type` is the code the model read, the status is an error; names a model made up stay out."""

    def fail() -> str:
        """Fail."""
        raise RuntimeError("CONFIDENTIAL")

    await run(build, [call("skills_unload", names=["sales"]), reply, say("ok")], tools=[fail])
    span = next(span for span in spans() if span.name == name)
    assert (span.attributes["error.type"], span.status.status_code) == (code, StatusCode.ERROR)
    assert "CONFIDENTIAL" not in "".join(span.to_json() for span in spans())


async def test_a_failing_provider_marks_its_span_and_the_agents(build, spans):
    """Both say why, by code; neither repeats the message."""
    failure = ModelFailed("CONFIDENTIAL words of a server", status=400)
    with pytest.raises(ModelFailed):
        await run(build, [failure])
    assert [(span.name, span.attributes["error.type"], span.status.status_code) for span in spans()] == [
        ("chat scripted", "model_failed", StatusCode.ERROR),
        (AGENT, "model_failed", StatusCode.ERROR),
    ]
    assert [span.status.description for span in spans()] == [None, None]
    assert "CONFIDENTIAL" not in "".join(span.to_json() for span in spans())


@pytest.mark.parametrize(
    ("replies", "options", "code"),
    [
        ([say(""), say("")], {}, "empty_reply"),
        ([call("skills_load", names=["sales"])], {"max_steps": 1, "final_call": False}, "max_steps"),
        ([call("skills_load", names=["sales"])], {"max_total_tokens": 50}, "max_total_tokens"),
    ],
)
async def test_a_turn_without_an_answer_says_why(build, spans, replies, options, code):
    """`error.type` of the agent's span is the turn's stop reason."""
    result = await run(build, replies, **options)
    assert (by_name(spans)[AGENT]["error.type"], result.stop_reason) == (code, code)


async def test_a_cancelled_turn_ends_its_spans(build, spans, executor):
    """Nothing is left open, and the code says what happened."""
    executor.hang = True
    replies = [call("skills_load", names=["sales"]), call("skills_run_script", path="scripts/sum.py")]
    model = ScriptedModel(replies)
    async with build(model=model) as system:
        task = asyncio.create_task(ReactSolver(system).run("x"))
        await asyncio.wait_for(executor.started.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    found = by_name(spans)
    assert found[AGENT]["error.type"] == found["execute_tool skills.run_script"]["error.type"] == "cancelled"


async def test_content_is_recorded_only_where_the_operator_wants_it(build, spans, monkeypatch):
    """With the capture variable the model's text is in its span, secrets masked all the same."""
    monkeypatch.setenv(CAPTURE, "true")
    await run(build, [together(say("I use MARK-1."))], secrets=(SecretStr("MARK-1"),))
    assert by_name(spans)["chat scripted"]["gen_ai.output.messages"] == "I use ***."


async def test_without_opentelemetry_turns_run_all_the_same(build, monkeypatch):
    """The extra is optional."""
    import builtins

    real = builtins.__import__

    def absent(name, *rest, **options):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    result = await run(build, [call("skills_load", names=["sales"]), call("skills_load", names=[]), say("ok")])
    assert result.status == "final"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai:gpt-5", ("openai", "gpt-5")),
        ("ollama:qwen3:4b", ("ollama", "qwen3:4b")),
        ("json:openai:tiny", ("openai", "tiny")),
        ("json-schema:ollama:qwen3:4b", ("ollama", "qwen3:4b")),
        ("replay:demo.yaml", ("replay", "demo.yaml")),
        ("scripted", ("scripted", "scripted")),
        ("json", ("json", "json")),
    ],
)
def test_provider_and_model_are_told_apart(name, expected):
    """What wraps a provider is not the provider."""
    assert company_and_model(name) == expected
