"""What a script seems to need: from its imports, and from what the instructions install."""

from __future__ import annotations

import os
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.environments.needs import script_blocks
from kdskills.environments.requirements import canonical_requirement
from kdskills.environments.suggest import (
    DISTRIBUTIONS,
    MAX_SCRIPT_BYTES,
    MAX_SCRIPTS,
    ScriptFacts,
    distribution_of,
    install_lines,
    script_block_text,
    skill_facts,
)

SCRIPT = "scripts/fill.py"


def write(folder: Path, path: str, text: str | bytes) -> None:
    """Write a file of the skill."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def facts(folder: Path, text: str | bytes) -> ScriptFacts:
    """Return what a script of this text shows."""
    write(folder, SCRIPT, text)
    return skill_facts(folder)[SCRIPT]


def names(found: ScriptFacts, *, optional: bool = False) -> list[str]:
    """Return the packages that are optional, or not."""
    return [package.requirement for package in found.packages if package.optional is optional]


@pytest.mark.parametrize(
    ("line", "name", "certain"),
    [
        ("import numpy as np", "numpy", True),
        ("import matplotlib.pyplot as plt", "matplotlib", True),
        ("from PIL import Image", "pillow", True),
        ("import cv2", "opencv-python-headless", True),
        ("from google.cloud import storage", "google-cloud-storage", True),
        ("from google.oauth2.credentials import Credentials", "google-auth", True),
        ("import google.genai", "google-genai", True),
        ("from ruamel.yaml import YAML", "ruamel-yaml", True),
        ("from google.maps import places", "google-maps-places", False),
        ("import google.auth; from google.auth.transport.requests import Request", "google-auth[requests]", True),
        ("import some_thing.part", "some-thing", False),
    ],
)
def test_an_import_is_of_a_distribution(tmp_path: Path, line: str, name: str, certain: bool) -> None:
    """Known modules have the distribution that gives them; others are a guess, said to be one."""
    (package,) = facts(tmp_path, f"import os\n{line}\n").packages
    assert (package.requirement, package.certain, package.path, package.line) == (name, certain, SCRIPT, 2)


def test_the_table_is_of_real_names() -> None:
    """Every distribution of the table is canonical, and nothing of the standard library is in it."""
    assert all(name == canonical_requirement(name) for name in DISTRIBUTIONS.values())
    assert not {module.partition(".")[0] for module in DISTRIBUTIONS} & sys.stdlib_module_names
    assert all(distribution_of(module) == (name, True) for module, name in DISTRIBUTIONS.items())


@pytest.mark.parametrize(
    "text",
    [
        "import os, sys, json\nfrom __future__ import annotations\nimport xml.etree.ElementTree\n",
        "import kdskills\nimport uno\nimport urllib2\n",
        "import typing\nif typing.TYPE_CHECKING:\n    import pandas\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n",
        "x = 'import pandas'\n# import numpy\n",
        "import é\nimport _private\n",
        "from . import pandas\nfrom .pandas import x\nfrom ... import y\n",
    ],
)
def test_nothing_is_suggested_for(tmp_path: Path, text: str) -> None:
    """The standard library, our own modules, imports for types alone, texts and impossible names need no package."""
    assert facts(tmp_path, text).packages == ()


@pytest.mark.parametrize(
    ("text", "needed", "optional"),
    [
        ("def main():\n    import pandas\n", ["pandas"], []),
        ("if __name__ == '__main__':\n    import pandas\n", ["pandas"], []),
        ("try:\n    import pandas\nexcept ImportError:\n    pandas = None\n", [], ["pandas"]),
        ("try:\n    import pandas\nexcept (ValueError, ModuleNotFoundError):\n    pass\n", [], ["pandas"]),
        ("try:\n    import pandas\nexcept:\n    pass\n", [], ["pandas"]),
        ("try:\n    import pandas\nexcept ValueError:\n    pass\n", ["pandas"], []),
        ("try:\n    import pandas\nexcept ImportError:\n    print('x')\n    sys.exit(1)\n", ["pandas"], []),
        ("try:\n    import pandas\nexcept ImportError:\n    raise SystemExit('x')\n", ["pandas"], []),
        ("try:\n    import pypdf\nexcept ImportError:\n    import PyPDF2\n", [], ["pypdf", "pypdf2"]),
        ("try:\n    import pandas\nexcept ImportError:\n    pass\nimport pandas\n", ["pandas"], []),
        ("try:\n    pass\nfinally:\n    import pandas\n", ["pandas"], []),
        ("try:\n    import numpy\nexcept ImportError:\n    pass\nelse:\n    import pandas\n", ["pandas"], ["numpy"]),
        ("match x:\n    case 1:\n        import pandas\n", ["pandas"], []),
        (
            "class A:\n    async def f(self):\n        with x:\n            for y in z:\n                import pandas\n",
            ["pandas"],
            [],
        ),
        ("if TYPE_CHECKING:\n    import numpy\nelse:\n    import pandas\n", ["pandas"], []),
    ],
)
def test_what_a_program_does_without_is_told_apart(
    tmp_path: Path, text: str, needed: list[str], optional: list[str]
) -> None:
    """An import is optional exactly where the program goes on when it fails."""
    found = facts(tmp_path, text)
    assert (names(found), names(found, optional=True)) == (needed, optional)


def test_modules_of_the_skill_bring_what_they_import(tmp_path: Path) -> None:
    """A script needs what the skill's own modules need that it imports, wherever they lie, and each is asked once."""
    write(tmp_path, "scripts/helper.py", "import pandas\nimport fill\n")
    write(tmp_path, "scripts/parts/__init__.py", "from . import deep\n")
    write(tmp_path, "scripts/parts/deep.py", "from ..helper import x\nfrom .deeper.end import y\nimport lxml\n")
    write(tmp_path, "scripts/parts/deeper/end.py", "import requests\n")
    write(tmp_path, "shared/tools.py", "import numpy\n")
    write(tmp_path, "scripts/unused.py", "import torch\n")
    found = facts(tmp_path, "import helper\nfrom parts import deep\nimport shared.tools\n")
    assert names(found) == ["lxml", "numpy", "pandas", "requests"]
    assert "scripts/unused.py" not in found.modules


