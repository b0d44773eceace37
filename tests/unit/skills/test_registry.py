"""The registry finds skills once, keeps them, and notices every change."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kdskills.errors import CallerMustAct, Diagnostic, RootChanged
from kdskills.skills.index import IndexStore
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot

BODY = "---\nname: {name}\ndescription: {description}\n{more}---\n{body}\n"


def write(root, path, description="does things", body="Body.", more="", name=None):
    """Write a skill's folder, old enough that its stamp proves something."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    text = BODY.format(name=name or folder.name, description=description, body=body, more=more)
    (folder / "SKILL.md").write_text(text)
    age(root)
    return folder


def age(root, seconds=60):
    """Set every modification time below *root* back."""
    old = time.time() - seconds
    for place in (*Path(root).rglob("*"), Path(root)):
        if not place.is_symlink():
            os.utime(place, (old, old))


def bundle(path, kind="bundle", label=None, **more):
    """Return a root over *path*."""
    return SkillRoot(f"{kind}://skills", path, label or kind, kind, **more)


def codes(diagnostics):
    """Return the codes of findings, sorted."""
    return sorted(note.code for note in diagnostics)


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "skills"
    write(folder, "acme/brief")
    write(folder, "acme/chart")
    write(folder, "flat")
    return folder


@pytest.fixture
def registry(root, tmp_path):
    return SkillRegistry([bundle(root)], index_dir=tmp_path / "index")


# ---- snapshots --------------------------------------------------------------------------------------------------


def test_a_snapshot_is_sorted_and_immutable(registry):
    """Skills are sorted by full id and cannot be changed."""
    skills = registry.snapshot().skills
    assert list(skills) == ["acme.brief", "acme.chart", "public.flat"]
    with pytest.raises(TypeError):
        skills["x.y"] = None


def test_it_is_the_same_object_until_something_changes(registry, root):
    """A refresh without changes keeps snapshot and generation; a change gives new ones."""
    first = registry.snapshot()
    assert registry.refresh().generation == first.generation
    assert registry.snapshot() is first
    write(root, "acme/new")
    registry.refresh()
    assert registry.snapshot() is not first
    assert registry.snapshot().generation == first.generation + 1


def test_older_snapshots_keep_theirs(registry, root):
    """What somebody holds does not change under him."""
    first = registry.snapshot()
    write(root, "acme/new")
    registry.refresh()
    assert "acme.new" not in first.skills
    assert "acme.new" in registry.snapshot().skills


def test_nothing_is_read_before_the_first_snapshot(tmp_path):
    """Making a registry costs nothing; a root may appear later."""
    registry = SkillRegistry([bundle(tmp_path / "later")], index_dir=None)
    write(tmp_path / "later", "acme/brief")
    assert list(registry.snapshot().skills) == ["acme.brief"]


def test_facts_of_a_skill(registry, root):
    """A registered skill knows its layer, path, size, digest and texts."""
    skill = registry.snapshot().skills["acme.brief"]
    file = root / "acme/brief/SKILL.md"
    assert (skill.layer, skill.path, skill.size) == ("bundle", file, file.stat().st_size)
    assert (skill.body, skill.compact, skill.sources, skill.location) == (
        "Body.",
        None,
        (),
        "skill://acme/brief/SKILL.md",
    )
    assert skill.digest.startswith("sha256:")
    assert len(skill.digest) == 71


# ---- refresh ----------------------------------------------------------------------------------------------------


def test_a_refresh_reports_what_was_added_changed_and_removed(registry, root):
    """The report names full ids, and unchanged skills stay the very objects."""
    before = registry.snapshot().skills
    write(root, "acme/new")
    write(root, "acme/brief", description="other")
    (root / "flat" / "SKILL.md").unlink()
    report = registry.refresh()
    assert (report.added, report.changed, report.removed) == (("acme.new",), ("acme.brief",), ("public.flat",))
    assert registry.snapshot().skills["acme.chart"] is before["acme.chart"]
    assert registry.snapshot().skills["acme.brief"].description == "other"


