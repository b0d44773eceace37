"""A root over a server: what is listed, what is fetched, and what is never believed."""

from __future__ import annotations

import asyncio
import json

import pytest

from kdskills.builtin.roots.mcp.wire import ServerFailed
from kdskills.errors import FileRefused, ToolCallRefused
from kdskills.session import SkillRuntime, allow, deny
from kdskills.skills.roots import InvalidSkill, far_content


def codes(far, full_id):
    found = far.subsystem.refresh() and far.subsystem._current_state().snapshot.invalid.get(full_id)
    return [finding.code for finding in found.diagnostics] if isinstance(found, InvalidSkill) else None


def test_listing_fetches_no_file(far, server):
    """The catalog is made of entries: name, description and label, by full id, without one file read."""
    server.put("skill://a/tidy", guide=b"x")
    root = far(server)
    view = root.subsystem.view()
    assert view.names == {"mcp-acme.tidy": "mcp-acme.tidy"}
    skill = view.skills["mcp-acme.tidy"]
    assert (skill.description, skill.folder, skill.location) == (
        "About tidy", None, "skill://mcp-acme/tidy/SKILL.md",
    )  # fmt: skip
    assert "mcp-acme.tidy" in view.catalog("gallery").text
    assert skill.tree_digest().startswith("sha256:")
    assert server.reads == []


def test_the_server_is_asked_once_a_minute(far, server):
    """Looking again soon asks nobody, and an unchanged listing keeps the same skills."""
    server.put("skill://a/tidy")
    root = far(server)
    before = root.subsystem.registry
    root.subsystem.refresh()
    assert server.asked == ["list"]
    root.later()
    assert server.asked == ["list", "list"]
    assert root.subsystem.registry is before


def test_new_skills_arrive_and_gone_ones_go(far, server):
    """A changed listing changes what a view holds."""
    server.put("skill://a/tidy")
    root = far(server)
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}
    server.put("skill://a/sweep")
    del server.skills["skill://a/tidy"]
    root.later()
    assert set(root.subsystem.registry) == {"mcp-acme.sweep"}


def test_a_server_that_is_down(far, server):
    """A server that fails is a finding, and what it listed before stays."""
    server.put("skill://a/tidy")
    root = far(server)
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}
    server.down = True
    root.later()
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}
    assert [note.code for note in root.subsystem.refresh().diagnostics] == ["mcp_unreachable"]
    fresh = far(server, "other")
    assert dict(fresh.subsystem.registry) == {}


def test_equal_names_get_path_parts(far, server):
    """Two skills of one name are told apart by their path; the other keeps its name."""
    for base in ("skill://a/tidy", "skill://b/c/tidy", "skill://a/sweep"):
        server.put(base)
    assert set(far(server).subsystem.registry) == {"mcp-acme.a-tidy", "mcp-acme.b-c-tidy", "mcp-acme.sweep"}


def test_one_server_cannot_speak_for_another(far, server):
    """The same uri at two servers is two skills; no field of an entry moves a skill out of its label's namespace."""
    server.put("skill://a/tidy")
    row = server.row("skill://a/tidy")
    row["frontmatter"] |= {"namespace": "internal", "id": "other", "imports": ["internal.secret"], "allowed-tools": "*"}
    server.rows = [row]
    for label in ("acme", "evil"):
        skills = far(server, label).subsystem.registry
        assert set(skills) == {f"mcp-{label}.tidy"}
        skill = skills[f"mcp-{label}.tidy"]
        assert (skill.imports, skill.allowed_tools, skill.allowed_tool_names) == ((), None, ())


@pytest.mark.parametrize("rows", [[{}], [{"uri": "skill://a/x/SKILL.md"}], [{"uri": 1, "frontmatter": {}}]])
def test_bad_entries_are_findings(far, server, rows):
    """An entry that cannot be used costs only itself, and is told."""
    server.put("skill://a/tidy")
    server.rows = [*rows, server.row("skill://a/tidy")]
    root = far(server)
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}
    assert "mcp_entry_invalid" in [note.code for note in root.subsystem.refresh().diagnostics]


def test_a_changed_set_needs_approval(far, server):
    """What was accepted is a set of (uri, digest): with one other file the skill is refused, also after a restart."""
    server.put("skill://a/tidy", guide=b"one")
    server.put("skill://a/tidy/inner")
    root = far(server)
    assert set(root.subsystem.registry) == {"mcp-acme.tidy", "mcp-acme.inner"}
    server.skills["skill://a/tidy"]["guide"] = b"two"
    root.later()
    assert codes(root, "mcp-acme.tidy") == ["mcp_changed"]
    assert set(root.subsystem.registry) == {"mcp-acme.inner"}  # a nested skill has its own
    again = far(server)
    assert codes(again, "mcp-acme.tidy") == ["mcp_changed"]
    again.listing.accept(again.listing.changes())
    again.subsystem.refresh()
    assert set(again.subsystem.registry) == {"mcp-acme.tidy", "mcp-acme.inner"}


