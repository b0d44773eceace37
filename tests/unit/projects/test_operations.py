"""The operations about projects: who may, what of it, in pieces."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

import pytest

from kdskills.app.identity import SCOPES
from kdskills.app.operations import OPERATIONS
from kdskills.errors import BadRequest, CallRefused, NotFound
from kdskills.skills.archives import ArchiveRefused
from tests.project_rows import audit

MANAGED = sorted(name for name in OPERATIONS if name.startswith("project_skills."))
WRITES = {"upload", "patch", "delete", "activate"}


def encoded(place) -> str:
    """Return a file's bytes in base64."""
    return base64.b64encode(place.read_bytes()).decode()


def arguments(name: str, archive) -> dict:
    """Return arguments for any operation about skills."""
    short = name.removeprefix("project_skills.")
    told = {} if short in {"upload", "list"} else {"skill": "brief"}
    more = {
        "upload": {"data": encoded(archive())},
        "patch": {"enabled": True},
        "activate": {"version_hash": "sha256:" + "0" * 64},
        "file": {"path": "SKILL.md"},
    }
    return told | more.get(short, {})


@pytest.mark.parametrize("name", MANAGED)
@pytest.mark.parametrize("scope", sorted(SCOPES))
async def test_scopes(host, archive, caller, name, scope) -> None:
    """Reading needs `skills:read`, changing `skills:write`; `admin` has both, and no other scope has either."""
    await host.projects.upload("acme", archive(), who="ann")
    needed = "skills:write" if name.removeprefix("project_skills.") in WRITES else "skills:read"
    context = caller(scope)
    if scope in {needed, "admin"}:
        try:
            await host.invoke(name, arguments(name, archive), context)
        except NotFound:
            assert name == "project_skills.activate"
    else:
        with pytest.raises(CallRefused) as caught:
            await host.invoke(name, arguments(name, archive), context)
        assert caught.value.code == "scope_missing"


@pytest.mark.parametrize("name", MANAGED)
async def test_other_projects_are_not_found(host, archive, caller, name) -> None:
    """From elsewhere another project is not found, whether it is there or not, and nothing happens to it."""
    await host.projects.upload("acme", archive(), who="ann")
    for project in ("acme", "nowhere", "..", ""):
        given = {"project": project, **arguments(name, archive)}
        with pytest.raises(NotFound):
            await host.invoke(name, given, caller(project="other"))
    assert [state.enabled for state in await host.projects.list("acme")] == [True]
    assert [project.name for project in await host.projects.projects()] == ["acme"]


@pytest.mark.parametrize("name", MANAGED)
async def test_the_machines_account_reaches_every_project(host, archive, name) -> None:
    """The local account names a project; without one it works on its own."""
    first = await host.projects.upload("acme", archive(), who="ann")
    given = arguments(name, archive) | {"project": "acme"}
    if name == "project_skills.activate":
        given["version_hash"] = first.version
    assert await host.call(name, **given)


async def test_uploads_by_path_are_for_the_machines_account(host, archive, caller, tmp_path) -> None:
    """A path is not looked at for callers elsewhere, whether it is there or not."""
    for place in (archive(), tmp_path / "nowhere"):
        with pytest.raises(CallRefused) as caught:
            await host.invoke("project_skills.upload", {"path": str(place)}, caller())
        assert caught.value.code == "not_yours_to_say"
    done = await host.call("project_skills.upload", path=archive(), project="acme")
    assert (done.skill, done.created, done.active) == ("brief", True, True)
    with pytest.raises(BadRequest):
        await host.call("project_skills.upload", path=tmp_path / "nowhere")


async def test_uploads_within_arguments(host, archive, caller) -> None:
    """Base64 of at most 1 MiB is taken; exactly one of path and data is given; what is bad is refused as anywhere."""
    done = await host.invoke("project_skills.upload", {"data": encoded(archive()), "activate": False}, caller())
    assert (done.active, done.enabled) == (False, True)
    for given in ({}, {"data": "***"}, {"data": "A" * 1_500_000}):
        with pytest.raises(BadRequest):
            await host.invoke("project_skills.upload", given, caller())
    with pytest.raises(BadRequest):
        await host.call("project_skills.upload", data="x", path="/x", project="acme")
    with pytest.raises(ArchiveRefused) as caught:
        await host.invoke("project_skills.upload", {"data": ""}, caller())
    assert caught.value.code == "archive_empty"


