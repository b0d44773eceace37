"""Each hook does what its docstring says; the answers of several plugins are combined so that order opens no hole."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import re
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from kdskills import hookspecs
from kdskills.app import BUILTIN, Host, Settings
from kdskills.app.plugins import HookAnswers, collect, plugin_manager
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.doors.cli.main import build_cli
from kdskills.errors import BadRequest, Diagnostic, NameTaken, PluginFailed, PluginInvalid, UnknownName
from kdskills.evals.files import Eval
from kdskills.evals.grading import CHECKS, Outcome, grade
from kdskills.execution import ExecutionOptions
from kdskills.hooks import Register, hookimpl
from kdskills.session.approval import AccessRequest, Denial
from kdskills.skills import SkillRoot
from kdskills.solver import ReactSolver, SolverSystem, TurnResult
from kdskills.solver.tools import SolverTool
from kdskills.testing.models import ScriptedModel, call, say
from kdskills.turn import build_skills_instruction_block

PRESS = Path(__file__).parents[3] / "bundles" / "press"


def host(*plugins: object) -> Host:
    """A Host with default settings, the shipped plugins and *plugins*."""
    return Host(Settings(), plugins=plugins, entry_points=False)


def answers(*plugins: object) -> HookAnswers:
    """Combined answers of the shipped plugins and *plugins*."""
    return HookAnswers(plugin_manager(*plugins, entry_points=False))


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

    class Engine(SubprocessExecutor):
        name = "mine"

    class Plugin:
        @hookimpl
        def kdskills_register_executors(self, register: Any) -> None:
            register("mine", lambda options: seen.append(options) or Engine(options))

    made = Host(Settings(sandbox_uid=4242), plugins=[Plugin()], entry_points=False)
    assert "mine" in {engine.name for engine in made.engines()}
    assert [options.sandbox_uid for options in seen] == [4242]
    assert made.engines() is made.engines()


def test_kdskills_register_models() -> None:
    """`prefix:rest` asks the factory registered under the prefix for `rest`."""
    model = ScriptedModel([])
    asked: list[str] = []

    class Plugin:
        @hookimpl
        def kdskills_register_models(self, register: Any) -> None:
            register("mine", lambda rest: asked.append(rest) or model)

    assert (host(Plugin()).wiring.model("mine:a:b"), asked) == (model, ["a:b"])


class Constant:
    """An embedder to which all texts are one."""

    def embed(self, texts: Any) -> list[list[float]]:
        """Return the same vector for each text."""
        return [[1.0] for _ in texts]


def test_kdskills_register_embedders() -> None:
    """`prefix:rest` of the setting asks the factory registered under the prefix for `rest`, at the first search, and no other."""
    asked: list[str] = []

    class Plugin:
        @hookimpl
        def kdskills_register_embedders(self, register: Any) -> None:
            register("mine", lambda rest: asked.append(rest) or Constant())

    words = host(Plugin())
    assert (words.run("skills.search", bundle=PRESS, query="zyzzyva").hits, asked) == ((), [])
    made = Host(Settings(embedder="mine:a:b"), plugins=[Plugin()], entry_points=False)
    assert asked == []
    answer = made.run("skills.search", bundle=PRESS, query="zyzzyva")
    assert (len(answer.hits) > 2, answer.diagnostics, asked) == (True, (), ["a:b"])


@pytest.mark.parametrize("factory", [lambda _: object(), lambda _: broken()], ids=["wrong", "raises"])
def test_an_embedder_that_cannot_be_used_leaves_words(factory: Any) -> None:
    """A search is answered by words, and the diagnostic names the plugin."""
    acme = plugin("kdskills_register_embedders", lambda register: register("mine", factory))
    made = Host(Settings(embedder="mine:x"), plugins=[acme], entry_points=False)
    answer = made.run("skills.search", bundle=PRESS, query="brief")
    (finding,) = answer.diagnostics
    assert (len(answer.hits) > 0, finding.code, "Acme" in finding.message) == (True, "embedder_failed", True)


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


def test_kdskills_register_checks() -> None:
    """A plugin's function is a check of evaluations on its own Host, with its parameters as arguments; shipped ones stay."""

    def signed(outcome: Outcome, key: str, least: int = 1) -> tuple[bool, str]:
        return outcome.result.text.count(key) >= least, f"key {key}"

    class Plugin:
        @hookimpl
        def kdskills_register_checks(self, register: Any) -> None:
            register("acme.signed", signed)

    checks = host(Plugin()).wiring.checks
    assert (set(checks) - set(CHECKS), set(CHECKS) - set(checks)) == ({"acme.signed"}, set())
    result = TurnResult(turn_id="t", session_id="s", status="final", stop_reason="answer", text="ab")
    rows = ({"acme.signed": "b"}, {"acme.signed": {"key": "b", "least": 2}}, {"acme.signed": {"kee": "b"}}, {"bad": {}})
    table = {**checks, "bad": lambda outcome: broken()}
    verdicts = asyncio.run(grade(Eval("e", "p", checks=rows), Outcome(result), checks=table))
    assert [(each.passed, each.error) for each in verdicts] == [
        *((True, ""), (False, ""), (False, "check_invalid")),
        (None, "plugin_failed"),
    ]
    assert "acme.signed" not in host().wiring.checks


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