def test_a_broken_file_of_accepted_sets_accepts_nothing(far, server):
    """When what was accepted cannot be read, everything needs approval."""
    server.put("skill://a/tidy")
    root = far(server)
    root.folder.mkdir(parents=True)
    (root.folder / "accepted.json").write_text("{")
    assert codes(root, "mcp-acme.tidy") == ["mcp_changed"]


def test_files_are_checked_and_kept(far, server):
    """A file is fetched once; a copy that was changed on disk is fetched again, never used."""
    server.put("skill://a/tidy", guide=b"the guide")
    root = far(server)
    files = far_content(root.subsystem.registry["mcp-acme.tidy"])
    for _ in range(2):
        assert files.fetch("guide", 100) == b"the guide"
    assert len(server.reads) == 1
    for copy in (root.folder / "files").iterdir():
        copy.write_bytes(b"evil text")
    assert files.fetch("guide", 100) == b"the guide"
    assert len(server.reads) == 2


@pytest.mark.parametrize(
    ("path", "sent", "reason"),
    [
        ("guide", b"THE GUIDE", "digest"),
        ("guide", b"the guide and more", "size"),
        ("guide", b"", "size"),
        ("SKILL.md", b"---\nname: tidy\n---\n", "size"),
    ],
)
def test_mismatches_give_nothing(far, server, path, sent, reason):
    """Bytes that are not those listed are refused with the reason, kept nowhere, and the entry is looked up again."""
    server.put("skill://a/tidy", guide=b"the guide")
    root = far(server)
    files = far_content(root.subsystem.registry["mcp-acme.tidy"])
    server.tampered[f"skill://a/tidy/{path}"] = sent
    with pytest.raises(FileRefused) as caught:
        files.fetch(path, 1000)
    assert caught.value.details["reason"] == reason
    assert "changed, needs approval" in caught.value.message
    assert server.asked[-1] == "get skill://a/tidy/SKILL.md"
    assert not (root.folder / "files").exists()


def test_a_mismatch_shows_the_new_set(far, server):
    """When the server says another set after a mismatch, the skill waits for approval at once."""
    server.put("skill://a/tidy", guide=b"one")
    root = far(server)
    files = far_content(root.subsystem.registry["mcp-acme.tidy"])
    server.skills["skill://a/tidy"]["guide"] = b"two"
    with pytest.raises(FileRefused):
        files.fetch("guide", 1000)
    assert codes(root, "mcp-acme.tidy") == ["mcp_changed"]


def test_unlisted_files_are_never_asked_for(far, server):
    """A file the entry does not list is no file, whatever the server would give."""
    server.put("skill://a/tidy", docs__a=b"x")
    files = far_content(far(server).subsystem.registry["mcp-acme.tidy"])
    for path, code in (("other", "file_missing"), ("docs", "not_regular"), ("../tidy/SKILL.md", "file_missing")):
        with pytest.raises(FileRefused) as caught:
            files.fetch(path, 1000)
        assert caught.value.code == code
    assert server.reads == []


def test_a_bare_uri(far, server):
    """A skill the listing leaves out is loaded by its uri through skills/get, without a file read."""
    uri = server.put("skill://a/tidy")
    server.rows = []
    root = far(server)
    assert dict(root.subsystem.registry) == {}
    assert root.listing.add(uri) == "mcp-acme.tidy"
    root.subsystem.refresh()
    assert set(root.subsystem.registry) == {"mcp-acme.tidy"}
    assert server.reads == []
    with pytest.raises(ServerFailed):
        root.listing.add("skill://a/none/SKILL.md")


def test_dynamic_skills(far, server):
    """Skills without a list of files need allow_dynamic, and nothing is remembered of them."""
    server.put("skill://a/tidy")
    server.rows = [server.row("skill://a/tidy") | {"resources": "dynamic"}]
    assert dict(far(server).subsystem.registry) == {}
    root = far(server, "open", allow_dynamic=True)
    skill = root.subsystem.registry["mcp-open.tidy"]
    assert skill.body == "Do it well."
    assert skill.tree_digest() != skill.tree_digest()
    assert not (root.folder / "accepted.json").exists()
    with pytest.raises(FileRefused), far_content(skill).materialized():
        pass
    server.tampered["skill://a/tidy/SKILL.md"] = b"---\nname: tidy\ndescription: Another\n---\n\nx\n"
    with pytest.raises(FileRefused) as caught:
        skill.content.body()
    assert caught.value.details["reason"] == "frontmatter"


def test_materialized(far, server):
    """A run gets a folder of checked files, which is gone afterwards."""
    server.put("skill://a/tidy", scripts__run_py=b"print(1)")
    skill = far(server).subsystem.registry["mcp-acme.tidy"]
    from kdskills.skills.safe_open import tree_digest

    with far_content(skill).materialized() as folder:
        assert (folder / "scripts" / "run_py").read_bytes() == b"print(1)"
        assert tree_digest(folder) == skill.tree_digest()
    assert not folder.exists()


