"""What a script needs, read from what its author wrote."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.environments.model import EnvironmentSpec, NodeSpec
from kdskills.environments.needs import MAX_BLOCK_BYTES, MAX_FINDINGS, combined, needs_of, script_blocks, spec_of
from kdskills.errors import AuthorMustAct
from kdskills.skills import Skill, parse_skill, parse_skill_bytes

HEX = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a skill with one script."""
    folder = tmp_path / "forms"
    write(folder, "SKILL.md", "---\nname: forms\ndescription: Fills forms.\n---\nFill.\n")
    write(folder, "scripts/fill.py", "print(1)\n")
    return folder


def write(folder: Path, path: str, text: str | bytes) -> None:
    """Write a file of the skill."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def front(folder: Path, fields: str) -> None:
    """Write the skill file with further fields."""
    write(folder, "SKILL.md", f"---\nname: forms\ndescription: Fills forms.\n{fields}---\nFill.\n")


def skill_in(folder: Path) -> Skill:
    """Return the skill."""
    skill = parse_skill(folder).skill
    assert skill is not None
    return skill


def spec(folder: Path, script: str | None = "scripts/fill.py") -> EnvironmentSpec:
    """Return what is declared."""
    return spec_of(skill_in(folder), script)


def problems(folder: Path, script: str | None = "scripts/fill.py") -> list[tuple[str | None, int | None, str]]:
    """Return what cannot be honoured: path, line and sentence of each."""
    found = needs_of(skill_in(folder), script).diagnostics
    assert {finding.code for finding in found} <= {"environment_invalid"}
    return [(finding.path, finding.line, finding.message) for finding in found]


BLOCK = "# /// script\n# requires-python = '>=3.11'\n# dependencies = ['Pandas>=2', 'pypdf[Crypto] >= 5,<6']\n# ///\n"


def test_nothing_is_needed_where_nothing_is_said(folder: Path) -> None:
    """A skill without declarations has an empty spec, also one that has no folder at all."""
    assert spec(folder) == spec(folder, None) == EnvironmentSpec()
    bare = parse_skill_bytes(b"---\nname: forms\ndescription: Fills forms.\n---\nFill.\n", folder="forms").skill
    assert bare is not None
    assert spec_of(bare, "scripts/fill.py") == EnvironmentSpec()


def test_a_block_of_a_script_speaks_alone(folder: Path) -> None:
    """The script's own block wins over every file, canonical and sorted, and is told as the origin."""
    write(folder, "scripts/fill.py", f"#!/usr/bin/env python3\n{BLOCK}import pandas\n")
    write(folder, "requirements.txt", "numpy\n")
    found = spec(folder)
    assert found.requirements == ("pandas>=2", "pypdf[crypto]<6,>=5")
    assert (found.requires_python, found.origins) == (">=3.11", ("scripts/fill.py",))
    assert spec(folder, None).requirements == ("numpy",)


def test_an_empty_block_says_that_nothing_is_needed(folder: Path) -> None:
    """A block without packages is a word, too: the files of the skill do not count for the script."""
    write(folder, "scripts/fill.py", "# /// script\n# dependencies = []\n# ///\n")
    write(folder, "requirements.txt", "numpy\n")
    assert spec(folder).requirements == ()


@pytest.mark.parametrize(
    ("files", "origin"),
    [
        (("scripts/sub/requirements.txt", "scripts/requirements.txt", "requirements.txt"), 0),
        (("scripts/requirements.txt", "requirements.txt", "pyproject.toml"), 0),
        (("requirements.txt", "pyproject.toml", "tools.yaml"), 0),
        (("pyproject.toml", "tools.yaml"), 0),
        (("tools.yaml",), 0),
    ],
)
def test_the_first_file_speaks(folder: Path, files: tuple[str, ...], origin: int) -> None:
    """Files are asked in their order, nearest first, and only one is heard."""
    for path in files:
        name = path.replace("/", "-").partition(".")[0]
        text = {
            "pyproject.toml": f"[project]\ndependencies = ['{name}']\n",
            "tools.yaml": f"tools: []\npython: {name}\n",
        }
        write(folder, path, text.get(path, f"{name}\n"))
    write(folder, "scripts/sub/fill.py", "print(1)\n")
    found = spec(folder, "scripts/sub/fill.py")
    name = files[origin].replace("/", "-").partition(".")[0]
    assert (found.requirements, found.origins) == ((name,), (files[origin],))


