"""`skills.read` and `describe`."""

from __future__ import annotations

import base64
import hashlib
import os

import pytest

from kdskills.errors import KdskillsError
from kdskills.session import AccessRequest, Denial, RuntimeLimits, TurnScope, TurnSources
from kdskills.sources import SourcesPool


async def refused(awaiting):
    with pytest.raises(KdskillsError) as caught:
        await awaiting
    return caught.value


@pytest.fixture
async def session(runtime):
    """A session with `sales` loaded."""
    return await runtime.create_session(initial=["sales"])


async def test_text(session, bundle):
    """Text comes with size, digest of the file and media type; the skill loaded last is meant."""
    found = await session.read("./references//guide.md")
    data = (bundle.root / "skills/acme/sales/references/guide.md").read_bytes()
    assert found.to_json() == {
        "skill": "sales",
        "path": "references/guide.md",
        "encoding": "text",
        "text": "# Guide\nUse the table.\n",
        "media_type": "text/markdown",
        "size": len(data),
        "digest": "sha256:" + hashlib.sha256(data).hexdigest(),
        "offset": 0,
        "truncated": False,
        "next_offset": None,
    }


async def test_binary(session):
    """Binary gives the exact bytes, from an offset on."""
    found = await session.read("assets/logo.bin", encoding="binary", offset=250)
    assert (base64.b64decode(found.b64), found.size, "text" in found.to_json()) == (bytes(range(250, 256)), 256, False)


async def test_skill_md_can_be_read(session):
    """Any regular file below the root can be read, SKILL.md too."""
    assert (await session.read("SKILL.md")).text.startswith("---\nname: sales")


async def test_windows(make, bundle):
    """Long text comes in windows of characters that join to the whole."""
    text = "äöü🙂" * 25
    bundle.file("acme.sales", "long.txt", text)
    session = await make(limits=RuntimeLimits(read_window_chars=33)).create_session(initial=["sales"])
    pieces, offset = [], 0
    while offset is not None:
        found = await session.read("long.txt", offset=offset)
        assert found.truncated is (found.next_offset is not None)
        pieces.append(found.text)
        offset = found.next_offset
    assert ("".join(pieces), len(pieces)) == (text, 4)
    assert (await session.read("long.txt", offset=9999)).text == ""


async def test_bom_is_dropped_and_newlines_kept(session, bundle):
    """A leading BOM goes, CRLF stays; size and digest are the file's."""
    bundle.file("acme.sales", "crlf.txt", b"\xef\xbb\xbfa\r\nb\r\n")
    found = await session.read("crlf.txt")
    assert (found.text, found.size) == ("a\r\nb\r\n", 9)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"a\x00b", b"\xc3"])
async def test_not_text(session, bundle, data):
    """Bytes that are no UTF-8, or hold NUL, want binary."""
    bundle.file("acme.sales", "data.dat", data)
    error = await refused(session.read("data.dat"))
    assert (error.code, error.who) == ("not_text", "model")
    assert base64.b64decode((await session.read("data.dat", encoding="binary")).b64) == data


@pytest.mark.parametrize("encoding", ["text", "binary"])
async def test_too_large(make, bundle, encoding):
    """Over max_read_bytes is too_large in either encoding."""
    bundle.file("acme.sales", "big.txt", "x" * 101)
    session = await make(limits=RuntimeLimits(max_read_bytes=100)).create_session(initial=["sales"])
    error = await refused(session.read("big.txt", encoding=encoding))
    assert (error.code, error.who, error.details["limit"]) == ("too_large", "author", 100)


async def test_missing_names_siblings(session, bundle):
    """A missing file lists at most 20 siblings."""
    for number in range(30):
        bundle.file("acme.sales", f"references/r{number:02}.md", "x")
    error = await refused(session.read("references/nope.md"))
    assert (error.code, len(error.details["siblings"]), error.details["siblings"][0]) == (
        "resource_not_found",
        20,
        "guide.md",
    )
    assert (await refused(session.read("nowhere/at/all.md"))).details["siblings"] == []


async def test_below_a_file(session):
    """A path through a file is missing, not a crash."""
    assert (await refused(session.read("SKILL.md/x"))).code == "resource_not_found"


