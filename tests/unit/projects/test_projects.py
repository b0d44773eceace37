"""Uploaded skills: versions, one pointer, enabled, pins, deletion, retention, audit."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.errors import BadRequest, Conflict, NotFound
from kdskills.hooks import hookimpl
from kdskills.projects.records import Author, all_versions
from kdskills.projects.service import Projects, VersionMissing, to_its_end
from kdskills.projects.views import ProjectViews
from kdskills.skills import SkillRoot
from kdskills.skills.archives import ArchiveRefused, read_tree, version_of
from kdskills.skills.private_files import remove_tree
from kdskills.turn import Granted, Refused
from tests.project_rows import audit, pin


async def versions_of(host, name: str = "brief") -> dict[str, bool]:
    """Return version to whether it is active."""
    return {found.version: found.active for found in await host.projects.versions("acme", name)}


async def answer(host, ref: str = "public.brief", consumer: str | None = "writer") -> Granted | Refused:
    """Return what the gate says now."""
    return (await host.projects.view("acme", consumer)).resolve(ref)


def on_disk(host) -> list[str]:
    """Return the files below the state folder's projects."""
    top = host.settings.state_dir / "projects"
    return sorted(p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file())


async def test_an_upload_is_a_version_in_a_read_only_folder(host, archive) -> None:
    """The report names skill and version; the files lie under the hash of their tree and cannot be written."""
    report = await host.projects.upload("acme", archive(**{"scripts/run.sh": "#!/bin/sh\n"}), who="ann")
    assert (report.skill, report.created, report.active, report.enabled) == ("brief", True, True, True)
    pinned = await pin(host.projects, "acme", "brief", "task_1")
    assert pinned.folder.parent.name == report.version.removeprefix("sha256:")
    assert version_of(read_tree(pinned.folder)) == report.version
    assert {place.stat().st_mode & 0o222 for place in pinned.folder.rglob("*")} == {0}
    granted = await answer(host)
    assert isinstance(granted, Granted)
    assert (granted.skill.body.strip(), granted.skill.layer) == ("Read, then write.", "project")


async def test_the_same_content_is_the_same_version(host, archive) -> None:
    """Uploaded twice, or at once by many, there is one version."""
    first = await host.projects.upload("acme", archive(), who="ann")
    rest = await asyncio.gather(*(host.projects.upload("acme", archive(), who="bob") for _ in range(4)))
    assert {report.version for report in rest} == {first.version}
    assert not any(report.created for report in rest)
    assert await versions_of(host) == {first.version: True}


async def test_many_uploads_at_once(host, archive) -> None:
    """Different versions uploaded at once are all kept, and exactly one is active."""
    places = [archive(body=f"Text {number}.") for number in range(6)]
    reports = await asyncio.gather(*(host.projects.upload("acme", place, who="ann") for place in places))
    known = await versions_of(host)
    assert set(known) == {report.version for report in reports}
    assert sum(known.values()) == 1


async def test_bytes_as_they_come(host, archive) -> None:
    """An upload may be a stream of pieces; its bytes are on disk meanwhile and gone afterwards."""
    data = archive().read_bytes()

    async def pieces():
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    report = await host.projects.upload("acme", pieces(), who="ann")
    assert report.skill == "brief"
    assert [path for path in on_disk(host) if path.startswith(".scratch")] == []


async def test_endless_bytes_are_cut(host) -> None:
    """A stream that does not end is refused at 32 MiB, and asked for no more."""
    asked = 0

    async def endless():
        nonlocal asked
        while True:
            asked += 1
            yield bytes(1024 * 1024)

    with pytest.raises(ArchiveRefused) as caught:
        await host.projects.upload("acme", endless(), who="ann")
    assert (caught.value.code, asked) == ("archive_too_large", 33)
    assert on_disk(host) == []


async def test_a_stream_that_breaks_leaves_nothing(host, archive) -> None:
    """When the sender goes away nothing stays, in the tables or on disk."""

    async def broken():
        yield archive().read_bytes()[:50]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await host.projects.upload("acme", broken(), who="ann")
    assert (on_disk(host), await host.projects.projects()) == ([], [])


async def test_a_refused_archive_leaves_nothing(host, tmp_path) -> None:
    """A bad archive makes no project, no row and no file."""
    place = tmp_path / "bad.zip"
    place.write_bytes(b"not a zip")
    with pytest.raises(ArchiveRefused):
        await host.projects.upload("acme", place, who="ann")
    assert (on_disk(host), await host.projects.projects()) == ([], [])
    assert await audit(host.projects, "acme") == []


