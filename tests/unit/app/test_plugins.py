"""Each hook does what its docstring says; the answers of several plugins are combined so that order opens no hole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from kdskills.app import BUILTIN, Host, Settings
from kdskills.app.plugins import Answers, collect, plugin_manager
from kdskills.doors.cli.main import build_cli
from kdskills.errors import Diagnostic, NameTaken, PluginInvalid, UnknownName
from kdskills.execution import ExecutionOptions
from kdskills.hooks import Register, hookimpl
from kdskills.session.wiring import AccessRequest, Denial
from kdskills.skills import SkillRoot
from kdskills.solver import ReactSolver, SolverSystem
from kdskills.solver.tools import SolverTool
from kdskills.testing.models import ScriptedModel, call, say

PRESS = Path(__file__).parents[3] / "bundles" / "press"


def host(*plugins: object) -> Host:
    """A Host with default settings, the shipped plugins and *plugins*."""
    return Host(Settings(), plugins=plugins, entry_points=False)


def answers(*plugins: object) -> Answers:
    """Combined answers of the shipped plugins and *plugins*."""
    return Answers(plugin_manager(*plugins, entry_points=False))


def test_register_refuses_a_taken_name() -> None:
    """The second plugin to claim a name is refused, and the first keeps it."""
    register: Register[int] = Register("thing")
    register("a", 1)
    with pytest.raises(NameTaken, match="'a'") as caught:
        register("a", 2)
    assert (register["a"], caught.value.code, caught.value.who) == (1, "name_taken", "operator")


def test_register_names_what_it_knows() -> None:
    """An unknown name is an error that lists the known ones, sorted."""
    register: Register[int] = Register("thing")
    register("b", 1)
    register("a", 2)
    with pytest.raises(UnknownName, match="known: a, b"):
        register["c"]
    assert (list(register), "a" in register, "c" in register) == (["a", "b"], True, False)


def test_shipped_plugins_are_all_loaded() -> None:
    """Every module of the tuple is registered under its dotted name."""
    names = {name for name, _ in plugin_manager(entry_points=False).list_name_plugin()}
    assert set(BUILTIN) <= names


def test_a_blocked_plugin_is_not_loaded() -> None:
    """A plugin the operator blocks registers nothing."""
    settings = Settings(plugins_blocked=("kdskills.builtin.executors.docker",))
    assert "docker" not in Host(settings, entry_points=False).registers.executors


def test_async_generator_hook_is_refused() -> None:
    """An async generator is refused like an async function."""

    class Plugin:
        @hookimpl
        async def kdskills_check_skill(self, skill: Any):
            """Never iterated."""
            yield skill

    with pytest.raises(PluginInvalid, match="async"):
        plugin_manager(Plugin(), entry_points=False)


def test_kdskills_register_executors() -> None:
    """A plugin's engine gets the operator's options and is one of the Host's engines."""
    seen: list[ExecutionOptions] = []

    class Engine:
        name = "mine"

    class Plugin:
        @hookimpl
        def kdskills_register_executors(self, register: Any) -> None:
            register("mine", lambda options: seen.append(options) or Engine())

    made = Host(Settings(sandbox_uid=4242), plugins=[Plugin()], entry_points=False)
    assert "mine" in {engine.name for engine in made.engines()}
    assert [options.sandbox_uid for options in seen] == [4242]
    assert made.engines() is made.engines()


def test_kdskills_register_models() -> None:
    """`prefix:rest` asks the factory registered under the prefix for `rest`."""
    model = ScriptedModel([])

    class Plugin:
        @hookimpl
        def kdskills_register_models(self, register: Any) -> None:
            register("mine", lambda rest: (model, rest))

    assert host(Plugin()).wiring.model("mine:a:b") == (model, "a:b")


class NoArguments(BaseModel):
    """Nothing."""


async def _body(arguments: BaseModel, context: Any) -> str:
    return "done"


