"""What `check`, `check --fix`, `show` and `why` say of what scripts need."""

from __future__ import annotations

import ast
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app import Host, Settings
from kdskills.environments import script_report
from kdskills.environments.script_report import ImageContent, SkillScripts, with_block
from kdskills.environments.suggest import script_block_text
from kdskills.errors import FileRefused
from kdskills.execution.rootfs import image_profiles, image_programs
from kdskills.skills import parse_skill

BLOCK = script_block_text(["pandas"])
NEEDS = ("environment_invalid", "dependency_undeclared", "program_unknown")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A Host without plugins of others, whose index folder may be written to."""
    return Host(Settings(index_dir=tmp_path / "index"), entry_points=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with one skill without scripts."""
    bundle = tmp_path / "b"
    front(bundle)
    return bundle


def write(bundle: Path, path: str, text: str | bytes) -> Path:
    """Write a file of the bundle's one skill and return its path."""
    file = bundle / "skills/office/forms" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def front(bundle: Path, fields: str = "", body: str = "Fill.\n") -> None:
    """Write the skill file."""
    write(bundle, "SKILL.md", f"---\nname: forms\ndescription: Fills PDF forms from a table.\n{fields}---\n{body}")


async def needs(host: Host, path: Path) -> list[Any]:
    """Return what `check` says of needs."""
    found = (await host.call("skills.check", path=path)).diagnostics
    return [finding for finding in found if finding.code in NEEDS]


async def test_what_a_script_imports_is_told_with_the_block(host: Host, bundle: Path) -> None:
    """An import that nothing declares is a warning at its line, with the block that declares all the script imports."""
    write(bundle, "scripts/fill.py", '"""Fills."""\n\nimport json\nimport yaml\nimport pandas\n')
    (finding,) = await needs(host, bundle)
    assert (finding.code, finding.severity) == ("dependency_undeclared", "warning")
    assert (finding.path, finding.line) == ("office/forms/scripts/fill.py", 5)
    assert "pandas" in finding.message
    assert "yaml" not in finding.message  # the image has it
    assert finding.fix.endswith(script_block_text(["pandas", "pyyaml"]).rstrip("\n"))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scripts/fill.py", f"{BLOCK}import pandas\n"),
        ("requirements.txt", "Pandas[excel]>=2\n"),
        ("scripts/requirements.txt", "pandas\n"),
        ("pyproject.toml", "[project]\ndependencies = ['pandas']\n"),
        ("tools.yaml", "tools: []\npython: pandas\n"),
    ],
)
async def test_what_is_declared_is_not_told(host: Host, bundle: Path, path: str, text: str) -> None:
    """A declaration in any of the files that count ends the warning."""
    write(bundle, "scripts/fill.py", "import pandas\n")
    assert len(await needs(host, bundle)) == 1
    write(bundle, path, text)
    assert await needs(host, bundle) == []


async def test_a_file_that_speaks_is_where_the_rest_belongs(host: Host, bundle: Path) -> None:
    """Where a file declares some packages, the cure is to add the others there, not a block that would silence it."""
    write(bundle, "requirements.txt", "numpy\n")
    script = write(bundle, "scripts/fill.py", "import numpy, pandas\n")
    (finding,) = await needs(host, bundle)
    assert finding.fix == "Add them to 'requirements.txt'."
    fixed = await host.call("skills.fix", path=bundle)
    assert [change.done for change in fixed.changes] == [()]
    assert "'requirements.txt' speaks for it" in fixed.changes[0].skipped[0]
    assert script.read_text() == "import numpy, pandas\n"


async def test_modules_are_told_where_they_are_run(host: Host, bundle: Path) -> None:
    """What a module needs is the matter of the scripts that import it; one that is a program, too, is told itself."""
    write(bundle, "scripts/fill.py", "import helper\n")
    write(bundle, "scripts/helper.py", "import pandas\n")
    assert [finding.path for finding in await needs(host, bundle)] == ["office/forms/scripts/fill.py"]
    write(bundle, "scripts/helper.py", "import pandas\nif __name__ == '__main__':\n    pass\n")
    assert len(await needs(host, bundle)) == 2


