"""`allowed-tools` in turns: approval beforehand, or a restriction that holds."""

from pathlib import Path

import pytest

from kdskills.bundle import load_bundle
from kdskills.errors import DescriptorError
from kdskills.execution import EnvironmentMount, ExecRequest
from kdskills.session.approval import allow, deny
from kdskills.skills.tool_names import allowed_tools
from kdskills.solver.allowed import allows_call, is_at_home
from kdskills.testing.models import call, say
from kdskills.turn import SkillsSubsystem

TOOLS = "allowed-tools: Bash(git:*) Bash(ls) Bash(python3 $SKILL_DIR/scripts/*) Read(notes/**) Write"
SUM = "python3 $SKILL_DIR/scripts/sum.py"


@pytest.fixture
def bundle(bundle_path):
    """The bundle, its skill `sales` with `allowed-tools`; `brief` has none."""
    file = bundle_path / "skills/acme/sales/SKILL.md"
    file.write_text(file.read_text().replace("---\nSum", f"{TOOLS}\n---\nSum"))
    return bundle_path


def set_mode(bundle, mode):
    """Write what `allowed-tools` does in the bundle's namespace."""
    file = bundle / "skills_descriptor.py"
    file.write_text(f"ALLOWED_TOOLS = {{'acme': {mode!r}}}\n" + file.read_text())


def shell(command):
    """Return the reply that runs *command*."""
    return call("exec_shell", command=command)


async def turn(solve, bundle, *replies, approve=None, loaded="sales", **options):
    """Run *replies* with a skill loaded; return errors of the calls, the argv a person was asked about, and the events."""
    asked, events = [], []

    async def ask(request):
        asked.append(request.argv[-1])
        return allow() if approve else deny("no")

    options |= {} if approve is None else {"approve": ask}
    result = await solve([call("skills_load", names=[loaded]), *replies, say("done")], sinks=[events.append], **options)
    return [made.error for step in result.steps[1:] for made in step.calls], asked, events


async def test_nobody_is_asked_about_what_an_active_skill_allows(solve, bundle):
    """Commands beyond it are, and it is told who approved."""
    errors, asked, events = await turn(solve, bundle, shell("git log; ls"), shell("git log; rm x"), approve=False)
    assert (errors, asked) == ([None, "approval_denied"], ["git log; rm x"])
    decided = [(event.skill, event.allowed, event.reason) for event in events if event.type == "approval.decided"]
    assert decided == [("acme.sales", True, "allowed-tools"), (None, False, "no")]


async def test_without_the_skill_each_command_is_asked_about(solve, bundle):
    """Another skill's `allowed-tools` does not count, and generated code is asked about whatever a skill allows."""
    _, asked, _ = await turn(solve, bundle, shell("git log"), approve=True, loaded="brief")
    assert asked == ["git log"]
    _, asked, _ = await turn(solve, bundle, call("exec_python", code="print(1)"), approve=True)
    assert asked == ["<code>"]


async def test_approval_is_for_the_skills_own_folder(solve, bundle):
    """The same words with another skill's folder are asked about."""
    calls = [shell(SUM), shell("git log"), call("exec_shell", command=SUM, skill="sales")]
    load = call("skills_load", names=["brief"], mode="add")
    errors, asked, _ = await turn(solve, bundle, load, *calls, approve=False)
    assert (errors, asked) == ([None, "approval_denied", None, None], [SUM])
    set_mode(bundle, "restrict")
    errors, _, _ = await turn(solve, bundle, load, *calls)
    assert errors == [None, "tool_denied", None, None]


@pytest.mark.parametrize(("environment", "home", "own"), [(True, "b", False), (True, "a", True), (False, "b", True)])
def test_packages_of_another_skill_are_not_approved(environment, home, own):
    """They may bring programs of any name."""
    mount = EnvironmentMount("x", Path("/nowhere")) if environment else None
    request = ExecRequest(argv=("bash", "-c", "git log"), env={"SKILL_DIR": f"/skills/{home}"}, environment=mount)
    assert is_at_home(request, "a") is own


@pytest.mark.parametrize(("grants", "questions"), [({"acme.brief": ("a.example",)}, 1), ({"acme": ("a.example",)}, 0)])
async def test_approval_is_for_the_skills_own_network(solve, bundle, grants, questions):
    """A command that gets what another skill is granted is asked about."""
    load = call("skills_load", names=["brief"], mode="add")
    _, asked, _ = await turn(solve, bundle, load, shell("git log"), approve=True, network=grants)
    assert len(asked) == questions


@pytest.mark.parametrize("mode", ["ask", "restrict"])
async def test_by_setting_it_approves_nothing(solve, bundle, mode):
    """Each command is asked about."""
    set_mode(bundle, mode)
    _, asked, _ = await turn(solve, bundle, shell("git log"), approve=True)
    assert asked == ["git log"]


async def test_a_restriction_holds_for_every_tool(solve, bundle, executor):
    """Other commands and tools are refused as a policy refuses them, before anybody is asked; skills may still be read."""
    set_mode(bundle, "restrict")
    errors, asked, _ = await turn(
        solve,
        bundle,
        shell("git log | ls"),
        shell("git log | sh"),
        call("exec_python", code="print(1)"),
        call("skills_run_script", path="scripts/sum.py"),
        call("react_write", path="a.txt", text="1"),
        call("files_edit", path="a.txt", old="1", new="2"),
        call("files_read", path="a.txt"),
        call("files_grep", pattern="x"),
        call("react_read", refs=["turn:a.txt"]),
        call("files_read", path="$SKILL_DIR/scripts/sum.py"),
        call("skills_read", path="references/notes.md"),
        call("react_read", refs=["sk:brief"]),
        approve=True,
    )
    denied = "tool_denied"
    assert errors == [None, denied, denied, denied, None, denied, denied, denied, denied, None, None, None]
    assert (asked, len(executor.requests)) == (["git log | ls"], 1)