def test_exports_leave_remote_skills_behind(far, server):
    """Code in a sandbox gets no remote skill: nothing there could check it."""
    server.put("skill://a/tidy")
    view = far(server).subsystem.view()
    export = view.export_runtime_globals()["SKILLS_DESCRIPTOR"]
    assert (export["skills"], export["roots"], export["mounts"]) == ([], [], {})
    assert json.dumps(export)


async def test_text_travels_in_results_only(far, server):
    """The body is in the pinned result of the load with its origin, and never top-level text."""
    server.put("skill://a/tidy")
    runtime = SkillRuntime(subsystem=far(server).subsystem)
    session = await runtime.create_session()
    reply = await session.call("skills_load", {"names": ["mcp-acme.tidy"]})
    assert reply.ok
    assert reply.result["bodies"] == [{"name": "mcp-acme.tidy", "origin": "mcp:acme", "text": "Do it well."}]
    assert reply.pin is not None
    assert reply.pin.startswith("skill:mcp-acme.tidy@sha256:")
    parts = await session.instructions()
    assert "Do it well." not in parts.text
    assert 'origin="mcp:acme"' in parts.active
    await runtime.aclose()


async def test_a_session_never_sees_what_was_tampered_with(far, server):
    """Loading and reading tampered files answer `skill_unreadable` with the reason, and nothing becomes active."""
    server.put("skill://a/tidy", guide=b"the guide")
    runtime = SkillRuntime(subsystem=far(server).subsystem)
    session = await runtime.create_session()
    server.tampered["skill://a/tidy/SKILL.md"] = server.skills["skill://a/tidy"]["SKILL.md"].replace(b"well", b"evil")
    with pytest.raises(ToolCallRefused) as caught:
        await session.load(["mcp-acme.tidy"])
    assert (caught.value.code, caught.value.details["reason"]) == ("skill_unreadable", "digest")
    assert await session.active() == []
    del server.tampered["skill://a/tidy/SKILL.md"]
    await session.load(["mcp-acme.tidy"])
    assert (await session.read("guide")).text == "the guide"
    for path, code in (("none", "resource_not_found"), ("../x", "path_denied")):
        with pytest.raises(ToolCallRefused) as caught:
            await session.read(path)
        assert caught.value.code == code
    await runtime.aclose()


class Engine:
    """Records requests and runs nothing."""

    name = "recording"

    def __init__(self):
        self.requests = []

    async def run(self, request):
        from kdskills.errors import ExecRefused

        self.requests.append(request)
        raise ExecRefused("recorded", code="engine_missing")


@pytest.mark.parametrize("answer", [allow("always"), deny("no")])
async def test_scripts_always_ask(far, server, answer):
    """A run asks with origin and set of files before anything is fetched; a yes binds to that set."""
    server.put("skill://a/tidy")
    server.skills["skill://a/tidy"]["scripts/run.py"] = b"print(1)"
    root = far(server)
    asked = []

    async def approve(request):
        asked.append((request.origin, request.skill, request.tree_digest, request.path))
        assert "skill://a/tidy/scripts/run.py" not in server.reads
        return answer

    engine = Engine()
    runtime = SkillRuntime(
        subsystem=root.subsystem, run_scripts=True, executor=engine, approve=approve, script_approval="allow"
    )
    session = await runtime.create_session()
    await session.load(["mcp-acme.tidy"])
    for _ in range(2):
        with pytest.raises(ToolCallRefused) as caught:
            await session.run_script("scripts/run.py")
    tree = root.subsystem.registry["mcp-acme.tidy"].tree_digest()
    expected = ("mcp:acme", "mcp-acme.tidy", tree, "scripts/run.py")
    if answer.allowed:
        assert caught.value.code == "executor_unavailable"
        assert (asked, len(engine.requests)) == ([expected], 2)
        assert "skill://a/tidy/scripts/run.py" in server.reads
    else:
        assert caught.value.code == "approval_denied"
        assert (asked, engine.requests) == ([expected, expected], [])
    await runtime.aclose()


async def test_nobody_to_ask_means_no(far, server):
    """Without an approver no script of a remote skill runs."""
    server.put("skill://a/tidy")
    server.skills["skill://a/tidy"]["scripts/run.py"] = b"print(1)"
    runtime = SkillRuntime(subsystem=far(server).subsystem, run_scripts=True, executor=Engine())
    session = await runtime.create_session()
    await session.load(["mcp-acme.tidy"])
    with pytest.raises(ToolCallRefused) as caught:
        await session.run_script("scripts/run.py")
    assert caught.value.code == "approval_unavailable"
    await runtime.aclose()


async def test_sixteen_loads_are_one_read(far, server):
    """Callers that load at one time share the fetch."""
    server.put("skill://a/tidy")
    runtime = SkillRuntime(subsystem=far(server).subsystem)
    sessions = [await runtime.create_session() for _ in range(16)]
    await asyncio.gather(*(session.load(["mcp-acme.tidy"]) for session in sessions))
    assert len(server.reads) == 1
    await runtime.aclose()
