"""Discovery finds skills where the layouts say, enters nothing else, and survives whatever lies around."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.skills import discovery
from kdskills.skills.discovery import ScanLimits
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot


def write(root, path, more="", name=None):
    """Write one good skill."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    text = f"---\nname: {name or folder.name}\ndescription: does things\n{more}---\nBody.\n"
    (folder / "SKILL.md").write_text(text)
    return folder


def find(path, kind="bundle", limits=discovery.SCAN_LIMITS, **more):
    """Return the snapshot over one root."""
    return SkillRegistry([SkillRoot("x://", path, kind, kind, **more)], index_dir=None, limits=limits).snapshot()


def notes(found):
    """Return codes and paths of findings."""
    return [(note.code, note.path) for note in found.diagnostics]


# ---- layouts ----------------------------------------------------------------------------------------------------


def test_flat_and_namespaced_layouts(tmp_path):
    """`<a>/SKILL.md` is in `public`, `<a>/<b>/SKILL.md` in `<a>`."""
    write(tmp_path, "flat")
    write(tmp_path, "acme/brief")
    assert list(find(tmp_path).skills) == ["acme.brief", "public.flat"]


def test_a_bundle_has_no_third_level(tmp_path):
    """Deeper folders of a bundle are no skills."""
    write(tmp_path, "a/b/c")
    assert list(find(tmp_path).skills) == []


@pytest.mark.parametrize("kind", ["user", "project"])
def test_user_and_project_roots_go_six_deep(tmp_path, kind):
    """Any depth up to six, all in the root's namespace; the seventh is not looked at."""
    write(tmp_path, "1/2/3/4/5/six")
    write(tmp_path, "one")
    write(tmp_path, "a/b/c/d/e/f/seven")
    assert list(find(tmp_path, kind).skills) == ["public.one", "public.six"]
    assert list(find(tmp_path, kind, namespace="mine").skills) == ["mine.one", "mine.six"]


def test_a_fixed_namespace_beats_the_field(tmp_path):
    """In user and project roots a namespace field is ignored with `namespace_ignored`, in a bundle it counts."""
    write(tmp_path, "one", more="namespace: sneaky\n")
    found = find(tmp_path, "project")
    assert (list(found.skills), notes(found)) == (["public.one"], [("namespace_ignored", "one/SKILL.md")])
    assert list(find(tmp_path).skills) == ["sneaky.one"]


def test_a_skill_file_in_the_root_itself_is_not_loaded(tmp_path):
    """`root_is_skill` warns; the skills below it are still found."""
    write(tmp_path, ".", name="root")
    write(tmp_path, "flat")
    found = find(tmp_path)
    assert (list(found.skills), notes(found)) == (["public.flat"], [("root_is_skill", "SKILL.md")])


def test_lower_case_skill_files_count_and_upper_case_wins(tmp_path):
    """`SKILL.md`, else `skill.md`."""
    (write(tmp_path, "low") / "SKILL.md").rename(tmp_path / "low/skill.md")
    both = write(tmp_path, "both")
    (both / "skill.md").write_text("no frontmatter")
    found = find(tmp_path)
    assert (list(found.skills), notes(found)) == (["public.both", "public.low"], [("file_name_case", "low/skill.md")])


