"""Agents of Google's ADK itself work with skills: with a model of its own that is scripted, and over Gemini's wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, FunctionCall, Part

from kdskills.builtin.adapters.google_adk import RuntimeToolset
from kdskills.errors import SessionError
from kdskills.models import ModelReply
from kdskills.session import Session, SkillCatalog, SkillRuntime
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say, together


@pytest.fixture
def runtime(tmp_path: Path) -> SkillRuntime:
    """Two skills, each with a file."""
    for name, body in (("sales", "Sum the {column}."), ("charts", "Draw bars.")):
        folder = tmp_path / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n")
        (folder / "notes.md").write_text(f"Notes on {name}.\n")
    return SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path))


class Script(BaseLlm):
    """ADK's model that says what it is told to, a list of calls or the end, and keeps what it was shown."""

    model: str = "script"
    steps: list[list[tuple[str, dict[str, Any]]]] = []  # noqa: RUF012 - pydantic copies it
    shown: list[LlmRequest] = []  # noqa: RUF012

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        """Answer."""
        self.shown.append(llm_request.model_copy(deep=True, update={"tools_dict": {}}))
        step = len(self.shown) - 1
        calls = self.steps[step] if step < len(self.steps) else []
        parts = [Part(function_call=FunctionCall(name=name, args=given)) for name, given in calls]
        yield LlmResponse(content=Content(role="model", parts=parts or [Part(text="done")]))

    def texts(self) -> list[str]:
        """The top-level text of each request."""
        return [str(request.config.system_instruction or "") for request in self.shown]

    def results(self) -> list[dict[str, Any]]:
        """Every tool result the model was shown."""
        parts = [part for content in self.shown[-1].contents for part in content.parts or []]
        return [dict(p.function_response.response or {}) for p in parts if p.function_response is not None]


def load(*names: str) -> tuple[str, dict[str, Any]]:
    """A call that loads."""
    return ("skills_load", {"names": list(names)})


async def ask(
    runner: InMemoryRunner, text: str = "go", *, user: str = "ada", session: str | None = None, **options: Any
) -> str:
    """Run an agent once, in a session that exists or a new one, and return its last words."""
    if session is None:
        session = (await runner.session_service.create_session(app_name="app", user_id=user)).id
    message, answer = Content(role="user", parts=[Part(text=text)]), ""
    async for event in runner.run_async(user_id=user, session_id=session, new_message=message, **options):
        if event.is_final_response() and event.content and event.content.parts:
            answer = event.content.parts[0].text or ""
    return answer


def runner_of(model: Any, *tools: Any, instruction: str = "Be brief.") -> InMemoryRunner:
    """A runner of one agent."""
    return InMemoryRunner(
        agent=LlmAgent(name="a", model=model, instruction=instruction, tools=list(tools)), app_name="app"
    )


async def test_instructions_are_fresh_for_each_request(runtime: SkillRuntime) -> None:
    """A body stands in the instructions from the request after its load until it is switched, braces and all."""
    script = Script(steps=[[load("sales")], [load("charts")]])
    assert await ask(runner_of(script, RuntimeToolset(runtime))) == "done"
    texts = script.texts()
    assert [("Sum the {column}." in t, "Draw bars." in t) for t in texts] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all("Be brief." in text and "<available_skills>" in text for text in texts)


async def test_tools_are_those_of_the_moment(runtime: SkillRuntime) -> None:
    """The agent's own tools stay; a skill added while the agent runs is in the schema of the next request."""

    async def weather(city: str) -> str:
        """Tell the weather."""
        await runtime.remove_skill("acme.charts")
        return f"rain in {city}"

    script = Script(steps=[[("weather", {"city": "Bonn"})]])
    assert await ask(runner_of(script, weather, RuntimeToolset(runtime))) == "done"
    declared = [
        {
            one.name: one.parameters_json_schema
            for tool in request.config.tools or []
            for one in tool.function_declarations
        }  # type: ignore[union-attr]
        for request in script.shown
    ]
    assert list(declared[0]) == ["weather", "skills_load", "skills_unload", "skills_read"]
    enums = [tools["skills_load"]["properties"]["names"]["items"]["enum"] for tools in declared]
    assert enums == [["charts", "sales"], ["sales"]]
    assert script.results() == [{"result": "rain in Bonn"}]


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("skills_load", {"names": ["nope"]}, "skill_not_found"),
        ("skills_load", {}, "invalid_argument"),
        ("skills_load", {"names": ["sales"], "self": 1, "tool_context": 2}, "invalid_argument"),
        ("skills_read", {"path": "notes.md"}, "no_active_skills"),
    ],
)
async def test_mistakes_are_results_the_model_can_act_on(
    runtime: SkillRuntime, name: str, given: dict[str, Any], code: str
) -> None:
    """Whatever the model gets wrong comes back as `error` with the runtime's text; the run goes on."""
    script = Script(steps=[[(name, given)], [load("sales")]])
    assert await ask(runner_of(script, RuntimeToolset(runtime))) == "done"
    bad, good = script.results()
    assert (json.loads(bad["error"])["error"]["code"], list(good)) == (code, ["result"])