async def test_readers_see_what_the_policy_grants(host, archive, caller, tmp_path) -> None:
    """A caller who may only read gets no denied or disabled skill by any operation; each reads like a missing one."""
    bundle = tmp_path / "bundle"
    (bundle / "skills").mkdir(parents=True)
    (bundle / "skills_descriptor.yaml").write_text("agents_config:\n  writer:\n    disabled: [secret]\n")
    await host.projects.create("acme", bundle=bundle, who="op")
    for name in ("brief", "secret", "closed"):
        await host.projects.upload("acme", archive(name), who="ann")
    await host.projects.patch("acme", "closed", enabled=False, who="op")
    reader, writer = caller("skills:read"), caller("skills:read", "skills:write")
    listed = await host.invoke("project_skills.list", {}, reader)
    assert [row.skill for row in listed.skills] == ["brief"]
    assert len((await host.invoke("project_skills.list", {}, writer)).skills) == 3
    for name in ("project_skills.get", "project_skills.versions", "project_skills.archive", "project_skills.file"):
        more = {"path": "SKILL.md"} if name.endswith("file") else {}
        words = set()
        for skill in ("secret", "closed", "missing"):
            with pytest.raises(NotFound) as caught:
                await host.invoke(name, {"skill": skill, **more}, reader)
            words.add(caught.value.message.replace(skill, "X"))
        assert len(words) == 1
        assert await host.invoke(name, {"skill": "secret", **more}, writer)
        assert await host.invoke(name, {"skill": "brief", **more}, reader)


async def test_files_and_archives_come_in_pieces(host, archive, caller) -> None:
    """Pieces put together are the file, at any size of piece; size and hash are told."""
    await host.projects.upload("acme", archive(**{"data.bin": "0123456789" * 100}), who="ann")
    for name, more, limit in (("file", {"path": "data.bin"}, 300), ("archive", {}, 999)):
        data, offset = b"", 0
        while offset is not None:
            given = {"skill": "brief", "offset": offset, "limit": limit, **more}
            piece = await host.invoke(f"project_skills.{name}", given, caller())
            data += base64.b64decode(piece.data)
            offset = piece.next_offset
        assert (len(data), hashlib.sha256(data).hexdigest()) == (piece.size, piece.sha256)
        if name == "archive":
            with zipfile.ZipFile(io.BytesIO(data)) as made:
                assert made.namelist() == ["brief/SKILL.md", "brief/data.bin"]
    beyond = await host.invoke("project_skills.file", {"skill": "brief", "path": "data.bin", "offset": 10**9}, caller())
    assert (beyond.data, beyond.next_offset) == ("", None)
    for bad in ({"offset": -1}, {"limit": 10**9}, {"path": ""}):
        with pytest.raises(BadRequest):
            await host.invoke("project_skills.file", {"skill": "brief", "path": "data.bin", **bad}, caller())


async def test_versions_by_hash(host, archive, caller) -> None:
    """An old version's files are there by its hash; activation goes back to it."""
    first = await host.projects.upload("acme", archive(body="One."), who="ann")
    await host.projects.upload("acme", archive(body="Two."), who="ann")
    old = await host.invoke(
        "project_skills.file", {"skill": "brief", "path": "SKILL.md", "version": first.version}, caller()
    )
    assert b"One." in base64.b64decode(old.data)
    listed = await host.invoke("project_skills.versions", {"skill": "brief"}, caller())
    assert [(found.active, found.created_by) for found in listed.versions] == [(True, "ann"), (False, "ann")]
    done = await host.invoke("project_skills.activate", {"skill": "brief", "version_hash": first.version}, caller())
    assert done.active == first.version
    row = (await audit(host.projects, "acme", limit=1))[0]
    assert (row.who, row.action, row.request_id) == ("http:token:t1", "skill.activate", "r1")


async def test_deleting_and_patching(host, archive, caller) -> None:
    """Disabling, deleting and asking again answer what is so."""
    await host.projects.upload("acme", archive(), who="ann")
    done = await host.invoke("project_skills.patch", {"skill": "brief", "enabled": False}, caller())
    assert not done.enabled
    assert (await host.invoke("project_skills.delete", {"skill": "brief"}, caller())).deleted
    with pytest.raises(NotFound):
        await host.invoke("project_skills.delete", {"skill": "brief"}, caller())


async def test_projects_from_elsewhere_and_here(host, archive, caller, tmp_path) -> None:
    """From elsewhere only the own project is listed, and no path of this machine is told; here all are."""
    await host.call("projects.create", project="acme", bundle=tmp_path)
    await host.call("projects.create", project="other")
    mine = await host.invoke("projects.list", {}, caller("admin"))
    assert [(row.project, row.bundle) for row in mine.projects] == [("acme", None)]
    everything = await host.call("projects.list")
    assert [(row.project, row.bundle) for row in everything.projects] == [("acme", str(tmp_path)), ("other", None)]
    with pytest.raises(CallRefused) as caught:
        await host.invoke("projects.create", {"project": "third"}, caller("admin"))
    assert caught.value.code == "local_only"
