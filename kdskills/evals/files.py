"""Files of evaluations: every published form of them, read into one, and written in the published one.

The forms, and what each key means, are in `docs/reference/eval-files.md`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from kdskills.bundle.load import load_bundle
from kdskills.errors import Conflict, Diagnostic, FileRefused, KdskillsError, StrPath, path_argument
from kdskills.execution.dirs import locked
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill
from kdskills.skills.private_files import replace_file
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot
from kdskills.skills.safe_open import EVALS, open_file, printable_path, read_file, walk_tree
from kdskills.turn.export import place_roots


@dataclass(frozen=True, slots=True)
class Eval:
    """One evaluation: what a user asks, which skill should be picked, and what a good answer has.

    Attributes:
        id: Unique in its bundle; of a row without one its file's place and number.
        prompt: What the user asks.
        skill: Full id of the skill that should be loaded; None where none should, or none is named.
        should_trigger: False where the skill the file belongs to must not be loaded; that one then is in `must_not`.
        acceptable: Full ids that are right, too.
        must_not: Full ids of skills that must not be loaded, or texts that must not be in the answer.
        files: Paths handed in with the prompt, relative to `folder`.
        expected: The answer the author expects, in words.
        assertions: Sentences that must be true of the outcome; a judge says whether.
        checks: Rows of checks by code, as the file has them; a script that is expected is one of them.
        consumer: Agent whose view of the skills holds; None means the solver's decision model.
        skills: Full ids of skills loaded from the start.
        repeat: How often it is run.
        budget: The most tokens one run of it may take; None means the solver's own bound.
        source: File and row it was read from, such as `evals/evals.json#3`.
        folder: Folder that `files` are relative to, as an absolute path.
        owner: Full id of the skill whose folder the file is in, else of the one the row names first.
        extra: Keys nobody here understands, as they were.
    """

    id: str
    prompt: str
    skill: str | None = None
    should_trigger: bool = True
    acceptable: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    expected: str = ""
    assertions: tuple[str, ...] = ()
    checks: tuple[Mapping[str, Any], ...] = ()
    consumer: str | None = None
    skills: tuple[str, ...] = ()
    repeat: int = 1
    budget: int | None = None
    source: str = ""
    folder: str = ""
    owner: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The evaluations of a skill or a bundle, and what of their files could not be understood."""

    evals: tuple[Eval, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


PUBLISHED: Final = f"{EVALS}/evals.json"
ROWS: Final = ("evals", "cases", "tests", "test_cases", "evaluations", "queries", "items", "rows", "scenarios")
"""Keys of a file's object that its rows stand under."""

SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "id": ("id", "case_id", "eval_id", "name"),
    "prompt": ("prompt", "question", "query", "input", "user_prompt", "request"),
    "skill": ("expected_skill", "expected_skills", "target_skill", "skill", "skill_name", "skills"),
    "should_trigger": ("should_trigger", "should_activate"),
    "acceptable": ("acceptable_skills", "acceptable", "acceptable_alternates"),
    "must_not": ("must_not", "must_not_trigger", "must_not_skills"),
    "files": ("files",),
    "expected": ("expected_output", "ground_truth", "expected", "expected_answer"),
    "assertions": ("assertions", "expectations", "expected_behavior", "expected_behaviors", "expected_behaviour"),
    "script": ("expected_script", "expected_scripts"),
}
"""How the fields of a row are called, the published key first. Of several in one row the first that says something
counts, of assertions all."""

DATA_FOLDERS: Final = frozenset({"files", "data", "fixtures", "assets", "inputs", "outputs", "results", "node_modules"})
"""Folders below `evals/` in which no file is looked at."""
SUFFIXES: Final = {".json": False, ".jsonl": True}
"""Names of files that are looked at, and whether each line of theirs is a document."""
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_PROMPT: Final = 1024 * 1024
MAX_INPUTS: Final = 1_000
MAX_REPEAT: Final = 1_000
MAX_FINDINGS: Final = 1_000
"""Findings told of one file; of more only their number."""