async def test_each_session_of_adk_has_its_own(runtime: SkillRuntime) -> None:
    """What one run loads is there in the session's next run; another user, session or consumer does not see it."""
    script = Script(steps=[[load("sales")]])
    runner = runner_of(script, RuntimeToolset(runtime))
    for user, session in (("ada", "1"), ("bob", "1"), ("ada", "2")):
        await runner.session_service.create_session(app_name="app", user_id=user, session_id=session)
    for user, session in (("ada", "1"), ("bob", "1"), ("ada", "2"), ("ada", "1")):
        await ask(runner, user=user, session=session)
    assert ["Sum the {column}." in text for text in script.texts()] == [False, True, False, False, True]
    assert len(await runtime.list_sessions()) == 3
    other = runner_of(script, RuntimeToolset(runtime, consumer="someone.else"))
    await other.session_service.create_session(app_name="app", user_id="ada", session_id="1")
    await ask(other, session="1")
    assert "Sum the {column}." not in script.texts()[-1]


async def test_a_named_session_is_used(runtime: SkillRuntime) -> None:
    """With `session_id` the program opens and closes the session, which must exist."""
    await runtime.create_session("mine", initial=["sales"])
    script = Script()
    await ask(runner_of(script, RuntimeToolset(runtime, session_id="mine")))
    assert "Sum the {column}." in script.texts()[0]
    with pytest.raises(SessionError):
        await ask(runner_of(script, RuntimeToolset(runtime, session_id="nope")))


async def test_a_read_sent_with_its_load_finds_the_skill(runtime: SkillRuntime) -> None:
    """Calls of one reply run side by side here; one sent behind the load it needs waits for it."""
    script = Script(steps=[[load("sales"), ("skills_read", {"path": "notes.md"})]])
    assert await ask(runner_of(script, RuntimeToolset(runtime))) == "done"
    assert json.loads(script.results()[1]["result"])["text"] == "Notes on sales.\n"


async def test_no_skills_no_tools_no_text(tmp_path: Path) -> None:
    """Without skills an agent is as if the toolset were not there; outside of a run the tools can be listed."""
    (tmp_path / "none").mkdir()
    toolset = RuntimeToolset(SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path / "none")))
    script = Script()
    await ask(runner_of(script, toolset))
    assert ("skills" in script.texts()[0], script.shown[0].config.tools or []) == (False, [])
    assert await toolset.get_tools() == []


async def test_cancelling_a_run_cancels_its_tool_call(runtime: SkillRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call the agent waits for is cancelled with the run."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(Session, "call", slow)
    task = asyncio.create_task(ask(runner_of(Script(steps=[[load("sales")]]), RuntimeToolset(runtime))))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 60)


def on_wire(monkeypatch: pytest.MonkeyPatch, server: ModelServer) -> str:
    """Lead Google's client to the server, and return a model's name."""
    monkeypatch.setenv("GOOGLE_API_KEY", "none")
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.url)
    return "gemini-3-flash"


@pytest.mark.parametrize("mode", [StreamingMode.NONE, StreamingMode.SSE])
async def test_over_the_wire(runtime: SkillRuntime, monkeypatch: pytest.MonkeyPatch, mode: StreamingMode) -> None:
    """The real client sends the instructions of the moment and the tools, and gets every answer; whole and in pieces."""
    script = [together(call("skills_load", names=["nope"]), call("skills_load", names=["sales"])), say("Two words.")]
    with ModelServer(script) as server:
        runner = runner_of(on_wire(monkeypatch, server), RuntimeToolset(runtime))
        assert await ask(runner, run_config=RunConfig(streaming_mode=mode)) == "Two words."
    first, second = server.requests
    assert first.tools == ["skills_load", "skills_unload", "skills_read"]
    assert ("Sum the {column}." in first.instructions, "Sum the {column}." in second.instructions) == (False, True)
    assert "skill_not_found" in second.results[0]


async def test_conversations_at_once_do_not_mix(runtime: SkillRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """One runner serves many users at once: each sees the text of its own skill alone."""

    def reader(asked: Asked) -> ModelReply:
        mine = "sales" if "please sum" in asked.text else "charts"
        if not asked.results:
            return call("skills_load", names=[mine])
        return say(f"{mine}: {'Sum the {column}.' in asked.instructions} {'Draw bars.' in asked.instructions}")

    with ModelServer(reader) as server:
        runner = runner_of(on_wire(monkeypatch, server), RuntimeToolset(runtime))
        texts = ["please sum", "please draw"] * 3
        answers = await asyncio.gather(*(ask(runner, text, user=f"u{n}") for n, text in enumerate(texts)))
    assert answers == ["sales: True False", "charts: False True"] * 3
