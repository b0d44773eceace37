"""Whom a turn is for: what tools, policy plugins, approvals and spans know of them, and that nothing else is written."""

import asyncio
import logging

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kdskills.builtin.models.record import RecordingModel
from kdskills.builtin.models.replay import ReplayModel
from kdskills.builtin.stores.sql import SqlStore
from kdskills.errors import BadRequest
from kdskills.models.cassette import read_cassette
from kdskills.session import Denial, User, allow
from kdskills.skills import SkillRoot
from kdskills.solver import PlainWiring, ReactSolver, ToolContext
from kdskills.testing.models import ScriptedModel, call, say, together
from kdskills.turn import SkillsSubsystem

ADA = User("ada", roles=["role-of-ada"], claims={"team": "claim-of-ada"})


class Database:
    """What an application hands to its tools."""

    def __repr__(self):
        return "dependency-of-ada"


class Asked(PlainWiring):
    """Keeps what policy plugins are asked."""

    def __init__(self):
        super().__init__()
        self.requests = []

    def deny(self, request):
        self.requests.append(request)
        return Denial("not Bob") if request.user is not None and request.user.id == "bob" else None


async def test_tools_know_the_user_and_get_the_same_object(build):
    """A tool reads id, roles and claims, and `deps` is the very object of the caller, in threads too."""
    seen = []

    async def lookup(context: ToolContext) -> str:
        """Look up."""
        seen.append((context.user, context.deps))
        return "ok"

    def count(context: ToolContext) -> str:
        """Count."""
        seen.append((context.user, context.deps))
        return "ok"

    database = Database()
    replies = [together(call("tools_lookup"), call("tools_count")), say("done")]
    async with build(replies, tools=[lookup, count]) as system:
        await ReactSolver(system).run("x", user=ADA, deps=database)
    assert [user for user, _ in seen] == [ADA, ADA]
    assert all(deps is database for _, deps in seen)
    assert ADA.roles == frozenset({"role-of-ada"})
    assert ADA.claims == {"team": "claim-of-ada"}


async def test_two_turns_at_once_have_a_user_each(build):
    """Tools of turns that run at the same time read the user and the object of their own turn."""
    seen, both = [], asyncio.Barrier(2)

    async def lookup(context: ToolContext) -> str:
        """Look up."""
        await both.wait()
        seen.append((context.user.id, context.deps))
        return "ok"

    def reply(request):
        return say("done") if request.messages[-1].role == "tool" else call("tools_lookup")

    async with build(model=ScriptedModel([reply] * 4), tools=[lookup]) as system:
        solver = ReactSolver(system)
        await asyncio.gather(solver.run("x", user="ada", deps=1), solver.run("y", user="bob", deps=2))
    assert sorted(seen) == [("ada", 1), ("bob", 2)]


async def test_policy_plugins_are_asked_for_a_user(build):
    """Loads, reads, runs and tool calls are asked about with the user and `deps`; a denial for one user holds for them."""
    wiring, database = Asked(), Database()
    replies = [
        call("skills_load", names=["sales"]),
        together(
            call("skills_read", path="references/notes.md"),
            call("skills_run_script", path="scripts/sum.py"),
            call("exec_python", code="1"),
            call("react_read", refs=["file:x"]),
        ),
        say("done"),
    ]
    async with build([*replies, *replies], wiring=wiring) as system:
        solver = ReactSolver(system)
        result = await solver.run("x", user=ADA, deps=database)
        assert {(request.user, request.deps) for request in wiring.requests} == {(ADA, database)}
        assert {request.kind for request in wiring.requests} == {"load", "read", "run", "tool"}
        assert [use.id for use in result.skills_used] == ["acme.sales"]
        refused = await solver.run("x", user="bob")
    assert refused.skills_used == ()


async def test_approvals_are_asked_with_the_id_alone(build):
    """Who approves a script or a program reads the user's id; an answer for one user is none for another."""
    asked = []

    async def approve(request):
        asked.append(request)
        return allow("always")

    script = [call("skills_load", names=["sales"]), call("skills_run_script", path="scripts/sum.py"), say("done")]
    async with build([*script, *script, *script, call("exec_python", code="1"), say("x")], approve=approve) as system:
        solver = ReactSolver(system)
        for user in (ADA, ADA, "bob", ADA):
            await solver.run("x", user=user)
    assert [(request.path, request.user) for request in asked] == [
        ("scripts/sum.py", "ada"),
        ("scripts/sum.py", "bob"),
        (None, "ada"),
    ]