async def test_what_cannot_be_honoured_is_an_error(host: Host, bundle: Path) -> None:
    """A declaration that reaches elsewhere fails the check, once, at its line, without further warnings."""
    write(bundle, "requirements.txt", "numpy\n--index-url https://x.example/simple\n")
    for name in ("a.py", "b.py"):
        write(bundle, f"scripts/{name}", "import pandas\n")
    (finding,) = await needs(host, bundle)
    assert (finding.code, finding.severity) == ("environment_invalid", "error")
    assert (finding.path, finding.line) == ("office/forms/requirements.txt", 2)
    assert not (await host.call("skills.check", path=bundle)).ok


async def test_what_the_instructions_install_is_told_with_the_field(host: Host, bundle: Path) -> None:
    """Packages of install lines that nothing declares are told at their lines, with fields that end them."""
    body = "```\npip install 'pdfplumber>=0.11' pandas pyyaml \"a; python_version<'9'\"\nnpm install pptxgenjs\n```\n"
    front(bundle, body=body)
    write(bundle, "scripts/fill.py", f"{BLOCK}import pandas\n")
    python, node = await needs(host, bundle)
    assert (python.code, python.line, node.line) == ("dependency_undeclared", 6, 7)
    assert {python.severity, node.severity} == {"info"}  # they may be meant for another machine
    assert python.fix.split("\n")[1:] == ["metadata:", '  kdskills.python: "a pdfplumber>=0.11"']
    fields = "metadata:\n" + "".join(finding.fix.split("\n")[2] + "\n" for finding in (python, node))
    front(bundle, fields, body)
    assert await needs(host, bundle) == []


async def test_programs_the_image_lacks_are_told(host: Host, bundle: Path) -> None:
    """A program that the skill names, or that runs one of its scripts, and that the image has not is a warning."""
    front(bundle, "metadata:\n  kdskills.programs: grep no-such-program\n")
    write(bundle, "scripts/deck.js", "1\n")
    write(bundle, "scripts/run.sh", "true\n")
    found = await needs(host, bundle)
    assert {finding.code for finding in found} == {"program_unknown"}
    expected = {("office/forms/SKILL.md", "no-such-program")}
    expected |= set() if "node" in image_programs() else {("office/forms/scripts/deck.js", "node")}
    assert {(finding.path, finding.ref) for finding in found} == expected


async def test_packages_of_the_image_need_no_word(tmp_path: Path, bundle: Path) -> None:
    """What the operator puts into the image is there for every script."""
    write(bundle, "scripts/fill.py", "import packaging.version\n")
    plain = Host(Settings(index_dir=tmp_path / "i"), entry_points=False)
    assert len(await needs(plain, bundle)) == 1
    richer = Host(Settings(index_dir=tmp_path / "i", image_packages=("Packaging",)), entry_points=False)
    assert await needs(richer, bundle) == []


async def test_an_image_that_cannot_be_built_is_no_matter_of_authors(tmp_path: Path, bundle: Path) -> None:
    """Where the operator names a package that is not installed, what the image would have counts as there."""
    write(bundle, "scripts/fill.py", "import no_such_package, yaml, pandas\n")
    host = Host(Settings(index_dir=tmp_path / "i", image_packages=("no-such-package",)), entry_points=False)
    (finding,) = await needs(host, bundle)
    assert finding.message.endswith(" have: pandas.")
    assert {"bash", "python3"} <= image_programs()


