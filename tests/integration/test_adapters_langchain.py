"""Agents of LangChain itself work with skills: with a model of its own that is scripted, and over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from kdskills.builtin.adapters.langchain import SkillsMiddleware, skill_tools
from kdskills.errors import SessionError
from kdskills.models import ModelReply
from kdskills.session import SkillCatalog, SkillRuntime
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say, together


@pytest.fixture
def catalog(tmp_path: Path) -> SkillCatalog:
    """Two skills, each with a file."""
    for name, body in (("sales", "Sum the column."), ("charts", "Draw bars.")):
        folder = tmp_path / "acme" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n")
        (folder / "notes.md").write_text(f"Notes on {name}.\n")
    return SkillCatalog.from_directory(tmp_path)


@pytest.fixture
def runtime(catalog: SkillCatalog) -> SkillRuntime:
    """A runtime over them."""
    return SkillRuntime(catalog=catalog)


class Script(BaseChatModel):
    """LangChain's model that says what it is told to, a list of calls or the end, and keeps what it was shown."""

    steps: list[list[tuple[str, dict[str, Any]]]]
    shown: list[list[BaseMessage]] = []  # noqa: RUF012 - pydantic copies it
    tools: list[list[str]] = []  # noqa: RUF012

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Note the tools."""
        self.tools.append([tool.name for tool in tools])
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        self.shown.append(messages)
        step = len(self.shown) - 1
        calls = self.steps[step] if step < len(self.steps) else []
        made = [{"name": name, "args": given, "id": f"c{step}-{number}"} for number, (name, given) in enumerate(calls)]
        message = AIMessage("" if made else "done", tool_calls=made)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def texts(self) -> list[str]:
        """The top-level text of each call."""
        return [str(messages[0].text) if isinstance(messages[0], SystemMessage) else "" for messages in self.shown]

    def results(self) -> list[ToolMessage]:
        """Every tool result the model was shown."""
        return [message for message in self.shown[-1] if isinstance(message, ToolMessage)]


def load(*names: str) -> tuple[str, dict[str, Any]]:
    """A call that loads."""
    return ("skills_load", {"names": list(names)})


async def ask(model: Any, runtime: SkillRuntime, text: str = "go", **options: Any) -> str:
    """Run an agent once."""
    agent: Any = create_agent(model, middleware=[SkillsMiddleware(runtime)], **options)
    return str((await agent.ainvoke({"messages": [HumanMessage(text)]}))["messages"][-1].text)


async def test_instructions_are_fresh_before_each_model_call(runtime: SkillRuntime) -> None:
    """A body stands in the system message from the call after its load until it is switched, never in the messages."""
    script = Script(steps=[[load("sales")], [load("charts")]])
    assert await ask(script, runtime, system_prompt="Be brief.") == "done"
    assert [("Sum the column." in t, "Draw bars." in t) for t in script.texts()] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all(text.startswith("Be brief.\n\n") and "<available_skills>" in text for text in script.texts())
    assert "Draw bars." not in repr(script.shown[-1][1:])
    assert await runtime.list_sessions() == []


async def test_own_tools_and_system_blocks_stay(runtime: SkillRuntime) -> None:
    """The agent's tools are offered and answered beside the skills'; a system message of blocks keeps them."""

    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    script = Script(steps=[[("weather", {"city": "Bonn"}), load("sales")]])
    own = SystemMessage(content=[{"type": "text", "text": "Be brief."}])
    assert await ask(script, runtime, tools=[weather], system_prompt=own) == "done"
    assert script.tools[0] == ["weather", "skills_load", "skills_unload", "skills_read"]
    assert script.results()[0].content == "rain in Bonn"
    assert "Be brief." in script.texts()[1]
    assert "Sum the column." in script.texts()[1]


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("skills_load", {"names": ["nope"]}, "skill_not_found"),
        ("skills_load", {}, "invalid_argument"),
        ("skills_load", {"names": "sales"}, "invalid_argument"),
        ("skills_load", {"names": ["sales"], "config": {}, "run_manager": 1, "callbacks": []}, "invalid_argument"),
        ("skills_load", {"names": ["sales"], "self": 1, "name": 2, "input": 3}, "invalid_argument"),
        ("skills_read", {"path": "notes.md"}, "no_active_skills"),
        ("skills_load", {"names": ["sales"], "runtime": "x", "state": {}}, "invalid_argument"),
    ],
)
async def test_mistakes_are_results_the_model_can_act_on(
    runtime: SkillRuntime, name: str, given: dict[str, Any], code: str
) -> None:
    """Whatever the model gets wrong comes back as a message of status error with the runtime's text; the run goes on."""
    script = Script(steps=[[(name, given)], [load("sales")]])
    assert await ask(script, runtime) == "done"
    bad, good = script.results()
    assert (bad.status, json.loads(str(bad.content))["error"]["code"], good.status) == ("error", code, "success")