async def test_uploading_never_enables(host, archive) -> None:
    """What an operator disabled stays disabled through uploads, activation, deletion and a new upload."""
    await host.projects.upload("acme", archive(), who="ann")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    second = await host.projects.upload("acme", archive(body="New."), who="ann")
    assert (second.enabled, (await host.projects.get("acme", "brief")).enabled) == (False, False)
    await host.projects.activate("acme", "brief", second.version, who="ann")
    await host.projects.delete("acme", "brief", who="ann")
    third = await host.projects.upload("acme", archive(body="Newer."), who="ann")
    assert (third.enabled, third.active) == (False, True)
    refused = await answer(host)
    assert isinstance(refused, Refused)
    assert refused.code == "plugin_denied"
    await host.projects.patch("acme", "brief", enabled=True, who="op")
    assert isinstance(await answer(host), Granted)


async def test_a_disabled_skill_is_refused_on_every_way(host, archive) -> None:
    """A disabled skill is in no catalog, resolves by no name, and comes with no import."""
    await host.projects.upload("acme", archive(), who="ann")
    await host.projects.upload("acme", archive("parent", lines="imports: [brief]\n"), who="ann")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    view = await host.projects.view("acme", "writer")
    assert list(view.listed) == ["public.parent"]
    assert all(isinstance(view.resolve(ref), Refused) for ref in ("brief", "public.brief", "sk:brief", "SK2"))
    parent = view.resolve("parent")
    assert isinstance(parent, Granted)
    assert [skill.full_id for skill in parent.closure] == ["public.parent"]


async def test_activation_is_one_pointer(host, archive) -> None:
    """Views follow the pointer at once; views taken before keep what they had."""
    first = await host.projects.upload("acme", archive(body="One."), who="ann")
    before = await host.projects.view("acme", "writer")
    second = await host.projects.upload("acme", archive(body="Two."), activate=False, who="ann")
    assert await versions_of(host) == {first.version: True, second.version: False}
    assert (await answer(host)).skill.body.strip() == "One."
    state = await host.projects.activate("acme", "brief", second.version, who="ann")
    assert (state.active, (await answer(host)).skill.body.strip()) == (second.version, "Two.")
    kept = before.resolve("brief")
    assert isinstance(kept, Granted)
    assert kept.skill.body.strip() == "One."


async def test_a_new_skill_may_wait(host, archive) -> None:
    """Uploaded without activation a skill is known and not yet to be had."""
    report = await host.projects.upload("acme", archive(), activate=False, who="ann")
    assert (report.active, (await host.projects.get("acme", "brief")).active) == (False, None)
    assert (await answer(host)).code == "unknown_skill"
    with pytest.raises(NotFound):
        await pin(host.projects, "acme", "brief", "task")
    with pytest.raises(NotFound):
        await host.projects.file("acme", "brief", "SKILL.md")


async def test_an_id_belongs_to_one_skill(host, archive) -> None:
    """Two skills of a project cannot have one id, neither by upload nor by activation."""
    await host.projects.upload("acme", archive("brief"), who="ann")
    with pytest.raises(Conflict) as caught:
        await host.projects.upload("acme", archive("other", lines="id: brief\n"), who="ann")
    assert caught.value.code == "id_taken"
    assert [state.name for state in await host.projects.list("acme")] == ["brief"]
    await host.projects.upload("else", archive("other", lines="id: brief\n"), who="ann")


async def test_activation_cannot_take_an_id(host, archive) -> None:
    """An old version whose id another skill has meanwhile stays inactive."""
    old = await host.projects.upload("acme", archive("one", lines="id: x\n"), who="ann")
    await host.projects.upload("acme", archive("one"), who="ann")
    await host.projects.upload("acme", archive("two", lines="id: x\n"), who="ann")
    with pytest.raises(Conflict):
        await host.projects.activate("acme", "one", old.version, who="ann")


async def test_a_disabled_skill_cannot_hide_behind_a_waiting_id(host, archive) -> None:
    """The id that counts is the active version's, whatever an upload that waits says."""
    await host.projects.upload("acme", archive(), who="ann")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    await host.projects.upload("acme", archive(lines="id: elsewhere\n"), activate=False, who="ann")
    assert (await answer(host)).code == "plugin_denied"