_NOBODY: Final = frozenset({"", "none", "null", "n/a"})
_TRUTH: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read(folder: StrPath, skills: Mapping[str, Skill] | None = None) -> EvalSet:
    """Return the evaluations of a skill's folder, or of a bundle's: those of its skills and those in its own `evals/`.

    What cannot be understood is left out and told; nothing about a file raises. Python of a bundle does not run.

    Args:
        folder: The skill's or the bundle's folder.
        skills: All skills of the bundle by full id, where they are known; names in rows mean these. None looks.
    """
    top = Path(os.path.realpath(path_argument(folder, "folder")))
    if skills is None:
        skills = _skills_of(top)
    names = SkillNames(skills)
    owners = {Path(os.path.realpath(skill.folder)): full_id for full_id, skill in skills.items() if skill.folder}
    folders = sorted({top, *(path for path in owners if path.is_relative_to(top))})
    readers = [FolderReader(top, path, owners.get(path), names) for path in folders]
    for reader in readers:
        reader.read()
    evals = [row for reader in readers for row in reader.evals]
    findings = [finding for reader in readers for finding in reader.findings]
    return EvalSet(tuple(_with_ids(evals, findings)), tuple(findings))


def _skills_of(top: Path) -> Mapping[str, Skill]:
    """Return the skills of a folder: itself, those of a bundle, or those that lie below it."""
    parsed = parse_skill(top)
    if parsed.skill is not None:
        return {parsed.skill.full_id: parsed.skill}
    try:
        descriptor = load_bundle(top, python="read").descriptor
        roots, _ = place_roots(descriptor, top, ())
    except KdskillsError:
        roots = (SkillRoot("folder://skills", top, top.name, "project"),)
    return SkillRegistry(roots, index_dir=None).snapshot().skills


def _with_ids(evals: Iterable[Eval], findings: list[Diagnostic]) -> Iterator[Eval]:
    """Yield the evaluations under ids that are unique: those several files use get their skill in front."""
    evals = list(evals)
    times = Counter(row.id for row in evals)
    used: set[str] = set()
    for row in evals:
        name = f"{row.owner}/{row.id}" if times[row.id] > 1 and row.owner and "/" not in row.id else row.id
        if name in used:
            name = f"{name}#{row.source.rpartition('#')[2]}"
            while name in used:
                name += "'"
            message = f"Another row has the id {row.id!r:.100}; this one is called {name!r:.200}."
            findings.append(_finding("eval_id_taken", message, row.source))
        used.add(name)
        yield row if name == row.id else replace(row, id=name)


def _finding(
    code: str, message: str, source: str, *, lost: bool = False, line: int | None = None, column: int | None = None
) -> Diagnostic:
    path, _, row = source.rpartition("#")
    path, row = (path, row) if row.isdecimal() else (source, "")
    message = f"Row {row}: {message}" if row else message
    return Diagnostic(code, "error" if lost else "warning", message, path, line, column, source if row else None)


class SkillNames:
    """The full ids that names in rows mean: `name`, `id`, `namespace/name`, `namespace:name` or a full id."""

    def __init__(self, skills: Mapping[str, Skill]) -> None:
        self._known: dict[str, list[str]] = defaultdict(list)
        for full_id, skill in sorted(skills.items()):
            for name in {full_id, skill.id, skill.name, f"{skill.namespace}.{skill.name}"}:
                self._known[name.casefold()].append(full_id)

    def full_id(self, name: str, owner: str | None) -> str | None:
        """Return the full id that *name* means, of several that in the namespace of *owner*; None for no skill."""
        plain = name.strip().removeprefix("$").removeprefix("sk:").removesuffix("/SKILL.md").strip("/").casefold()
        dotted = plain.replace("/", ".").replace(":", ".")
        full_ids = self._known.get(dotted) or self._known.get(plain.rpartition("/")[2]) or []
        same_namespace = [
            full_id for full_id in full_ids if owner and full_id.partition(".")[0] == owner.partition(".")[0]
        ]
        return next(iter(same_namespace or full_ids), None)