def test_kdskills_register_tools() -> None:
    """A plugin's tool is offered by every solver of the Host."""

    class Plugin:
        @hookimpl
        def kdskills_register_tools(self, register: Any) -> None:
            register("acme.ping", SolverTool("acme.ping", "Answers.", NoArguments, _body))

    assert [tool.id for tool in host(Plugin()).wiring.tools] == ["acme.ping"]


def test_kdskills_register_interpreters() -> None:
    """A plugin's suffix joins the shipped table; a shipped one cannot be taken over."""

    class Ruby:
        @hookimpl
        def kdskills_register_interpreters(self, register: Any) -> None:
            register(".rb", ["ruby", "{path}"])

    class Thief:
        @hookimpl
        def kdskills_register_interpreters(self, register: Any) -> None:
            register(".py", ["evil", "{path}"])

    table = host(Ruby()).interpreters()
    assert (table[".rb"], table[".py"]) == (("ruby", "{path}"), ("python3", "{path}"))
    with pytest.raises(NameTaken):
        host(Thief()).interpreters()


def test_kdskills_register_commands() -> None:
    """A plugin's command is on the command line of its own Host only."""

    class Plugin:
        @hookimpl
        def kdskills_register_commands(self, cli: typer.Typer) -> None:
            @cli.command()
            def ping() -> None:
                """Answer."""
                typer.echo("pong")

    assert CliRunner().invoke(build_cli(host(Plugin())), ["ping"]).output == "pong\n"
    assert CliRunner().invoke(build_cli(host()), ["ping"]).exit_code == 2


def test_kdskills_prepare_templates() -> None:
    """A plugin's filter is in the environment prompts are rendered in, of its own Host only."""

    class Plugin:
        @hookimpl
        def kdskills_prepare_templates(self, env: Any) -> None:
            env.filters["shout"] = str.upper

    assert host(Plugin()).templates.from_string("{{ 'a' | shout }}").render() == "A"
    assert "shout" not in host().templates.filters


SKILL = "---\nname: {name}\ndescription: A skill of a plugin.\n---\nDo it.\n"


def make_root(folder: Path, *names: str) -> Path:
    """Write flat skills below *folder*."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "SKILL.md").write_text(SKILL.format(name=name))
    return folder


def test_kdskills_skill_roots(tmp_path: Path) -> None:
    """A plugin's root is used, below the bundle's own: the bundle wins an id both have."""
    root = make_root(tmp_path / "plugin", "extra", "shared")
    bundle = tmp_path / "bundle"
    make_root(bundle / "skills", "shared")

    class Plugin:
        @hookimpl
        def kdskills_skill_roots(self, descriptor: Any) -> list[SkillRoot]:
            return [SkillRoot(uri="plugin://p", path=root, label="p", kind="plugin")]

    made = host(Plugin())
    registry = made.subsystem(made.bundle(bundle)).registry
    assert {full_id: skill.layer for full_id, skill in registry.items()} == {
        "public.extra": "plugin",
        "public.shared": "bundle",
    }


def test_kdskills_open_skill_root(tmp_path: Path) -> None:
    """The first plugin that knows a URI's scheme opens the root; None of others does not count."""
    root = SkillRoot(uri="acme://x", path=tmp_path, label="x", kind="plugin")

    class Knows:
        @hookimpl
        def kdskills_open_skill_root(self, uri: str, base: Path) -> SkillRoot | None:
            return root if uri.startswith("acme:") else None

    class Ignorant:
        @hookimpl
        def kdskills_open_skill_root(self, uri: str, base: Path) -> None:
            return None

    asked = answers(Knows(), Ignorant())
    assert (asked.open_skill_root("acme://x", tmp_path), asked.open_skill_root("other://x", tmp_path)) == (root, None)


def test_kdskills_check_skill(tmp_path: Path) -> None:
    """Findings of all plugins are joined into `check`, and an error keeps the skill from loading."""

    def finder(code: str, severity: Any) -> object:
        class Plugin:
            @hookimpl
            def kdskills_check_skill(self, skill: Any) -> list[Diagnostic]:
                return [Diagnostic(code, severity, f"{code} in {skill.name}")] if skill.name == "odd" else []

        return Plugin()

    bundle = tmp_path / "b"
    make_root(bundle / "skills", "odd", "fine")
    made = host(finder("house_rule", "warning"), finder("house_ban", "error"))
    found = made.run("skills.check", path=bundle)
    assert {d.code for d in found.diagnostics if d.code.startswith("house")} == {"house_rule", "house_ban"}
    assert list(made.subsystem(made.bundle(bundle)).registry) == ["public.fine"]


