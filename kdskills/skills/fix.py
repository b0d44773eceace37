"""Mend a skill folder: plan edits without touching anything, then apply them in one go."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kdskills.errors import FileRefused
from kdskills.skills.fields import FIELD_OF, FieldReader, clean_folder, name_problem
from kdskills.skills.findings import FileFindings
from kdskills.skills.folder import FolderParts, open_skill
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, Frontmatter, read_frontmatter, single_quoted
from kdskills.skills.model import ParsedSkill
from kdskills.skills.parse import parse_parts
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import read_file
from kdskills.skills.yaml_core import Fields, Items, Scalar, YamlRefused, load_yaml

SKILL_FILE = "SKILL.md"

_BOM = b"\xef\xbb\xbf"
_COMMENT = re.compile(r"(?:^|\s)#")
_QUOTED = re.compile(r"""'[^']*+'|"(?:[^"\\]|\\.)*+(?:"|(?P<open>\\?\Z))""", re.DOTALL)  # one never closed stays
_RAW_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@dataclass(frozen=True, slots=True)
class FixPlan:
    """Edits that mend one skill folder: names and bytes of its skill file now and then. Nothing has happened yet.

    `done` says what is mended and `skipped` what cannot be mended here and why, one sentence each; the bytes of the
    body stay the same.
    """

    folder: Path
    file_name: str
    before: bytes
    after: bytes
    new_file_name: str
    new_folder_name: str
    done: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.done)

    @property
    def diff(self) -> str:
        """The edits as a unified diff, renames as lines before it; "" when there is nothing to do."""
        old, new = f"{self.folder.name}/{self.file_name}", f"{self.new_folder_name}/{self.new_file_name}"
        head = f"rename from {old}\nrename to {new}\n" if old != new else ""
        if self.before == self.after:
            return head
        was, will = (data.decode("utf-8").replace("\ufeff", "<BOM>").split("\n") for data in (self.before, self.after))
        diff = difflib.unified_diff(was, will, f"a/{old}", f"b/{new}", lineterm="")
        return head + "".join(line.rstrip("\r") + "\n" for line in diff)


def plan_fix(path: str | Path, *, rename: bool = False) -> FixPlan | None:
    """Return what would mend the skill folder or file at *path*, or None when its file cannot be read at all.

    A rewrite is planned only if the skill then has the same fields and body with fewer findings; a skill that is
    refused as it is stays as it is. With *rename* the folder may be renamed to the skill's name.
    """
    opened = open_skill(path, "lenient")
    if not isinstance(opened, FolderParts):
        return None
    folder, before = opened.folder, opened.data
    done: list[str] = []
    skipped: list[str] = []
    after = before
    for sentence, edit in _EDITS:
        findings = FileFindings("lenient", SKILL_FILE)
        front = read_frontmatter(after, findings)
        if front is not None:
            raw = _RawLines(after)
            edit(raw, front, findings)
            if raw.data() != after and _better(after, raw.data(), folder.name):
                after = raw.data()
                done.append(sentence)
    file_name = SKILL_FILE
    if opened.file_name != SKILL_FILE:
        if os.path.lexists(folder / SKILL_FILE) and not _same_file(folder / SKILL_FILE, folder / opened.file_name):
            file_name = opened.file_name
            skipped.append(f"{opened.file_name} keeps its name: there is a {SKILL_FILE} already.")
        else:
            done.append(f"{opened.file_name} becomes {SKILL_FILE}.")
    folder_name = folder.name
    if rename:
        folder_name, sentence = _folder_name(folder, parse_parts(after, folder=folder.name))
        if sentence:
            (done if folder_name != folder.name else skipped).append(sentence)
    return FixPlan(folder, opened.file_name, before, after, file_name, folder_name, tuple(done), tuple(skipped))


def apply_fix(plan: FixPlan) -> Path:
    """Carry *plan* out and return the skill file's path.

    The new text replaces the old one in one step and keeps its mode; renames come after it. Raises FileRefused when the
    file is not the one the plan was made for (`changed`), a name is taken (`taken`), or the system refuses
    (`unreadable`).
    """
    skill_file = plan.folder / plan.file_name
    current = read_file(plan.folder, plan.file_name, limit=MAX_SKILL_BYTES)
    if current.data != plan.before:
        raise FileRefused(f"{plan.file_name} has changed since the plan was made", code="changed", path=plan.file_name)
    folder = plan.folder.with_name(plan.new_folder_name)
    for old, new in ((skill_file, plan.folder / plan.new_file_name), (plan.folder, folder)):
        if old != new and os.path.lexists(new) and not _same_file(old, new):
            raise FileRefused(f"{new.name} is there already", code="taken", path=new.name)
    try:
        if plan.after != plan.before:
            replace_file(skill_file, plan.after, mode=stat.S_IMODE(current.stat.st_mode), durable=True)
        if plan.new_file_name != plan.file_name:
            skill_file.rename(plan.folder / plan.new_file_name)
        if folder != plan.folder:
            plan.folder.rename(folder)
    except OSError as error:
        reason = error.strerror or "the system refused"
        raise FileRefused(f"{plan.file_name} cannot be mended: {reason}", path=plan.file_name) from error
    return folder / plan.new_file_name