async def test_profiles_that_have_what_is_missing_are_told(tmp_path: Path, bundle: Path) -> None:
    """Imports, interpreters, declared programs and commands of the instructions, each with the profiles that bring it."""
    body = "```bash\n$ git status && echo done\npip install tabulate\n```\n"
    front(bundle, "metadata:\n  kdskills.programs: no-such-program\n", body)
    write(bundle, "scripts/deck.js", "1\n")
    write(bundle, "scripts/fill.py", "import pandas\nimport no_such_package\n")
    (bundle / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    host = Host(Settings(index_dir=tmp_path / "i"), entry_points=False)
    answer = await host.call("environments.suggest", bundle=bundle)
    rows = {row.profile: (row.programs, row.packages) for row in answer.profiles}
    assert rows == {"data": ((), ("pandas", "tabulate")), "node": (("git", "node"), ()), "web": (("git",), ())}
    assert (answer.ok, answer.programs, answer.packages) == (False, ("no-such-program",), ("no-such-package",))
    richer = Host(Settings(index_dir=tmp_path / "i", image_profiles=("node",)), entry_points=False)
    there = image_programs(("node",)) & {"git", "node"}
    left = {
        name for row in (await richer.call("environments.suggest", bundle=bundle)).profiles for name in row.programs
    }
    assert left == {"git", "node"} - there


async def test_an_image_with_a_profile_tells_what_it_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building it is a no where this machine lacks some of it, and `doctor` says so of a profile of the settings."""
    monkeypatch.setattr("kdskills.execution.rootfs.cache_dir", lambda: tmp_path / "cache")
    programs, packages = image_profiles()["documents"].absent()
    settings = Settings(index_dir=tmp_path / "i", state_dir=tmp_path / "s", image_profiles=("documents",))
    host = Host(settings, entry_points=False)
    built = await host.call("image.build")
    assert built.complete == (not (programs or packages))
    assert all(name in built.absent[0] for name in programs + packages)
    (check,) = [each for each in (await host.call("doctor")).checks if each.name == "image profiles"]
    assert (check.ok, check.found) == (built.complete, "; ".join(built.absent) or "documents complete")


# -- check --fix -------------------------------------------------------------------------------------------------------


async def test_fix_writes_the_block_once(host: Host, bundle: Path) -> None:
    """The block comes after the first line for the system; mode and the rest stay, and a second run has nothing to do."""
    script = write(bundle, "scripts/fill.py", "#!/usr/bin/env python3\nimport pandas\n")
    script.chmod(0o755)
    fixed = await host.call("skills.fix", path=bundle)
    assert [(Path(change.path).name, change.done) for change in fixed.changes] == [
        ("fill.py", ("It declares what it imports.",))
    ]
    assert script.read_text() == f"#!/usr/bin/env python3\n{BLOCK}\nimport pandas\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert list(script.parent.iterdir()) == [script]
    assert fixed.left.warnings == 0
    again = await host.call("skills.fix", path=bundle)
    assert again.changes == ()


async def test_a_dry_run_only_shows(host: Host, bundle: Path) -> None:
    """Nothing is written, and the diff is what would be."""
    script = write(bundle, "scripts/fill.py", "import pandas\n")
    (change,) = (await host.call("skills.fix", path=bundle, dry_run=True)).changes
    assert '+#   "pandas",' in change.diff
    assert script.read_text() == "import pandas\n"


async def test_guesses_are_never_written(host: Host, bundle: Path) -> None:
    """An import whose package is a guess leaves the script alone, until the instructions say how to install it."""
    script = write(bundle, "scripts/fill.py", "import pandas, some_guess\n")
    (change,) = (await host.call("skills.fix", path=bundle)).changes
    assert change.done == ()
    assert "some-guess would be a guess" in change.skipped[0]
    assert script.read_text() == "import pandas, some_guess\n"
    front(bundle, body="```sh\npip install some_guess\n```\n")
    await host.call("skills.fix", path=bundle)
    assert script.read_text().startswith(script_block_text(["pandas", "some-guess"]))


def test_a_script_that_changed_meanwhile_is_not_overwritten(bundle: Path) -> None:
    """What was planned for one text is not written over another, and the author's edit stays."""
    script = write(bundle, "scripts/fill.py", "import pandas\n")
    skill = parse_skill(script.parents[1]).skill
    assert skill is not None
    scripts = SkillScripts(
        skill, ImageContent.collect({"packages": (), "profiles": ()}, {".py": ["python3", "{path}"]})
    )
    (plan,) = scripts.declare(dry_run=True)
    script.write_text("import pandas, json\n")
    with pytest.raises(FileRefused) as refused:
        script_report._write_block(script.parents[1], plan)
    assert refused.value.code == "changed"
    assert script.read_text() == "import pandas, json\n"


def _link(script: Path) -> None:
    script.rename(script.parents[3] / "outside.py")
    script.symlink_to(script.parents[3] / "outside.py")


@pytest.mark.parametrize("spoil", [_link, lambda script: script.write_bytes(b"import pandas\n\0")], ids=["link", "nul"])
async def test_hostile_scripts_are_left_alone(host: Host, bundle: Path, spoil: Callable[[Path], Any]) -> None:
    """What leads out of the skill, or is no program, is not written to."""
    script = write(bundle, "scripts/fill.py", "import pandas\n")
    spoil(script)
    before = script.read_bytes()
    assert (await host.call("skills.fix", path=bundle)).changes == ()
    assert script.read_bytes() == before


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"", b"import a\n"),
        (b"", b"import a"),
        (b"#!/usr/bin/python3\n", b"import a\n"),
        (b"# coding: latin-1\n", b"x = '\xe9'\n"),
        (b"#!/usr/bin/python3\n# -*- coding: utf-8 -*-\n", b"# (c)\nimport a\n"),
        (b"#!/x\r\n", b"import a\r\n"),
        (b"", b'"""Text."""\nfrom __future__ import annotations\n'),
    ],
)
def test_the_block_stands_where_it_changes_nothing(head: bytes, rest: bytes) -> None:
    """It comes after first lines for the system, before a blank line, with the line ends there are."""
    end = b"\r\n" if b"\r\n" in rest else b"\n"
    block = BLOCK.encode().replace(b"\n", end)
    assert with_block(head + rest, BLOCK) == head + block + end + rest
    assert with_block(head + end + rest, BLOCK) == head + block + end + rest  # a blank line is there already