async def test_directory_lists_entries(session, bundle):
    """A directory is not_a_file with up to 100 entries."""
    for number in range(120):
        bundle.file("acme.sales", f"many/f{number:03}", "x")
    error = await refused(session.read("many"))
    assert (error.code, len(error.details["entries"]), error.details["entries"][0]) == ("not_a_file", 100, "f000")
    assert "assets/" not in (await refused(session.read("assets"))).details["entries"]


async def test_fifo_does_not_hang(session, bundle):
    """A pipe is no file, and opening it does not wait for a writer."""
    os.mkfifo(bundle.root / "skills/acme/sales/pipe")
    assert (await refused(session.read("pipe"))).code == "not_a_file"


@pytest.mark.parametrize("inside", [True, False])
async def test_links_are_never_followed(session, bundle, inside):
    """A link in any part is path_denied symlink, also one that stays inside."""
    folder = bundle.root / "skills/acme/sales"
    (folder / "link.md").symlink_to(folder / "SKILL.md" if inside else "/etc/passwd")
    (folder / "dir").symlink_to(folder / "references" if inside else "/etc", target_is_directory=True)
    for path in ("link.md", "dir/guide.md", "dir/passwd", "dir"):
        error = await refused(session.read(path))
        assert (error.code, error.details["reason"]) == ("path_denied", "symlink")


@pytest.mark.parametrize(
    "path", ["../brief/SKILL.md", "references/../SKILL.md", "/etc/passwd", "a\\b", "a\0b", "C:x", "."]
)
async def test_hostile_paths_through_the_tool(session, path):
    """Hostile paths are refused in the reply, whichever form they have."""
    reply = await session.call("skills_read", {"path": path})
    assert (reply.ok, reply.error["code"], reply.error["who"]) == (False, "path_denied", "model")


async def test_percent_is_no_escape(session):
    """Paths are never URL-decoded."""
    assert (await refused(session.read("%2e%2e/brief/SKILL.md"))).code == "resource_not_found"


async def test_which_skill(session):
    """Nothing loaded, an unknown, a denied and an unloaded skill each have their code; denied reads like unknown."""
    assert (await refused(session.read("SKILL.md", skill="brief"))).code == "skill_not_active"
    denied = await refused(session.read("SKILL.md", skill="acme.embargo"))
    unknown = await refused(session.read("SKILL.md", skill="acme.nothing"))
    assert denied.code == unknown.code == "skill_not_found"
    assert denied.message.replace("embargo", "x") == unknown.message.replace("nothing", "x")
    await session.unload(all=True)
    assert (await refused(session.read("SKILL.md"))).code == "no_active_skills"


async def test_order_of_checks(runtime):
    """session, shape, anything active, which skill, path text, existence: each earlier one wins."""
    empty = await runtime.create_session()
    assert (await refused(runtime.read("none", "", encoding="x"))).code == "session_not_found"
    assert (await refused(empty.read("../x", skill="nope", encoding="x"))).code == "invalid_argument"
    assert (await refused(empty.read("", skill="nope"))).code == "invalid_argument"
    assert (await refused(empty.read("../x", skill="nope"))).code == "no_active_skills"
    await empty.load(["sales"])
    assert (await refused(empty.read("../x", skill="nope"))).code == "skill_not_found"
    assert (await refused(empty.read("../x"))).code == "path_denied"
    assert (await refused(empty.read("x"))).code == "resource_not_found"


async def test_deny_a_file(make):
    """A plugin may refuse one file of a visible skill."""

    def deny(request: AccessRequest) -> Denial | None:
        return (
            Denial("r", "not this file") if request.kind == "read" and request.path == "references/guide.md" else None
        )

    session = await make(deny=deny).create_session(initial=["sales"])
    error = await refused(session.read("references/guide.md"))
    assert (error.code, error.message) == ("skill_denied", "not this file")
    assert (await session.read("SKILL.md")).size > 0