QUERY = "write a brief, chart data and check an embargo"


def ranker(order: Any) -> object:
    """A plugin that answers the full ids of hits with what *order* makes of them."""
    return plugin("kdskills_rank_skills", lambda consumer, query, hits: order([hit.full_id for hit in hits]))


def located(made: Host, **arguments: Any) -> tuple[list[str], int, bool, list[str]]:
    """Full ids, total and `more` of a search of PRESS, and the codes of its diagnostics."""
    answer = made.run("skills.search", bundle=PRESS, query=QUERY, consumer="solver.react.decision", **arguments)
    return [hit.full_id for hit in answer.hits], answer.total, answer.more, [d.code for d in answer.diagnostics]


def test_kdskills_rank_skills() -> None:
    """A plugin is handed consumer, query and all hits, reorders and drops them, and pages are cut of its order."""
    usual, total, _, _ = located(host())
    assert total == len(usual) >= 3
    seen: list[Any] = []

    def order(consumer: str, query: str, hits: Any) -> list[str]:
        seen.append((consumer, query, len(hits)))
        return [hit.full_id for hit in hits][:0:-1]  # the worst first, and the best not at all

    made = host(plugin("kdskills_rank_skills", order))
    ranked = usual[:0:-1]
    assert located(made) == (ranked, total - 1, False, [])
    assert located(made, limit=1) == (ranked[:1], total - 1, True, [])
    assert located(made, limit=1, offset=1) == (ranked[1:2], total - 1, total > 3, [])
    assert seen == [("solver.react.decision", QUERY, total)] * 3


def test_the_plugin_registered_last_has_the_last_word() -> None:
    """Each plugin gets the order of the one before; None leaves it."""
    usual = located(host())[0]
    first, second = ranker(lambda ids: ids[:3]), ranker(lambda ids: ids[::-1])
    assert located(host(first, second, ranker(lambda ids: None)))[0] == usual[2::-1]
    assert located(host(second, first))[0] == usual[:-4:-1]


def test_a_ranking_plugin_adds_nothing() -> None:
    """Denied, unknown, repeated and endless ids are ignored and told; what may not be seen stays out of reach."""
    usual, total, _, _ = located(host())
    for order in (
        lambda ids: ["press.embargo", "no.such", "\ud800", *ids, ids[0]],
        lambda ids: itertools.chain(ids, itertools.repeat(ids[0])),
    ):
        assert located(host(ranker(order))) == (usual, total, False, ["plugin_failed"])


def test_a_ranking_plugin_drops_everything() -> None:
    """An empty answer leaves no hit, and no total tells of what was dropped."""
    assert located(host(ranker(lambda ids: []))) == ([], 0, False, [])


def _broken_generator(ids: list[str]) -> Iterator[str]:
    yield ids[-1]
    raise UnknownName("no name of ours", name="x", kind="y")


@pytest.mark.parametrize("wrong", ["text", b"text", {}, {"a.b"}, 5, [5], [None], _broken_generator])
def test_a_ranking_plugin_that_fails_changes_nothing(wrong: Any) -> None:
    """What raises, has no order or holds something else than texts is told; the other plugins still count."""
    usual, total, _, _ = located(host())
    failing = ranker(wrong if callable(wrong) else lambda ids: wrong)
    made = host(failing, ranker(lambda ids: ids[::-1]))
    assert located(made) == (usual[::-1], total, False, ["plugin_failed"])
    answer = made.run("skills.search", bundle=PRESS, query=QUERY)
    assert "Acme failed in kdskills_rank_skills" in answer.diagnostics[0].message


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


