"""Conversation sessions at the doors: one caller's session is nobody else's."""

import asyncio

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES, Identity
from kdskills.app.operations import Context
from kdskills.errors import ExecRefused, ToolCallRefused

DESCRIPTOR = """
CUSTOM_SKILLS_ROOT = "skills"
AGENTS_CONFIG = {"writer": {"enabled": ["lab.*"]}, "auditor": {"disabled": ["lab.*"]}}
"""


@pytest.fixture
def bundle(tmp_path):
    """A bundle with one skill that one agent may use and another may not."""
    folder = tmp_path / "bundle/skills/lab/notes"
    (folder / "references").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: notes\ndescription: Takes notes.\n---\nWrite it down.\n")
    (folder / "references/form.md").write_text("the form\n")
    (tmp_path / "bundle/skills_descriptor.py").write_text(DESCRIPTOR)
    return tmp_path / "bundle"


@pytest.fixture
def host(bundle):
    """A Host over the bundle."""
    return Host(Settings(bundle=bundle), entry_points=False)


def caller(**facts):
    """Return a context of a caller elsewhere."""
    return Context(identity=Identity(**({"agent": "writer", "scopes": SCOPES, "door": "http"} | facts)))


def rewrite(path, text):
    """Write a file anew."""
    path.write_text(text)


async def load(host, context, name="notes", **more):
    """Load a skill in the caller's session."""
    return await host.invoke("skills.load", {"names": [name], **more}, context)


async def test_loading_returns_the_instructions_and_opens_what_is_read(host):
    """A load gives the text of the skill; its files can be read afterwards, in the same session only."""
    found = await load(host, caller())
    assert [(text.name, text.body.strip()) for text in found.instructions] == [("notes", "Write it down.")]
    read = await host.invoke("skills.read", {"path": "references/form.md"}, caller())
    assert read.result["text"] == "the form\n"
    with pytest.raises(ToolCallRefused) as refused:
        await host.invoke("skills.read", {"path": "references/form.md", "session_id": "other"}, caller())
    assert refused.value.code != "path_not_found"


@pytest.mark.parametrize("difference", [{"agent": "a_b"}, {"alias": "c"}, {"tenant": "t"}], ids=str)
async def test_sessions_of_other_callers_are_other_sessions(host, difference):
    """Nothing loaded by one caller is loaded for another, whatever parts of the identity differ."""
    await load(host, caller())
    with pytest.raises(ToolCallRefused):
        await host.invoke("skills.read", {"path": "references/form.md"}, caller(**difference))


async def test_agent_and_alias_never_run_together(host):
    """Agent `a_b` with alias `c` and agent `a` with alias `b_c` have sessions of their own."""
    await load(host, caller(agent="a_b", alias="c"))
    with pytest.raises(ToolCallRefused):
        await host.invoke("skills.read", {"path": "references/form.md"}, caller(agent="a", alias="b_c"))


async def test_policy_decides_for_the_callers_agent(host):
    """An agent whose rules disable a skill reads of it what it would read of one that does not exist."""
    codes = []
    for name in ("notes", "nothing-like-it"):
        with pytest.raises(ToolCallRefused) as refused:
            await load(host, caller(agent="auditor"), name)
        codes.append((refused.value.code, refused.value.message.replace(name, "X")))
    assert codes[0] == codes[1]


async def test_unloading_ends_what_may_be_read(host):
    """After an unload the files are closed again; unknown names are told and change nothing."""
    await load(host, caller())
    found = await host.invoke("skills.unload", {"names": ["notes", "ghost"]}, caller())
    assert (found.result["active_skills"], found.result["ignored"]) == ([], ["ghost"])
    with pytest.raises(ToolCallRefused):
        await host.invoke("skills.read", {"path": "references/form.md"}, caller())


@pytest.mark.parametrize("session_id", ["", "a/b", "../x", "x" * 129, "a b", "é", "a\n"], ids=repr)
async def test_only_plain_session_names_are_taken(host, session_id):
    """Anything else is an invalid argument, which the model mends; it names the field, and opens nothing."""
    with pytest.raises(ToolCallRefused, match="/session_id") as refused:
        await load(host, caller(), session_id=session_id)
    assert refused.value.details["errors"][0]["path"] == "/session_id"


async def test_many_first_uses_at_once_open_one_session(host):
    """Four callers of one session begin together; every load succeeds and the session is one."""
    await asyncio.gather(*(load(host, caller(), mode="add") for _ in range(4)))
    found = await host.invoke("skills.unload", {"names": ["ghost"]}, caller())
    assert len(found.result["active_skills"]) == 1


async def test_an_edited_skill_is_seen_by_the_next_load(host, bundle):
    """The project's skills are looked at again at each call."""
    await load(host, caller())
    rewrite(bundle / "skills/lab/notes/SKILL.md", "---\nname: notes\ndescription: Takes notes.\n---\nWrite it twice.\n")
    found = await load(host, caller())
    assert [text.body.strip() for text in found.instructions] == ["Write it twice."]


async def test_sessions_in_a_database_outlive_the_host(bundle, tmp_path):
    """With a session store of its own, a new Host goes on where the old one stopped."""
    pytest.importorskip("sqlalchemy")
    settings = Settings(bundle=bundle, session_store=f"sqlite:///{tmp_path}/sessions.db")
    await load(Host(settings, entry_points=False), caller())
    read = await Host(settings, entry_points=False).invoke("skills.read", {"path": "references/form.md"}, caller())
    assert read.result["text"] == "the form\n"


@pytest.mark.needs("bubblewrap")
async def test_scripts_come_back_with_the_engine(bundle, monkeypatch):
    """Without an engine a script is refused with what cures it, and runs in the same session once it is cured."""
    (bundle / "skills/lab/notes/scripts").mkdir()
    (bundle / "skills/lab/notes/scripts/say.py").write_text("print('said')\n")
    host = Host(Settings(bundle=bundle, executor="subprocess"), entry_points=False)
    await load(host, caller())
    script = {"path": "scripts/say.py", "skill": "notes"}
    for _ in range(2):
        with pytest.raises(ExecRefused) as refused:
            await host.invoke("skills.run_script", script, caller())
        assert (refused.value.code, "allow_unisolated" in str(refused.value.to_json())) == ("policy_denied", True)
    monkeypatch.setattr(host.wiring, "_settings", host.settings.model_copy(update={"executor": "bubblewrap"}))
    for _ in range(2):
        found = await host.invoke("skills.run_script", script, caller())
        assert (found.result["exit_code"], found.result["stdout"]) == (0, "said\n")