async def test_uploads_cannot_claim_a_namespace(host, archive) -> None:
    """Whatever its file says, an uploaded skill is in `public`: no way into `internal`, none over a bundle's skill."""
    for place in ("internal", "press", "skills"):
        lines = f"namespace: {place}\n"
        if place == "skills":
            with pytest.raises(ArchiveRefused):
                await host.projects.upload("acme", archive("mine", lines=lines), who="ann")
            continue
        await host.projects.upload("acme", archive("mine", lines=lines), who="ann")
        view = await host.projects.view("acme", None, include_internal=True)
        assert list(view.skills) == ["public.mine"]


async def test_the_bundle_wins_and_its_rules_hold(host, archive, tmp_path) -> None:
    """A project's bundle brings skills and rules; an upload is bound by them and replaces no skill of the bundle."""
    bundle = tmp_path / "bundle"
    (bundle / "skills" / "brief").mkdir(parents=True)
    (bundle / "skills" / "brief" / "SKILL.md").write_text("---\nname: brief\ndescription: The bundle's.\n---\nMine.\n")
    (bundle / "skills_descriptor.yaml").write_text(
        "agents_config:\n  writer:\n    disabled: [public.secret]\n  narrow:\n    enabled: [public.brief]\n"
    )
    await host.projects.create("acme", bundle=bundle, who="op")
    await host.projects.upload("acme", archive(), who="ann")
    await host.projects.upload("acme", archive("secret"), who="ann")
    await host.projects.upload("acme", archive("extra"), who="ann")
    view = await host.projects.view("acme", "writer")
    assert list(view.listed) == ["public.brief", "public.extra"]
    assert view.resolve("brief").skill.description == "The bundle's."
    assert view.resolve("secret").code == "denied"
    assert list((await host.projects.view("acme", "narrow")).listed) == ["public.brief"]
    found = await host.projects.skills("acme")
    assert found.name == "bundle"
    (bundle / "skills_descriptor.yaml").write_text("agents_config: {}\n")
    assert isinstance((await host.projects.view("acme", "writer")).resolve("secret"), Granted)
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    assert isinstance((await host.projects.view("acme", "writer")).resolve("brief"), Granted)


async def test_projects_share_nothing(host, archive) -> None:
    """A skill of one project is unknown in every other."""
    await host.projects.upload("acme", archive(), who="ann")
    assert (await host.projects.list("other"), list((await host.projects.view("other", None)).skills)) == ([], [])
    for call in (host.projects.get, host.projects.versions, host.projects.archive):
        with pytest.raises(NotFound):
            await call("other", "brief")


@pytest.mark.parametrize("project", ["", ".", "..", "a/b", "A", "a.b", "-a", "a" * 65, "ä", "a\n"])
async def test_names_of_projects(host, archive, project) -> None:
    """A project's name is a plain word: it is part of paths and subjects."""
    with pytest.raises(BadRequest) as caught:
        await host.projects.upload(project, archive(), who="ann")
    assert caught.value.code == "project_invalid"
    assert on_disk(host) == []


async def test_deleting_keeps_what_is_in_use(host, archive) -> None:
    """Running work keeps the files it pinned through deletion and retention; then they go."""
    await host.projects.upload("acme", archive(), who="ann")
    pinned = await pin(host.projects, "acme", "brief", "task_1")
    again = await pin(host.projects, "acme", "brief", "task_1")
    assert again == pinned
    await host.projects.delete("acme", "brief", who="ann")
    assert (await answer(host)).code == "unknown_skill"
    with pytest.raises(NotFound):
        await host.projects.get("acme", "brief")
    assert (await host.projects.collect(keep_days=-1)).versions == ()
    assert (pinned.folder / "SKILL.md").exists()
    assert await host.projects.unpin("acme", "task_1") == 1
    assert await host.projects.unpin("acme", "task_1") == 0
    assert (await host.projects.collect(keep_days=-1)).versions == (f"brief@{pinned.version}",)
    assert on_disk(host) == []


async def test_pins_hold_one_version(host, archive) -> None:
    """A pin keeps its version while another becomes active, and counts are told."""
    first = await host.projects.upload("acme", archive(body="One."), who="ann")
    await pin(host.projects, "acme", "brief", "job_1")
    await host.projects.upload("acme", archive(body="Two."), who="ann")
    old = await pin(host.projects, "acme", "brief", "job_2", version=first.version)
    assert old.version == first.version
    assert {found.version: found.pins for found in await host.projects.versions("acme", "brief")}[first.version] == 2
    assert (await host.projects.collect(keep_days=-1, keep_versions=0)).versions == ()
    for holder in ("job_1", "job_2"):
        await host.projects.unpin("acme", holder)
    gone = await host.projects.collect(keep_days=-1, keep_versions=0)
    assert gone.versions == (f"brief@{first.version}",)
    assert isinstance(await answer(host), Granted)