def test_the_block_begins_a_line_of_its_own() -> None:
    """A first line that does not end is ended, and a byte order mark stands alone."""
    block = BLOCK.encode()
    assert with_block(b"#!/usr/bin/python3", BLOCK) == b"#!/usr/bin/python3\n" + block
    assert with_block(b"\xef\xbb\xbfimport a\n", BLOCK) == b"\xef\xbb\xbf\n" + block + b"\nimport a\n"


@pytest.mark.parametrize(
    "data", [f"{BLOCK}x = 1\n".encode(), b"# a\n# coding: latin-1\nx = '\xe9'\n", b"import (", b"x = " + b"(" * 100_000]
)
def test_a_block_that_would_change_the_program_is_not_made(data: bytes) -> None:
    """A second block, an encoding that would no longer hold, and what cannot be parsed are left alone."""
    assert with_block(data, BLOCK) is None


@given(
    st.lists(st.sampled_from(["#!/x", "# coding: utf-8", "# ///", "# /// script", "#", "", "x = 1", "# a"]), max_size=8)
)
def test_a_script_with_a_block_is_the_same_program(lines: list[str]) -> None:
    """Whatever comments a script begins with, it stays the same program, or is left alone."""
    before = "\n".join(lines).encode()
    after = with_block(before, BLOCK)
    if after is not None:
        assert BLOCK.encode() in after
        assert ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
        assert with_block(after, BLOCK) is None


# -- show and why ------------------------------------------------------------------------------------------------------


async def test_show_lists_what_each_script_needs(host: Host, bundle: Path) -> None:
    """Each script has what is declared and by whom, what it seems to need, and what the image lacks of it."""
    front(bundle, "metadata:\n  kdskills.programs: no-such-program\n")
    write(bundle, "scripts/a.py", f"{BLOCK}import pandas\nimport subprocess\nsubprocess.run(['gone-program'])\n")
    write(bundle, "scripts/b.py", "import some_guess, requests\n")
    write(bundle, "scripts/notes.txt", "no script\n")
    shown = await host.call("skills.show", bundle=bundle, ref="forms", by="code")
    first, second = shown.scripts
    assert (first.path, first.requirements, first.suggested) == ("scripts/a.py", ("pandas",), ())
    assert first.origins == ("scripts/a.py", "SKILL.md")
    assert first.programs == ("gone-program", "no-such-program", "python3")
    assert first.missing == ("pandas", "gone-program", "no-such-program")
    assert second.suggested == ("requests", "some-guess?")


async def test_why_names_what_is_missing(host: Host, bundle: Path) -> None:
    """The notes say of each script what it needs beyond the image; one that needs nothing has none."""
    write(bundle, "requirements.txt", "pandas>=2\n")
    write(bundle, "scripts/a.py", "import pandas\n")
    before = (await host.call("skills.why", bundle=bundle, ref="forms")).notes
    assert before == ("scripts/a.py: needs pandas>=2 (requirements.txt); the sandbox's image lacks pandas",)
    write(bundle, "requirements.txt", "")
    write(bundle, "scripts/a.py", "import json\n")
    assert (await host.call("skills.why", bundle=bundle, ref="forms")).notes == ()