def test_files_elsewhere_are_read_where_they_lie(folder: Path, tmp_path: Path) -> None:
    """The files of a skill that was fetched are read in the folder they were fetched into."""
    write(tmp_path / "fetched", "requirements.txt", "numpy\n")
    assert spec_of(skill_in(folder), "scripts/fill.py", folder=tmp_path / "fetched").requirements == ("numpy",)


# -- Inline metadata ---------------------------------------------------------------------------------------------------


def regular_blocks(text: str) -> list[str]:
    """Return the blocks of type `script` as the published rule's own words define them, slowly: any start, the last end."""
    lines = text.split("\n")
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        start = re.fullmatch("# /// ([a-zA-Z0-9-]+)", lines[at])
        until = at + 1
        while until < len(lines) and (lines[until] == "#" or lines[until].startswith("# ")):
            until += 1
        ends = [number for number in range(at + 2, until) if lines[number] == "# ///"]
        if start and ends:
            if start[1] == "script":
                blocks.append("".join(line[2:] + "\n" for line in lines[at + 1 : ends[-1]]))
            at = ends[-1]
        at += 1
    return blocks


LINES = [
    "# /// script",
    "# /// other",
    "# ///",
    "#",
    "# a = 1",
    "#a",
    "",
    "x = 1",
    " # /// script",
    "# /// script ",
    "# /// ",
]


@given(st.lists(st.sampled_from(LINES), max_size=14), st.sampled_from(["\n", "\r\n"]))
def test_blocks_are_those_of_the_published_grammar(lines: list[str], end: str) -> None:
    """Whatever comments stand in a program, the blocks found are those the rule defines, with the lines they begin at."""
    blocks, begins = script_blocks(end.join(lines))
    assert blocks == regular_blocks("\n".join(lines))
    assert [lines[begin - 1] for begin in begins] == ["# /// script"] * len(blocks)