DOI_SKILL = "---\nname: fine\ndescription: d\n---\nCited here [[S:1]].\n"


@pytest.mark.parametrize("allowed", [True, False])
async def test_kdskills_resolve_source(tmp_path: Path, allowed: bool) -> None:
    """A source that only has a DOI is cited with what a plugin knows of it; nothing is asked where the setting is off."""
    threads: list[str] = []

    class Plugin:
        @hookimpl
        def kdskills_resolve_source(self, row: Any) -> Any:
            threads.append(threading.current_thread().name)
            return {"url": f"https://doi.org/{row['doi']}", "title": "A paper"}

    make_root(tmp_path / "b" / "skills", "fine")
    (tmp_path / "b" / "skills" / "fine" / "SKILL.md").write_text(DOI_SKILL)
    (tmp_path / "b" / "skills" / "fine" / "sources.yaml").write_text("- {sid: 1, doi: 10.1/x}\n")
    one = Host(Settings(resolve_sources=allowed), plugins=[Plugin()], entry_points=False)
    model = ScriptedModel([call("skills.load", names=["fine"]), say("So it is [[S:1]].")])
    async with SolverSystem(bundle=one.bundle(tmp_path / "b"), model=model, executor=None, wiring=one.wiring) as system:
        result = await ReactSolver(system).run("hello")
        with system.subsystem.activate("solver.react.decision"):
            block = build_skills_instruction_block(["fine"])
    titles = [(row["sid"], row["title"], row["url"]) for row in result.sources]
    assert titles == ([(1, "A paper", "https://doi.org/10.1/x")] if allowed else [])
    assert [row.title for row in block.pool] == (["A paper"] if allowed else [])
    assert threads == (["kdskills-sources"] if allowed else [])


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


# ---- plugins that fail ----


def plugin(hook: str, body: Any) -> object:
    """A plugin object of class `Acme` whose *hook* is *body*, with the hook's own arguments."""
    names = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    scope: dict[str, Any] = {"body": body}
    exec(f"def {hook}(self, {names}):\n    return body({names})", scope)
    return type("Acme", (), {hook: hookimpl(scope[hook])})()


def broken(*arguments: Any) -> Any:
    """A hook that raises."""
    raise RuntimeError("no such table: rules")


REGISTERING = sorted(
    name for name in vars(hookspecs) if name.startswith("kdskills_register_") and "commands" not in name
)


@pytest.mark.parametrize("hook", REGISTERING)
def test_a_plugin_that_raises_while_it_registers_is_named(hook: str) -> None:
    """The Host is not built, and says which plugin's hook raised what."""
    with pytest.raises(PluginFailed, match="RuntimeError: no such table: rules") as caught:
        host(plugin(hook, broken))
    assert (caught.value.who, caught.value.code, caught.value.details["hook"]) == ("operator", "plugin_failed", hook)
    assert caught.value.details["plugin"].endswith("Acme")