async def test_retention_keeps_some_and_the_young(host, archive) -> None:
    """Unused versions stay for their days, and the latest few however old; the active one always stays."""
    reports = [await host.projects.upload("acme", archive(body=f"{n}."), who="ann") for n in range(5)]
    assert (await host.projects.collect()).versions == ()
    assert len((await host.projects.collect(keep_days=-1, keep_versions=2)).versions) == 2
    left = await versions_of(host)
    assert set(left) == {report.version for report in reports[2:]}
    assert left[reports[4].version]


async def test_a_deleted_version_comes_back(host, archive) -> None:
    """Uploaded again after deletion, a version that was still kept is used again and not collected."""
    first = await host.projects.upload("acme", archive(), who="ann")
    await host.projects.delete("acme", "brief", who="ann")
    second = await host.projects.upload("acme", archive(), who="ann")
    assert (second.version, second.created) == (first.version, False)
    assert (await host.projects.collect(keep_days=-1, keep_versions=0)).versions == ()
    assert isinstance(await answer(host), Granted)


async def test_leftovers_of_processes_that_died_go(host, archive) -> None:
    """Scratch and versions no row names are swept once they are old, and not while they may be under way."""
    await host.projects.upload("acme", archive(), who="ann")
    top = host.settings.state_dir / "projects"
    (top / ".scratch" / "dead").mkdir()
    (top / "acme" / "brief" / ("0" * 64)).mkdir()
    (top / "acme" / "brief" / ("1" * 64 + ".zip")).write_bytes(b"x")
    assert (await host.projects.collect()).leftovers == 0
    folders = host.projects._folders
    known = host.storage.database.ask(all_versions)
    assert folders.sweep(known, older_than_s=-1) == 3
    assert isinstance(await answer(host), Granted)


@pytest.mark.parametrize("step", ["install", "write"])
async def test_a_crash_leaves_the_old_state(host, archive, monkeypatch, step) -> None:
    """Wherever an upload dies, the old version stays in use, and the next upload succeeds."""
    first = await host.projects.upload("acme", archive(body="One."), who="ann")

    def die(*arguments):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(type(host.projects._folders), step, die)
        with pytest.raises(MemoryError):
            await host.projects.upload("acme", archive(body="Two."), who="ann")
    assert await versions_of(host) == {first.version: True}
    assert (await answer(host)).skill.body.strip() == "One."
    second = await host.projects.upload("acme", archive(body="Two."), who="ann")
    assert (second.created, (await answer(host)).skill.body.strip()) == (True, "Two.")


async def test_files_and_archives_are_read_by_what_was_listed(host, archive) -> None:
    """A file is one of the version's files and nothing else; the archive unpacks to the version."""
    await host.projects.upload("acme", archive(**{"references/a.txt": "hello"}), who="ann")
    found = await host.projects.file("acme", "brief", "references/a.txt")
    assert (found.path.read_text(), found.file.size) == ("hello", 5)
    for path in ("references", "../SKILL.md", "/etc/passwd", "references/../SKILL.md", "", "SKILL.md\x00", "skill.md"):
        with pytest.raises(NotFound):
            await host.projects.file("acme", "brief", path)
    place = await host.projects.archive("acme", "brief")
    before = place.read_bytes()
    place.unlink()
    assert (await host.projects.archive("acme", "brief")).read_bytes() == before
    report = await host.projects.upload("copy", place, who="ann")
    assert report.version == (await host.projects.version("acme", "brief")).version


async def test_every_change_is_told(host, archive) -> None:
    """Each change writes one row with who, what and hashes; what changes nothing writes none."""
    first = await host.projects.upload("acme", archive(body="One."), who=Author("ann", request_id="r1"))
    second = await host.projects.upload("acme", archive(body="Two."), activate=False, who="ann")
    await host.projects.activate("acme", "brief", second.version, who="bob")
    await host.projects.activate("acme", "brief", second.version, who="bob")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    await host.projects.delete("acme", "brief", who="op")
    rows = list(reversed(await audit(host.projects, "acme")))
    assert [(row.who, row.action) for row in rows] == [
        ("ann", "skill.upload"),
        ("ann", "skill.upload"),
        ("bob", "skill.activate"),
        ("op", "skill.patch"),
        ("op", "skill.delete"),
    ]
    assert rows[0].request_id == "r1"
    assert rows[2].facts == {"before": first.version, "active": second.version}