@pytest.mark.parametrize("line", ["# /// a", "# /// script", "# ///", "#", "# ", "# /// script\n# x\n"])
def test_a_long_program_is_looked_through_in_linear_time(line: str) -> None:
    """A megabyte of lines that look like beginnings or ends takes no longer than any other megabyte."""
    text = f"{line}\n" * (1_000_000 // (len(line) + 1))
    began = time.process_time()
    script_blocks(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("block", "line", "words"),
    [
        (BLOCK + "\n" + BLOCK, 6, "two blocks"),
        ("# /// script\n# dependencies = [\n# ///\n", None, "TOML"),
        ("# /// script\n# dependencies = 'numpy'\n# ///\n", 2, "no list of texts"),
        ("# /// script\n# dependencies = [1]\n# ///\n", 2, "no list of texts"),
        (
            "# /// script\n# dependencies = [\n#   'numpy',\n#   'a @ https://x.example/a.whl',\n# ]\n# ///\n",
            4,
            "address",
        ),
        ("# /// script\n# dependencies = ['../a']\n# ///\n", 2, "path or an address"),
        ("# /// script\n# dependencies = ['git+https://x.example/a']\n# ///\n", 2, "path or an address"),
        ("# /// script\n# requires-python = 'new'\n# ///\n", 2, "range of versions"),
        ("# /// script\n# requires-python = 3\n# ///\n", 2, "range of versions"),
        (f"# /// script\n# requires-python = '>={'1' * 5000}'\n# ///\n", 2, "range of versions"),
        (f"# /// script\n# dependencies = ['a=={'1' * 5000}']\n# ///\n", 2, "characters"),
        (f"# /// script\n# a = {'[' * 50_000}\n# ///\n", None, "TOML"),
        (f"# /// script\n# a = {'9' * 5_000}\n# ///\n", None, "TOML"),
        ("# /// script\n# [[tool.uv.index]]\n# url = 'https://x.example'\n# ///\n", 2, "for operators"),
        ("# /// script\n# [tool.uv]\n# extra-index-url = ['https://x.example']\n# ///\n", 3, "for operators"),
        (
            "# /// script\n# dependencies = ['My.Pkg']\n# [tool.uv.sources]\n# my_pkg = { git = 'https://x.example' }\n# ///\n",
            4,
            "source of its own",
        ),
    ],
)
def test_a_block_that_cannot_be_honoured_is_told(folder: Path, block: str, line: int | None, words: str) -> None:
    """A broken or greedy block is one finding at its line, and whoever asks for the spec alone gets it as an error."""
    write(folder, "scripts/fill.py", block)
    ((path, at, message),) = problems(folder)
    assert path == "scripts/fill.py"
    assert words in message
    assert line is None or at == line
    with pytest.raises(AuthorMustAct, match=re.escape(words)) as refused:
        spec(folder)
    assert (refused.value.code, refused.value.details["path"], refused.value.details["line"]) == (
        "environment_invalid",
        path,
        at,
    )


def test_sources_of_other_packages_do_not_matter(folder: Path) -> None:
    """A source of a package that the script does not name changes nothing."""
    write(
        folder, "scripts/fill.py", "# /// script\n# dependencies = ['a']\n# tool.uv.sources.b = {path = 'b'}\n# ///\n"
    )
    assert spec(folder).requirements == ("a",)


@pytest.mark.parametrize(
    ("path", "text"),
    [("scripts/run.sh", BLOCK), ("scripts/run", BLOCK), ("scripts/run", f"#!/bin/sh\n{BLOCK}")],
)
def test_only_python_programs_have_blocks(folder: Path, path: str, text: str) -> None:
    """What looks like a block in another language is a comment."""
    write(folder, path, text)
    assert spec(folder, path).requirements == ()


def test_a_program_without_a_suffix_is_python_by_its_first_line(folder: Path) -> None:
    """A file whose first line starts Python may have a block."""
    write(folder, "scripts/run", f"#!/usr/bin/env -S uv run python\n{BLOCK}")
    assert spec(folder, "scripts/run").origins == ("scripts/run",)


def test_a_block_in_a_long_script_is_read_and_one_in_an_endless_script_is_told(folder: Path) -> None:
    """A block behind megabytes of data counts; a script that is longer than may be read is an error, and no file of the
    skill speaks for it.
    """
    write(folder, "requirements.txt", "numpy\n")
    write(folder, "scripts/fill.py", "DATA = (\n" + "    b'0123456789abcdef',\n" * 400_000 + ")\n" + BLOCK)
    assert spec(folder).origins == ("scripts/fill.py",)
    write(folder, "scripts/fill.py", BLOCK + "#" * MAX_BLOCK_BYTES)
    ((path, _, message),) = problems(folder)
    assert (path, f"more than {MAX_BLOCK_BYTES} bytes" in message) == ("scripts/fill.py", True)
    assert not needs_of(skill_in(folder), "scripts/fill.py").spec


@pytest.mark.parametrize("kind", ["binary", "link", "folder", "absent"])
def test_a_script_that_cannot_be_looked_into_says_nothing(folder: Path, kind: str) -> None:
    """A script which is no text, a link or nothing at all has no block; the skill's files speak."""
    script = folder / "scripts/fill.py"
    write(folder, "requirements.txt", "numpy\n")
    write(folder, "elsewhere.py", BLOCK)
    script.unlink()
    if kind == "binary":
        write(folder, "scripts/fill.py", os.urandom(4096) + b"\0")
    elif kind == "link":
        script.symlink_to("../elsewhere.py")
    elif kind == "folder":
        script.mkdir()
    assert spec(folder).requirements == ("numpy",)


def test_other_encodings_do_not_hide_a_block(folder: Path) -> None:
    """A program in Latin-1 has the block that it has."""
    write(folder, "scripts/fill.py", b"# -*- coding: latin-1 -*-\n\n" + BLOCK.encode() + b"x = '\xe9'\n")
    assert spec(folder).requires_python == ">=3.11"


# -- Files of the skill ------------------------------------------------------------------------------------------------


def test_files_named_by_a_file_are_read_once(folder: Path) -> None:
    """`-r` is followed within the skill, relative to the file it stands in; rings end."""
    write(folder, "requirements.txt", "-r more/base.txt\n--requirement=other.txt\na\n")
    write(folder, "more/base.txt", "-r ../requirements.txt\nb\n")
    write(folder, "other.txt", "c\n")
    found = spec(folder)
    assert (found.requirements, found.origins) == (("a", "b", "c"), ("requirements.txt", "more/base.txt", "other.txt"))


@pytest.mark.parametrize(
    "target", ["../base.txt", "/etc/passwd", "a/../../base.txt", "https://x.example/base.txt", "gone.txt", "link.txt"]
)
def test_files_elsewhere_are_not_read(folder: Path, target: str) -> None:
    """`-r` leads nowhere outside the skill, through no link, and to no file that is not there."""
    write(folder.parent, "base.txt", "stolen\n")
    (folder / "link.txt").symlink_to("../base.txt")
    write(folder, "requirements.txt", f"a\n-r {target}\n")
    assert {(path, line) for path, line, _ in problems(folder) if path != target} == {("requirements.txt", 2)}
    assert "stolen" not in needs_of(skill_in(folder), None).spec.requirements


def test_hashes_stay_with_their_requirements(folder: Path) -> None:
    """Hashes are kept by requirement, sorted, those of a second line of the same added."""
    other = "cd" * 32
    write(
        folder,
        "requirements.txt",
        f"b==1 --hash=sha256:{other} \\\n  --hash=sha256:{HEX}\na\nB == 1 --hash=sha256:{HEX}\n",
    )
    found = spec(folder)
    assert found.requirements == ("a", "b==1")
    assert found.hashes == {"b==1": (f"sha256:{HEX}", f"sha256:{other}")}


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("huge", "bytes"),
        ("link", "link"),
        ("pipe", "regular"),
        ("folder", "regular"),
        ("latin", "UTF-8"),
        ("nul", "NUL"),
    ],
)
def test_hostile_files_are_told_and_never_followed(folder: Path, name: str, kind: str, words: str) -> None:
    """What is no plain text file of a sensible size is an error that names it; nothing blocks, and nothing raises."""
    path = folder / name
    if kind == "huge":
        with path.open("wb") as stream:
            stream.truncate(100 * 1024 * 1024)
    elif kind == "link":
        write(folder.parent, "secret", "stolen\n")
        path.symlink_to("../secret")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"ok\n\xff\n" if kind == "latin" else b"ok\n\0\n")
    found = problems(folder)
    assert [each[0] for each in found] == [name]
    assert words in found[0][2]
    assert found[0][1] == (2 if kind in {"latin", "nul"} else None)
    assert needs_of(skill_in(folder), None).spec.requirements == ()