@pytest.mark.parametrize(
    ("hook", "name", "entry", "words"),
    [
        ("kdskills_register_executors", "mine", "no factory", "no function that makes one"),
        ("kdskills_register_executors", 5, SubprocessExecutor, "its name must be text"),
        ("kdskills_register_models", "mine", ScriptedModel([]), "no function that makes one"),
        ("kdskills_register_embedders", "mine", Constant(), "no function that makes one"),
        ("kdskills_register_stores", "mine", None, "no function that makes one"),
        ("kdskills_register_tools", "acme.x", "text", "a str is no SolverTool"),
        ("kdskills_register_tools", "acme.x", len, "tool_from_function"),
        ("kdskills_register_tools", "acme.x", SolverTool("acme.y", "d", NoArguments, _body), "own id is 'acme.y'"),
        ("kdskills_register_tools", "acme.x", SolverTool("acme.x", "", NoArguments, _body), "no description"),
        ("kdskills_register_tools", "acme.x", SolverTool("acme.x", "d", dict, _body), "no pydantic model"),  # type: ignore[arg-type]
        ("kdskills_register_tools", "acme.x", SolverTool("acme.x", "d", NoArguments, "no"), "must be functions"),  # type: ignore[arg-type]
        ("kdskills_register_interpreters", ".rb", "ruby {path}", "no list of words"),
        ("kdskills_register_interpreters", ".rb", ["ruby"], "{path}"),
        ("kdskills_register_checks", "contains", lambda outcome: (True, ""), "a shipped check has this name"),
        ("kdskills_register_checks", "acme.x", "text", "no function"),
        ("kdskills_register_checks", "acme.x", lambda outcome, key: (True, ""), "arguments that have a type each"),
        ("kdskills_register_checks", "acme.x", lambda: (True, ""), "it takes the outcome"),
        ("kdskills_register_operations", "acme.x", object(), "no Operation"),
    ],
)
def test_what_cannot_be_used_is_refused_where_it_is_registered(hook: str, name: Any, entry: Any, words: str) -> None:
    """A wrong type is the plugin's fault, told with its name when the Host is built, not when it is first needed."""
    with pytest.raises(PluginInvalid, match=re.escape(words)) as caught:
        host(plugin(hook, lambda register: register(name, entry)))
    assert caught.value.details["plugin"].endswith("Acme")


@pytest.mark.parametrize(
    ("hook", "use"),
    [
        ("kdskills_register_executors", lambda made: made.engines()),
        ("kdskills_register_models", lambda made: made.wiring.model("mine:x")),
        ("kdskills_register_stores", lambda made: made.session_store("mine:x")),
    ],
)
@pytest.mark.parametrize("factory", [lambda _: object(), broken], ids=["wrong", "raises"])
def test_what_a_factory_makes_is_held_to_its_protocol(hook: str, use: Any, factory: Any) -> None:
    """An engine, model or store that is none is refused with the plugin's name before anything is asked of it."""
    made = host(plugin(hook, lambda register: register("mine", factory)))
    with pytest.raises(PluginFailed, match="Acme") as caught:
        use(made)
    assert caught.value.details["hook"] == hook


def test_two_plugins_of_one_name_are_both_named() -> None:
    """Who takes a name, and who had it, is in the message."""
    twice = [plugin("kdskills_register_tools", lambda register: register("acme.x", TOOL)) for _ in range(2)]
    with pytest.raises(NameTaken, match=r"Acme and .*Acme#2"):
        host(*twice)


TOOL = SolverTool("acme.x", "d", NoArguments, _body)