class FolderReader:
    """Reads the files in the `evals/` of one skill, or of a bundle itself, into `evals` and `findings`.

    Args:
        top: Folder that the paths told are relative to.
        folder: Folder of the skill or bundle.
        owner: Full id of the skill.
        names: What names of skills mean.
    """

    def __init__(self, top: Path, folder: Path, owner: str | None, names: SkillNames) -> None:
        self.folder, self.owner, self.names = folder, owner, names
        self._prefix = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
        self.evals: list[Eval] = []
        self.findings: list[Diagnostic] = []

    def read(self) -> None:
        """Read all of them."""
        try:
            entries = walk_tree(self.folder, EVALS)
        except FileRefused as error:
            if error.code != "file_missing":
                self._tell(
                    "eval_file_unreadable", f"Evaluations cannot be read: {error.message}.", self._prefix + EVALS
                )
            return
        for entry in entries:
            path = PurePosixPath(entry.path)
            if path.suffix.lower() not in SUFFIXES or any(
                part in DATA_FOLDERS or part.startswith(".") for part in path.parts[:-1]
            ):
                continue
            count_before = len(self.findings)
            self._read_file(f"{EVALS}/{entry.path}", deep=len(path.parts) > 1)
            if (surplus := len(self.findings) - count_before - MAX_FINDINGS) > 0:
                del self.findings[count_before + MAX_FINDINGS :]
                source = printable_path(f"{self._prefix}{EVALS}/{entry.path}")
                self._tell("eval_findings_cut", f"{surplus:,} more findings of this file are not told.", source)

    def _tell(self, code: str, message: str, source: str, *, lost: bool = True, **where: int | None) -> None:
        self.findings.append(_finding(code, message, source, lost=lost, **where))

    def _read_file(self, path: str, *, deep: bool) -> None:
        source = printable_path(self._prefix + path)
        try:
            text = read_file(self.folder, path, limit=MAX_BYTES).data.decode("utf-8-sig")
        except FileRefused as error:
            self._tell("eval_file_unreadable", f"The file cannot be read: {error.message}.", source)
            return
        except UnicodeDecodeError as error:
            self._tell("eval_file_broken", f"The file is no UTF-8: byte {error.start:,} is not.", source)
            return
        by_line = SUFFIXES[PurePosixPath(path).suffix.lower()]
        pieces = enumerate(text.split("\n"), 1) if by_line else [(1, text)]
        for number, piece in pieces:
            if by_line and not piece.strip():
                continue
            line = number if by_line else None
            try:
                document, doubled = load_json(piece, line)
            except DocumentBroken as error:
                self._tell("eval_file_broken", error.message, source, line=error.line, column=error.column)
                continue
            if doubled:
                message = f"Keys stand twice in one object, and the last one counts: {', '.join(doubled):.200}."
                self._tell("eval_file_broken", message, source, line=line)
            rows = rows_of([document] if by_line else document)
            if rows is None or (deep and not any(_has_prompt(row) for row in rows)):
                if not deep:
                    message = f"No rows are found: there is no list, and none under {', '.join(ROWS[:3])}."
                    self._tell("eval_file_unknown", message, source)
                continue
            owner = self._owner_of(document, path)
            for index, row in enumerate(rows, number):
                self._read_row(row, path, f"{source}#{index}", owner)

    def _owner_of(self, document: Any, path: str) -> str | None:
        """Return the skill that rows of a file are about: its folder's, else the one that file or folder names."""
        if self.owner is not None:
            return self.owner
        file_name = next((document.get(key) for key in ("skill_name", "skill")), None) if _is_row(document) else None
        refs = (file_name, *PurePosixPath(path).parts[1:-1])
        return next(
            (full_id for ref in refs if isinstance(ref, str) and (full_id := self.names.full_id(ref, None))), None
        )

    def _read_row(self, row: Any, path: str, source: str, owner: str | None) -> None:
        if not _is_row(row):
            self._tell("eval_row_broken", f"The row is no object but {_kind(row)}.", source)
            return
        reader = RowReader(row, self, source, owner, str(PurePosixPath(path).parent))
        evaluation = reader.read()
        if evaluation is not None:
            self.evals.append(evaluation)


