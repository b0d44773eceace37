"""The adapter is thin, keeps nothing, and asks the runtime for everything."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelRetry, ToolFailed

from kdskills.builtin.adapters import pydantic_ai as adapter
from kdskills.builtin.adapters.pydantic_ai import SkillsCapability, SkillsToolset
from kdskills.errors import BadRequest, MissingExtra, SessionError
from kdskills.session import SkillCatalog, SkillRuntime

CTX: Any = SimpleNamespace(max_retries=2)


@pytest.fixture
def runtime(tmp_path: Path) -> SkillRuntime:
    """One skill with a file."""
    folder = tmp_path / "acme" / "sales"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: sales\ndescription: Reads sales.\n---\nSum the column.\n")
    (folder / "notes.md").write_text("Mind the totals.\n")
    return SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path))


async def call(toolset: Any, name: str, **arguments: Any) -> Any:
    """Call a tool as the framework does."""
    return await toolset.call_tool(name, arguments, CTX, (await toolset.get_tools(CTX))[name])


@pytest.mark.parametrize("path", sorted(Path(adapter.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_an_adapter_is_thin(path: Path) -> None:
    """At most 150 lines, and of the runtime only sessions, specs, instructions and calls."""
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    used = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    forbidden = {"load", "unload", "read", "run_script", "active", "refresh", "resolve", "view", "store", "config"}
    assert used & forbidden == set()


async def test_a_session_for_each_run(runtime: SkillRuntime) -> None:
    """Runs share nothing; a run's session is closed at its end, after an error too."""
    toolset: Any = SkillsToolset(runtime)
    async with await toolset.for_run(CTX) as one, await toolset.for_run(CTX) as two:
        await call(one, "skills_load", names=["sales"])
        assert len(await runtime.list_sessions()) == 2
        assert "Sum the column." in (await one.get_instructions(CTX) or "")
        assert "Sum the column." not in (await two.get_instructions(CTX) or "")
    assert await runtime.list_sessions() == []
    with pytest.raises(RuntimeError):
        async with await toolset.for_run(CTX):
            raise RuntimeError
    assert await runtime.list_sessions() == []


async def test_a_named_session_is_used_and_left_open(runtime: SkillRuntime) -> None:
    """With `session_id` what one run loads is there in the next."""
    await runtime.create_session("chat")
    toolset: Any = SkillsToolset(runtime, session_id="chat")
    async with await toolset.for_run(CTX) as run:
        await call(run, "skills_load", names=["sales"])
    async with await toolset.for_run(CTX) as run:
        assert "Sum the column." in (await run.get_instructions(CTX) or "")
    assert [head.session_id for head in await runtime.list_sessions()] == ["chat"]


async def test_a_session_that_does_not_exist_fails_the_run(runtime: SkillRuntime) -> None:
    """A wrong id is the caller's mistake: no session is made up for it."""
    toolset: Any = SkillsToolset(runtime, session_id="nope")
    with pytest.raises(SessionError):
        async with await toolset.for_run(CTX):
            pass
    assert await runtime.list_sessions() == []


async def test_outside_a_run_nothing_is_answered(runtime: SkillRuntime) -> None:
    """An agent may enter the toolset it was built with; that opens no session, and calls are refused."""
    toolset: Any = SkillsToolset(runtime)
    async with toolset:
        with pytest.raises(BadRequest):
            await toolset.get_tools(CTX)
        with pytest.raises(BadRequest):
            await toolset.get_instructions(CTX)
    assert await runtime.list_sessions() == []


async def test_tools_are_the_runtimes_specs(runtime: SkillRuntime) -> None:
    """Names, texts and schemas are passed on; what changes the session runs alone; retries are the agent's."""
    async with await SkillsToolset[Any](runtime).for_run(CTX) as run:
        tools = await run.get_tools(CTX)
    shown = [(t.tool_def.name, t.tool_def.description, t.tool_def.parameters_json_schema) for t in tools.values()]
    assert shown == [(spec.name, spec.description, dict(spec.input_schema)) for spec in runtime.tool_specs()]
    assert {name: tool.tool_def.sequential for name, tool in tools.items()} == {
        "skills_load": True,
        "skills_unload": True,
        "skills_read": False,
    }
    assert {tool.max_retries for tool in tools.values()} == {2}


async def test_no_skills_no_tools_no_text(tmp_path: Path) -> None:
    """Without skills an agent is as if the toolset were not there."""
    runtime = SkillRuntime(catalog=SkillCatalog.from_directory(tmp_path))
    async with await SkillsToolset[Any](runtime).for_run(CTX) as run:
        assert (await run.get_tools(CTX), await run.get_instructions(CTX)) == ({}, None)


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("skills_load", {"names": ["nope"]}, "skill_not_found"),
        ("skills_load", {}, "invalid_argument"),
        ("skills_read", {"path": "notes.md"}, "no_active_skills"),
    ],
)
async def test_the_models_mistakes_are_retries(
    runtime: SkillRuntime, name: str, arguments: dict[str, Any], code: str
) -> None:
    """What the model can mend is a `ModelRetry` with the runtime's own text."""
    async with await SkillsToolset[Any](runtime).for_run(CTX) as run:
        with pytest.raises(ModelRetry) as refused:
            await call(run, name, **arguments)
    assert code in refused.value.message


async def test_others_mistakes_are_failures(runtime: SkillRuntime, tmp_path: Path) -> None:
    """What an author must mend is a failed result, which costs no retry."""
    async with await SkillsToolset[Any](runtime).for_run(CTX) as run:
        (tmp_path / "acme/sales/SKILL.md").write_text("no frontmatter")
        with pytest.raises(ToolFailed) as failed:
            await call(run, "skills_load", names=["sales"])
    assert "skill_unreadable" in failed.value.message


def test_the_capability_brings_the_toolset(runtime: SkillRuntime) -> None:
    """The capability hands its arguments on and adds nothing, and its toolset goes by its id."""
    made: Any = SkillsCapability(runtime, session_id="chat", id="skills").get_toolset()
    assert (type(made), made.id) == (SkillsToolset, "skills")
    assert (made._runtime, made._consumer, made._session_id) == (runtime, None, "chat")


def test_without_the_framework_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing pydantic-ai is the extra's own error."""
    monkeypatch.setitem(sys.modules, "pydantic_ai.capabilities", None)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    with pytest.raises(MissingExtra, match="models"):
        __import__(adapter.__name__)