async def test_nothing_but_the_id_is_written(build, tmp_path, monkeypatch, caplog):
    """No event, transcript, recording, store, log line or span holds a role, a claim or a dependency."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    caplog.set_level(logging.DEBUG)

    def fail(context: ToolContext) -> str:
        """Fail."""
        raise RuntimeError(f"{context.user} {context!r}")

    replies = [call("skills_load", names=["sales"]), call("tools_fail"), say("done")]
    model = RecordingModel(ScriptedModel(replies), tmp_path / "demo.yaml")
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    events = []
    async with build(model=model, tools=[fail], store=store, sinks=[events.append]) as system:
        result = await ReactSolver(system).run("x", session_id="c1", user=ADA, deps=Database())
    await store.aclose()
    spans = exporter.get_finished_spans()
    provider.shutdown()
    written = [
        repr(ADA),
        result.to_json(),
        events,
        caplog.text,
        [(s.name, dict(s.attributes), s.events) for s in spans],
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "bundle" not in path.parts]
    assert {"demo.yaml", "store.db"} <= {path.name for path in files}
    text = "\n".join([*map(str, written), *(path.read_bytes().decode("utf-8", "replace") for path in files)])
    assert not [word for word in ("role-of-ada", "claim-of-ada", "dependency-of-ada") if word in text]
    named = {span.name.partition(" ")[0] for span in spans if span.attributes.get("user.id") == "ada"}
    assert named == {"invoke_agent", "chat", "execute_tool"}


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: "", "/user"),
        (lambda: "a\nb", "/user"),
        (lambda: "a" * 201, "/user"),
        (lambda: 7, "/user"),
        (lambda: {"id": "ada"}, "/user"),
        (lambda: User(None), "/user"),
        (lambda: User("ada", roles="admin"), "/user/roles"),
        (lambda: User("ada", roles=["admin", ""]), "/user/roles"),
        (lambda: User("ada", roles=[7]), "/user/roles"),
        (lambda: User("ada", claims=["x"]), "/user/claims"),
    ],
)
async def test_a_user_that_cannot_be_used_is_refused(build, tmp_path, make, path):
    """Before anything is begun, with the part that is wrong; one text is no collection of roles."""
    async with build() as system:
        with pytest.raises(BadRequest) as refused:
            await ReactSolver(system).run("x", user=make())
    assert refused.value.details["errors"][0]["path"] == path
    assert not list((tmp_path / "turns").glob("*"))


def test_a_user_stays_as_they_are():
    """What an application changes afterwards in its own lists and mappings changes no user."""
    roles, claims = ["a"], {"b": 1}
    user = User("ada", roles, claims)
    roles.append("admin")
    claims["b"] = 2
    assert (user.roles, dict(user.claims)) == (frozenset({"a"}), {"b": 1})
    with pytest.raises(TypeError):
        user.claims["b"] = 3


def skill(folder, name, body, description="Keeps notes.", **files):
    """Write a skill of a user and return its root."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: {description}\n---\n{body}\n")
    for path, text in files.items():
        (folder / name / path.replace("__", "/")).parent.mkdir(exist_ok=True)
        (folder / name / path.replace("__", "/")).write_text(text)
    return SkillRoot("own://", folder, folder.name, "user")


def texts_of(model):
    """Return everything a model was sent."""
    return "\n".join(
        request.instructions + "".join(message.text for message in request.messages) for request in model.requests
    )


async def test_an_overlay_holds_in_prompts_search_reads_scripts_and_sources(build, tmp_path, executor):
    """The user's skill is listed, found, loaded, read and run by its full id, and its source is cited in the answer."""
    (root_path := tmp_path / "ada").mkdir()
    sources = "- {sid: 1, title: Ada's diary, url: 'https://example.org/ada'}\n"
    files = {"sources.yaml": sources, "scripts__count.py": "print(1)", "references__more.md": "More of Ada."}
    root = skill(root_path, "notes", "Ada's rule [[S:1]].", **files)
    model = ScriptedModel(
        [
            call("skills_load", names=["user.notes", "sales"]),
            together(
                call("skills_read", skill="user.notes", path="references/more.md"),
                call("skills_run_script", skill="user.notes", path="scripts/count.py"),
                call("react_read", refs=["skill:user.notes"]),
            ),
            say("As noted [[S:1]]."),
        ]
    )
    async with build(model=model) as system:
        overlay = system.subsystem.overlay([root])
        result = await ReactSolver(system).run("x", overlay=overlay, user="ada")
        hits = overlay.view("solver.react.decision").search("keeps notes").hits
        assert "user.notes" not in system.subsystem.registry
    assert [use.id for use in result.skills_used] == ["user.notes", "acme.sales"]
    assert result.sources[result.cited[0] - 1]["title"] == "Ada's diary"
    assert hits[0].full_id == "user.notes"
    assert "<name>\nuser.notes\n</name>" in model.requests[0].instructions
    assert "Ada's rule [[S:1]]." in model.requests[1].instructions
    assert "More of Ada." in texts_of(model)
    assert [mount.id for mount in executor.requests[0].skills] == ["user.notes"]


