"""What an answer claims, held against what a turn did: files it says were written, and calls it says succeeded.

Only sentences that report a deed in the past count ("I saved the table as out.csv", "I ran sum.py"); plans, advice,
questions, failures and code do not. What is not recognised is not checked: this finds the usual false report, it does not
prove an answer.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kdskills.models import parse_object

if TYPE_CHECKING:
    from kdskills.solver.events import CallRecord


_DEEDS = (
    "wrote|written|saved|created|generated|produced|exported|stored|rendered|made|built|drew|drawn|plotted|compiled|"
    "recorded|placed|put|prepared|added|converted|updated|downloaded"
)
_FILE = r"(?<![\w/@:.-])(?:\.?/)?(?:[\w-][\w.-]*/)*[\w-][\w.-]*\.[A-Za-z][A-Za-z0-9]{0,7}\b(?![/@(])"
_QUOTE = r"[`\"'*(\[<]*"

_REPORTS: Final = (
    # "I have written ...", "Saved ..." at the beginning, "... has been created ..."
    re.compile(rf"(?:\b(?:I|we)(?:'ve| have)?(?: \w+){{0,2}} |^\W*(?:\w+ly )?|\b(?:has|have) been (?:\w+ly )?)(?:{_DEEDS})\b(?! on\b)", re.IGNORECASE),
    # "Files written:"
    re.compile(rf"\bfiles?(?: \w+)? (?:{_DEEDS})\W*$", re.IGNORECASE),
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
_FOREIGN_DEEDS: Final = re.compile(
    r"\b(?:according to|says|when(?:ever)?|(?:each|every) (?:time|run|day|night|week|month)|by (?:you|the|its|their|an?)|"
    r"(?:that|which) (?:was|were|added|created|wrote|made)|plan(?=:))\b",
    re.IGNORECASE,
)
"""What others do or did, and plans: of files only, for a tool is the turn's own."""
_SOURCE: Final = re.compile(r"\b(?:from|using|with|on|of|per|via|reading|read|by|like|than|following)\s+(?:the |a |your )?(?:file )?[`\"'*(\[<]*$", re.IGNORECASE)  # fmt: skip
_BEFORE: Final = 100
"""Characters before a path that tell whether it is a source: with all of them, many paths in one sentence take for ever."""
_PATH: Final = re.compile(_FILE)
_CODE: Final = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_LIBRARY: Final = re.compile(r"[A-Z]\w*\.js")
_NO_FILES: Final = frozenset({"com", "org", "net", "io"})
_TYPES: Final = mimetypes.MimeTypes()
"""Types by suffix, the same on every machine: without those of its own files, among which are `.bar` and `.p`."""
_FURTHER: Final = frozenset(
    (
        *("md", "rtf", "docx", "odt", "epub", "pptx", "xlsx", "ods", "ics", "log", "diff", "patch"),
        *("yaml", "yml", "toml", "ini", "cfg", "jsonl", "geojson", "parquet", "feather", "pkl", "npz", "npy", "dat"),
        *("sql", "db", "sqlite", "ipynb", "ts", "tsx", "jsx", "rb", "pl", "php", "cpp", "rs", "go", "java"),
        *("gz", "bz2", "xz", "7z"),
    )
)


def claimed_files(text: str) -> tuple[str, ...]:
    """Return the paths that *text* reports as written, each once, in the order of their mention."""
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
            no_report = _NO_REPORT.search(sentence) or _FOREIGN_DEEDS.search(sentence)
            if not no_report and any(pattern.search(sentence) for pattern in _REPORTS):
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
        if suffix in _FURTHER or _TYPES.guess_type(path, strict=False)[0] is not None:
            yield path


_NOT_RUN: Final = frozenset({"repeated_call", "budget_exceeded", "cancelled"})
"""Codes of calls that say nothing of what they would have done."""
MAX_NAME: Final = 200
"""Characters of a name that is looked for: nobody writes longer ones, and a model may have called anything."""
_FILE_CALLS: Final = frozenset({"react.write", "files.edit"})
_UNNAMED: Final = frozenset({"exec.python", "exec.shell_output"})
_SCRIPT: Final = re.compile(r"(?<![\w.-])[\w.-]+\.(?:py|sh|bash|js|mjs|cjs|ts|rb|pl|R|php)\b")
_RAN: Final = "ran|executed|called|used|invoked|applied|queried"
_DID: Final = rf"""
    \b(?:I|we)(?:'ve|\ have)?(?:\ \w+){{0,2}}\ (?:{_RAN}|run)\b
    |^\W*(?:\w+ly\ )?(?:{_RAN})\b
    |\b(?:computed|calculated|obtained|determined|generated|produced|created|checked|verified|validated|tested|extracted)\b
     .{{0,100}}\b(?:with|by|using|via|from|through)\b
    |\b(?:has|have|was|were)(?:\ been)?(?:\ \w+ly)?\ (?:{_RAN}|run)\b
    |\b(?:returned|reported|gave|produced|printed|showed|confirmed|ran)\b
"""
_WELL: Final = r"\bsuccess(?:ful(?:ly)?)?\b|\b(?:succeeded|passed|worked|completed)\b|\b(?:no|without(?:\ any)?)\ (?:errors?|problems?|issues?)\b"
_WENT_WELL: Final = re.compile(_WELL, re.IGNORECASE | re.VERBOSE)
_REPORTED: Final = re.compile(f"{_DID}|{_WELL}", re.IGNORECASE | re.VERBOSE)
_FLAWLESS: Final = re.compile(r"\b(?:no|without(?: any)?) (?:errors?|problems?|issues?)\b", re.IGNORECASE)
_ADMITTED: Final = re.compile(
    r"\b(?:errors?|fail\w*|crash\w*|time[ds]? ?out|refus\w+|den(?:ied|ies)|missing|problems?|issues?|attempt\w*|tr(?:y|ied)|"
    r"instead|although|though|despite|but|however|stopped|abort\w*|exit\w*|exception|traceback|broken?|invalid|unavailable|"
    r"unsuccessful\w*|warn\w*|nothing|no)\b",
    re.IGNORECASE,
)


