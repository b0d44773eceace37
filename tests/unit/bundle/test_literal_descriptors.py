"""Python descriptors read as data: literals are understood, code is refused and never runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.bundle import load_bundle
from kdskills.errors import BundleError, DescriptorError
from kdskills.solver import SolverSystem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle folder with room for a descriptor."""
    (tmp_path / "press/skills").mkdir(parents=True)
    return tmp_path / "press"


def described(folder: Path, text: str | bytes) -> Path:
    """Write the descriptor of the bundle."""
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "skills_descriptor.py").write_bytes(data)
    return folder


def refusal(folder: Path, text: str | bytes) -> BundleError:
    """Return the error of reading a descriptor as data."""
    with pytest.raises(BundleError) as caught:
        load_bundle(described(folder, text), python="read")
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        'CUSTOM_SKILLS_ROOT = "skills"\nAGENTS_CONFIG = {"w": {"disabled": ["x", "a" ".y"]}}\n',
        '"""Words."""\nfrom __future__ import annotations\nAGENTS_CONFIG: dict = {"w": {"disabled": ("x", "a.y")}}\n',
        'SKILLS_DESCRIPTOR = {"version": 1, "agents_config": {"w": {"disabled": {"x", "a.y"}, "enabled": None}}}\n',
        '\ufeff# -*- coding: utf-8 -*-\nnote = OTHER = -1.5\nAGENTS_CONFIG = {}\nAGENTS_CONFIG = {"w": {"disabled": ["x", "a.y"]}}',
    ],
)
def test_literals_read_and_run_give_the_same(folder: Path, text: str) -> None:
    """A descriptor of literals says the same whether it is read or run, and only running it trusts the folder."""
    read, run = (load_bundle(described(folder, text), python=how) for how in ("read", "execute"))
    assert (read.descriptor, read.trusted, run.trusted) == (run.descriptor, False, True)
    assert set(read.descriptor.agents_config["w"].disabled) == {"x", "a.y"}


CODE = {
    "call": "open({mark!r}, 'w')",
    "import": "import os\nos.mkdir({mark!r})",
    "import of a name": "from os import mkdir\nmkdir({mark!r})",
    "import of itself": "import antigravity",
    "__import__": "CUSTOM_SKILLS_ROOT = __import__('os').mkdir({mark!r})",
    "decorator": "@lambda made: __import__('os').mkdir({mark!r})\ndef CUSTOM_SKILLS_ROOT(): pass",
    "decorated class": "@(lambda made: __import__('os').mkdir({mark!r}))\nclass Rules: pass",
    "class body": "class Rules:\n    __import__('os').mkdir({mark!r})",
    "default": "def rules(x=__import__('os').mkdir({mark!r})): pass",
    "comprehension": "AGENTS_CONFIG = {{x: {{}} for x in [__import__('os').mkdir({mark!r})]}}",
    "f-string": 'CUSTOM_SKILLS_ROOT = f"""{{__import__(\'os\').mkdir({mark!r})}}"""',
    "walrus": "(a := __import__('os').mkdir({mark!r}))",
    "unpacking": "AGENTS_CONFIG = {{**__import__('os').mkdir({mark!r})}}",
    "starred": "SKILLS = [*__import__('os').mkdir({mark!r})]",
    "subscript": "x = []\nx[__import__('os').mkdir({mark!r})] = 1",
    "augmented": "x = 1\nx += open({mark!r}, 'w').fileno()",
    "condition": "if open({mark!r}, 'w'): pass",
    "assert": "assert open({mark!r}, 'w')",
    "delete": "del __import__('os').mkdir({mark!r}).x",
    "arithmetic": "AGENTS_CONFIG = 'a' * 10 ** 9",
    "power": "version = 9 ** 9 ** 9",
    "a name": "CUSTOM_SKILLS_ROOT = __file__",
    "other encoding": "# coding: utf-7\nCUSTOM_SKILLS_ROOT = 'skills'",
}


@pytest.mark.parametrize("text", CODE.values(), ids=CODE)
def test_code_is_refused_and_does_not_run(folder: Path, text: str) -> None:
    """Whatever is more than literals is `bundle_untrusted` for who called, names its line and the way out, and never runs."""
    mark = folder / "mark"
    error = refusal(folder, text.format(mark=str(mark)))
    assert (error.code, error.who, mark.exists()) == ("bundle_untrusted", "caller", False)
    assert error.message.startswith("skills_descriptor.py, line ")
    assert "--trust" in error.message


DEEP = {
    "parentheses": ("A = " + "(" * 10_000, "bundle_python_failed"),
    "signs": ("A = " + "-" * 200_000 + "1", "bundle_unreadable"),
    "sums": ("A = " + "1+" * 100_000 + "1", "bundle_unreadable"),
    "calls": ("A = a" + "()" * 100_000, "bundle_unreadable"),
    "lists": ("A = " + "[" * 150 + "]" * 150, "bundle_unreadable"),
    "branches": ("if 1:\n pass\n" + "elif 1:\n pass\n" * 15_000, "bundle_unreadable"),
    "a long number": ("A = " + "9" * 100_000, "bundle_python_failed"),
    "many literals": ("A = [" + "0," * 200_000 + "]", "bundle_unreadable"),
    "NUL": ("A = 1\0", "bundle_python_failed"),
    "no text": (b"A = '\xff'", "bundle_python_failed"),
    "no Python": ("AGENTS_CONFIG = {", "bundle_python_failed"),
    "a key that is a list": ("AGENTS_CONFIG = {[]: 1}", "bundle_python_failed"),
}


@pytest.mark.parametrize(("text", "code"), DEEP.values(), ids=DEEP)
def test_deep_and_huge_sources_are_refused(folder: Path, text: str | bytes, code: str) -> None:
    """Deep nesting, huge literals and what is no Python are errors of the author, never a traceback."""
    error = refusal(folder, text)
    assert (error.code, error.who) == (code, "author")


def test_a_read_descriptor_is_as_strict(folder: Path) -> None:
    """Names close to the known ones and wrong types are errors of the descriptor when it is read, too."""
    for text in ("AGENT_CONFIG = {}", "SKILLS_DESCRIPTOR = []", "CUSTOM_SKILLS_ROOT = b'x'", "AGENTS_CONFIG = ..."):
        with pytest.raises(DescriptorError):
            load_bundle(described(folder, text), python="read")


@pytest.mark.parametrize("python", ["read", "refuse"])
def test_tools_of_an_untrusted_bundle_do_not_run(folder: Path, python) -> None:
    """A solver refuses a bundle with `tools.py` that was loaded without leave to run code; nothing of it runs."""
    mark = folder / "mark"
    (folder / "tools.py").write_text(f"open({str(mark)!r}, 'w')\nTOOLS = []\n")
    bundle = load_bundle(folder, python=python)
    with pytest.raises(BundleError) as caught:
        SolverSystem(bundle=bundle)
    assert (caught.value.code, mark.exists()) == ("bundle_untrusted", False)
    assert SolverSystem(bundle=load_bundle(folder)).bundle.trusted