@pytest.mark.parametrize(
    ("hook", "wrong"),
    [
        ("kdskills_skill_roots", ["not a root"]),
        ("kdskills_skill_roots", 5),
        ("kdskills_open_skill_root", "not a root"),
        ("kdskills_hide_skills", ["press.brief"]),
        ("kdskills_hide_skills", {"press.brief": 5}),
        ("kdskills_deny", True),
        ("kdskills_source_key", 5),
        ("kdskills_resolve_source", ["no", "row"]),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_hook_that_fails_is_named(hook: str, wrong: Any, raises: bool, caplog: Any) -> None:
    """Plugin, hook, what was expected and what came: in the error and, for the operator, in the log."""
    asked = answers(plugin(hook, broken if raises else lambda *_: wrong))
    arguments = {
        "kdskills_skill_roots": (None,),
        "kdskills_open_skill_root": ("x:y", PRESS),
        "kdskills_hide_skills": ("agent", ()),
        "kdskills_deny": (AccessRequest("load", "c", "s"),),
        "kdskills_source_key": ({},),
        "kdskills_resolve_source": ({},),
    }
    with pytest.raises(PluginFailed) as caught:
        getattr(asked, hook.removeprefix("kdskills_"))(*arguments[hook])
    details = caught.value.details
    assert details["plugin"].endswith("Acme")
    assert (details["hook"], caught.value.who) == (hook, "operator")
    assert details["expected"] == inspect.signature(getattr(hookspecs, hook)).return_annotation
    assert ("RuntimeError" if raises else type(wrong).__name__) in details["found"]
    assert caught.value.message in caplog.text


def test_a_filter_that_fails_grants_nothing() -> None:
    """No view is made while a plugin cannot say what it hides, whatever it raises."""

    def refuses(*arguments: Any) -> Any:
        raise UnknownName("mine", name="x", kind="y")

    made = host(plugin("kdskills_hide_skills", refuses))
    with pytest.raises(PluginFailed, match="kdskills_hide_skills"):
        made.subsystem(made.bundle(PRESS)).view("solver.react.decision")


def test_a_check_that_fails_is_an_error_of_the_skill(tmp_path: Path) -> None:
    """A skill that a plugin could not check is not loaded, and `check` says which plugin it was."""
    make_root(tmp_path / "b" / "skills", "fine")
    made = host(plugin("kdskills_check_skill", broken))
    found = [d for d in made.run("skills.check", path=tmp_path / "b").diagnostics if d.code == "plugin_failed"]
    assert {(d.severity, d.ref) for d in found} == {("error", "public.fine")}
    assert "Acme" in found[0].message
    assert list(made.subsystem(made.bundle(tmp_path / "b")).registry) == []


def test_listeners_are_all_told() -> None:
    """A listener that fails keeps no other from being told, and all that failed are named."""
    heard: list[Any] = []
    hooks = (broken, heard.append, broken)
    asked = answers(*(plugin("kdskills_turn_started", hook) for hook in hooks))
    with pytest.raises(PluginFailed) as caught:
        asked.turn_started("turn")
    assert heard == ["turn"]
    assert len(caught.value.details["plugins"]) == 2


def test_a_command_that_cannot_be_added_is_named() -> None:
    """The command line is not built with half of a plugin."""
    with pytest.raises(PluginFailed, match="kdskills_register_commands"):
        build_cli(host(plugin("kdskills_register_commands", broken)))


def test_a_wrapper_is_refused() -> None:
    """A hook around other hooks could take back a denial."""

    class Acme:
        @hookimpl(wrapper=True)
        def kdskills_deny(self, request: Any) -> Any:
            yield
            return None

    with pytest.raises(PluginInvalid, match="wrapper"):
        plugin_manager(Acme(), entry_points=False)


class Unmarked:
    """Would hide everything, were it marked."""

    def kdskills_hide_skills(self, agent: str, skills: Any) -> dict[str, str]:
        """Hide all."""
        return {skill.full_id: "mine" for skill in skills}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Unmarked(), "kdskills_hide_skills is not marked"),
        (Listener, "kdskills_turn_finished is a method, but the plugin is a class"),
        (object(), "has no hooks"),
        ("acme.plugin", "'acme.plugin' (str) has no hooks"),
    ],
    ids=["unmarked", "class", "object", "text"],
)
def test_a_plugin_that_would_not_be_called_is_refused(given: object, words: str) -> None:
    """What looks like a filter and is none is refused when it is registered, instead of letting everything pass."""
    with pytest.raises(PluginInvalid, match=re.escape(words)):
        host(given)


def test_a_class_of_static_hooks_is_a_plugin() -> None:
    """Functions of a class that need no object are called as they are."""

    class Static:
        @staticmethod
        @hookimpl
        def kdskills_source_key(source: Any) -> str:
            return "mine"

    assert answers(Static).source_key({}) == "mine"


def test_an_error_in_words_keeps_its_code_and_names_the_plugin() -> None:
    """What a hook says with an error of ours reaches the caller as it was said, with plugin and hook beside it."""

    def refuses(*arguments: Any) -> Any:
        raise BadRequest("acme:// needs a table", table="")

    with pytest.raises(BadRequest) as caught:
        answers(plugin("kdskills_open_skill_root", refuses)).open_skill_root("acme://", PRESS)
    assert caught.value.details.pop("plugin").endswith("Acme")
    assert caught.value.details == {"hook": "kdskills_open_skill_root", "table": ""}


def test_a_plugin_given_twice_is_refused() -> None:
    """The same object again is the operator's mistake, told in words."""
    one = Listener()
    with pytest.raises(PluginInvalid, match="Listener"):
        plugin_manager(one, one, entry_points=False)


def test_an_installed_plugin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an entry point's module raises, the plugin is named."""
    points = [metadata.EntryPoint("acme", "kdskills.testing.programs.boom", "kdskills")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "kdskills" else [])
    with pytest.raises(PluginInvalid, match="plugin acme cannot be imported: ValueError: boom"):
        plugin_manager()