class RowReader:
    """Reads one row; a value that is not understood is told, and stays among the `extra` keys."""

    def __init__(self, row: Mapping[str, Any], files: FolderReader, source: str, owner: str | None, base: str) -> None:
        self._left = {str(key): value for key, value in row.items()}
        self._files, self._source, self._owner, self._base = files, source, owner, base

    def read(self) -> Eval | None:
        """Return the evaluation, or None for a row without a prompt."""
        prompt = self._text("prompt")
        if not prompt.strip() or len(prompt) > MAX_PROMPT:
            problem = f"more than {MAX_PROMPT:,} characters in its prompt" if prompt.strip() else "no prompt"
            keys = ", ".join(sorted(self._left))
            self._tell("eval_row_broken", f"The row has {problem}; its other keys: {keys:.200}.", lost=True)
            return None
        should_trigger = self._truth()
        none_expected, skill, acceptable = self._skill()
        if should_trigger is None:
            should_trigger = not none_expected
        owner = self._owner or skill
        must_not = [self._files.names.full_id(name, owner) or name for name in self._texts("must_not")]
        if should_trigger:
            skill = skill or owner
        elif owner is not None:
            must_not.insert(0, owner)
            skill = None if skill == owner else skill
        acceptable += tuple(self._full_id(name) for name in self._texts("acceptable"))
        return Eval(
            id=self._id(owner),
            prompt=prompt,
            skill=skill,
            should_trigger=should_trigger,
            acceptable=tuple(dict.fromkeys(name for name in acceptable if name != skill)),
            must_not=tuple(dict.fromkeys(must_not)),
            files=tuple(dict.fromkeys(self._inputs())),
            expected=self._text("expected"),
            assertions=tuple(self._texts("assertions", every=True)),
            owner=owner,
            source=self._source,
            folder=str(self._files.folder),
            **self._own_keys(tuple({"script_ran": name} for name in self._texts("script"))),
            extra=self._unread_keys(),
        )

    def _tell(self, code: str, message: str, *, lost: bool = False) -> None:
        self._files.findings.append(_finding(code, message, self._source, lost=lost))

    def _broken(self, key: str, value: Any, expected: str) -> None:
        self._tell("eval_key_broken", f"`{key}` must be {expected}, not {_kind(value)}; it does not count.")

    def _values(self, field_name: str, *, every: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield the keys of a field that say something, the first alone unless *every* counts, and take them out."""
        for key in SPELLINGS[field_name]:
            if self._left.get(key) is not None:
                yield key, self._left.pop(key)
                if not every:
                    return

    def _text(self, field_name: str) -> str:
        for key, value in self._values(field_name):
            lines = value if isinstance(value, list) else [value]
            if all(isinstance(line, str | int) and not isinstance(line, bool) for line in lines):
                return _whole_text("\n\n".join(map(str, lines)))
            self._left[key] = value
            self._broken(key, value, "text")
        return ""

    def _texts(self, field_name: str, *, every: bool = False) -> Iterator[str]:
        for key, value in self._values(field_name, every=every):
            for entry in value if isinstance(value, list) else [value]:
                text = entry
                if _is_row(entry):
                    text = next((entry[name] for name in _WORDS if isinstance(entry.get(name), str)), None)
                if isinstance(text, str) and text.strip():
                    yield _whole_text(text)
                elif text != "":
                    self._left.setdefault(key, value)
                    self._broken(key, entry, "text, or a list of texts")

    def _id(self, owner: str | None) -> str:
        """Return the row's own id; a number, or that of the row, gets its skill or else its file in front."""
        row_id = self._text("id")
        path, _, number = self._source.rpartition("#")
        stem = PurePosixPath(path).stem
        return f"{owner or stem}/{row_id or f'{stem}-{number}'}" if not row_id or row_id.isdecimal() else row_id

    def _truth(self) -> bool | None:
        for key, value in self._values("should_trigger"):
            truth = _TRUTH.get(str(value).strip().casefold())
            if truth is not None:
                return truth
            self._left[key] = value
            self._broken(key, value, "true or false")
        return None

    def _skill(self) -> tuple[bool, str | None, tuple[str, ...]]:
        """Return whether the row expressly expects no skill; the skill; and others it names, which are right, too."""
        present = any(key in self._left for key in SPELLINGS["skill"][:2])
        full_ids = [self._full_id(name) for name in self._texts("skill") if name.strip().casefold() not in _NOBODY]
        for key in SPELLINGS["skill"][:2]:
            if self._left.get(key, ...) is None:
                del self._left[key]
        return present and not full_ids, next(iter(full_ids), None), tuple(full_ids[1:])

    def _full_id(self, name: str) -> str:
        full_id = self._files.names.full_id(name, self._owner)
        if full_id is None:
            self._tell("eval_skill_unknown", f"There is no skill {name!r:.100} here.")
        return full_id or name

    def _inputs(self) -> Iterator[str]:
        for written in self._texts("files"):
            try:
                yield from self.input_paths(written.removeprefix("./").rstrip("/"))
            except FileRefused as error:
                self._tell("eval_input_refused", f"The input {written!r:.200} cannot be used: {error.message:.300}.")

    def input_paths(self, path: str) -> list[str]:
        """Return the files at a path as written from the skill's folder, or else from the file with the row."""
        try:
            return _files_at(self._files.folder, path)
        except FileRefused as error:
            if error.code != "file_missing":
                raise
        return _files_at(self._files.folder, f"{self._base}/{path}")

    def _own_keys(self, checks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        """Return what stands under `kdskills`, as fields, with *checks* before those that stand there."""
        written = self._left.pop("kdskills", None)
        try:
            keys = OwnKeys.model_validate({} if written is None else written)
        except ValidationError as error:
            self._left["kdskills"] = written
            for problem in error.errors():
                key = ".".join(map(str, ("kdskills", *problem["loc"])))
                self._tell("eval_key_broken", f"`{key:.100}` does not count: {problem['msg']}.")
            wrong = {problem["loc"][:1] for problem in error.errors()}
            keys = OwnKeys.model_validate(
                {k: v for k, v in written.items() if (k,) not in wrong} if _is_row(written) else {}
            )
        return dict(keys) | {"skills": tuple(map(self._full_id, keys.skills)), "checks": (*checks, *keys.checks)}

    def _unread_keys(self) -> Mapping[str, Any]:
        """Return the keys nobody understood; numbers that JSON does not have are None."""
        try:
            _refuse_nan(self._left)
        except ValueError:
            self._tell("eval_key_broken", "NaN and Infinity are no numbers of JSON, and do not count.")
            unread: Mapping[str, Any] = json.loads(json.dumps(self._left), parse_constant=lambda _: None)
            return unread
        return self._left


def _refuse_nan(value: object) -> None:
    json.dumps(value, allow_nan=False)


def _is_row(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


class OwnKeys(BaseModel):
    """What may stand under `kdskills` in a row; the meanings are those of `Eval`."""

    model_config = ConfigDict(extra="forbid")

    checks: tuple[dict[str, Any], ...] = ()
    consumer: StrictStr | None = None
    skills: tuple[StrictStr, ...] = ()
    repeat: StrictInt = Field(1, ge=1, le=MAX_REPEAT)
    budget: StrictInt | None = Field(None, ge=1)


def evals_schema() -> dict[str, Any]:
    """Return the JSON Schema of `evals/evals.json`; of what it refuses, `read` tells what does not count."""
    text: dict[str, Any] = {"type": ["string", "integer"]}
    text = {"anyOf": [text, {"type": "array", "items": text}, {"type": "null"}]}
    entry = {"anyOf": [{"const": ""}, {"type": "string", "pattern": r"\S"}, {"type": "object"}]}
    texts: dict[str, Any] = {"anyOf": [*entry["anyOf"], {"type": "array", "items": entry}, {"type": "null"}]}
    prompt_text = {
        "anyOf": [
            {"type": ["string", "integer"], "pattern": r"\S"},
            {"type": "array", "minItems": 1, "items": text["anyOf"][0]},
        ]
    }
    keys = {
        "id": text | {"description": "Unique in the bundle."},
        "prompt": text | {"description": "What the user asks."},
        "expected_skill": texts | {"description": "The skill that should be loaded; null: none."},
        "should_trigger": {"type": ["boolean", "integer", "string", "null"]},
        "acceptable_skills": texts | {"description": "Skills that are right, too."},
        "must_not": texts | {"description": "Skills that must not be loaded, or texts an answer must not have."},
        "files": texts | {"description": "Files handed in with the prompt."},
        "expected_output": text | {"description": "The answer the author expects, in words."},
        "assertions": texts | {"description": "Sentences that must be true of the outcome."},
        "kdskills": {"anyOf": [OwnKeys.model_json_schema(), {"type": "null"}]},
    }
    prompts = [{"required": [key], "properties": {key: prompt_text}} for key in SPELLINGS["prompt"]]
    row: dict[str, Any] = {"type": "object", "properties": keys, "anyOf": prompts}
    rows = {"type": "array", "items": row}
    by_id = {"type": "object", "minProperties": 1, "additionalProperties": row}
    inside = [{"type": "object", "required": [key], "properties": {key: {"anyOf": [rows, by_id]}}} for key in ROWS]
    return {"title": "Evaluations of a skill", "anyOf": [*inside, rows, row]}


_WORDS: Final = ("text", "assertion", "expectation", "description", "path", "name")
"""Keys that the words of an entry stand under where it is an object."""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _whole_text(text: str) -> str:
    """Return *text* without halves of characters, which cannot be written anywhere."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _files_at(folder: Path, path: str) -> list[str]:
    """Return *path* of a file, or those of all files below a folder. Raises FileRefused."""
    try:
        with open_file(folder, path):
            return [path]
    except FileRefused as error:
        if error.code != "not_regular":
            raise
    entries = walk_tree(folder, path)
    if len(entries) > MAX_INPUTS or any(entry.kind != "file" for entry in entries):
        raise FileRefused(f"{path!r} has more than {MAX_INPUTS:,} files, or a link among them", path=path)
    return [f"{path}/{entry.path}" for entry in entries]


class DocumentBroken(Exception):  # internal to this module, which turns it into a finding
    """A document cannot be parsed; line and column count from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.message, self.line, self.column = message, line, column


def load_json(text: str, line: int | None = None) -> tuple[Any, list[str]]:
    """Return the value of JSON *text*, and the keys that stand in one object twice.

    Raises DocumentBroken, with *line* for its own where it is part of a file.
    """
    doubled: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            doubled.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return values

    try:
        return json.loads(text, object_pairs_hook=mapping), doubled
    except json.JSONDecodeError as error:
        raise DocumentBroken(f"This is no JSON: {error.msg}.", line or error.lineno, error.colno) from error
    except (ValueError, RecursionError) as error:
        raise DocumentBroken("This JSON is nested too deep, or has a number of too many digits.", line) from error


def rows_of(document: Any) -> list[Any] | None:
    """Return the rows of a document: a list, what stands under one of `ROWS`, or a row alone; None for none."""
    if isinstance(document, list):
        return document
    if not _is_row(document):
        return None
    rows: list[Any] | None = None
    for key in ROWS:
        value = document.get(key)
        if _is_row(value) and value and all(map(_is_row, value.values())):
            value = [{"id": name, **row} for name, row in value.items()]
        if isinstance(value, list) and (rows is None or any(map(_has_prompt, value))):
            rows = [*(rows or ()), *value]
    return [document] if rows is None and _has_prompt(document) else rows


def _has_prompt(row: object) -> bool:
    return _is_row(row) and any(key in row for key in SPELLINGS["prompt"])


def add_row(folder: StrPath, row: Mapping[str, Any], *, skill_name: str = "") -> str:
    """Append a row to `evals/evals.json` of a skill's or bundle's folder, and return the id it has there.

    A new file has the published form. In one that is there everything else stays, and the new row calls its fields as
    the others do. The file is replaced in one step; two who add at once are both kept.

    Args:
        folder: The skill's or bundle's folder.
        row: Published keys; without `id` it gets the next number.
        skill_name: What a new file calls its skill.

    Raises:
        FileRefused: `eval_file_broken`: what is there is not understood, and is left alone; or a link is in the way.
        Conflict: `eval_id_taken`.
        OSError: The system refuses.
    """
    top = Path(os.path.realpath(path_argument(folder, "folder")))
    evals_folder = top / EVALS
    if not os.path.lexists(evals_folder):
        evals_folder.mkdir(exist_ok=True)
    walk_tree(top, EVALS)  # refuses a link
    with locked(evals_folder):
        path = top / PUBLISHED
        if os.path.lexists(path):
            data, status = read_file(top, PUBLISHED, limit=MAX_BYTES)
            text, mode = _decoded(data), stat.S_IMODE(status.st_mode)
            document = _editable(text)
        else:
            text, mode, document = "", 0o644, {"skill_name": skill_name, "evals": []}
        rows = document if isinstance(document, list) else next(document[key] for key in ROWS if key in document)
        row_id = _append(rows, row)
        replace_file(path, _written(document, text), mode=mode, durable=True)
    return str(row_id)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileRefused(f"{PUBLISHED} is no UTF-8", code="eval_file_broken", path=PUBLISHED) from error


def _editable(text: str) -> Any:
    """Return the document of a file that can be written again without losing anything. Raises FileRefused."""
    try:
        document, doubled = load_json(text)
        _refuse_nan(document)
        problem = f"the key {doubled[0]!r:.100} stands twice in one object" if doubled else ""
    except (DocumentBroken, ValueError, RecursionError) as error:
        document, problem = None, str(error).removesuffix(".")
    lists = [document] if not _is_row(document) else [document[key] for key in ROWS if key in document]
    if not problem and not (lists and isinstance(lists[0], list)):
        problem = "it has no list of rows"
    if problem:
        words = f"{PUBLISHED} is left as it is: {problem}"
        raise FileRefused(words, code="eval_file_broken", path=PUBLISHED)
    return document


def _append(rows: list[Any], row: Mapping[str, Any]) -> Any:
    """Append *row* with the keys that *rows* use, and return its id. Raises Conflict."""
    row_objects = [entry for entry in rows if _is_row(entry)]
    used = {key for other in row_objects for key in other}
    ids = [entry["id"] for entry in row_objects if "id" in entry]
    numbers = [value for value in ids if isinstance(value, int) and not isinstance(value, bool)]
    row_id = row.get("id")
    if row_id is None:
        row_id = max(numbers, default=0) + 1
        if len(numbers) != len(ids):
            used_ids = set(map(str, ids))
            row_id = next(name for n in count(len(rows) + 1) if (name := f"eval-{n}") not in used_ids)
    elif str(row_id) in map(str, ids):
        raise Conflict(f"another row of {PUBLISHED} has the id {row_id!r:.100}", code="eval_id_taken", id=row_id)
    new_row: dict[str, Any] = {"id": row_id}
    for key, value in row.items():
        spellings = next((names for names in SPELLINGS.values() if names[0] == key), ())
        if key != "id":
            new_row[key if key in used else next((name for name in spellings if name in used), key)] = value
    rows.append(new_row)
    return row_id


def _written(document: Any, text: str) -> bytes:
    """Return *document* as JSON, indented and escaped as *text* is."""
    indent = re.search(r"\n([ \t]+)", text)
    escaped = text.isascii() and "\\u" in text
    words = json.dumps(document, indent=indent[1] if indent else 2, ensure_ascii=escaped, allow_nan=False)
    try:
        return f"{words}\n".encode()
    except UnicodeEncodeError:  # half a character, which only an escape can write
        return f"{json.dumps(document, indent=indent[1] if indent else 2, allow_nan=False)}\n".encode()