async def test_unknown_things_change_nothing(host, archive) -> None:
    """Patching, activating and deleting what is not there is not found, and makes no project."""
    for call in (
        host.projects.patch("acme", "brief", enabled=True, who="x"),
        host.projects.activate("acme", "brief", "sha256:" + "0" * 64, who="x"),
        host.projects.delete("acme", "brief", who="x"),
    ):
        with pytest.raises(NotFound):
            await call
    assert await host.projects.projects() == []
    await host.projects.upload("acme", archive(), who="ann")
    for version in ("sha256:" + "0" * 64, "", "../x"):
        with pytest.raises(NotFound):
            await host.projects.activate("acme", "brief", version, who="x")


async def test_bundles_have_absolute_paths(host) -> None:
    """A relative path would mean another folder for every process."""
    with pytest.raises(BadRequest) as caught:
        await host.projects.create("acme", bundle=Path("bundles/press"), who="op")
    assert caught.value.code == "bundle_path_relative"


async def test_the_subsystem_is_kept_until_something_changes(host, archive) -> None:
    """Two questions share one subsystem; a change makes another."""
    await host.projects.upload("acme", archive(), who="ann")
    one, two = await host.projects.skills("acme"), await host.projects.skills("acme")
    assert one.subsystem is two.subsystem
    await host.projects.patch("acme", "brief", enabled=False, who="op")
    assert (await host.projects.skills("acme")).subsystem is not one.subsystem


async def test_another_process_sees_changes(host, archive, tmp_path) -> None:
    """A second Host on the same state follows uploads and switches at its next question."""
    await host.projects.upload("acme", archive(), who="ann")
    other = Host(host.settings, entry_points=False)
    try:
        assert list((await other.projects.view("acme", None)).listed) == ["public.brief"]
        await host.projects.patch("acme", "brief", enabled=False, who="op")
        assert list((await other.projects.view("acme", None)).listed) == []
    finally:
        await other.storage.aclose()


async def test_the_clock_of_retention(host, archive) -> None:
    """A version's days count from when it was last the active one, by the clock given."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made = Projects(
        host.storage.database,
        host.settings.state_dir,
        ProjectViews(host.subsystem, host.bundle),
        clock=lambda: now,
    )
    first = await made.upload("acme", archive(body="One."), who="ann")
    now += timedelta(days=100)
    await made.upload("acme", archive(body="Two."), who="ann")
    now += timedelta(days=29)
    assert (await made.collect(keep_versions=0)).versions == ()
    now += timedelta(days=2)
    assert (await made.collect(keep_versions=0)).versions == (f"brief@{first.version}",)


async def test_nothing_is_made_by_looking_at_a_host(host) -> None:
    """Asking a Host for a project's skills makes no database nobody asked for."""
    with pytest.raises(BadRequest):
        await host.project_skills("acme")
    assert not host.settings.state_dir.exists()


async def test_a_host_serves_projects(host, archive) -> None:
    """What operations look at is the project, once it is known."""
    await host.projects.upload("acme", archive(), who="ann")
    assert list((await host.project_skills("acme")).subsystem.registry) == ["public.brief"]


async def test_other_machines_fetch_what_they_lack(host, archive, tmp_path) -> None:
    """With a shared storage a machine with another state folder has every version, checked by its hash."""
    shared = host.settings.model_copy(
        update={
            "artifacts": str(tmp_path / "shared"),
            "database_url": f"sqlite:///{tmp_path / 'one.db'}",
        }
    )
    one = Host(shared, entry_points=False)
    two = Host(shared.model_copy(update={"state_dir": tmp_path / "state2"}), entry_points=False)
    try:
        first = await one.projects.upload("acme", archive(**{"run.sh": "#!/bin/sh"}), who="ann")
        await one.projects.upload("acme", archive(**{"run.sh": "#!/bin/sh"}), who="bob")
        assert len([place for place in (tmp_path / "shared").rglob("*") if place.is_file()]) == 1
        assert isinstance((await two.projects.view("acme", None)).resolve("brief"), Granted)
        pinned = await pin(two.projects, "acme", "brief", "job")
        assert pinned.folder.is_relative_to(tmp_path / "state2")
        assert version_of(read_tree(pinned.folder)) == first.version
        await two.projects.unpin("acme", "job")
        await one.projects.delete("acme", "brief", who="ann")
        await one.projects.collect(keep_days=-1)
        assert [place for place in (tmp_path / "shared").rglob("*") if place.is_file()] == []
    finally:
        await one.storage.aclose()
        await two.storage.aclose()