async def test_generated_code_sees_the_same_skills(build, tmp_path, executor):
    """What travels with a program has the user's skill, its folder and rules, and no name of a role."""
    root = skill(tmp_path / "ada", "notes", "Ada's rule.")
    replies = [call("skills_load", names=["user.notes"]), call("exec_python", code="1"), say("done")]
    async with build(replies) as system:
        overlay = system.subsystem.overlay([root], {"enabled": ["user.*"], "disabled": ["acme.brief"]})
        await ReactSolver(system).run("x", overlay=overlay, user=ADA)
        granted = overlay.view("solver.codegen", tools=system.tool_ids)
    request = executor.requests[0]
    travelling = request.globals["SKILLS_DESCRIPTOR"]
    assert [row["id"] for row in travelling["skills"]] == sorted(granted.skills) == ["acme.sales", "user.notes"]
    assert {mount.id: mount.root for mount in request.skills}["user.notes"] == tmp_path / "ada" / "notes"
    assert "role-of-ada" not in str(request.globals)


async def test_rules_of_groups_hold_in_turns(build, bundle_path):
    """A role gives and takes skills for every agent of the turn; nobody else is changed, not even at the same moment."""
    (bundle_path / "skills_descriptor.py").write_text(
        'AGENTS_CONFIG = {"*": {"disabled": ["acme.secret"]}, "@guests": {"enabled": ["acme.brief"]}}\n'
    )

    def reply(request):
        return say("a") if request.messages[-1].role == "tool" else call("skills_load", names=["sales"])

    async with build(model=ScriptedModel([reply] * 4)) as system:
        solver = ReactSolver(system)
        guest, staff = await asyncio.gather(
            solver.run("x", user=User("eve", roles=["guests"])), solver.run("y", user=User("ada", roles=["staff"]))
        )
    assert guest.skills_used == ()
    assert [use.id for use in staff.skills_used] == ["acme.sales"]


async def test_two_overlays_at_once_do_not_leak(build, tmp_path):
    """Turns of two users run step by step at the same time; neither reads a word of the other's skill."""
    both = asyncio.Barrier(2)

    async def meet() -> str:
        """Meet."""
        await both.wait()
        return "met"

    def model_of(name):
        return [
            call("skills_load", names=["user.notes"]),
            call("tools_meet"),
            call("skills_read", path="SKILL.md"),
            say(name),
        ]

    scripts = {name: iter(model_of(name)) for name in ("ada", "bob")}
    seen = {"ada": "", "bob": ""}

    def reply(request):
        name = next(message.text for message in request.messages if message.role == "user")
        seen[name] += request.instructions + "".join(message.text for message in request.messages)
        return next(scripts[name])

    async with build(model=ScriptedModel([reply] * 8), tools=[meet]) as system:
        solver = ReactSolver(system)
        runs = [
            solver.run(
                name,
                user=name,
                overlay=system.subsystem.overlay([skill(tmp_path / name, "notes", f"Secret of {name}.")]),
            )
            for name in ("ada", "bob")
        ]
        results = await asyncio.gather(*runs)
    assert [result.text for result in results] == ["ada", "bob"]
    for name, other in (("ada", "bob"), ("bob", "ada")):
        assert f"Secret of {name}." in seen[name]
        assert f"Secret of {other}." not in seen[name]