def test_a_touched_file_with_the_same_bytes_is_no_change(registry, root):
    """New times alone change nothing."""
    first = registry.snapshot()
    os.utime(root / "acme/brief/SKILL.md")
    assert registry.refresh().changed == ()
    assert registry.snapshot() is first


@pytest.mark.parametrize("name", ["compact.md", "tools.yaml", "sources.yaml"])
def test_companions_count_as_the_skill(registry, root, name):
    """Adding, changing and removing a companion is a change of the skill and of the root's digest."""
    seen = [registry.snapshot().roots[0].digest]
    for text in ("[]\n", "[ ]\n", None):
        file = root / "acme/brief" / name
        file.unlink() if text is None else file.write_text(text)
        assert registry.refresh().changed == ("acme.brief",)
        seen.append(registry.snapshot().roots[0].digest)
    assert (len(set(seen)), seen[0] == seen[-1]) == (3, True)


def test_a_same_size_edit_within_one_tick_is_seen(registry, root):
    """Bytes changed with equal size and times right after discovery are found by the next refresh."""
    file = root / "acme/brief/SKILL.md"
    text = file.read_text()
    file.write_text(text.replace("does things", "does stuffs"))
    registry.snapshot()
    facts = file.stat()
    with file.open("r+") as stream:  # the same inode
        stream.write(text.replace("does things", "does thongs"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert registry.refresh().changed == ("acme.brief",)


def test_an_edit_that_puts_old_times_back_is_seen(registry, root):
    """A tool that restores modification times hides nothing."""
    file = root / "acme/brief/SKILL.md"
    registry.snapshot()
    facts = file.stat()
    with file.open("r+") as stream:
        stream.write(file.read_text().replace("does things", "does stuffs"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert registry.refresh().changed == ("acme.brief",)


def test_a_failing_refresh_keeps_the_old_snapshot(root, tmp_path):
    """The error reaches the caller; what was known stays."""
    fail = []

    def check(skill):
        if fail:
            raise OSError("the disk is gone")
        return ()

    registry = SkillRegistry([bundle(root)], index_dir=None, check=check)
    first = registry.snapshot()
    fail.append(True)
    write(root, "acme/new")
    with pytest.raises(OSError, match="disk is gone"):
        registry.refresh()
    assert registry.snapshot() is first
    fail.clear()
    assert registry.refresh().added == ("acme.new",)


def test_clear_cache_gives_a_new_object(registry):
    """After `clear_cache` the next snapshot is another object that says the same."""
    first = registry.snapshot()
    registry.clear_cache()
    second = registry.snapshot()
    assert (second is first, second.skills == first.skills, second.digest == first.digest) == (False, True, True)
    assert second.generation > first.generation


# ---- threads ----------------------------------------------------------------------------------------------------


def _together(count, work):
    results, errors = [], []

    def run():
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the assertion
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


def test_threads_share_one_first_run(root):
    """Many first callers cause one discovery and get one object."""
    calls = []

    def check(skill):
        calls.append(skill.full_id)
        time.sleep(0.02)
        return ()

    registry = SkillRegistry([bundle(root)], index_dir=None, check=check)
    results, errors = _together(8, registry.snapshot)
    assert (errors, len({id(result) for result in results}), sorted(calls)) == (
        [],
        1,
        ["acme.brief", "acme.chart", "public.flat"],
    )


def test_threads_share_one_refresh_and_its_failure(root):
    """Callers who come while a refresh runs get its report, or its error."""
    begun, go, fail = threading.Event(), threading.Event(), []

    def check(skill):
        begun.set()
        go.wait(60)
        if fail:
            raise OSError("no")
        return ()

    def let_go_when_all_wait():
        """Wait until one caller looks and the four others wait for it."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            run = registry._run
            if run is not None and len(run.done._cond._waiters) == 4:
                break
            time.sleep(0.005)
        go.set()

    go.set()
    registry = SkillRegistry([bundle(root)], index_dir=None, check=check)
    registry.snapshot()
    for failing in (False, True):
        fail[:] = [True] * failing
        write(root, f"acme/new-{failing}".lower())
        begun.clear()
        go.clear()
        watcher = threading.Thread(target=let_go_when_all_wait)
        watcher.start()
        results, errors = _together(5, registry.refresh)
        watcher.join()
        if failing:
            assert (results, {str(error) for error in errors}) == ([], {"no"})
        else:
            assert (errors, {report.added for report in results}) == ([], {("acme.new-false",)})


def test_refreshing_while_reading_and_clearing_never_breaks(registry, root):
    """Readers, refreshers and clearers at once see whole snapshots only."""
    stop = time.monotonic() + 0.5
    known = {"acme.brief", "acme.chart", "public.flat"}

    def work(kind):
        while time.monotonic() < stop:
            if kind == "read":
                assert known <= registry.snapshot().skills.keys()
            elif kind == "refresh":
                registry.refresh()
            elif kind == "clear":
                registry.clear_cache()
            else:
                write(root, "acme/new", description=str(time.monotonic_ns()))

    kinds = iter(["read", "read", "refresh", "clear", "write"])
    assert _together(5, lambda: work(next(kinds)))[1] == []


def test_a_check_cannot_use_the_registry_that_asks_it(root):
    """A check calling back is told so instead of waiting for itself for ever."""
    made = []
    registry = SkillRegistry([bundle(root)], index_dir=None, check=lambda skill: made[0].refresh() and ())
    made.append(registry)
    with pytest.raises(CallerMustAct, match="calling it"):
        registry.snapshot()


# ---- several roots ----------------------------------------------------------------------------------------------


def test_the_last_root_wins_a_full_id(tmp_path):
    """Kinds decide, not the order given; the winner replaces the whole skill and both are named."""
    write(tmp_path / "user", "flat", description="user's", more="tags: [a]\n")
    write(tmp_path / "bundle", "flat", description="bundle's")
    roots = [bundle(tmp_path / "bundle", label="press"), bundle(tmp_path / "user", "user", label="mine")]
    found = SkillRegistry(roots, index_dir=None).snapshot()
    assert (found.skills["public.flat"].description, found.skills["public.flat"].tags) == ("bundle's", ())
    assert found.origins["public.flat"].label == "press"
    note = next(note for note in found.diagnostics if note.code == "skill_overridden")
    assert (note.severity, note.ref) == ("info", "public.flat")
    assert "press" in note.message
    assert "mine" in note.message


def test_within_a_root_the_later_path_wins(tmp_path):
    """Two folders of one id: the later path is used, and a finding says so."""
    write(tmp_path, "one", more="id: same\n", description="first")
    write(tmp_path, "two", more="id: same\n", description="second")
    found = SkillRegistry([bundle(tmp_path)], index_dir=None).snapshot()
    assert found.skills["public.same"].description == "second"
    note = next(note for note in found.diagnostics if note.code == "duplicate_id")
    assert (note.severity, note.path, note.ref) == ("warning", "two/SKILL.md", "public.same")


def test_a_refused_skill_does_not_let_a_weaker_one_shine_through(tmp_path):
    """A bad skill stays known as invalid, and the good one below it stays hidden."""
    write(tmp_path / "user", "flat")
    (tmp_path / "bundle" / "flat").mkdir(parents=True)
    (tmp_path / "bundle" / "flat" / "SKILL.md").write_text("no frontmatter\n")
    write(tmp_path / "bundle", "good")
    found = SkillRegistry([bundle(tmp_path / "user", "user"), bundle(tmp_path / "bundle")], index_dir=None).snapshot()
    assert (list(found.skills), list(found.invalid)) == (["public.good"], ["public.flat"])
    refused = found.invalid["public.flat"]
    assert (refused.path, refused.root.kind) == ("flat/SKILL.md", "bundle")
    assert codes(refused.diagnostics) == ["no_frontmatter"]
    assert "no_frontmatter" in codes(found.diagnostics)


def test_a_refused_skill_is_known_by_the_id_it_gave_itself(tmp_path):
    """Where the frontmatter can be read, its id counts, so a lost gate opens nothing below."""
    write(tmp_path / "user", "gated", more="")
    folder = write(tmp_path / "bundle", "other", more="id: gated\n")
    (folder / "tools.yaml").write_text("{broken")
    found = SkillRegistry([bundle(tmp_path / "user", "user"), bundle(tmp_path / "bundle")], index_dir=None).snapshot()
    assert (list(found.skills), list(found.invalid)) == ([], ["public.gated"])
    assert "tools_invalid" in codes(found.invalid["public.gated"].diagnostics)


def test_a_missing_root_is_a_warning_on_the_host_and_an_error_in_a_verified_child(tmp_path):
    """`root_missing` costs nothing but itself; a verified registry calls it an error."""
    write(tmp_path / "there", "flat")
    roots = [bundle(tmp_path / "none", "user"), bundle(tmp_path / "there")]
    host = SkillRegistry(roots, index_dir=None).snapshot()
    child = SkillRegistry(roots, index_dir=None, verified=True).snapshot()
    assert [state.present for state in host.roots] == [False, True]
    assert list(host.skills) == ["public.flat"]
    assert [(n.code, n.severity) for n in host.diagnostics] == [("root_missing", "warning")]
    assert [(n.code, n.severity) for n in child.diagnostics] == [("root_missing", "error")]


def test_a_root_that_comes_and_goes(tmp_path):
    """A missing root is looked for at each refresh."""
    registry = SkillRegistry([bundle(tmp_path / "root")], index_dir=tmp_path / "index")
    assert registry.snapshot().skills == {}
    write(tmp_path / "root", "flat")
    assert registry.refresh().added == ("public.flat",)
    (tmp_path / "root").rename(tmp_path / "away")
    assert registry.refresh().removed == ("public.flat",)
    assert codes(registry.snapshot().diagnostics) == ["root_missing"]


def test_the_digest_of_a_snapshot_says_roots_and_winners(tmp_path):
    """Equal files under equal logical roots give equal digests wherever they lie; another winner gives another."""
    for place in ("one", "two"):
        write(tmp_path / place / "skills", "acme/brief")
    digests = [
        SkillRegistry([bundle(tmp_path / place / "skills")], index_dir=None).snapshot().digest
        for place in ("one", "two")
    ]
    write(tmp_path / "two" / "skills", "acme/brief", description="other")
    digests.append(SkillRegistry([bundle(tmp_path / "two" / "skills")], index_dir=None).snapshot().digest)
    assert (digests[0] == digests[1], digests[1] == digests[2]) == (True, False)


# ---- checks of plugins ------------------------------------------------------------------------------------------


def test_findings_of_a_check_join_and_an_error_refuses(root):
    """A plugin can add findings and refuse a skill, which then is invalid."""

    def check(skill):
        if skill.id == "chart":
            return [Diagnostic("house_rule", "error", "No charts.", ref=skill.full_id)]
        return [Diagnostic("house_style", "warning", "Dull.", ref=skill.full_id)] if skill.id == "flat" else []

    found = SkillRegistry([bundle(root)], index_dir=None, check=check).snapshot()
    assert (list(found.skills), list(found.invalid)) == (["acme.brief", "public.flat"], ["acme.chart"])
    assert codes(found.skills["public.flat"].diagnostics) == ["house_style"]
    assert codes(found.diagnostics) == ["house_rule", "house_style"]


def test_an_unchanged_skill_is_checked_once(root, tmp_path):
    """Checks run for what is new, and their answers are not kept on disk, for plugins may change."""
    calls = []
    make = lambda: SkillRegistry([bundle(root)], index_dir=tmp_path / "i", check=lambda s: calls.append(s.id) or ())
    registry = make()
    registry.snapshot()
    registry.refresh()
    assert sorted(calls) == ["brief", "chart", "flat"]
    make().snapshot()
    assert len(calls) == 6


# ---- texts ------------------------------------------------------------------------------------------------------


def test_texts_are_read_on_first_use(root, tmp_path):
    """A file unreadable by now shows that discovery from the index did not read it."""
    SkillRegistry([bundle(root)], index_dir=tmp_path / "index").snapshot()
    skill = SkillRegistry([bundle(root)], index_dir=tmp_path / "index").snapshot().skills["acme.brief"]
    write(root, "acme/brief", body="Later.")
    assert skill.body == "Later."
    assert codes(skill.content.read_body().diagnostics) == ["stale"]


def test_compact_and_sources_are_read_like_the_body(root, tmp_path):
    """Companions come from their files, and are stale when those change."""
    (root / "acme/brief/compact.md").write_text("Short.\n")
    (root / "acme/brief/sources.yaml").write_text("- sid: 1\n  url: https://example.org/\n  title: T\n")
    age(root)
    skill = SkillRegistry([bundle(root)], index_dir=None).snapshot().skills["acme.brief"]
    assert skill.compact.strip() == "Short."
    assert [dict(row)["title"] for row in skill.sources] == ["T"]
    (root / "acme/brief/compact.md").write_text("Shorter.\n")
    assert codes(skill.content.read_compact().diagnostics) == ["stale"]
    assert skill.content.read_sources().diagnostics == ()


def test_a_verified_registry_refuses_changed_texts(root):
    """In a verified child a changed body is `skill_changed`."""
    skill = SkillRegistry([bundle(root)], index_dir=None, verified=True).snapshot().skills["acme.brief"]
    assert skill.body == "Body."
    write(root, "acme/brief", body="Other.")
    with pytest.raises(RootChanged) as caught:
        skill.body  # noqa: B018 - reading is the deed
    assert caught.value.code == "skill_changed"


def test_the_tree_digest_is_taken_now(root):
    """A skill's tree digest covers all its files as they are."""
    skill = SkillRegistry([bundle(root)], index_dir=None).snapshot().skills["acme.brief"]
    before = skill.tree_digest()
    (root / "acme/brief/scripts").mkdir()
    (root / "acme/brief/scripts/run.py").write_text("print(1)\n")
    assert before != skill.tree_digest()


# ---- what an unchanged look leaves out ----------------------------------------------------------------------------


def test_a_look_that_finds_nothing_new_judges_nothing(root, tmp_path):
    """Without a change the report is empty and the findings of a check stay, though it is not asked again."""
    asked = []

    def check(skill):
        asked.append(skill.full_id)
        return [Diagnostic("odd", "warning", "odd")]

    registry = SkillRegistry([bundle(root)], index_dir=tmp_path / "index", check=check)
    first = registry.snapshot()
    report = registry.refresh()
    assert (report.added, report.changed, report.removed, report.generation) == ((), (), (), first.generation)
    assert (report.diagnostics, registry.snapshot(), len(asked)) == (first.diagnostics, first, 3)


def test_a_second_root_that_changes_is_seen_though_the_first_did_not(tmp_path):
    """One unchanged root is no reason to pass over another."""
    write(tmp_path / "one", "acme/brief")
    write(tmp_path / "two", "acme/chart")
    registry = SkillRegistry([bundle(tmp_path / "one"), bundle(tmp_path / "two")], index_dir=None)
    registry.snapshot()
    write(tmp_path / "two", "acme/chart", description="other")
    assert registry.refresh().changed == ("acme.chart",)
    shutil.rmtree(tmp_path / "two")
    assert registry.refresh().removed == ("acme.chart",)


def test_looking_again_at_one_young_file_writes_no_index(root, tmp_path, monkeypatch):
    """A file that changed a moment ago is hashed at each look; that alone is no reason to write all skills again."""
    for number in range(120):
        write(root, f"acme/s{number:03}")
    registry = SkillRegistry([bundle(root)], index_dir=tmp_path / "index")
    registry.snapshot()
    saved = []
    monkeypatch.setattr(IndexStore, "save", lambda *given: saved.append(given))
    (root / "acme/brief/SKILL.md").write_text(BODY.format(name="brief", description="new", body="B", more=""))
    assert [registry.refresh().changed for _ in range(5)] == [("acme.brief",), (), (), (), ()]
    assert saved == []
    for number in range(3):
        (root / f"acme/s{number:03}/SKILL.md").write_text(BODY.format(name="x", description="new", body="B", more=""))
    registry.refresh()
    assert len(saved) == 1