def hider(*full_ids: str) -> object:
    """A plugin that hides some skills."""

    class Plugin:
        @hookimpl
        def kdskills_hide_skills(self, agent: str, skills: Any) -> dict[str, str]:
            return dict.fromkeys(full_ids, f"hidden from {agent}")

    return Plugin()


def test_kdskills_hide_skills() -> None:
    """The union of all answers is refused, in whatever order plugins came; nothing can be revealed."""
    first, second = hider("data.chart"), hider("data.profile", "press.embargo")
    found = []
    for plugins in ((first, second), (second, first)):
        made = host(*plugins)
        view = made.subsystem(made.bundle(PRESS)).view("solver.react.decision")
        found.append(
            {
                i: getattr(view.resolve(i), "code", "granted")
                for i in ("data.chart", "data.profile", "press.embargo", "press.brief")
            }
        )
    assert found[0] == found[1]
    assert found[0] == {
        "data.chart": "plugin_denied",
        "data.profile": "plugin_denied",
        "press.embargo": "denied",
        "press.brief": "granted",
    }


def test_kdskills_deny() -> None:
    """One Denial refuses, whatever the other plugins say."""

    def says(answer: Denial | None) -> object:
        class Plugin:
            @hookimpl
            def kdskills_deny(self, request: AccessRequest) -> Denial | None:
                return answer

        return Plugin()

    request = AccessRequest("load", "c", "s", skill="press.brief")
    denial = Denial("at night", "not now")
    for plugins in ((says(None), says(denial)), (says(denial), says(None))):
        assert answers(*plugins).deny(request) == denial
    assert answers(says(None)).deny(request) is None


def test_kdskills_source_key() -> None:
    """The first plugin's key counts; None leaves the usual one."""

    class Plugin:
        @hookimpl
        def kdskills_source_key(self, source: Any) -> str | None:
            return source.get("doi")

    assert (answers(Plugin()).source_key({"doi": "10.1/x"}), answers(Plugin()).source_key({})) == ("10.1/x", None)


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    @hookimpl
    def kdskills_turn_started(self, turn: Any) -> None:
        """Note the start."""
        self.heard.append(("started", turn.consumer))

    @hookimpl
    def kdskills_turn_finished(self, turn: Any, outcome: Any) -> None:
        """Note the end."""
        self.heard.append(("finished", outcome.status))


async def _turn(listener: Listener, model: ScriptedModel) -> None:
    made = host(listener)
    async with SolverSystem(bundle=made.bundle(PRESS), model=model, executor=None, wiring=made.wiring) as system:
        await ReactSolver(system).run("hello")


async def test_kdskills_turn_started() -> None:
    """A plugin is told before the first model call, with the consumer of the turn."""
    listener = Listener()
    await _turn(listener, ScriptedModel([say("hi")]))
    assert listener.heard[0] == ("started", "solver.react.decision")


async def test_kdskills_turn_finished() -> None:
    """A plugin is told the outcome once, also of a turn whose tool call failed."""
    listener = Listener()
    await _turn(listener, ScriptedModel([call("skills.load", names=["press.embargo"]), say("no")]))
    assert [word for word, _ in listener.heard] == ["started", "finished"]
    assert listener.heard[-1] == ("finished", "final")


def test_names_taken_by_two_plugins() -> None:
    """Two plugins with one model prefix stop the Host from being built."""

    class Plugin:
        @hookimpl
        def kdskills_register_models(self, register: Any) -> None:
            register("replay", lambda rest: None)

    with pytest.raises(NameTaken, match="replay"):
        collect(plugin_manager(Plugin(), entry_points=False))