def test_a_linked_folder_is_not_entered(folder: Path) -> None:
    """Requirements behind a link to a folder are not read."""
    write(folder.parent, "elsewhere/requirements.txt", "stolen\n")
    for file in (folder / "scripts").iterdir():
        file.unlink()
    (folder / "scripts").rmdir()
    (folder / "scripts").symlink_to("../elsewhere")
    assert "link" in problems(folder)[0][2]
    assert needs_of(skill_in(folder), "scripts/fill.py").spec.requirements == ()


def test_many_mistakes_are_some_findings(folder: Path) -> None:
    """A megabyte of mistakes is told of as many as anybody reads, soon."""
    write(folder, "requirements.txt", "".join(f"-x{number}\n" for number in range(100_000)))
    began = time.process_time()
    assert len(problems(folder)) == MAX_FINDINGS
    assert time.process_time() - began < 10


def test_too_many_packages_are_refused(folder: Path) -> None:
    """More packages than any script needs are one finding."""
    write(folder, "requirements.txt", "".join(f"a{number}\n" for number in range(600)))
    assert [message for _, _, message in problems(folder)] == ["More than 500 packages are named."]
    write(folder, "requirements.txt", "")
    write(folder, "pyproject.toml", f"[project]\ndependencies = {[f'a{number}' for number in range(600)]}\n")
    assert [message for _, _, message in problems(folder)] == ["It names more than 500 packages."]


