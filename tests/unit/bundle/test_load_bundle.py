"""Loading bundles: which file, what it may do, and what it cannot talk the loader into."""

from __future__ import annotations

import json
import linecache
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kdskills.bundle import AgentRules, Bundle, SkillsDescriptor, load_bundle
from kdskills.errors import BundleError, DescriptorError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty bundle folder."""
    path = tmp_path / "press"
    path.mkdir()
    return path


def write(folder: Path, name: str, text: str | bytes) -> Path:
    """Write a file of the bundle."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(folder: Path, **options) -> BundleError:
    """Return the error loading raises."""
    with pytest.raises(BundleError) as caught:
        load_bundle(folder, **options)
    assert caught.value.who == "author"
    return caught.value


def wrong(folder: Path, **options) -> DescriptorError:
    """Return the descriptor's error loading raises; it names the file, whose author must mend it."""
    with pytest.raises(DescriptorError) as caught:
        load_bundle(folder, **options)
    assert caught.value.who == "author"
    assert caught.value.details["file"].startswith("skills_descriptor.")
    return caught.value


CONTENT = {"custom_skills_root": "mine", "agents_config": {"w": {"disabled": ["x"]}}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("skills_descriptor.py", 'CUSTOM_SKILLS_ROOT = "mine"\nAGENTS_CONFIG = {"w": {"disabled": ["x"]}}\n'),
        ("skills_descriptor.py", f"SKILLS_DESCRIPTOR = {CONTENT!r}\n"),
        ("skills_descriptor.yaml", "custom_skills_root: mine\nagents_config:\n  w:\n    disabled: x\n"),
        ("skills_descriptor.yaml", "\ufeffCUSTOM_SKILLS_ROOT: mine\r\nAGENTS_CONFIG: {w: {disabled: [x]}}\r\n"),
        ("skills_descriptor.json", json.dumps(CONTENT)),
        ("skills_descriptor.json", "\ufeff" + json.dumps(CONTENT)),
    ],
)
def test_three_kinds_of_descriptor(folder: Path, name: str, text: str) -> None:
    """Python, YAML and JSON say the same thing; the descriptor is fixed to the bundle's folder."""
    write(folder, name, text)
    bundle = load_bundle(folder)
    expected = SkillsDescriptor(
        custom_skills_root="mine", agents_config={"w": AgentRules(disabled=("x",))}, bundle_root=str(folder)
    )
    assert bundle == Bundle(folder, "press", expected)
    assert bundle.descriptor.resolve_root() == folder / "mine"


def test_without_descriptor_skills_must_exist(folder: Path) -> None:
    """A folder without descriptor is a bundle if it has `skills/`."""
    assert refusal(folder).code == "bundle_empty"
    write(folder, "skills", "no folder")
    assert refusal(folder).code == "bundle_empty"
    (folder / "skills").unlink()
    (folder / "skills").mkdir()
    assert load_bundle(folder).descriptor.resolve_root() == folder / "skills"


def test_missing_folder(tmp_path: Path) -> None:
    """No folder, or a file, is `bundle_missing`."""
    assert refusal(tmp_path / "gone").code == "bundle_missing"
    assert refusal(write(tmp_path, "file", "x")).code == "bundle_missing"


def test_two_descriptors_are_ambiguous(folder: Path) -> None:
    """At most one descriptor; a dangling link counts too."""
    write(folder, "skills_descriptor.json", "{}")
    (folder / "skills_descriptor.py").symlink_to(folder / "gone")
    error = refusal(folder)
    assert (error.code, error.details["files"]) == (
        "bundle_ambiguous",
        ["skills_descriptor.py", "skills_descriptor.json"],
    )


@pytest.mark.parametrize("name", ["skills_descriptor.py", "skills_descriptor.yaml", "skills_descriptor.json"])
def test_descriptor_must_be_a_regular_file(folder: Path, name: str) -> None:
    """A link (even into the folder), a folder and a FIFO are refused, and nothing of them is read or run."""
    real = write(folder, "real", "raise SystemExit(7)" if name.endswith("py") else "{}")
    path = folder / name
    path.symlink_to(real)
    assert refusal(folder).code == "bundle_file_refused"
    path.unlink()
    path.mkdir()
    assert refusal(folder).code == "bundle_file_refused"
    path.rmdir()
    os.mkfifo(path)
    assert refusal(folder).code == "bundle_file_refused"