def test_names_of_the_skill_are_no_packages(tmp_path: Path) -> None:
    """A file or folder of the skill is what an import of its name means."""
    write(tmp_path, "lib/office/docx.py", "")
    assert facts(tmp_path, "import docx\nfrom office import x\nimport yaml\n").packages[0].requirement == "pyyaml"


@pytest.mark.parametrize(
    ("text", "programs"),
    [
        ("subprocess.run(['pdftoppm', '-r', '90'])", ("pdftoppm",)),
        ("from subprocess import check_output\ncheck_output(('git', 'log'))", ("git",)),
        ("shutil.which('ffmpeg')", ("ffmpeg",)),
        ("asyncio.create_subprocess_exec('soffice', '--headless')", ("soffice",)),
        ("subprocess.run('rm -rf x', shell=True)", ()),
        ("subprocess.run([name])\nsubprocess.run([])\nsubprocess.run()\nsubprocess.run(['/bin/x'])\nrun(1)", ()),
    ],
)
def test_programs_are_those_named_literally(tmp_path: Path, text: str, programs: tuple[str, ...]) -> None:
    """A program is told where its name stands in the call, never where it would have to be worked out."""
    assert facts(tmp_path, text).programs == programs


HOSTILE = {
    "syntax": b"import pandas\nimport (",
    "python 2": b"import pandas\nprint 'x'\n",
    "nul": b"import pandas\n\0",
    "bytes": bytes(range(256)) * 100,
    "encoding": b"# coding: no-such-codec\nimport pandas\n",
    "huge": b"import pandas\n" + b"#" * MAX_SCRIPT_BYTES,
    "brackets": b"x = " + b"(" * 100_000,
    "minus": b"x = " + b"-" * 200_000 + b"1",
    "sum": b"x = 1" + b"+1" * 100_000,
    "attributes": b"x" + b".a" * 100_000,
    "elif": b"if a:\n  pass\n" + b"elif b:\n  pass\n" * 12_000,
    "indents": b"".join(b" " * depth + b"if a:\n" for depth in range(700)) + b" " * 700 + b"pass\n",
    "strings": b"x = f'{" * 20_000,
    "digits": b"x = " + b"9" * 100_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_show_nothing_and_break_nothing(tmp_path: Path, text: bytes) -> None:
    """A text that is no program, or one that exhausts a parser, costs its suggestions and nothing else, soon."""
    began = time.process_time()
    assert facts(tmp_path, text).packages == ()
    assert time.process_time() - began < 20


@given(st.binary(max_size=200))
def test_any_bytes_show_something_or_nothing(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No bytes of a script raise."""
    folder = tmp_path_factory.getbasetemp() / "any"
    assert facts(folder, data).packages is not None


def test_links_and_crowds_are_not_looked_into(tmp_path: Path) -> None:
    """A link to a program is none of the skill's, and only so many files are read."""
    write(tmp_path, "outside.py", "import pandas\n")
    skill = tmp_path / "skill"
    write(skill, SCRIPT, "import linked\n")
    (skill / "scripts/linked.py").symlink_to("../../outside.py")
    assert [each.requirement for each in skill_facts(skill)[SCRIPT].packages] == ["linked"]
    for number in range(MAX_SCRIPTS + 20):
        write(skill, f"scripts/{number:03}.py", "")
    assert len(skill_facts(skill)) == MAX_SCRIPTS
    assert skill_facts(tmp_path / "gone") == {}


def block(*lines: str) -> str:
    """Return instructions with one code block."""
    return "\n".join(["---", "name: forms", "---", "```bash", *lines, "```", ""])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pip install pdfplumber", ["pdfplumber"]),
        ("$ pip3 install -U 'Pandas>=2' numpy  # both", ["numpy", "pandas>=2"]),
        ("sudo python3 -m pip install --index-url https://x.example/simple a", ["a"]),
        ("uv pip install --system a[b]", ["a[b]"]),
        ("cd x && pip install a; echo b", ["a"]),
        ("pip install -r requirements.txt -e . ./a https://x.example/a.whl git+https://x.example/a", []),
        ("npm install -g pptxgenjs @img/sharp@0.33", ["@img/sharp@0.33", "pptxgenjs"]),
        ("npm i ../a https://x.example/a.tgz", []),
        ("pip install 'a", []),
        ("pip install " + "a " * 2_000, []),
        ("pip freeze", []),
        ("echo pip install a", []),
    ],
)
def test_install_lines_name_packages(tmp_path: Path, line: str, found: list[str]) -> None:
    """What a line of a code block installs is told with its line; options, files and addresses are no packages."""
    write(tmp_path, "SKILL.md", block("# first", line))
    packages = install_lines(tmp_path)
    assert [package.requirement for package in packages] == found
    assert all((package.path, package.line, package.certain) == ("SKILL.md", 6, True) for package in packages)
    assert all(package.node == ("npm" in line) for package in packages)


