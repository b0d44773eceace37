"""What the pages for MCP clients tell people to write works: with the SDK's client, and with the real Codex and a fake model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from kdskills.remote.labmodel import FakeResponses, call, say, tool_outputs, visible_tools

SERVED = "http://127.0.0.1:8765"
"""Where the pages say that the service is."""


def block(repo: Path, page: str, language: str, word: str, *, absent: bool = False) -> str:
    """Return the fenced block of a page that has a word in it, or has it not."""
    text = (repo / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return next(
        m[1]
        for m in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if (word in m[1]) != absent
    )


async def test_claude_over_http(service: Any, repo: Path) -> None:
    """The entry of the page, its variable filled in, is served as its token may; another token is refused."""
    entry = json.loads(block(repo, "use-from-claude.md", "json", '"http"'))["mcpServers"]["kdskills"]
    url = entry["url"].replace(SERVED, service.url)
    header = entry["headers"]["Authorization"]
    token = service.token(agent="desk.editor", scopes=("skills:read", "work:run", "work:read"))
    async with (
        httpx2.AsyncClient(
            headers={"Authorization": header.replace("${KDSKILLS_TOKEN}", token)}, trust_env=False
        ) as web,
        Client(streamable_http_client(url, http_client=web), cache=None) as client,
    ):
        loaded = await client.call_tool("skills_load", {"names": ["profile"], "session_id": "s1"})
        assert "# Profile a table" in loaded.content[0].text  # type: ignore[union-attr]
        read = await client.call_tool("skills_read", {"path": "scripts/profile.py", "session_id": "s1"})
        assert not read.is_error
        assert "press.embargo" in [prompt.name for prompt in (await client.list_prompts()).prompts]
    async with httpx2.AsyncClient(headers={"Authorization": header}, trust_env=False) as web:
        with pytest.raises((MCPError, ExceptionGroup)):
            async with Client(streamable_http_client(url, http_client=web), cache=None):
                pass


def brain(over_http: bool) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """Return a model that loads a skill, reads a file of it, and answers."""
    session = {"session_id": "s1"} if over_http else {}
    calls = [("skills_load", {"names": ["profile"]}), ("skills_read", {"path": "scripts/profile.py"})]

    def think(request: dict[str, Any]) -> list[dict[str, Any]]:
        done = len(tool_outputs(request))
        if done == len(calls):
            return [say("The table has no gaps.")]
        name, arguments = calls[done]
        return [call(name, {**arguments, **session}, namespace="mcp__kdskills")]

    return think


@dataclass(frozen=True)
class Codex:
    """The real program in a home of its own, with the configuration it was given."""

    program: Path
    home: Path

    def configure(self, text: str) -> None:
        """Write its file."""
        (self.home / "config.toml").write_text(text, encoding="utf-8")

    def run(self, *words: str, **variables: str) -> str:
        """Run it, and return what it prints."""
        path = f"{self.program.parent}{os.pathsep}{os.environ['PATH']}"  # a node of ours lies beside the launcher
        env = {"PATH": path, "HOME": str(self.home), "CODEX_HOME": str(self.home), **variables}
        run = subprocess.run(
            [self.program, *words],
            cwd=self.home,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def ask(self, *, over_http: bool, **variables: str) -> tuple[list[str], list[str]]:
        """Ask it something, and return the tools of ours that its model saw first, and the outcomes of its calls."""
        with FakeResponses(brain(over_http)) as model:
            words = ["exec", "--skip-git-repo-check", *model.config_args, "Is my table complete?"]
            assert "The table has no gaps." in self.run(*words, **variables)
        prefix = "mcp__kdskills."
        tools = [name.removeprefix(prefix) for name in visible_tools(model.requests[0]) if name.startswith(prefix)]
        return tools, list(tool_outputs(model.requests[-1]).values())


@pytest.fixture
def codex(codex_program: Path) -> Iterator[Codex]:
    """Codex in an empty home."""
    with tempfile.TemporaryDirectory(prefix="kdskills-codex-home-") as home:
        yield Codex(codex_program, Path(home))


@pytest.fixture
def printed(repo: Path, tmp_path: Path) -> str:
    """The table that is printed for Codex, with a state folder of the test's own."""
    program = Path(sys.executable).with_name("kdskills")
    env = {**os.environ, "KDSKILLS_BUNDLE": str(repo / "bundles/press")}
    words = [program, "mcp", "--agent", "desk.editor", "config", "codex"]
    table = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    return f'{table}env.KDSKILLS_STATE_DIR = "{tmp_path}/state"\n'


@pytest.mark.needs("codex")
def test_codex_starts_the_printed_server(codex: Codex, repo: Path, printed: str) -> None:
    """Codex reads and shows the printed table; with the page's further lines its model loads a skill and reads a file."""
    codex.configure(printed + block(repo, "use-from-codex.md", "toml", "[mcp_servers", absent=True))
    entry = tomllib.loads(printed)["mcp_servers"]["kdskills"]
    (row,) = json.loads(codex.run("mcp", "list", "--json"))
    shown = json.loads(codex.run("mcp", "get", "kdskills", "--json"))
    assert (row["name"], shown["enabled"]) == ("kdskills", True)
    assert {name: shown["transport"][name] for name in ("type", *entry)} == {"type": "stdio", **entry}
    tools, outcomes = codex.ask(over_http=False)
    assert {"skills_load", "skills_read", "skills_run_script", "skills_search"} <= set(tools)
    assert ["# Profile a table" in outcomes[0], "Usage: profile.py" in outcomes[1]] == [True, True], outcomes


@pytest.mark.needs("codex")
def test_codex_asks_before_it_changes_something(codex: Codex, printed: str) -> None:
    """Without the line that approves, `codex exec` refuses what is not marked as reading only, and lets the rest pass."""
    codex.configure(f"{printed}required = true\nstartup_timeout_sec = 60\n")
    _, (loading, reading) = codex.ask(over_http=False)
    assert "approval" in loading
    assert "no_active_skills" in reading


@pytest.mark.needs("codex")
def test_codex_over_http(codex: Codex, repo: Path, service: Any) -> None:
    """The page's table leads Codex to the service with its token; its tools are what the scopes open."""
    codex.configure(block(repo, "use-from-codex.md", "toml", "bearer_token_env_var").replace(SERVED, service.url))
    token = service.token(agent="desk.editor", scopes=("skills:read", "work:run"))
    tools, outcomes = codex.ask(over_http=True, KDSKILLS_TOKEN=token)
    assert "skills_load" in tools
    assert "tokens_list" not in tools
    assert ["# Profile a table" in outcomes[0], "Usage: profile.py" in outcomes[1]] == [True, True], outcomes