def test_descriptor_too_large(folder: Path) -> None:
    """A descriptor over 1 MiB is refused unread."""
    write(folder, "skills_descriptor.yaml", b"#" * (1024 * 1024 + 1))
    assert refusal(folder).code == "bundle_file_refused"


def test_linked_bundle_folder(folder: Path, tmp_path: Path) -> None:
    """The folder itself may be a link; the bundle is named after what it leads to."""
    (folder / "skills").mkdir()
    (tmp_path / "link").symlink_to(folder)
    assert load_bundle(tmp_path / "link").root == folder
    assert load_bundle(str(folder) + "/.").name == "press"


# ---- Python is code ------------------------------------------------------------------------------------------------


def test_python_sees_its_file_and_leaves_no_traces(folder: Path) -> None:
    """The code has `__file__` and a namespace of its own; modules, path, cwd and bytecode stay as they were."""
    text = "import os.path\nHERE = os.path.dirname(__file__)\nCUSTOM_SKILLS_ROOT = os.path.join(HERE, 'mine')\n"
    write(folder, "skills_descriptor.py", text)
    before = (set(sys.modules), list(sys.path), Path.cwd())
    bundle = load_bundle(folder)
    assert (set(sys.modules), list(sys.path), Path.cwd()) == before
    assert [entry.name for entry in folder.iterdir()] == ["skills_descriptor.py"]
    assert bundle.descriptor.custom_skills_root == "mine"


def test_python_runs_anew_each_time(folder: Path) -> None:
    """Two loads share no namespace."""
    write(
        folder, "skills_descriptor.py", "try:\n    N += 1\nexcept NameError:\n    N = 1\nCUSTOM_SKILLS_ROOT = f'r{N}'\n"
    )
    assert [load_bundle(folder).descriptor.custom_skills_root for _ in range(2)] == ["r1", "r1"]


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        ("x = 1\nraise SystemExit(0)\n", 2, "SystemExit"),
        ("import sys\n\nsys.exit('bye')\n", 3, "SystemExit"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
        ("x = 1\nif x\n", 2, "SyntaxError"),
        ("import no_such_module_anywhere\n", 1, "ModuleNotFoundError"),
        ("x = '\0'\n", 1, "null bytes"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError"),
        ("class E(Exception):\n    pass\nraise E\n", 3, "E"),
    ],
)
def test_python_that_fails(folder: Path, text: str, line: int, kind: str) -> None:
    """Whatever the code raises, `SystemExit` too, is a `BundleError` with file and line."""
    write(folder, "skills_descriptor.py", text)
    error = refusal(folder)
    assert (error.code, error.details["file"], kind in error.message) == (
        "bundle_python_failed",
        "skills_descriptor.py",
        True,
    )
    assert error.details["line"] == line


def test_python_refused(folder: Path) -> None:
    """`python="refuse"` runs nothing; YAML and JSON still load."""
    proof = folder / "ran"
    write(folder, "skills_descriptor.py", f"open({str(proof)!r}, 'w')\n")
    assert refusal(folder, python="refuse").code == "bundle_python_refused"
    assert not proof.exists()
    (folder / "skills_descriptor.py").unlink()
    write(folder, "skills_descriptor.json", "{}")
    assert load_bundle(folder, python="refuse").descriptor.agents_config == {}
    with pytest.raises(TypeError):
        load_bundle(folder, python="never")


@pytest.mark.parametrize(
    "name",
    ["AGENT_CONFIG", "agents_config", "AGENTS_CONFIGS", "CUSTOM_SKILL_ROOT", "SKILL_DESCRIPTOR", "skills_descriptor"],
)
def test_python_similar_names_are_errors(folder: Path, name: str) -> None:
    """A name that looks like one that is read is an error: a typo must not lose a denial."""
    write(folder, "skills_descriptor.py", f"{name} = {{}}\n")
    error = wrong(folder)
    assert (error.code, error.details["key"]) == ("descriptor_unknown_key", name)


def test_python_other_names_are_ignored(folder: Path) -> None:
    """Helpers, private names, modules and classes mean nothing."""
    text = (
        "import os\nfrom kdskills.bundle import SkillsDescriptor\n_AGENTS_CONFIG = 3\nTEAM = ['a']\n"
        "def make(): return {}\nAGENTS_CONFIG = make()\n"
    )
    write(folder, "skills_descriptor.py", text)
    assert load_bundle(folder).diagnostics == ()