def test_only_code_blocks_are_read(tmp_path: Path) -> None:
    """Prose about installing is no line of a shell; longer fences hold shorter ones."""
    text = "pip install a\n\n````md\n```\npip install b\n```\n````\npip install c\n~~~\npip install d\n"
    write(tmp_path, "SKILL.md", text)
    assert [package.requirement for package in install_lines(tmp_path)] == ["b", "d"]


@pytest.mark.parametrize(
    "data", [None, b"\xff" * 100, b"```\npip install \0\n", os.urandom(5000)], ids=["none", "no-text", "zero", "noise"]
)
def test_hostile_instructions_install_nothing(tmp_path: Path, data: bytes | None) -> None:
    """Instructions that are not there, or no text, name no package."""
    if data is not None:
        write(tmp_path, "SKILL.md", data)
    assert install_lines(tmp_path) == ()


@pytest.mark.parametrize("requirement", ["pandas>=2", 'a[b]>=1; python_version < "3"'])
def test_a_written_block_reads_back(requirement: str) -> None:
    """The block to paste is one block of the published grammar that declares what it was made of."""
    blocks, begins = script_blocks(script_block_text([requirement, "b"], ">=3.11") + "import b\n")
    assert len(blocks) == 1
    assert begins == [1]
    table = tomllib.loads(blocks[0])
    assert table == {"dependencies": sorted([requirement, "b"]), "requires-python": ">=3.11"}