async def test_a_conversation_goes_on_with_the_users_skill_and_without_it(build, tmp_path):
    """A loaded skill of the user stays loaded in their next turn; in a turn without the overlay it is gone, and told."""
    root = skill(tmp_path / "ada", "notes", "Ada's rule.")
    model = ScriptedModel([call("skills_load", names=["user.notes"]), say("a"), say("b"), say("c")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        for overlay in (system.subsystem.overlay([root]), system.subsystem.overlay([root]), None):
            result = await solver.run("x", session_id="c1", user="ada", overlay=overlay)
        kept = await system.conversations.get("c1")
    assert kept.head.user == "ada"
    assert [("Ada's rule." in request.instructions) for request in model.requests] == [False, True, True, False]
    assert result.skills_used == ()


@pytest.mark.parametrize("history", ["session", "none", ()])
async def test_nobody_enters_the_session_of_somebody_else(build, tmp_path, history):
    """Whatever is read of a conversation: what another user has loaded in its session is theirs alone."""
    replies = [call("skills_load", names=["user.notes"]), say("a")]
    async with build(replies) as system:
        solver = ReactSolver(system)
        overlays = {
            name: system.subsystem.overlay([skill(tmp_path / name, "notes", f"Secret of {name}.")])
            for name in ("ada", "bob")
        }
        await solver.run("x", session_id="c1", user="ada", overlay=overlays["ada"])
        for other in ("bob", None):
            with pytest.raises(BadRequest) as refused:
                await solver.run("y", session_id="c1", user=other, overlay=overlays["bob"], history=history)
            assert refused.value.code == "conversation_foreign"


async def test_a_session_without_a_conversation_gives_no_text_of_another_overlay(build, tmp_path):
    """A skill of the same id that another overlay has is not shown the text that was loaded before."""
    model = ScriptedModel([call("skills_load", names=["user.notes"]), say("a"), say("b")])
    async with build(model=model) as system:
        solver = ReactSolver(system)
        for name in ("ada", "bob"):
            overlay = system.subsystem.overlay([skill(tmp_path / name, "notes", f"Secret of {name}.")])
            await solver.run("x", session_id="s1", history="none", overlay=overlay)
    assert "Secret of ada." in model.requests[1].instructions
    assert "Secret of" not in model.requests[2].instructions


async def test_a_broken_overlay_is_told_and_the_turn_goes_on(build, tmp_path):
    """A root that raises and a skill that shadows cost themselves; the result says so, without the root's own words."""

    def fails():
        raise SystemError("password of the database")

    roots = [
        SkillRoot("x://", tmp_path, "db", "user", fill=fails),
        SkillRoot("y://", skill(tmp_path / "eve", "sales", "Evil.").path, "eve", "user", namespace="acme"),
    ]
    model = ScriptedModel([call("skills_load", names=["sales"]), say("a")])
    async with build(model=model) as system:
        result = await ReactSolver(system).run("x", overlay=system.subsystem.overlay(roots))
    assert {"overlay_unreadable", "overlay_shadows"} <= {finding.code for finding in result.diagnostics}
    assert "password" not in str(result.to_json())
    assert "Sum the column." in model.requests[1].instructions
    assert "Evil." not in texts_of(model)


async def test_an_overlay_of_another_system_is_refused(build, bundle_path, tmp_path):
    """It would bring other rules, so that nothing of this bundle's denials would hold."""
    async with build() as system:
        other = SkillsSubsystem(bundle_root=bundle_path, roots=(), index_dir=None)
        for overlay in (other.overlay(), other, "x"):
            with pytest.raises(BadRequest, match=r"system\.subsystem\.overlay"):
                await ReactSolver(system).run("x", overlay=overlay)
    assert not list((tmp_path / "turns").glob("*"))


async def test_what_a_user_brings_approves_nothing(build, tmp_path):
    """`allowed-tools` of a user's skill spares nobody a question, unless the descriptor names its namespace."""
    asked = []

    async def approve(request):
        asked.append(request.argv[-1])
        return allow()

    folder = skill(tmp_path / "ada", "notes", "x").path / "notes" / "SKILL.md"
    folder.write_text("---\nname: notes\ndescription: x\nallowed-tools: Bash(ls:*)\n---\nx\n")
    replies = [call("skills_load", names=["user.notes"]), call("exec_shell", command="ls"), say("done")]
    async with build(replies, approve=approve) as system:
        overlay = system.subsystem.overlay([SkillRoot("x://", tmp_path / "ada", "ada", "user")])
        await ReactSolver(system).run("x", overlay=overlay)
    assert asked == ["ls"]


async def test_a_recorded_turn_with_an_overlay_is_replayed(build, tmp_path):
    """With the same overlay a recording gives the same answer and skills; without it the recording does not fit."""
    root = skill(tmp_path / "ada", "notes", "Ada's rule.")
    file = tmp_path / "demo.yaml"
    replies = [call("skills_load", names=["user.notes"]), say("done")]
    async with build(model=RecordingModel(ScriptedModel(replies), file)) as system:
        first = await ReactSolver(system).run("x", overlay=system.subsystem.overlay([root]))
    async with build(model=ReplayModel(read_cassette(file))) as system:
        again = await ReactSolver(system).run("x", overlay=system.subsystem.overlay([root]))
    assert (again.text, again.skills_used) == (first.text, first.skills_used)
