"""Findings about a skill file: the table of codes with their severity under each verdict, and the collector of one file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from kdskills.errors import Diagnostic, Severity
from kdskills.skills.model import Verdict

_SEVERITIES: dict[str, Severity | None] = {"E": "error", "W": "warning", "I": "info", "-": None}
_VERDICTS = get_args(Verdict)


class FindingCode(NamedTuple):
    """One row of the table of codes; `marks` has a letter of `EWI-` for each verdict: lenient, spec, skills-ref."""

    code: str
    marks: str
    meaning: str
    cure: str

    def severity(self, verdict: Verdict) -> Severity | None:
        """Return the severity under *verdict*, or None when the finding is not reported under it."""
        return _SEVERITIES[self.marks[_VERDICTS.index(verdict)]]


_ROWS = (
    # The file, its bytes and its fences.
    ("path_missing", "EEE", "There is nothing at the path.", "Give the path of a skill folder or of its SKILL.md."),
    ("not_a_directory", "EEE", "The path is neither a folder nor a skill file.", "Give the skill's folder."),
    ("file_missing", "EEE", "The folder has no SKILL.md.", "Add a SKILL.md."),
    ("unreadable", "EEE", "The file cannot be read, or is no regular file.", "Make it a regular file you may read."),
    ("symlink", "EEE", "The skill file is a symbolic link.", "Put the file itself there."),
    ("too_large", "EEE", "The skill file has more than 2,097,152 bytes.", "Move long material into `references/`."),
    ("not_utf8", "EEE", "The file is not UTF-8.", "Save it as UTF-8."),
    ("nul_byte", "EEE", "The file holds a NUL byte.", "Remove it."),
    ("no_frontmatter", "EEE", "The first line is not `---`.", "Begin the file with a line `---`."),
    ("unclosed_frontmatter", "EEE", "No line `---` closes the frontmatter.", "Close it with a line `---`."),
    ("invalid_yaml", "EEE", "The YAML cannot be read, or uses what skills may not use.", "Mend the YAML; quote texts."),
    ("not_a_mapping", "EEE", "The frontmatter is empty or no mapping of fields.", "Write one `key: value` a line."),
    ("dots_close", "WII", "A line `...` ends the frontmatter.", "Write `---` instead."),
    ("bom", "WWW", "The file begins with a byte order mark.", "Remove it."),
    ("file_name_case", "WWI", "The file is called skill.md.", "Call it SKILL.md."),
    ("yaml_repaired", "W--", "Values were quoted so that the YAML parses.", "Quote them."),
    ("duplicate_key", "WEE", "A key stands twice in one mapping; the first one counts.", "Remove the second."),
    # The name.
    ("name_missing", "WEE", "There is no name; the folder's is used.", "Add `name:`."),
    ("name_bad_chars", "WEE", "The name has something but letters, digits and hyphens.", "Use a-z, 0-9 and hyphens."),
    ("name_not_lowercase", "WEE", "The name has capital letters.", "Write it in lower case."),
    ("name_too_long", "WEE", "The name has more than 64 characters.", "Shorten it."),
    ("name_edge_hyphen", "WEE", "The name begins or ends with a hyphen.", "Remove the hyphen."),
    ("name_double_hyphen", "WEE", "The name has two hyphens in a row.", "Use one."),
    ("name_dir_mismatch", "WEE", "The name is not that of the folder.", "Rename the folder, or change the name."),
    ("name_not_ascii", "IWI", "The name has letters or digits outside ASCII.", "Use a-z and 0-9."),
    ("name_unsafe", "EEE", "The name cannot be used as a name of a folder or an id.", "Use a-z, 0-9 and hyphens."),
    ("id_normalised", "WW-", "An id or namespace was changed to letters, digits, `-` and `_`.", "Write it so."),
    ("id_name_differ", "WW-", "The id is not the name; both are kept.", "Make them equal, or drop the id."),
    ("namespace_reserved", "EE-", "`skills`, `skill` and `sk` are no namespaces.", "Take another."),
    ("namespace_ignored", "WW-", "This root fixes the namespace.", "Remove the field."),
    # Other fields.
    ("description_missing", "EEE", "There is no description.", "Say what the skill does and when to use it."),
    ("description_too_long", "WEE", "The description has more than 1,024 characters.", "Shorten it."),
    ("compatibility_too_long", "WEE", "The compatibility has more than 500 characters.", "Shorten it."),
    ("compatibility_type", "WEE", "The compatibility is no text, or (`spec`) blank.", "Write a text, or drop it."),
    ("metadata_type", "WEI", "The metadata is no mapping of text to text.", "Quote values."),
    ("allowed_tools_type", "WEI", "`allowed-tools` is not one text.", "Write one line."),
    ("unexpected_fields", "IEE", "There are keys this verdict does not know.", "Remove them."),
    ("field_type", "WW-", "A field was coerced, read restrictively or ignored.", "Write the type its row names."),
    ("empty_body", "WWW", "There are no instructions.", "Write them."),
    # Companions.
    (
        "compact_invalid",
        "WW-",
        "`compact.md` cannot be used; the full body serves.",
        "Write UTF-8 text without frontmatter.",
    ),
    (
        "sources_invalid",
        "WW-",
        "`sources.yaml`, or a row of it, cannot be used.",
        "Write a list of rows, each a mapping.",
    ),
    ("skill_yaml", "WW-", "A skill is a SKILL.md; no YAML file is one.", "Write a SKILL.md with frontmatter."),
    (
        "tools_invalid",
        "EE-",
        "`tools.yaml` cannot be used, so the skill is not.",
        "Write a list of tool ids or mappings with `id`.",
    ),
    # Bodies.
    (
        "unknown_placeholder",
        "WWW",
        "The body names an argument that is not declared; it stays as it is.",
        "Declare it under `arguments`, or write `\\$`.",
    ),
)
CODES: Mapping[str, FindingCode] = MappingProxyType({row[0]: FindingCode(*row) for row in _ROWS})
"""The table of codes, in the order of its reference page."""


class FileFindings:
    """Findings of one file, by its posix path below the root; what the verdict does not report is left out."""

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
        """Report *code* at a line and column from 1; *fix* and *severity* stand instead of the table's."""
        row = CODES[code]
        usual = row.severity(self.verdict)
        if usual is not None:
            line, column = position or (None, None)
            cure = row.cure if fix is None else fix
            self.items.append(Diagnostic(code, severity or usual, message, self.path, line, column, ref, cure))

    @property
    def refused(self) -> bool:
        """Whether one of them is an error."""
        return any(item.severity == "error" for item in self.items)