@dataclass
class _Outcomes:
    """What came of the calls about one name: the last error (`exit` for a program's own), and what succeeded."""

    error: str | None = None
    succeeded: set[str] = field(default_factory=set)


def claimed_successes(text: str, calls: Iterable[CallRecord]) -> tuple[str, ...]:
    """Return the names of tools, scripts and files of *calls* of which *text* reports a success they did not have.

    What counts is the last call about a name, and only if none about it with other arguments succeeded. A program that ended
    with an exit code other than 0 has run: of it only a report that it went well is false. A text that anywhere speaks of the
    name in a sentence about a failure reports no success.
    """
    outcomes = {name: each for name, each in _outcomes(calls).items() if len(name) <= MAX_NAME}
    failed = {name: each.error for name, each in outcomes.items() if each.error is not None}
    if not failed:
        return ()
    prose = _CODE.sub("", text)
    written = {path.rpartition("/")[2] for path in claimed_files(text)}
    sentences = [sentence for line in prose.splitlines() for sentence in re.split(r"(?<=[.!?])\s+", line)]
    return tuple(name for name, error in failed.items() if _claims(sentences, name, error, written))


def _claims(sentences: Iterable[str], name: str, error: str, written: Collection[str]) -> bool:
    """Whether one of *sentences* reports a success of *name*, and none a failure."""
    mention = _mention(name)  # the name itself may hold a word for a failure
    about = [mention.sub("NAME", sentence) for sentence in sentences if mention.search(sentence)]
    if any(_NO_REPORT.search(each) or _ADMITTED.search(_FLAWLESS.sub("", each)) for each in about):
        return False
    if error == "file":
        return name in written
    return any((_WENT_WELL if error == "exit" else _REPORTED).search(each) for each in about)


def _mention(name: str) -> re.Pattern[str]:
    """Return what finds *name* in prose; of a tool either spelling of its id, or its last word where it is marked as code."""
    if _SCRIPT.fullmatch(name) or "." not in name:
        return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")
    last = re.escape(re.split(r"[./]", name)[-1])
    ids = "|".join(map(re.escape, (name, name.replace(".", "_"))))
    return re.compile(rf"(?<![\w.-])(?:{ids})(?![\w-]|\.\w)|`{last}(?:\(\))?`")


def _outcomes(calls: Iterable[CallRecord]) -> dict[str, _Outcomes]:
    outcomes: dict[str, _Outcomes] = {}
    for call in calls:
        if call.error in _NOT_RUN:
            continue
        for path in call.artifacts if call.ok else ():
            written = outcomes.setdefault(path.rpartition("/")[2], _Outcomes())
            written.error = None
            written.succeeded.add("")
        name = _name_of(call)
        if name is None:
            continue
        past = outcomes.setdefault(name, _Outcomes())
        past.error = _error_of(call)
        if past.error is None:
            past.succeeded.add(call.arguments)
        elif past.succeeded - {call.arguments}:
            past.error = None
    return outcomes


def _name_of(call: CallRecord) -> str | None:
    """Return what people call that which *call* is about, or None where it has no name."""
    arguments = parse_object(call.arguments) or {}
    if call.tool == "exec.shell":  # of several scripts nobody knows which one failed
        scripts = set(_SCRIPT.findall(str(arguments.get("command", ""))))
        return scripts.pop() if len(scripts) == 1 else None
    if call.tool == "skills.run_script" or call.tool in _FILE_CALLS:
        words = str(arguments.get("path", "")).split()
        return words[0].rpartition("/")[2] or None if words else None
    if call.tool in _UNNAMED or call.tool.partition(".")[0] in {"skills", "react", "files"}:
        return None
    return call.tool


def _error_of(call: CallRecord) -> str | None:
    """Return None for a success, `exit` for a program that ended with another code than 0, `file` and `call` for errors."""
    if not call.ok:
        return "file" if call.tool in _FILE_CALLS else "call"
    code = (
        (parse_object(call.result or "") or {}).get("exit_code") if call.tool.startswith(("skills.", "exec.")) else None
    )
    return None if code in {None, 0} else "exit"