async def test_a_read_sent_with_its_load_finds_the_skill(runtime: SkillRuntime) -> None:
    """Calls of one reply run side by side here; one sent behind the load it needs waits for it."""
    script = Script(steps=[[load("sales"), ("skills_read", {"path": "notes.md"})]])
    assert await ask(script, runtime) == "done"
    assert json.loads(str(script.results()[1].content))["text"] == "Notes on sales.\n"


async def test_an_unknown_tool_is_told(runtime: SkillRuntime) -> None:
    """A tool nobody offered is answered by the framework, not taken for one of ours."""
    script = Script(steps=[[("skills_delete", {})], [("skills_run_script", {"path": "x"})]])
    assert await ask(script, runtime) == "done"
    assert [message.status for message in script.results()] == ["error", "error"]


async def test_threads_keep_their_own_session(runtime: SkillRuntime) -> None:
    """With a checkpointer what one run of a thread loads is there in its next, and no other thread sees it."""
    script = Script(steps=[[load("sales")], [], [], []])
    agent: Any = create_agent(script, middleware=[SkillsMiddleware(runtime)], checkpointer=InMemorySaver())
    for thread in ("one", "two", "one"):
        state = await agent.ainvoke({"messages": [HumanMessage("go")]}, {"configurable": {"thread_id": thread}})
        assert "skills_session" not in state
    assert ["Sum the column." in text for text in script.texts()] == [False, True, False, True]
    assert len(await runtime.list_sessions()) == 2


async def test_no_caller_chooses_the_session_of_another(runtime: SkillRuntime) -> None:
    """A session id in the input of a run is dropped: whose session it is, only the graph says."""
    session = await runtime.create_session("theirs", initial=["sales"])
    script = Script(steps=[])
    agent: Any = create_agent(script, middleware=[SkillsMiddleware(runtime)])
    await agent.ainvoke({"messages": [HumanMessage("go")], "skills_session": session.id})
    assert "Sum the column." not in script.texts()[0]


async def test_a_thread_whose_session_ended_begins_a_new_one(runtime: SkillRuntime) -> None:
    """A session that expired between two runs is opened anew; one the program named must exist."""
    agent: Any = create_agent(Script(steps=[]), middleware=[SkillsMiddleware(runtime)], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "t"}}
    await agent.ainvoke({"messages": [HumanMessage("go")]}, thread)
    (head,) = await runtime.list_sessions()
    await runtime.close_session(head.session_id)
    assert (await agent.ainvoke({"messages": [HumanMessage("go")]}, thread))["messages"][-1].text == "done"
    fixed: Any = create_agent(Script(steps=[]), middleware=[SkillsMiddleware(runtime, session_id="nope")])
    with pytest.raises(SessionError):
        await fixed.ainvoke({"messages": [HumanMessage("go")]})