def test_a_folder_with_only_skill_yaml_is_told_so(tmp_path):
    """`skill_yaml` for what no file of YAML can be."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old/skill.yaml").write_text("name: old\n")
    found = find(tmp_path)
    assert (list(found.skills), list(found.invalid), notes(found)) == ([], [], [("skill_yaml", "old/skill.yaml")])


def test_deeper_skill_files_are_resources(tmp_path):
    """A skill owns its subtree: `nested_skill` informs, nothing is loaded."""
    write(tmp_path, "acme/outer")
    write(tmp_path, "acme/outer/examples/inner")
    write(tmp_path, "flat")
    write(tmp_path, "flat/inner")
    found = find(tmp_path)
    assert list(found.skills) == ["acme.outer", "public.flat"]
    assert notes(found) == [
        ("nested_skill", "acme/outer/examples/inner/SKILL.md"),
        ("nested_skill", "flat/inner/SKILL.md"),
    ]


def test_nested_roots_make_them_skills_of_the_owners_namespace(tmp_path):
    """With `nested` deeper skill files are separate skills, in the namespace their owner ended up in."""
    write(tmp_path, "acme/outer")
    write(tmp_path, "acme/outer/inner/innermost")
    write(tmp_path, "acme/outer/inner")
    write(tmp_path, "flat", more="namespace: own\n")
    write(tmp_path, "flat/sub/deep")
    found = find(tmp_path, nested=True)
    assert list(found.skills) == ["acme.inner", "acme.innermost", "acme.outer", "own.deep", "own.flat"]
    assert notes(found) == []


def test_a_nested_skill_that_goes_falls_back_to_its_owner(tmp_path):
    """Refreshing sees nested skills come and go, and owners move them to another namespace."""
    write(tmp_path, "acme/outer")
    inner = write(tmp_path, "acme/outer/inner")
    registry = SkillRegistry([SkillRoot("x://", tmp_path, "x", "bundle", nested=True)], index_dir=None)
    assert list(registry.snapshot().skills) == ["acme.inner", "acme.outer"]
    write(tmp_path, "acme/outer", more="namespace: other\n")
    assert registry.refresh().added == ("other.inner", "other.outer")
    (inner / "SKILL.md").unlink()
    assert registry.refresh().removed == ("other.inner",)
    write(tmp_path, "acme/outer/inner")
    assert registry.refresh().added == ("other.inner",)


# ---- what is not entered ----------------------------------------------------------------------------------------


def test_hidden_and_generated_folders_are_not_entered(tmp_path):
    """Dot folders, node_modules and __pycache__ are passed over in silence, at every level."""
    for name in (".git", ".x", "node_modules", "__pycache__"):
        write(tmp_path, name)
        write(tmp_path, f"acme/{name}")
        write(tmp_path, f"acme/good/{name}/inner")
    write(tmp_path, "acme/good")
    found = find(tmp_path)
    assert (list(found.skills), notes(found)) == (["acme.good"], [])


def test_linked_folders_are_not_entered(tmp_path):
    """A linked folder is named with `symlink_skipped`, wherever it leads, and in skills too."""
    outside = write(tmp_path / "outside", "secret")
    root = tmp_path / "root"
    write(root, "acme/good")
    (root / "flat").symlink_to(outside)
    (root / "acme/linked").symlink_to(root / "acme/good")
    (root / "acme/good/refs").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root)
    (root / "self").symlink_to("self")
    found = find(root)
    assert list(found.skills) == ["acme.good"]
    assert sorted(notes(found)) == [
        ("symlink_skipped", "acme/good/refs"),
        ("symlink_skipped", "acme/linked"),
        ("symlink_skipped", "flat"),
        ("symlink_skipped", "loop"),
    ]


def test_the_root_may_be_a_link(tmp_path):
    """The root is resolved once; paths of skills are canonical."""
    write(tmp_path / "real", "flat")
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    found = find(tmp_path / "alias")
    assert found.skills["public.flat"].path == tmp_path / "real/flat/SKILL.md"


def test_a_root_that_is_a_file_is_missing(tmp_path):
    """What is no folder holds no skills."""
    (tmp_path / "file").write_text("")
    assert notes(find(tmp_path / "file")) == [("root_missing", None)]


# ---- one bad neighbour ------------------------------------------------------------------------------------------


def _link(folder):
    (folder / "SKILL.md").rename(folder / "other.md")
    (folder / "SKILL.md").symlink_to("other.md")


def _fifo(folder):
    (folder / "SKILL.md").unlink()
    os.mkfifo(folder / "SKILL.md")


def _folder(folder):
    (folder / "SKILL.md").unlink()
    (folder / "SKILL.md").mkdir()


def _socket(folder):
    (folder / "SKILL.md").unlink()
    here = Path.cwd()
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("SKILL.md")
    os.chdir(here)


def _tools(text):
    return lambda folder: (folder / "tools.yaml").write_bytes(text)


def _linked_tools(folder):
    (folder / "real.yaml").write_text("[]")
    (folder / "tools.yaml").symlink_to("real.yaml")


def _text(data):
    return lambda folder: (folder / "SKILL.md").write_bytes(data)


BOMB = "".join(
    f"{'abcdefghi'[n]}: &{'abcdefghi'[n]} [{','.join(['*' + 'abcdefghi'[n - 1]] * 9) if n else 'lol'}]\n"
    for n in range(9)
)

BAD = {
    "symlink": (_link, "symlink"),
    "fifo": (_fifo, "unreadable"),
    "socket": (_socket, "unreadable"),
    "nul": (_text(b"---\nname: bad\ndescription: d\n---\n\0"), "nul_byte"),
    "not utf-8": (_text(b"---\nname: bad\ndescription: \xff\n---\nx"), "not_utf8"),
    "too large": (_text(b"---\nname: bad\ndescription: d\n---\n" + b"x" * 10_000_000), "too_large"),
    "empty": (_text(b""), "no_frontmatter"),
    "bomb": (_text(f"---\n{BOMB}description: d\n---\nx\n".encode()), "invalid_yaml"),
    "path in the name": (_text(b"---\nname: ../../etc\ndescription: d\n---\nx"), "name_unsafe"),
    "no description": (_text(b"---\nname: bad\n---\nx"), "description_missing"),
    "reserved": (_text(b"---\nname: bad\nnamespace: sk\ndescription: d\n---\nx"), "namespace_reserved"),
    "tools": (_tools(b"{"), "tools_invalid"),
    "tools nul": (_tools(b"\0"), "tools_invalid"),
    "tools huge": (_tools(b"- a\n" * 1_000_000), "tools_invalid"),
    "tools linked": (_linked_tools, "tools_invalid"),
    "tools a folder": (lambda folder: (folder / "tools.yaml").mkdir(), "tools_invalid"),
    "a folder": (_folder, "unreadable"),
}


@pytest.mark.parametrize(("spoil", "code"), BAD.values(), ids=BAD.keys())
def test_a_bad_skill_costs_only_itself(tmp_path, spoil, code):
    """Whatever is wrong with one skill, its neighbours load, and a second start says the same."""
    write(tmp_path / "root", "acme/aaa")
    spoil(write(tmp_path / "root", "acme/bad"))
    write(tmp_path / "root", "acme/zzz")
    root = SkillRoot("x://", tmp_path / "root", "x", "bundle")
    starts = [SkillRegistry([root], index_dir=tmp_path / "index").snapshot() for _ in range(2)]
    assert {"acme.aaa", "acme.zzz"} <= starts[0].skills.keys()
    assert (starts[0].invalid, starts[0].diagnostics) == (starts[1].invalid, starts[1].diagnostics)
    (refused,) = starts[0].invalid.values()
    assert code in [note.code for note in refused.diagnostics]
    assert refused.path == "acme/bad/SKILL.md"


def test_unusable_compact_and_sources_cost_only_themselves(tmp_path):
    """A broken `compact.md` warns and the body serves; sources are understood on first use."""
    folder = write(tmp_path, "acme/brief")
    (folder / "compact.md").write_bytes(b"\xff")
    (folder / "sources.yaml").write_bytes(b"{")
    found = find(tmp_path)
    skill = found.skills["acme.brief"]
    assert notes(found) == [("compact_invalid", "acme/brief/compact.md")]
    assert (skill.compact, skill.sources) == (None, ())
    assert [note.code for note in skill.content.read_sources().diagnostics] == ["sources_invalid"]


def test_linked_companions_are_not_read(tmp_path):
    """A link beside the skill file is no companion."""
    (tmp_path / "secret").write_text("secret")
    folder = write(tmp_path / "root", "acme/brief")
    (folder / "compact.md").symlink_to(tmp_path / "secret")
    found = find(tmp_path / "root")
    assert (found.skills["acme.brief"].compact, notes(found)[0][0]) == (None, "compact_invalid")


def test_a_folder_that_cannot_be_listed_is_a_finding_and_tried_again(tmp_path, monkeypatch):
    """An error of the system costs that folder only, and the next refresh looks again."""
    write(tmp_path, "acme/aaa")
    write(tmp_path, "other/bbb")
    real = discovery.list_folder
    broken = {"acme"}

    def fail(descriptor, path, stamps=None):
        if path in broken:
            raise PermissionError(13, "Permission denied")
        return real(descriptor, path, stamps)

    monkeypatch.setattr(discovery, "list_folder", fail)
    registry = SkillRegistry([SkillRoot("x://", tmp_path, "x", "bundle")], index_dir=None)
    assert (list(registry.snapshot().skills), notes(registry.snapshot())) == (["other.bbb"], [("unreadable", "acme")])
    broken.clear()
    assert registry.refresh().added == ("acme.aaa",)


def test_names_that_are_no_utf8_do_no_harm(tmp_path):
    """Any bytes in names of folders and files give skills or findings that can be printed and stored."""
    odd = os.fsdecode(b"caf\xe9")
    write(tmp_path / "root", f"acme/{odd}", name="coffee")
    write(tmp_path / "root", f"{odd}/inner")
    write(tmp_path / "root", "acme/good")
    (tmp_path / "root/acme/good" / odd).write_text("x")
    root = SkillRoot("x://", tmp_path / "root", "x", "bundle")
    starts = [SkillRegistry([root], index_dir=tmp_path / "index").snapshot() for _ in range(2)]
    assert "acme.good" in starts[0].skills
    assert starts[0].skills == starts[1].skills
    for note in starts[0].diagnostics:
        str(note).encode()
    assert [skill.body for skill in starts[1].skills.values()] == ["Body."] * len(starts[1].skills)


# ---- bounds -----------------------------------------------------------------------------------------------------


def test_bounds_cut_at_one_place_in_sorted_order(tmp_path):
    """The same skills are left out each time, with `scan_limit`, from the index too."""
    for name in "ebdac":
        write(tmp_path / "root", f"acme/{name}")
    root = SkillRoot("x://", tmp_path / "root", "x", "bundle")
    for limits, expected in (
        (ScanLimits(skills=3), "abc"),
        (ScanLimits(folders=4), "ab"),
        (ScanLimits(skills=5), "abcde"),
    ):
        for _ in range(2):
            found = SkillRegistry([root], index_dir=tmp_path / expected, limits=limits).snapshot()
            assert "".join(skill.id for skill in found.skills.values()) == expected
            assert ([code for code, _ in notes(found)] == ["scan_limit"]) == (expected != "abcde")


def test_a_skill_with_too_many_files_is_named(tmp_path, monkeypatch):
    """More files or bytes than a skill may have: `skill_large`, and it still loads."""
    folder = write(tmp_path, "acme/many")
    (folder / "data").mkdir()
    for number in range(512):
        (folder / "data" / str(number)).touch()
    big = write(tmp_path, "acme/big")
    with (big / "blob").open("wb") as stream:
        stream.truncate(16 * 1024 * 1024)
    write(tmp_path, "acme/fine")
    found = find(tmp_path)
    assert (len(found.skills), notes(found)) == (3, [("skill_large", "acme/big"), ("skill_large", "acme/many")])


def test_a_skill_of_endless_folders_is_bounded(tmp_path):
    """Folders in folders cost bounded work and descriptors, and no neighbour."""
    deep = write(tmp_path, "acme/deep")
    here = Path.cwd()
    os.chdir(deep)
    for _ in range(300):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(here)
    write(tmp_path, "acme/fine")
    found = find(tmp_path)
    assert list(found.skills) == ["acme.deep", "acme.fine"]
    assert [code for code, _ in notes(found)] == ["unreadable"]


def test_a_change_below_a_skill_is_noticed(tmp_path):
    """A new nested skill file or a link below a skill is found by the next refresh."""
    folder = write(tmp_path, "acme/outer")
    (folder / "references").mkdir()
    registry = SkillRegistry([SkillRoot("x://", tmp_path, "x", "bundle")], index_dir=None)
    assert registry.snapshot().diagnostics == ()
    (folder / "references/SKILL.md").write_text("x")
    registry.refresh()
    assert notes(registry.snapshot()) == [("nested_skill", "acme/outer/references/SKILL.md")]


def test_no_descriptor_is_left_open(tmp_path):
    """Discovery closes what it opens, with every kind of trouble around."""
    for name, (spoil, _) in BAD.items():
        spoil(write(tmp_path, f"acme/{name.replace(' ', '-')}"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    find(tmp_path)
    find(tmp_path, nested=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- properties -------------------------------------------------------------------------------------------------


NAMES = st.sampled_from(
    ["a", "b", "SKILL.md", "skill.md", "skill.yaml", "tools.yaml", "compact.md", ".x", "é", "skills", "A b"]
)
CONTENT = st.sampled_from(
    ["", "[]", "x", "---\nname: a\ndescription: d\n---\nB\n", "---\nname: a\nid: b\ndescription: d\n---\nB\n"]
)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=4).map(tuple), st.one_of(CONTENT, st.just(None), st.just(42)), max_size=14
)


def _plant(root, tree):
    for parts, value in tree.items():
        place = root.joinpath(*parts)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if value is None:
                place.symlink_to("b")
            elif value == 42:
                place.mkdir()
            else:
                place.write_text(value)
        except OSError:
            continue  # a file where a folder should be: the tree is what could be planted


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=TREES, second=TREES, kind=st.sampled_from(["bundle", "user"]), nested=st.booleans())
def test_any_tree_is_survived_and_refreshed_rightly(tmp_path_factory, first, second, kind, nested):
    """No tree raises; a refresh and a warm start after any change say what a fresh look says."""
    base = tmp_path_factory.mktemp("tree")
    (base / "root").mkdir()
    root = SkillRoot("x://", base / "root", "x", kind, nested=nested)
    _plant(base / "root", first)
    registry = SkillRegistry([root], index_dir=base / "index")
    registry.snapshot()
    _plant(base / "root", second)
    registry.refresh()
    fresh = SkillRegistry([root], index_dir=None).snapshot()
    warm = SkillRegistry([root], index_dir=base / "index").snapshot()
    for found in (registry.snapshot(), warm):
        assert dict(found.skills) == dict(fresh.skills)
        assert (found.invalid, found.diagnostics, found.digest) == (fresh.invalid, fresh.diagnostics, fresh.digest)


def test_listing_counts_what_is_there(tmp_path):
    """Counts and sizes cover files and links of the folder itself."""
    (tmp_path / "SKILL.md").write_bytes(b"123")
    (tmp_path / "data").write_bytes(b"45")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "sub").mkdir()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        got = discovery.list_folder(descriptor, "")
    finally:
        os.close(descriptor)
    assert (got.count, got.size, got.folders, got.files) == (3, 3 + 2 + len("data"), ["sub"], {"SKILL.md": True})


def test_a_folder_that_cannot_be_read_is_named_with_the_systems_reason(tmp_path):
    """What a person can act on stands in the finding: the folder and why the system refused."""
    from kdskills.errors import FileRefused
    from kdskills.skills.discovery import unreadable_note

    refusal = FileRefused("x", code="unreadable")
    refusal.__cause__ = PermissionError(13, "Permission denied")
    expected = "The folder acme/locked cannot be read: Permission denied."
    assert unreadable_note("acme/locked", refusal).message == expected
    swapped = FileRefused("x", code="symlink")
    assert "became something else" in unreadable_note("acme/locked", swapped).message


@pytest.mark.parametrize(("late", "again"), [(0, 2), (1_000_000_000, 2), (3_000_000_000, 0)])
def test_a_folder_changed_just_before_the_walk_is_listed_again(tmp_path, late, again):
    """Stamps less than two seconds older than the walk prove nothing: a skill added in the same tick must be found."""
    (tmp_path / "acme").mkdir()

    def load(descriptor, path, namespace, found, subtree, old):
        raise AssertionError("there is no skill here")

    def walk(old, clock):
        scanner = discovery.RootScanner(
            SkillRoot("x://", tmp_path, "bundle", "bundle"), str(tmp_path), old, load, lambda: clock
        )
        return scanner, scanner.run()

    newest = max(place.stat().st_ctime_ns for place in (tmp_path, tmp_path / "acme"))
    _, first = walk(None, newest + late)
    second, _ = walk(first, newest + 10_000_000_000)
    assert len(second.listed) == again
