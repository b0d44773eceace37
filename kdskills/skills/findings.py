"""Findings about a skill file: the table of codes with their severity under each verdict, and the collector of one file."""

from __future__ import annotations

from typing import NamedTuple

from kdskills.errors import Diagnostic, Severity
from kdskills.skills.model import Verdict


class FindingCode(NamedTuple):
    """One row of the table of codes.

    A severity of None means that the finding is not reported under that verdict.
    """

    code: str
    lenient: Severity | None
    spec: Severity | None
    skills_ref: Severity | None
    meaning: str
    cure: str

    def severity(self, verdict: Verdict) -> Severity | None:
        """Return the severity under *verdict*, or None."""
        if verdict == "lenient":
            return self.lenient
        return self.spec if verdict == "spec" else self.skills_ref


def _fatal(code: str, meaning: str, cure: str) -> FindingCode:
    return FindingCode(code, "error", "error", "error", meaning, cure)


def _strict(code: str, meaning: str, cure: str) -> FindingCode:
    return FindingCode(code, "warning", "error", "error", meaning, cure)


def _extension(code: str, meaning: str, cure: str) -> FindingCode:
    return FindingCode(code, "warning", "warning", None, meaning, cure)


_TABLE = (
    # The file, its bytes and its fences.
    _fatal("path_missing", "There is nothing at the path.", "Give the path of a skill folder or of its SKILL.md."),
    _fatal("not_a_directory", "The path is neither a folder nor a skill file.", "Give the skill's folder."),
    _fatal("file_missing", "The folder has no SKILL.md.", "Add a SKILL.md."),
    _fatal("unreadable", "The file cannot be read, or is no regular file.", "Make it a regular file you may read."),
    _fatal("symlink", "The skill file is a symbolic link.", "Put the file itself there."),
    _fatal("too_large", "The skill file has more than 2,097,152 bytes.", "Move long material into `references/`."),
    _fatal("not_utf8", "The file is not UTF-8.", "Save it as UTF-8."),
    _fatal("nul_byte", "The file holds a NUL byte.", "Remove it."),
    _fatal("no_frontmatter", "The first line is not `---`.", "Begin the file with a line `---`."),
    _fatal("unclosed_frontmatter", "No line `---` closes the frontmatter.", "Close it with a line `---`."),
    _fatal("invalid_yaml", "The YAML cannot be read, or uses what skills may not use.", "Mend the YAML; quote texts."),
    _fatal("not_a_mapping", "The frontmatter is empty or no mapping of fields.", "Write one `key: value` a line."),
    FindingCode("dots_close", "warning", "info", "info", "A line `...` ends the frontmatter.", "Write `---` instead."),
    FindingCode("bom", "warning", "warning", "warning", "The file begins with a byte order mark.", "Remove it."),
    FindingCode("file_name_case", "warning", "warning", "info", "The file is called skill.md.", "Call it SKILL.md."),
    FindingCode("yaml_repaired", "warning", None, None, "Values were quoted so that the YAML parses.", "Quote them."),
    _strict("duplicate_key", "A key stands twice in one mapping; the first one counts.", "Remove the second."),
    # The name.
    _strict("name_missing", "There is no name; the folder's is used.", "Add `name:`."),
    _strict("name_bad_chars", "The name has something but letters, digits and hyphens.", "Use a-z, 0-9 and hyphens."),
    _strict("name_not_lowercase", "The name has capital letters.", "Write it in lower case."),
    _strict("name_too_long", "The name has more than 64 characters.", "Shorten it."),
    _strict("name_edge_hyphen", "The name begins or ends with a hyphen.", "Remove the hyphen."),
    _strict("name_double_hyphen", "The name has two hyphens in a row.", "Use one."),
    _strict("name_dir_mismatch", "The name is not that of the folder.", "Rename the folder, or change the name."),
    FindingCode(
        "name_not_ascii", "info", "warning", "info", "The name has letters or digits outside ASCII.", "Use a-z and 0-9."
    ),
    _fatal("name_unsafe", "The name cannot be used as a name of a folder or an id.", "Use a-z, 0-9 and hyphens."),
    _extension("id_normalised", "An id or namespace was changed to letters, digits, `-` and `_`.", "Write it so."),
    _extension("id_name_differ", "The id is not the name; both are kept.", "Make them equal, or drop the id."),
    FindingCode(
        "namespace_reserved", "error", "error", None, "`skills`, `skill` and `sk` are no namespaces.", "Take another."
    ),
    FindingCode("namespace_ignored", "warning", "warning", None, "This root fixes the namespace.", "Remove the field."),
    # Other fields.
    _fatal("description_missing", "There is no description.", "Say what the skill does and when to use it."),
    _strict("description_too_long", "The description has more than 1,024 characters.", "Shorten it."),
    _strict("compatibility_too_long", "The compatibility has more than 500 characters.", "Shorten it."),
    _strict("compatibility_type", "The compatibility is no text, or (`spec`) blank.", "Write a text, or drop it."),
    FindingCode(
        "metadata_type", "warning", "error", "info", "The metadata is no mapping of text to text.", "Quote values."
    ),
    FindingCode(
        "allowed_tools_type", "warning", "error", "info", "`allowed-tools` is not one text.", "Write one line."
    ),
    FindingCode(
        "unexpected_fields", "info", "error", "error", "There are keys this verdict does not know.", "Remove them."
    ),
    FindingCode(
        "field_type",
        "warning",
        "warning",
        None,
        "A field was coerced, read restrictively or ignored.",
        "Write the type its row names.",
    ),
    FindingCode("empty_body", "warning", "warning", "warning", "There are no instructions.", "Write them."),
    # Companions.
    _extension(
        "compact_invalid", "`compact.md` cannot be used; the full body serves.", "Write UTF-8 text without frontmatter."
    ),
    _extension(
        "sources_invalid", "`sources.yaml`, or a row of it, cannot be used.", "Write a list of rows, each a mapping."
    ),
    _extension("skill_yaml", "A skill is a SKILL.md; no YAML file is one.", "Write a SKILL.md with frontmatter."),
    FindingCode(
        "tools_invalid",
        "error",
        "error",
        None,
        "`tools.yaml` cannot be used, so the skill is not.",
        "Write a list of tool ids or mappings with `id`.",
    ),
    # Bodies.
    FindingCode(
        "unknown_placeholder",
        "warning",
        "warning",
        "warning",
        "The body names an argument that is not declared; it stays as it is.",
        "Declare it under `arguments`, or write `\\$`.",
    ),
)