def test_a_project_says_packages_and_versions_of_python(folder: Path) -> None:
    """`[project]` counts with both fields; tables of tools and further groups do not."""
    text = "[project]\nrequires-python = '~=3.11'\ndependencies = ['B[y,x]', \"a; python_version < '3'\"]\n"
    write(
        folder,
        "pyproject.toml",
        text + "[project.optional-dependencies]\nc = ['c']\n[tool.poetry.dependencies]\nd = '1'\n",
    )
    found = spec(folder)
    assert (found.requirements, found.requires_python) == (('a; python_version < "3"', "b[x,y]"), "~=3.11")


@pytest.mark.parametrize("text", ["[tool.ruff]\nline-length = 90\n", "[project]\nname = 'x'\n", "project = 1\n"])
def test_a_project_that_names_nothing_says_nothing(folder: Path, text: str) -> None:
    """A file for tools alone lets the skill's own fields speak."""
    write(folder, "pyproject.toml", text)
    front(folder, "metadata:\n  kdskills.python: numpy\n")
    assert (spec(folder).requirements, spec(folder).origins) == (("numpy",), ("SKILL.md",))


# -- Fields of the skill -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        "metadata:\n  kdskills.python: b>=2 a\n  kdskills.programs: jq git\n",
        "metadata:\n  kdskills:\n    python: [b>=2, a]\n    programs:\n    - jq\n    - git\n",
        "metadata:\n  kdskills:\n    python: |\n      b>=2\n      a\n    programs: jq git\n",
    ],
    ids=["texts", "lists", "lines"],
)
def test_fields_are_texts_or_lists(folder: Path, fields: str) -> None:
    """Names stand in one text, parted by blanks, as the published format has it, or in a list."""
    front(folder, fields)
    found = spec(folder)
    assert (found.requirements, found.programs, found.origins) == (("a", "b>=2"), ("git", "jq"), ("SKILL.md",))


def test_companions_speak_before_the_frontmatter(folder: Path) -> None:
    """`tools.yaml` is heard first, field by field."""
    front(folder, "metadata:\n  kdskills.python: a\n  kdskills.programs: git\n")
    write(folder, "tools.yaml", "tools: []\npython: [b]\n")
    found = spec(folder)
    assert (found.requirements, found.programs, found.origins) == (("b",), ("git",), ("tools.yaml", "SKILL.md"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("kdskills.programs: ../sh", "no name of a program"),
        ("kdskills.programs: a;b", "no name of a program"),
        ("kdskills.python: ./a", "path or an address"),
        ("kdskills.node: git+ssh://x.example/a", "no name of a package"),
        ("kdskills.node: a@git+ssh://x.example/a", "elsewhere"),
        ("kdskills: {python: {a: 1}}", "no list of texts"),
        ("kdskills: {programs: [1]}", "no list of texts"),
    ],
)
def test_fields_that_cannot_be_honoured_are_told(folder: Path, fields: str, words: str) -> None:
    """Names that are none are errors of the file they stand in."""
    front(folder, f"metadata:\n  {fields}\n")
    assert any(path == "SKILL.md" and words in message for path, _, message in problems(folder, None))


# -- Node --------------------------------------------------------------------------------------------------------------

MANIFEST = b'{"dependencies": {"pptxgenjs": "^3.12.0", "@img/sharp": "*"}}'
LOCK = json.dumps(
    {
        "lockfileVersion": 3,
        "packages": {
            "": {},
            "node_modules/pptxgenjs": {
                "resolved": "https://registry.npmjs.org/pptxgenjs/-/a.tgz",
                "integrity": "sha512-x",
            },
            "node_modules/pptxgenjs/node_modules/b": {"inBundle": True},
        },
    }
).encode()


def test_node_packages_come_with_their_lock(folder: Path) -> None:
    """A manifest counts with the lock beside it, for what Node runs and for the skill, not for Python."""
    write(folder, "scripts/package.json", MANIFEST)
    write(folder, "scripts/package-lock.json", LOCK)
    write(folder, "requirements.txt", "numpy\n")
    found = spec(folder, "scripts/deck.mjs")
    assert (found.node, found.requirements) == (NodeSpec(MANIFEST, LOCK), ())
    assert found.origins == ("scripts/package.json", "scripts/package-lock.json")
    assert spec(folder).node is None
    both = spec(folder, "scripts/run.sh")
    assert (both.node, both.requirements) == (found.node, ("numpy",))