def test_python_says_it_once(folder: Path) -> None:
    """A whole descriptor beside single names is a conflict, and it is a dict."""
    write(folder, "skills_descriptor.py", "SKILLS_DESCRIPTOR = {}\nAGENTS_CONFIG = {}\n")
    assert wrong(folder).code == "descriptor_conflict"
    write(folder, "skills_descriptor.py", "SKILLS_DESCRIPTOR = ['x']\n")
    assert wrong(folder).code == "descriptor_type"


# ---- YAML and JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("yaml", "agents_config: {w: {disabled: [x]}}\nagents_config: {}\n"),
        ("yaml", "agents_config:\n  w:\n    disabled: [x]\n    disabled: []\n"),
        ("yaml", "a: &x [1]\nb: *x\n"),
        ("yaml", "a: !!python/object/apply:os.system ['true']\n"),
        ("yaml", "a: [\n"),
        ("yaml", "--- {}\n--- {}\n"),
        ("yaml", b"a: \xff\n"),
        ("yaml", "a: " + "[" * 50 + "]" * 50),
        ("json", '{"agents_config": {"w": {"disabled": ["x"], "disabled": []}}}'),
        ("json", '{"a": NaN}'),
        ("json", '{"a": }'),
        ("json", b"\xff{}"),
        ("json", "[" * 200_000),
        ("json", "{} {}"),
        ("json", ""),
    ],
)
def test_unreadable_data(folder: Path, name: str, text: str | bytes) -> None:
    """Doubled keys, anchors, tags, bad syntax, bad UTF-8 and absurd depth are `bundle_unreadable`."""
    write(folder, f"skills_descriptor.{name}", text)
    error = refusal(folder)
    assert (error.code, error.details["file"]) == ("bundle_unreadable", f"skills_descriptor.{name}")


def test_unreadable_data_names_the_line(folder: Path) -> None:
    """Where the reader knows the line, the message says it."""
    write(folder, "skills_descriptor.yaml", "version: 1\nversion: 1\n")
    assert refusal(folder).message == "skills_descriptor.yaml, line 2: the key 'version' stands twice"


@pytest.mark.parametrize(
    ("name", "text"), [("yaml", ""), ("yaml", "- a\n"), ("yaml", "text"), ("json", "[]"), ("json", "null")]
)
def test_data_must_be_a_mapping(folder: Path, name: str, text: str) -> None:
    """An empty file or another type is no descriptor: it says nothing that could be trusted."""
    write(folder, f"skills_descriptor.{name}", text)
    assert wrong(folder).code == "descriptor_type"


def test_yaml_words_stay_text(folder: Path) -> None:
    """YAML 1.2: `no` and `on` are skill ids like any other."""
    write(folder, "skills_descriptor.yaml", "agents_config: {on: {disabled: [no, yes]}}\n")
    assert load_bundle(folder).descriptor.rules("on").disabled == ("no", "yes")


def test_errors_of_the_content_name_the_file(folder: Path) -> None:
    """A typo in a rule names file and key."""
    write(folder, "skills_descriptor.yaml", "agents_config: {w: {disable: [x]}}\n")
    error = wrong(folder)
    assert (error.details["key"], error.details["file"]) == ("agents_config.w.disable", "skills_descriptor.yaml")


# ---- a file cannot point out of its bundle ---------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["..", "../other", "a/../../other", "/etc", "link"])
def test_bundle_file_cannot_leave(folder: Path, root: str) -> None:
    """A root outside, by dots, link or absolute path, is refused unless the caller allows it."""
    (folder / "link").symlink_to(folder.parent)
    write(folder, "skills_descriptor.json", json.dumps({"custom_skills_root": root}))
    assert wrong(folder).code == "descriptor_root_outside_bundle"
    bundle = load_bundle(folder, allow_outside_bundle=True)
    assert bundle.descriptor.resolve_root() == folder / root


def test_bundle_file_cannot_allow_itself(folder: Path) -> None:
    """The file's own `allow_outside_bundle` and `bundle_root` do not count, and say so."""
    content = {"custom_skills_root": "../other", "allow_outside_bundle": True, "bundle_root": "/"}
    write(folder, "skills_descriptor.json", json.dumps(content))
    assert wrong(folder).code == "descriptor_root_outside_bundle"
    write(folder, "skills_descriptor.json", json.dumps(content | {"custom_skills_root": "in"}))
    bundle = load_bundle(folder)
    assert (bundle.descriptor.bundle_root, bundle.descriptor.allow_outside_bundle) == (str(folder), False)
    assert [(found.code, found.ref) for found in bundle.diagnostics] == [
        ("descriptor_key_ignored", "bundle_root"),
        ("descriptor_key_ignored", "allow_outside_bundle"),
    ]