async def test_spoilt_shared_archives_are_not_used(host, archive, tmp_path) -> None:
    """Another version, a damaged archive or none under the key: the version is missing, and nothing is made of it."""
    shared = host.settings.model_copy(
        update={"artifacts": str(tmp_path / "shared"), "database_url": f"sqlite:///{tmp_path / 'one.db'}"}
    )
    one = Host(shared, entry_points=False)
    two = Host(shared.model_copy(update={"state_dir": tmp_path / "state2"}), entry_points=False)
    try:
        await one.projects.upload("acme", archive(), who="ann")
        kept = next(place for place in (tmp_path / "shared").rglob("*") if place.is_file())
        for data in (archive(body="Evil.").read_bytes(), archive("other").read_bytes(), b"no zip", None):
            if data is None:
                kept.unlink()
            else:
                kept.write_bytes(data)
            with pytest.raises(VersionMissing):
                await two.projects.file("acme", "brief", "SKILL.md")
            assert (await two.projects.view("acme", None)).resolve("brief").code == "unknown_skill"
        assert [p for p in (tmp_path / "state2" / "projects").rglob("*") if p.is_file()] == []
    finally:
        await one.storage.aclose()
        await two.storage.aclose()


async def test_files_that_vanished_are_told(host, archive) -> None:
    """Without a shared storage a version whose folder is gone says so, to the operator."""
    report = await host.projects.upload("acme", archive(), who="ann")
    root = host.projects._folders.root("acme", "brief", report.version)
    remove_tree(root)
    with pytest.raises(VersionMissing) as caught:
        await pin(host.projects, "acme", "brief", "job")
    assert (caught.value.code, caught.value.who) == ("version_missing", "operator")


async def test_a_missing_version_costs_only_itself(archive, tmp_path, caplog) -> None:
    """The project's other skills stay, no weaker skill takes the place, and it comes back with its files."""
    folder = tmp_path / "plugin" / "brief"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: brief\ndescription: A plugin's.\n---\nWeak.\n")

    class Plugin:
        @hookimpl
        def kdskills_skill_roots(self, descriptor):
            return [SkillRoot("plugin://x", folder.parent, "x", "plugin")]

    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=None)
    host = Host(settings, plugins=[Plugin()], entry_points=False)
    try:
        await host.projects.upload("acme", archive("other"), who="ann")
        assert (await answer(host)).skill.layer == "plugin"
        report = await host.projects.upload("acme", archive(), who="ann")
        assert (await answer(host)).skill.layer == "project"
        root = host.projects._folders.root("acme", "brief", report.version)
        root.rename(tmp_path / "aside")
        host.projects._views._kept.clear()
        assert (await answer(host)).code == "plugin_denied"
        assert isinstance(await answer(host, "other"), Granted)
        assert report.version in caplog.text
        (tmp_path / "aside").rename(root)
        assert (await answer(host)).skill.layer == "project"
    finally:
        await host.storage.aclose()


async def test_callers_who_go_away(host, archive) -> None:
    """Cancelled at any moment an upload is done or not begun: no version lacks a file, and no scratch stays."""
    places = [archive(body=f"Text {n}.", **{f"f{m}": "x" * 1000 for m in range(20)}) for n in range(12)]
    for number, place in enumerate(places):
        task = asyncio.create_task(host.projects.upload("acme", place, who="ann"))
        await asyncio.sleep(number * 0.002)
        task.cancel()
        task.cancel()
        await asyncio.wait([task])
    await host.projects.upload("acme", places[0], who="ann")
    for found in await host.projects.versions("acme", "brief"):
        folder = host.projects._folders.folder("acme", "brief", found.version)
        assert read_tree(folder) == found.files
    assert [path for path in on_disk(host) if path.startswith(".scratch")] == []
    assert await versions_of(host)


async def test_a_step_is_not_interrupted() -> None:
    """What runs in a thread is waited for, however often its caller is cancelled; its error is not lost as a warning."""
    ended = []

    async def step() -> None:
        await asyncio.sleep(0.05)
        ended.append(True)
        raise BufferError

    task = asyncio.create_task(to_its_end(step()))
    for _ in range(3):
        await asyncio.sleep(0.001)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    with pytest.raises(BufferError):
        await to_its_end(step())