async def test_a_restriction_holds_while_others_are_active_and_ends_with_its_skill(solve, bundle):
    """A second skill lifts nothing; unloading the one that restricts does."""
    set_mode(bundle, "restrict")
    errors, _, _ = await turn(
        solve, bundle,
        call("skills_load", names=["brief"], mode="add"), shell("rm x"),
        call("skills_unload", names=["sales"]), shell("rm x"),
    )  # fmt: skip
    assert errors == [None, "tool_denied", None, None]


@pytest.mark.parametrize(
    ("rule", "tool", "arguments", "allowed"),
    [
        ("Read(notes/**)", "files.read", {"path": "notes/a/b.md"}, True),
        ("Read(./notes/**)", "files.read", {"path": "/work/notes/a"}, True),
        ("Read(notes/**)", "files.read", {"path": "notes/../secret"}, False),
        ("Read(notes/**)", "files.read", {"path": "/etc/passwd"}, False),
        ("Read(*.md)", "files.read", {"path": "deep/a.md"}, True),
        ("Read(~/.ssh/**)", "files.read", {"path": ".ssh/id"}, False),
        ("Read(/**)", "files.read", {"path": "a"}, False),
        ("Read(notes/**)", "react.read", {"refs": ["turn:notes/a", "src:1"]}, True),
        ("Read(notes/**)", "react.read", {"refs": ["turn:notes/a", "turn:b"]}, False),
        ("Read(notes/**)", "files.read", {"path": "${SKILL_DIR}/f"}, True),
        ("Read(notes/**)", "files.read", {"path": "$SKILL_DIRx/f"}, False),
        ("Read(notes/**)", "react.read", {"refs": ["turn:$SKILL_DIR/f"]}, False),
        ("Glob(notes/**)", "files.glob", {"pattern": "$SKILL_DIR/*"}, True),
        ("Glob(notes/**)", "files.glob", {"pattern": "$SKILL_DIRx/*"}, False),
        ("Glob(notes/**)", "files.glob", {"pattern": "*.md", "path": "notes"}, True),
        ("Glob(notes/**)", "files.glob", {"pattern": "/work/*", "path": "notes"}, False),
        ("Glob(notes/**)", "files.glob", {"pattern": "*"}, False),
        ("Write(out/**)", "react.write", {"path": "out/a"}, True),
        ("Write(out/**)", "react.write", {"path": "/skills/x"}, False),
        ("Read", "react.write", {"path": "a"}, False),
        ("Bash", "exec.python", {"code": "x"}, True),
        ("Bash(git:*)", "skills.run_script", {"path": "scripts/x"}, False),
        ("exec.python", "exec.python", {"code": "x"}, True),
        ("Read", "tools.lookup", {}, False),
        ("tools.lookup", "tools.lookup", {}, True),
        ("Bash(git:*)", "exec.shell", {"command": "git log"}, True),
    ],
)
def test_what_a_rule_allows(rule, tool, arguments, allowed):
    """Paths by the turn's folder, commands by their words, other tools by id."""
    assert allows_call(allowed_tools([rule]), tool, arguments) is allowed


def test_required_tools_may_have_published_names(bundle):
    """A skill that needs `Bash` is there where `exec.shell` is."""
    (bundle / "skills/acme/sales/tools.yaml").write_text("- {id: Bash, required: true}\n- {id: Read, required: true}\n")
    subsystem = SkillsSubsystem(load_bundle(bundle).descriptor, bundle_root=bundle, roots=(), index_dir=None)
    assert "acme.sales" in subsystem.view("x", tools=("exec.shell", "files.read")).skills
    assert "acme.sales" in subsystem.view("x", tools=("Bash", "Read")).skills
    assert "acme.sales" not in subsystem.view("x", tools=("exec.python", "files.read")).skills


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("approve", "nobody is asked about commands it allows"),
        ("ask", "it does nothing"),
        ("restrict", "no other tool"),
    ],
)
def test_an_explanation_tells_which_of_the_two_it_is(bundle, mode, words):
    """`kdskills why` says what `allowed-tools` does here."""
    set_mode(bundle, mode)
    subsystem = SkillsSubsystem(load_bundle(bundle).descriptor, bundle_root=bundle, roots=(), index_dir=None)
    (note,) = [note for note in subsystem.view("x").explain("acme.sales").notes if "allowed-tools" in note]
    assert f"({mode}): " in note
    assert words in note


@pytest.mark.parametrize("value", ["approve", {"acme": "yes"}, {"acme.*": "ask"}, {"acme": None}, {3: "ask"}, ["acme"]])
def test_a_mistyped_mode_is_an_error(value):
    """A typo must not lose a restriction."""
    from kdskills.bundle.descriptor import SkillsDescriptor

    with pytest.raises(DescriptorError) as caught:
        SkillsDescriptor.from_json({"allowed_tools": value})
    assert caught.value.code == "descriptor_type"


def test_modes_travel_with_a_descriptor():
    """As JSON and back; the others have the mode of `*`."""
    from kdskills.bundle.descriptor import SkillsDescriptor

    descriptor = SkillsDescriptor.from_json({"allowed_tools": {"acme": "restrict", "*": "ask"}})
    again = SkillsDescriptor.from_json(descriptor.to_json())
    assert [again.allowed_tools_mode(name) for name in ("acme", "other")] == ["restrict", "ask"]
    assert SkillsDescriptor.from_json({}).allowed_tools_mode("acme") == "approve"