def test_fields_name_node_packages(folder: Path) -> None:
    """`node` makes a manifest of the names, versions behind `@`."""
    front(folder, "metadata:\n  kdskills.node: pptxgenjs@3.12 @img/sharp\n")
    found = spec(folder, None).node
    assert found is not None
    assert json.loads(found.manifest) == {"dependencies": {"@img/sharp": "*", "pptxgenjs": "3.12"}}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b'{"dependencies": []}', "no mapping"),
        (b'{"dependencies": {"a": "file:../a"}}', "elsewhere"),
        (b'{"dependencies": {"a": "someone/a"}}', "elsewhere"),
        (b'{"devDependencies": {"a": "https://x.example/a.tgz"}}', "elsewhere"),
        (b'{"dependencies": {"a": 1}}', "elsewhere"),
        (b'{"dependencies": {"../a": "1"}}', "no name"),
        (b'{"dependencies": {"\\ud800": "1"}}', "no name"),
        (b'{"dependencies": {"a": "1"}, "workspaces": ["x"]}', "`workspaces`"),
        (b'{"dependencies": {"a": "1"}, "overrides": {"a": "file:x"}}', "`overrides`"),
    ],
)
def test_manifests_that_reach_elsewhere_are_refused(folder: Path, manifest: bytes, words: str) -> None:
    """Packages from paths, addresses and repositories, and what is no manifest, are errors of its file."""
    write(folder, "package.json", manifest)
    found = problems(folder, None)
    assert [each[0] for each in found] == ["package.json"]
    assert words in found[0][2]


@pytest.mark.parametrize(
    "row",
    [
        {"resolved": "https://x.example/a.tgz", "integrity": "sha512-x"},
        {"resolved": "https://registry.npmjs.org.x.example/a.tgz", "integrity": "sha512-x"},
        {"resolved": "git+ssh://git@x.example/a.git#1", "integrity": "sha512-x"},
        {"resolved": "https://registry.npmjs.org/a/-/a.tgz"},
        {"link": True, "resolved": "../a"},
        {},
        1,
    ],
)
def test_locks_that_reach_elsewhere_are_refused(folder: Path, row: object) -> None:
    """A lock is of the registry's files, each with its digest."""
    write(folder, "package.json", MANIFEST)
    write(folder, "package-lock.json", json.dumps({"packages": {"node_modules/a": row}}))
    ((path, _, message),) = problems(folder, None)
    assert path == "package-lock.json"
    assert "not locked" in message


def test_locks_of_old_are_refused(folder: Path) -> None:
    """A lock without `packages` says how to make one that has them."""
    write(folder, "package.json", MANIFEST)
    write(folder, "package-lock.json", b'{"lockfileVersion": 1, "dependencies": {}}')
    (finding,) = needs_of(skill_in(folder), None).diagnostics
    assert finding.fix is not None
    assert "npm 7" in finding.fix


# -- Several together --------------------------------------------------------------------------------------------------


def test_several_specs_are_one(folder: Path) -> None:
    """All requirements hold together, each once; versions of Python must fit all."""
    first = EnvironmentSpec(("a", "b>=1"), ">=3.11", {"a": ("sha256:1", "sha256:2")}, NodeSpec(b"x"), ("jq",), ("x",))
    second = EnvironmentSpec(("b>=1", "b<2"), "<3.14", {"a": ("sha256:2",)}, None, ("git",), ("y",))
    found = combined([first, second])
    assert found == EnvironmentSpec(
        ("a", "b<2", "b>=1"), "<3.14,>=3.11", {"a": ("sha256:2",)}, NodeSpec(b"x"), ("git", "jq"), ("x", "y")
    )
    assert combined([found, first, second]) == found
    assert combined([]) == EnvironmentSpec()
    assert combined([first, EnvironmentSpec(node=NodeSpec(b"y"))]).node is None


def test_specs_that_trust_no_common_file_conflict() -> None:
    """Two skills that accept different files of one requirement cannot share an environment."""
    with pytest.raises(AuthorMustAct) as refused:
        combined(
            [EnvironmentSpec(("a",), hashes={"a": ("sha256:1",)}), EnvironmentSpec(("a",), hashes={"a": ("sha256:2",)})]
        )
    assert refused.value.code == "environment_conflict"
