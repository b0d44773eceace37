"""Whether a program started is judged by its end and its words: what is missing is named, and nothing else counts against it."""

from __future__ import annotations

import pytest

from kdskills.environments.script_report import judge_start

TRACE = "Traceback (most recent call last):\n  File 'x.py', line 1\n"


@pytest.mark.parametrize(
    ("status", "code", "stdout", "stderr"),
    [
        ("ok", 0, "No module named 'x'", ""),
        ("nonzero", 2, "", "usage: a.py [-h] file"),
        ("nonzero", 1, "Usage: a.py IN OUT", ""),
        ("nonzero", 1, "", TRACE + "FileNotFoundError: [Errno 2] No such file or directory: '--help'"),
        ("nonzero", 1, "", TRACE + "KeyError: 'API_KEY'"),
        ("timeout", 124, "", ""),
    ],
)
def test_what_got_past_its_imports_has_started(status, code, stdout, stderr):
    """An end with 0, with usage, at the time limit or by any error of the program's own is a start."""
    assert judge_start(status, code, stdout, stderr).started


@pytest.mark.parametrize(
    ("status", "code", "stderr", "missing"),
    [
        ("nonzero", 1, TRACE + "ModuleNotFoundError: No module named 'google.cloud'", ("google.cloud",)),
        ("nonzero", 1, TRACE + "ImportError: libGL.so.1: cannot open shared object file", ()),
        ("nonzero", 1, TRACE + 'OSError: no library called "cairo-2" was found', ()),
        ("nonzero", 1, "Error: Cannot find module 'sharp'\nRequire stack:", ("sharp",)),
        ("nonzero", 127, "a.sh: line 2: frob: command not found\n", ("frob",)),
        ("nonzero", 127, "env: \u2018node\u2019: No such file or directory\n", ("node",)),
        ("nonzero", 1, "pandas is needed: pip install -q pandas\n", ("pandas",)),
        (
            "nonzero",
            1,
            "  File \"subprocess.py\", line 9\nFileNotFoundError: [Errno 2] No such file or directory: 'pdftoppm'\n",
            ("pdftoppm",),
        ),
        ("nonzero", 1, "  File 'a.py', line 1\nSyntaxError: invalid syntax\n", ()),
        ("oom", None, "", ()),
        ("limit", 152, "", ()),
    ],
)
def test_what_lacks_something_has_not_started(status, code, stderr, missing):
    """A missing module, package or program is named; no memory and a text that is no program are no start either."""
    verdict = judge_start(status, code, "", stderr)
    assert (verdict.started, verdict.missing) == (False, missing)
    assert verdict.reason


def test_words_without_end_are_judged_in_time():
    """Output of a hostile program costs time in its length alone, and what it names is bounded."""
    for text in ("pip install " + "-a " * 50_000, "x" * 1_000_000 + ": not found", "No module named " + "a." * 300_000):
        verdict = judge_start("nonzero", 127, "", text)
        assert all(len(name) < 1_000_000 for name in verdict.missing)