def test_absolute_root_inside_becomes_relative(folder: Path) -> None:
    """An absolute root inside the bundle is kept relative, so that it stays checked and travels."""
    write(folder, "skills_descriptor.json", json.dumps({"custom_skills_root": str(folder / "mine")}))
    assert load_bundle(folder).descriptor.custom_skills_root == "mine"
    sibling = folder.parent / "press2"
    sibling.mkdir()
    write(folder, "skills_descriptor.json", json.dumps({"custom_skills_root": str(sibling)}))
    assert wrong(folder).code == "descriptor_root_outside_bundle"


# ---- what lies beside --------------------------------------------------------------------------------------------------


def test_tools_and_demo(folder: Path) -> None:
    """`tools.py` and `demo.yaml` are found; a link in their place is left out with a warning."""
    (folder / "skills").mkdir()
    assert (load_bundle(folder).tools_path, load_bundle(folder).demo_path) == (None, None)
    write(folder, "tools.py", "")
    (folder / "demo.yaml").symlink_to(folder / "tools.py")
    bundle = load_bundle(folder)
    assert (bundle.tools_path, bundle.demo_path) == (folder / "tools.py", None)
    assert [(found.code, found.severity, found.path) for found in bundle.diagnostics] == [
        ("bundle_file_ignored", "warning", "demo.yaml")
    ]


def test_warnings_of_the_descriptor_come_along(folder: Path) -> None:
    """A bundle reports its descriptor's warnings."""
    write(folder, "skills_descriptor.yaml", "owner: press\n")
    assert [found.code for found in load_bundle(folder).diagnostics] == ["descriptor_unknown_key"]


@pytest.mark.parametrize("name", ["hello", "press"])
def test_shipped_bundles_load(repo: Path, name: str) -> None:
    """The bundles of this repository load without a finding."""
    bundle = load_bundle(repo / "bundles" / name)
    assert (bundle.name, bundle.diagnostics) == (name, ())


@pytest.mark.parametrize(
    "source",
    [
        "raise BaseException('stop')",
        "import asyncio\nraise asyncio.CancelledError",
        "class Odd(Exception):\n    def __str__(self): return 1\nraise Odd",
        "raise GeneratorExit",
    ],
)
def test_whatever_a_python_descriptor_raises_is_a_bundle_error(tmp_path: Path, source: str) -> None:
    """Errors outside the tree of Exception, or that cannot even be printed, do not get past the loader."""
    (tmp_path / "skills_descriptor.py").write_text(source)
    with pytest.raises(BundleError) as caught:
        load_bundle(tmp_path)
    assert (caught.value.code, caught.value.details["file"]) == ("bundle_python_failed", "skills_descriptor.py")


def test_an_interrupt_by_the_user_is_not_a_bundle_error(tmp_path: Path) -> None:
    """Ctrl-C while a descriptor runs ends the program."""
    (tmp_path / "skills_descriptor.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_bundle(tmp_path)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/proc/self/mem/x", ""])
def test_paths_no_system_takes_are_missing_bundles(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever text is given as a path, the answer is a BundleError."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError):
        load_bundle(path)


def test_the_line_is_found_without_the_source_cache_all_threads_share(folder, monkeypatch):
    """Two threads in `linecache` break each other; loading a broken descriptor does not go there."""
    write(folder, "skills_descriptor.py", "A = 1\n\nraise ValueError('no')\n")
    with monkeypatch.context() as shared:
        for name in ("checkcache", "updatecache", "getlines", "lazycache"):
            shared.setattr(linecache, name, lambda *_: {}["taken by another thread"])
        try:
            load_bundle(folder)
        except BundleError as error:
            found = (error.code, error.details["line"])
    assert found == ("bundle_python_failed", 3)


def test_threads_load_one_bundle_side_by_side(folder):
    """Six threads load a good and a broken descriptor many times: each time the same answer."""
    write(folder, "skills_descriptor.py", "CUSTOM_SKILLS_ROOT = 'skills'\n")
    broken = folder.parent / "broken"
    broken.mkdir()
    write(broken, "skills_descriptor.py", "A = 1\n" * 50 + "raise ValueError('no')\n")

    def load(_):
        line = refusal(broken).details["line"]
        return load_bundle(folder).descriptor.custom_skills_root, line

    with ThreadPoolExecutor(6) as threads:
        assert set(threads.map(load, range(200))) == {("skills", 51)}