async def test_citations_in_a_turn(make, bundle):
    """Inside a turn the body and .md files carry the pool's sids; other files, digest and the session do not change."""
    bundle.skill("acme.sales", "Up [[S:1]] and [[S:9]].")
    bundle.file("acme.sales", "sources.yaml", "- {sid: 1, url: 'https://example.org/a', title: A}\n")
    bundle.file("acme.sales", "notes.md", "See [[S:1]].")
    bundle.file("acme.sales", "notes.txt", "See [[S:1]].")
    merged = []
    pool = SourcesPool.from_rows([{"sid": 1, "url": "https://example.org/other", "title": "Other"}])
    sources = TurnSources(pool, lambda full_id, result: merged.append((full_id, dict(result.sid_map))))
    plain = await make().create_session()
    session = plain.within(TurnScope(sources=sources))
    await session.load(["sales"])
    assert merged == [("acme.sales", {1: 2})]
    assert (await session.active())[0].body == "Up [[S:2]] and."
    assert "Up [[S:2]] and." in (await session.instructions()).active
    found = await session.read("notes.md")
    assert (found.text, found.size) == ("See [[S:2]].", 12)
    assert (await session.read("notes.txt")).text == "See [[S:1]]."
    assert (await plain.active())[0].body == "Up [[S:1]] and [[S:9]]."
    assert len(merged) == 1
    assert sources.pool.get(2)["title"] == "A"


async def test_dropped_citations_and_bad_rows_are_told_once(make, bundle):
    """What is dropped from a body or its sources is told with its place, once however often the body is shown."""
    bundle.skill("acme.sales", "Up [[S:1]] and [[S:9]].")
    bundle.file(
        "acme.sales", "sources.yaml", "- {sid: 1, url: 'https://example.org/a', title: A}\n- {sid: 2, title: B}\n"
    )
    told = []
    sources = TurnSources(SourcesPool(), found=told.append)
    session = (await make().create_session()).within(TurnScope(sources=sources))
    await session.load(["sales"])
    for _ in range(3):
        await session.instructions()
    place = "skill://acme/sales/SKILL.md"
    assert [(d.code, d.ref, d.path) for d in told if d.code == "citation_dropped"] == [("citation_dropped", "9", place)]
    assert [d.path for d in told if d.code == "source_without_identity"] == [place]
    assert len(told) == len(set(told))


async def test_describe(runtime, bundle):
    """Describe works for any visible skill, loaded or not, and hashes afresh."""
    session = await runtime.create_session()
    before = await session.describe("sales")
    bundle.file("acme.sales", "references/guide.md", "changed")
    after = await session.describe("sales")
    assert (before.digest, before.tree_digest == after.tree_digest) == (after.digest, False)
    assert (await runtime.describe("report")).imports == ("base",)
    assert (await refused(session.describe("acme.embargo"))).code == "skill_not_found"
    assert (await refused(runtime.describe("acme.embargo"))).code == "skill_not_found"


async def test_imported_files_only_with_their_importer(runtime):
    """A dependency is readable while its importer is loaded; loading it alone needs the gate."""
    session = await runtime.create_session(initial=["report"])
    assert (await session.read("SKILL.md", skill="acme.base")).skill == "base"
    await session.load(["brief"])
    assert (await refused(session.read("SKILL.md", skill="acme.base"))).code == "skill_not_active"


async def test_private_dependency(bundle, make):
    """An internal dependency is usable inside its closure and unknown otherwise."""
    bundle.skill("internal.rules", "House rules.")
    bundle.skill("acme.letter", "Write.", imports="[internal.rules]")
    session = await make().create_session(initial=["letter"])
    assert "House rules." in (await session.instructions()).active
    assert "House rules." in (await session.read("SKILL.md", skill="internal.rules")).text
    assert (await refused(session.load(["internal.rules"]))).code == "skill_not_found"
    await session.unload(all=True)
    await session.load(["sales"])
    assert (await refused(session.read("SKILL.md", skill="internal.rules"))).code == "skill_not_found"


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["d"] * 100), "x/" * 3000 + "y"], ids=["name", "depth", "length"])
async def test_endless_paths(session, path):
    """Names and paths no file system has are missing files, not broken skills."""
    assert (await refused(session.read(path))).code == "resource_not_found"


async def test_half_characters(session):
    """A path with a lone surrogate is out of shape, not a crash."""
    assert (await refused(session.read("a\ud800b"))).code == "invalid_argument"