async def test_a_named_session_is_used_and_left_open(runtime: SkillRuntime) -> None:
    """With `session_id` the program opens and closes the session."""
    await runtime.create_session("mine", initial=["sales"])
    script = Script(steps=[])
    agent: Any = create_agent(script, middleware=[SkillsMiddleware(runtime, session_id="mine")])
    await agent.ainvoke({"messages": [HumanMessage("go")]})
    assert ["Sum the column." in text for text in script.texts()] == [True]
    assert [head.session_id for head in await runtime.list_sessions()] == ["mine"]


async def test_no_skills_no_tools_no_text(tmp_path: Path) -> None:
    """Without skills an agent is as if the middleware were not there."""
    (tmp_path / "none").mkdir()
    script = Script(steps=[])
    assert await ask(script, SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path / "none"))) == "done"
    assert (script.texts(), script.tools) == ([""], [])


async def test_tools_for_a_graph_of_ones_own(runtime: SkillRuntime) -> None:
    """`skill_tools` are the session's tools of the moment, with the provider-safe names and the runtime's schemas."""
    session = await runtime.create_session()
    tools = {tool.name: tool for tool in skill_tools(session)}
    assert {name: tool.args_schema for name, tool in tools.items()} == {
        spec.name: spec.input_schema for spec in session.tool_specs()
    }
    answer = await tools["skills_load"].ainvoke(
        {"type": "tool_call", "id": "c", "name": "skills_load", "args": {"names": ["sales"]}}
    )
    assert (answer.status, [one.name for one in await session.active()]) == ("success", ["sales"])


async def test_cancelling_a_run_cancels_its_tool_call(catalog: SkillCatalog) -> None:
    """The call the agent waits for is cancelled with the run."""
    began, ended = asyncio.Event(), asyncio.Event()

    class Slow(SkillRuntime):
        async def call(self, *args: Any, **options: Any) -> Any:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    run = asyncio.create_task(ask(Script(steps=[[load("sales")]]), Slow(catalog=catalog)))
    await began.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended.is_set()


def chat_model(url: str, *, streaming: bool) -> ChatOpenAI:
    """LangChain's own client of the wire."""
    return ChatOpenAI(model="m", api_key="none", base_url=f"{url}/v1", max_retries=0, streaming=streaming)  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [False, True])
async def test_over_the_wire(runtime: SkillRuntime, streaming: bool) -> None:
    """The real client sends the instructions of the moment and the tools, and gets every answer; whole and in pieces."""
    script = [together(call("skills_load", names=["nope"]), call("skills_load", names=["sales"])), say("Two words.")]
    with ModelServer(script) as server:
        assert await ask(chat_model(server.url, streaming=streaming), runtime) == "Two words."
    first, second = server.requests
    assert first.tools == ["skills_load", "skills_unload", "skills_read"]
    assert ("Sum the column." in first.instructions, "Sum the column." in second.instructions) == (False, True)
    assert "skill_not_found" in second.results[0]


async def test_conversations_at_once_do_not_mix(runtime: SkillRuntime) -> None:
    """One agent serves many threads at once: each sees the text of its own skill alone."""

    def reader(asked: Asked) -> ModelReply:
        mine = "sales" if "please sum" in asked.text else "charts"
        if not asked.results:
            return call("skills_load", names=[mine])
        return say(f"{mine}: {'Sum the column.' in asked.instructions} {'Draw bars.' in asked.instructions}")

    with ModelServer(reader) as server:
        model = chat_model(server.url, streaming=False)
        agent: Any = create_agent(model, middleware=[SkillsMiddleware(runtime)])
        runs: list[Callable[[], Any]] = [
            lambda text=text: agent.ainvoke({"messages": [HumanMessage(text)]})
            for text in ("please sum", "please draw") * 3
        ]
        states = await asyncio.gather(*(run() for run in runs))
    assert [state["messages"][-1].text for state in states] == ["sales: True False", "charts: False True"] * 3