def _same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _folder_name(folder: Path, parsed: ParsedSkill) -> tuple[str, str]:
    """Return the folder's new name and what is said about it; "" when nothing is to be done."""
    skill = parsed.skill
    if skill is None:
        return folder.name, "The folder keeps its name: the skill cannot be loaded."
    if skill.name == clean_folder(folder.name):
        return folder.name, ""
    if name_problem(skill.name) or len(os.fsencode(skill.name)) > 255:
        reason = f"{skill.name!r} is no valid one; mend the name of the skill first"
        return folder.name, f"The folder keeps its name: {reason}."
    if os.path.lexists(folder.with_name(skill.name)):
        return folder.name, f"The folder keeps its name: {skill.name!r} is there already."
    return skill.name, f"The folder {folder.name!r} becomes {skill.name!r}."


def _better(before: bytes, after: bytes, folder: str) -> bool:
    """Whether *after* has the fields and body of *before*, with fewer findings."""
    old, new = parse_parts(before, folder=folder), parse_parts(after, folder=folder)
    if old.skill is None or new.skill is None or len(new.diagnostics) >= len(old.diagnostics):
        return False
    bare = [replace(skill, frontmatter={}, diagnostics=(), digest="", size=0) for skill in (old.skill, new.skill)]
    return bare[0] == bare[1] and old.skill.body == new.skill.body


class _RawLines:
    """A file's lines as they are, line ends included, beside its parsed frontmatter."""

    def __init__(self, data: bytes) -> None:
        self.bom = _BOM if data.startswith(_BOM) else b""
        self.lines: list[str] = _RAW_LINE.findall(data[len(self.bom) :].decode("utf-8"))

    def replace_line(self, number: int, text: str) -> None:
        """Replace the text of a line, keeping its end."""
        line = self.lines[number]
        self.lines[number] = text + line[len(line.rstrip("\r\n")) :]

    def data(self) -> bytes:
        """Return the file."""
        return self.bom + "".join(self.lines).encode("utf-8")


Edit = Callable[[_RawLines, Frontmatter, FileFindings], None]
"""Changes the lines of a skill file, perhaps, by what was read in it."""


def _unmark(raw: _RawLines, front: Frontmatter, findings: FileFindings) -> None:
    raw.bom = b""


def _undot(raw: _RawLines, front: Frontmatter, findings: FileFindings) -> None:
    for finding in findings.items:
        if finding.code == "dots_close" and finding.line is not None:
            raw.replace_line(finding.line - 1, "---")


def _quote(raw: _RawLines, front: Frontmatter, findings: FileFindings) -> None:
    for repair in front.repairs:
        raw.replace_line(repair.line + 1, repair.after)


def _join_tools(raw: _RawLines, front: Frontmatter, findings: FileFindings) -> None:
    fields = front.fields
    key = next((key for key in fields.items if FIELD_OF.get(key) == "allowed_tools"), None)
    node = fields.items[key] if key is not None else None
    if key is None or not isinstance(node, Items) or not all(isinstance(item, Scalar) for item in node.items):
        return
    joined = FieldReader(front, FileFindings("lenient", SKILL_FILE), ()).allowed_tools()
    end = front.document.text.count("\n", 0, node.end) if node.flow else int(node.items[-1].mark.line)
    first, last = fields.keys[key].line + 1, end + 1
    unquoted = [
        _QUOTED.sub(lambda quoted: "" if quoted["open"] is None else quoted[0], line)
        for line in raw.lines[first : last + 1]
    ]
    if joined is None or any(map(_COMMENT.search, unquoted)):
        return  # a comment would be lost
    raw.replace_line(first, f"{key}: {_scalar(joined)}")
    del raw.lines[first + 1 : last + 1]


_EDITS: tuple[tuple[str, Edit], ...] = (
    ("The byte order mark goes.", _unmark),
    ("The closing `...` becomes `---`.", _undot),
    ("Values that needed quotes get them.", _quote),
    ("The list of allowed tools becomes one line.", _join_tools),
)


def _scalar(text: str) -> str:
    """Return *text* plain if it then reads as itself, else quoted."""
    try:
        root = load_yaml(f"k: {text}").root
    except YamlRefused:
        return single_quoted(text)
    node = root.items.get("k") if isinstance(root, Fields) and len(root.items) == 1 else None
    return text if isinstance(node, Scalar) and node.value == text else single_quoted(text)
