"""Files an answer says were written, read from its text to be compared with the files there are.

Only sentences that report a deed in the past are read ("I saved the table as out.csv"); plans, advice, questions and code
are not. What is not recognised is not checked: this finds the usual false report, it does not prove an answer.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Collection, Iterator
from typing import Final

_DEEDS = (
    "wrote|written|saved|created|generated|produced|exported|stored|rendered|made|built|drew|drawn|plotted|compiled|"
    "recorded|placed|put|prepared|added|converted|updated|downloaded"
)
_FILE = r"(?<![\w/@:.-])(?:\.?/)?(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.[A-Za-z][A-Za-z0-9]{0,7}\b(?![/@(])"
_QUOTE = r"[`\"'*(\[<]*"

_REPORTS: Final = (
    # "I have written ...", "Saved ..." at the beginning, "... has been created ..."
    re.compile(rf"(?:\b(?:I|we)(?:'ve| have)?(?: \w+){{0,2}} |^\W*(?:\w+ly )?|\b(?:has|have) been (?:\w+ly )?)(?:{_DEEDS})\b", re.IGNORECASE),
    # "written to x", "saved as x", "available in x"
    re.compile(rf"\b(?:{_DEEDS}|available)(?: \w+)? (?:to|as|in|into|at|under) (?:the file |file )?{_QUOTE}{_FILE}", re.IGNORECASE),
    # "x was created"
    re.compile(rf"{_FILE}[`\"'*)\]>]* (?:has been|have been|was|were|is|are)(?: now| \w+ly)* (?:{_DEEDS})\b", re.IGNORECASE),
)  # fmt: skip
_NO_REPORT: Final = re.compile(
    r"\b(?:not|cannot|never|unable|failed|will|would|should|could|must|might|if|unless|please|you can|you could|let me)\b"
    r"|n't\b|\?\s*$",
    re.IGNORECASE,
)
_SOURCE: Final = re.compile(r"\b(?:from|using|with|on|of|per|via|reading|read|by|like|than|following)\s+(?:the |a )?(?:file )?[`\"'*(\[<]*$", re.IGNORECASE)  # fmt: skip
_BEFORE: Final = 100
"""Characters before a path that tell whether it is a source: with all of them, many paths in one sentence take for ever."""
_PATH: Final = re.compile(_FILE)
_CODE: Final = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LIBRARY: Final = re.compile(r"[A-Z]\w*\.js")
_NO_FILES: Final = frozenset({"com", "org", "net", "io"})
_FURTHER: Final = frozenset({"md", "yaml", "yml", "toml", "parquet", "ipynb", "log", "ini", "cfg", "sql", "db", "sqlite", "dat"})  # fmt: skip


def claimed_files(text: str) -> tuple[str, ...]:
    """Return the paths that *text* reports as written, each once, in the order they are named."""
    paths: list[str] = []
    listing = False
    for line in _CODE.sub("", text).splitlines():
        bullet = re.match(r"\s*(?:[-*•]|\d+[.)])\s+", line)
        if listing and bullet:
            first = next(_files(line), None)
            paths += [first] if first else []
            continue
        listing = listing and not line.strip()
        for sentence in re.split(r"(?<=[.!?])\s+", line):
            if _is_report(sentence):
                paths += _files(sentence)
                listing = listing or sentence.rstrip(" *_").endswith(":")
    return tuple(dict.fromkeys(paths))


def missing_files(text: str, present: Collection[str]) -> tuple[str, ...]:
    """Return the claimed files that are not among *present*; a name alone stands for a file of any folder."""
    names = {path.rpartition("/")[2] for path in present}
    return tuple(
        path
        for path in claimed_files(text)
        if not any(file == path or file.endswith(f"/{path}") or path.endswith(f"/{file}") for file in present)
        and not ("/" not in path and path in names)
    )


def _is_report(sentence: str) -> bool:
    return not _NO_REPORT.search(sentence) and any(pattern.search(sentence) for pattern in _REPORTS)


def _files(sentence: str) -> Iterator[str]:
    """Give the paths in a sentence, without those it names as a source, as in "made from data.csv"."""
    for match in _PATH.finditer(sentence):
        path = match.group().removeprefix("./")
        suffix = path.rpartition(".")[2].lower()
        if (
            suffix in _NO_FILES
            or _LIBRARY.fullmatch(path)
            or _SOURCE.search(sentence[max(0, match.start() - _BEFORE) : match.start()])
        ):
            continue
        if suffix in _FURTHER or mimetypes.guess_type(path, strict=False)[0] is not None:
            yield path