def all_codes() -> tuple[FindingCode, ...]:
    """Return the table, in the order of its reference page."""
    return _TABLE


_BY_CODE = {row.code: row for row in _TABLE}


def code_row(code: str) -> FindingCode:
    """Return one row of the table.

    Raises:
        KeyError: There is no such code.
    """
    return _BY_CODE[code]


def reference_table() -> str:
    """Return the table of codes in Markdown, as `docs/reference/skill-format.md` shows it."""
    letters = {"error": "E", "warning": "W", "info": "I", None: "-"}
    lines = ["| code | lenient | spec | skills-ref | meaning | cure |", "|---|---|---|---|---|---|"]
    for row in _TABLE:
        marks = " | ".join(letters[severity] for severity in (row.lenient, row.spec, row.skills_ref))
        lines.append(f"| `{row.code}` | {marks} | {row.meaning} | {row.cure} |")
    return "\n".join(lines) + "\n"


class FileFindings:
    """Findings of one file; what a verdict does not report is left out.

    Args:
        verdict: Decides on severities.
        at: Posix path of the file, relative to its root.
    """

    __slots__ = ("items", "path", "verdict")

    def __init__(self, verdict: Verdict, path: str) -> None:
        self.verdict: Verdict = verdict
        self.path = path
        self.items: list[Diagnostic] = []

    def add(
        self,
        code: str,
        message: str,
        *,
        position: tuple[int, int] | None = None,
        ref: str | None = None,
        fix: str | None = None,
        severity: Severity | None = None,
    ) -> None:
        """Report *code*, with the severity of the table unless another is given.

        Args:
            code: A code of the table.
            message: One sentence.
            position: Line and column, both from 1.
            ref: Field or id.
            fix: What mends it; the table's cure when omitted.
            severity: Instead of the table's, where the table names an exception.
        """
        row = code_row(code)
        table_severity = row.severity(self.verdict)
        if table_severity is None:
            return
        line, column = position or (None, None)
        self.items.append(
            Diagnostic(
                code,
                severity or table_severity,
                message,
                self.path,
                line,
                column,
                ref,
                row.cure if fix is None else fix,
            )
        )

    @property
    def refused(self) -> bool:
        """Whether one of them is an error."""
        return bool(self.items) and any(item.severity == "error" for item in self.items)
